package leaseclient

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// LockKeyPrefix starts every lock key. Its last segment is the version of the
// derivation; another derivation is another prefix.
const LockKeyPrefix = "starintel:target-lease:v1:"

// DefaultComponent is the canonical value of an absent workflow name or
// operation class. An omitted component is never left out of the tuple.
const DefaultComponent = "default"

// Identity is the canonical tuple that names mutually exclusive work. Two
// workers exclude each other exactly when all seven components are equal.
//
// The zero value is not an identity. Values come from [Identity.Normalize];
// everything that takes an Identity expects a canonical one.
type Identity struct {
	TenantID        string `json:"tenant_id"`
	ProgramID       string `json:"program_id"`
	TargetNamespace string `json:"target_namespace"`
	TargetID        string `json:"target_id"`
	ActorName       string `json:"actor_name"`
	WorkflowName    string `json:"workflow_name"`
	OperationClass  string `json:"operation_class"`
}

// component is one named part of an identity, in contract order.
type component struct {
	name  string
	value *string
}

// components lists the seven parts in the order that the lock key hashes them.
func (id *Identity) components() [7]component {
	return [7]component{
		{"tenant_id", &id.TenantID},
		{"program_id", &id.ProgramID},
		{"target_namespace", &id.TargetNamespace},
		{"target_id", &id.TargetID},
		{"actor_name", &id.ActorName},
		{"workflow_name", &id.WorkflowName},
		{"operation_class", &id.OperationClass},
	}
}

// Normalize returns the canonical form: every component trimmed, in NFC,
// lower-cased rune by rune and within its limits. An absent workflow name or
// operation class becomes [DefaultComponent]. The error is an [*InvalidError]
// that names the first component at fault.
//
// Normalize is idempotent: a component whose canonical form would change when
// normalized once more is refused.
func (id Identity) Normalize() (Identity, error) {
	if id.WorkflowName == "" {
		id.WorkflowName = DefaultComponent
	}
	if id.OperationClass == "" {
		id.OperationClass = DefaultComponent
	}
	for _, c := range id.components() {
		v, err := normalizeComponent(*c.value)
		if err != nil {
			return Identity{}, &InvalidError{Field: c.name, Reason: err.Error()}
		}
		*c.value = v
	}
	return id, nil
}

// validate wants an identity that is canonical already.
func (id Identity) validate() error {
	n, err := id.Normalize()
	if err != nil {
		return err
	}
	if n != id {
		return &InvalidError{Field: "lock_identity", Reason: "not in canonical form"}
	}
	return nil
}

// maxRawComponent bounds the work done before the real limit can be judged:
// white space may be trimmed and composition shortens a text.
const maxRawComponent = 8 * MaxIdentifierBytes

// normalizeComponent canonicalizes one component or says what is wrong with it.
func normalizeComponent(s string) (string, error) {
	if len(s) > maxRawComponent {
		return "", fmt.Errorf("longer than %d bytes", MaxIdentifierBytes)
	}
	if !utf8.ValidString(s) {
		return "", fmt.Errorf("not valid UTF-8")
	}
	s = norm.NFC.String(strings.TrimSpace(s))
	s = strings.Map(unicode.ToLower, s)
	if s == "" {
		return "", fmt.Errorf("empty")
	}
	if len(s) > MaxIdentifierBytes {
		return "", fmt.Errorf("longer than %d bytes", MaxIdentifierBytes)
	}
	if strings.Contains(s, "..") {
		return "", fmt.Errorf("contains path syntax")
	}
	for i, r := range s {
		if unicode.IsLetter(r) || unicode.IsDigit(r) {
			continue
		}
		if i == 0 {
			return "", fmt.Errorf("must start with a letter or a digit")
		}
		if !strings.ContainsRune("._:-", r) {
			return "", fmt.Errorf("contains the character %q; letters, digits, '.', '_', ':' and '-' are allowed", r)
		}
	}
	if !norm.NFC.IsNormalString(s) {
		return "", fmt.Errorf("has no stable lower-case form")
	}
	return s, nil
}

// Canonical returns the JSON array that the lock key hashes. It is also what
// the store keeps beside the fencing counter, to recognize a key that belongs
// to another identity.
func (id Identity) Canonical() string {
	parts := make([]string, 0, 7)
	for _, c := range id.components() {
		parts = append(parts, *c.value)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(parts); err != nil {
		// Seven strings always encode; a failure here is memory corruption.
		panic(fmt.Sprintf("encode identity: %v", err))
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// LockKey derives the opaque key of a canonical identity. It never leaves the
// sidecar except in stamps, which say which lock a write was accepted under.
func (id Identity) LockKey() string {
	sum := sha256.Sum256([]byte(id.Canonical()))
	return LockKeyPrefix + base64.RawURLEncoding.EncodeToString(sum[:])
}

// ParseCanonical reads what [Identity.Canonical] wrote. It refuses anything
// that is not exactly a canonical form.
func ParseCanonical(s string) (Identity, error) {
	var parts []string
	if err := json.Unmarshal([]byte(s), &parts); err != nil {
		return Identity{}, fmt.Errorf("parse canonical identity: %w", err)
	}
	if len(parts) != 7 {
		return Identity{}, fmt.Errorf("parse canonical identity: %d components instead of 7", len(parts))
	}
	var id Identity
	for i, c := range id.components() {
		*c.value = parts[i]
	}
	n, err := id.Normalize()
	if err != nil {
		return Identity{}, fmt.Errorf("parse canonical identity: %w", err)
	}
	if n != id || n.Canonical() != s {
		return Identity{}, fmt.Errorf("parse canonical identity: not in canonical form")
	}
	return id, nil
}

// ParseLockKey returns the digest of a lock key. The error says that the text
// is not a lock key of this version.
func ParseLockKey(key string) ([sha256.Size]byte, error) {
	var digest [sha256.Size]byte
	enc, ok := strings.CutPrefix(key, LockKeyPrefix)
	if !ok {
		return digest, fmt.Errorf("lock key lacks the prefix %s", LockKeyPrefix)
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(enc)
	if err != nil || len(b) != len(digest) {
		return digest, fmt.Errorf("lock key is not a digest of %d bytes", len(digest))
	}
	return [sha256.Size]byte(b), nil
}
