package apikey

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// ErrInvalid is the answer to every kind of bad credential.
var ErrInvalid = errors.New("credential is not valid")

// Bounds of verification.
const (
	// maxVerifying bounds verifications at one time, and with them memory.
	maxVerifying = 2
	// maxCached and cacheTime bound the memory of verified keys.
	maxCached = 1024
	cacheTime = 5 * time.Minute
)

// Verifier verifies keys against a file. It is safe for concurrent use.
type Verifier struct {
	file   File
	pepper []byte
	now    func() time.Time
	slots  chan struct{}
	// dummy is verified against when there is nothing else, so that an unknown
	// id takes as long as a wrong secret.
	dummy stored
	// cacheKey is this process's secret for the memory of verified keys.
	cacheKey []byte

	mu     sync.Mutex
	seen   fileState
	keys   map[string]*Key
	cached map[[sha256.Size]byte]verified
}

// fileState tells whether a file has changed.
type fileState struct {
	modified time.Time
	size     int64
	inode    uint64
}

// verified remembers that a text was a certain key.
type verified struct {
	id, hash string
	until    time.Time
}

// NewVerifier reads the file once, so that a wrong one is told at the start.
func NewVerifier(file File, pepper []byte) (*Verifier, error) {
	if len(pepper) < MinPepper {
		return nil, fmt.Errorf("the pepper is shorter than %d bytes", MinPepper)
	}
	v := &Verifier{
		file: file, pepper: pepper, now: time.Now, slots: make(chan struct{}, maxVerifying),
		cacheKey: make([]byte, 32), cached: make(map[[sha256.Size]byte]verified),
	}
	_, _ = rand.Read(v.cacheKey)
	var err error
	if v.dummy, err = parseHash(newHash(pepper, newSecret())); err != nil {
		return nil, err
	}
	return v, v.refresh()
}

// refresh reads the file again when it has changed.
func (v *Verifier) refresh() error {
	fi, err := os.Stat(v.file.path)
	if err != nil {
		return fmt.Errorf("look at API keys: %w", err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := Private(fi); err != nil {
		return fmt.Errorf("API keys in %s: %w", v.file.path, err)
	}
	if v.keys != nil && v.seen == stateOf(fi) {
		return nil
	}
	c, read, err := v.file.load()
	if err != nil {
		// Nobody is let in by what the file said before.
		v.keys = nil
		return err
	}
	v.keys = make(map[string]*Key, len(c.Keys))
	for _, k := range c.Keys {
		v.keys[k.ID] = k
	}
	v.seen = stateOf(read)
	return nil
}

// Verify returns the key that a text is. The error is [ErrInvalid] for every bad
// credential, ctx's when its time is up, and another one when the file cannot be
// trusted.
func (v *Verifier) Verify(ctx context.Context, text string) (*Key, error) {
	if err := v.refresh(); err != nil {
		return nil, err
	}
	id, secret, ok := split(text)
	mac := hmac.New(sha256.New, v.cacheKey)
	mac.Write([]byte(text))
	name := [sha256.Size]byte(mac.Sum(nil))
	now := v.now()

	v.mu.Lock()
	key := v.keys[id]
	hit := v.cached[name]
	v.mu.Unlock()
	if key != nil && hit.id == key.ID && hit.hash == key.Hash && now.Before(hit.until) {
		if key.Active(now) {
			return key, nil
		}
		return nil, ErrInvalid
	}

	against := v.dummy
	if ok && key != nil {
		s, err := parseHash(key.Hash)
		if err != nil {
			return nil, err
		}
		against = s
	} else {
		key = nil
	}
	select {
	case v.slots <- struct{}{}:
		defer func() { <-v.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if !against.matches(v.pepper, secret) || key == nil || !key.Active(now) {
		return nil, ErrInvalid
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.cached) >= maxCached {
		v.cached = make(map[[sha256.Size]byte]verified)
	}
	v.cached[name] = verified{id: key.ID, hash: key.Hash, until: now.Add(cacheTime)}
	return key, nil
}
