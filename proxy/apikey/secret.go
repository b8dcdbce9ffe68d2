package apikey

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"golang.org/x/crypto/argon2"
)

// Prefix starts every key; its number is the version of the form.
const Prefix = "star_sk_v1_"

// MinPepper is the least length of the pepper, in bytes.
const MinPepper = 32

// maxKeyText bounds what is looked at as a key.
const maxKeyText = 512

// The cost of one verification: 19 MiB and two passes.
const (
	argonMemory = 19 * 1024
	argonTime   = 2
	argonLanes  = 1
	hashBytes   = 32
	saltBytes   = 16
)

// newSecret returns 260 random bits as text without "_".
func newSecret() string { return strings.ToLower(rand.Text() + rand.Text()) }

// format makes the text of a key.
func format(id, secret string) string { return Prefix + id + "_" + secret }

// split takes a key apart. The id may hold "_", the secret does not.
func split(text string) (id, secret string, ok bool) {
	rest, ok := strings.CutPrefix(text, Prefix)
	if !ok || len(text) > maxKeyText {
		return "", "", false
	}
	i := strings.LastIndexByte(rest, '_')
	if i <= 0 || i == len(rest)-1 {
		return "", "", false
	}
	return rest[:i], rest[i+1:], true
}

// stored is a hash taken apart.
type stored struct{ salt, sum []byte }

// hashPattern is the only form of a hash that this version writes and reads.
var hashPattern = regexp.MustCompile(fmt.Sprintf(`^\$argon2id\$v=19\$m=%d,t=%d,p=%d\$([A-Za-z0-9+/]{22})\$([A-Za-z0-9+/]{43})$`, argonMemory, argonTime, argonLanes))

// parseHash reads a hash of the file.
func parseHash(text string) (stored, error) {
	m := hashPattern.FindStringSubmatch(text)
	if m == nil {
		return stored{}, errors.New("its hash has an unknown form or cost")
	}
	salt, err := base64.RawStdEncoding.DecodeString(m[1])
	if err != nil {
		return stored{}, errors.New("its hash is malformed")
	}
	sum, err := base64.RawStdEncoding.DecodeString(m[2])
	if err != nil {
		return stored{}, errors.New("its hash is malformed")
	}
	return stored{salt, sum}, nil
}

// derive hashes a peppered secret.
func derive(pepper []byte, secret string, salt []byte) []byte {
	mac := hmac.New(sha256.New, pepper)
	mac.Write([]byte(secret))
	return argon2.IDKey(mac.Sum(nil), salt, argonTime, argonMemory, argonLanes, hashBytes)
}

// newHash hashes a new secret.
func newHash(pepper []byte, secret string) string {
	salt := make([]byte, saltBytes)
	_, _ = rand.Read(salt)
	return fmt.Sprintf("$argon2id$v=19$m=%d,t=%d,p=%d$%s$%s", argonMemory, argonTime, argonLanes,
		base64.RawStdEncoding.EncodeToString(salt), base64.RawStdEncoding.EncodeToString(derive(pepper, secret, salt)))
}

// matches verifies a secret in constant time.
func (s stored) matches(pepper []byte, secret string) bool {
	return subtle.ConstantTimeCompare(derive(pepper, secret, s.salt), s.sum) == 1
}
