package apikey

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/gofrs/flock"

	"github.com/starintel/fencerider/leaseclient"
)

// Bounds of the file of keys.
const (
	maxFile = 4 << 20
	// MaxKeys bounds the keys of one file, revoked ones included.
	MaxKeys = 10_000
	// MaxRules bounds the rules of one key, allowing and denying.
	MaxRules = 256
)

// Key is one key as the file keeps it. It holds no secret.
type Key struct {
	// ID names the credential in leases, logs and audit events.
	ID string `json:"id"`
	// PrincipalID owns what the key acquires.
	PrincipalID string `json:"principal_id"`
	// ClientID names the software that uses it.
	ClientID string `json:"client_id"`
	Grant
	CreatedAt time.Time `json:"created_at"`
	// ExpiresAt and RevokedAt are zero while they do not apply.
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	RevokedAt time.Time `json:"revoked_at,omitzero"`
	Note      string    `json:"note,omitempty"`
	// Hash is the argon2id hash of the peppered secret.
	Hash string `json:"hash"`
}

// Active reports whether the key may be used at an instant.
func (k *Key) Active(now time.Time) bool {
	return k.RevokedAt.IsZero() && (k.ExpiresAt.IsZero() || now.Before(k.ExpiresAt))
}

// contents is the file.
type contents struct {
	Version int    `json:"version"`
	Keys    []*Key `json:"keys"`
}

// File is a file of keys. Its methods lock it against other processes.
type File struct{ path string }

// OpenFile names a file of keys; it need not exist yet.
func OpenFile(path string) File { return File{path} }

// ErrNoKey says that the file has no key of that id.
var ErrNoKey = errors.New("there is no key of that id")

// load reads and judges the file. Nobody but its owner may be able to read it.
func (f File) load() (*contents, fs.FileInfo, error) {
	file, err := os.Open(f.path)
	if err != nil {
		return nil, nil, fmt.Errorf("open API keys: %w", err)
	}
	defer func() { _ = file.Close() }()
	fi, err := file.Stat()
	if err != nil {
		return nil, nil, fmt.Errorf("look at API keys: %w", err)
	}
	if err := Private(fi); err != nil {
		return nil, nil, fmt.Errorf("API keys in %s: %w", f.path, err)
	}
	b, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err != nil {
		return nil, nil, fmt.Errorf("read API keys: %w", err)
	}
	if len(b) > maxFile {
		return nil, nil, fmt.Errorf("API keys in %s: longer than %d bytes", f.path, maxFile)
	}
	var c contents
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return nil, nil, fmt.Errorf("API keys in %s cannot be read as JSON: %w", f.path, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, nil, fmt.Errorf("API keys in %s: something follows the keys", f.path)
	}
	if err := c.validate(); err != nil {
		return nil, nil, fmt.Errorf("API keys in %s: %w", f.path, err)
	}
	return &c, fi, nil
}

// Private reports an error unless a file can be read by its owner only, and that
// is this process's user or root.
func Private(fi fs.FileInfo) error {
	if fi.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("file mode is %04o, want 0600: others can read it", fi.Mode().Perm())
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && st.Uid != 0 && int(st.Uid) != os.Getuid() {
		return errors.New("file belongs to another user")
	}
	return nil
}

// validate says what is wrong with the file.
func (c *contents) validate() error {
	if c.Version != 1 {
		return fmt.Errorf("version %d is unknown, want 1", c.Version)
	}
	if len(c.Keys) > MaxKeys {
		return fmt.Errorf("more than %d keys", MaxKeys)
	}
	seen := make(map[string]bool)
	for _, k := range c.Keys {
		if k == nil {
			return errors.New("a key is null")
		}
		if err := k.validate(); err != nil {
			return fmt.Errorf("key %.64q: %w", k.ID, err)
		}
		if seen[k.ID] {
			return fmt.Errorf("key %q is there twice", k.ID)
		}
		seen[k.ID] = true
	}
	return nil
}

// validate says what is wrong with a key.
func (k *Key) validate() error {
	for _, f := range [...]struct{ name, value string }{{"id", k.ID}, {"principal_id", k.PrincipalID}, {"client_id", k.ClientID}} {
		if err := leaseclient.ValidateIdentifier(f.name, f.value); err != nil {
			return err
		}
	}
	if err := leaseclient.ValidateText("note", k.Note); err != nil {
		return err
	}
	if len(k.Allow)+len(k.Deny) > MaxRules {
		return &leaseclient.InvalidError{Field: "allow, deny", Reason: fmt.Sprintf("more than %d rules", MaxRules)}
	}
	if _, err := parseHash(k.Hash); err != nil {
		return err
	}
	return k.Grant.Validate()
}

// change lets f change the file, which is made when it is not there, in one step:
// a reader sees it before or after.
func (f File) change(do func(c *contents) error) error {
	if err := os.MkdirAll(filepath.Dir(f.path), 0o700); err != nil {
		return fmt.Errorf("make directory of API keys: %w", err)
	}
	lock := flock.New(f.path+".lock", flock.SetPermissions(0o600))
	if err := lock.Lock(); err != nil {
		return fmt.Errorf("lock API keys: %w", err)
	}
	defer func() { _ = lock.Unlock() }()
	c, _, err := f.load()
	if errors.Is(err, fs.ErrNotExist) {
		c, err = &contents{Version: 1, Keys: []*Key{}}, nil
	}
	if err != nil {
		return err
	}
	if err := do(c); err != nil {
		return err
	}
	if err := c.validate(); err != nil {
		return err
	}
	b, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return fmt.Errorf("write API keys: %w", err)
	}
	return f.replace(append(b, '\n'))
}

// replace puts new contents in the place of the file, on disk.
func (f File) replace(b []byte) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(f.path), ".keys-*")
	if err != nil {
		return fmt.Errorf("write API keys: %w", err)
	}
	defer func() {
		if err != nil {
			_ = tmp.Close()
			_ = os.Remove(tmp.Name())
			err = fmt.Errorf("write API keys: %w", err)
		}
	}()
	if err = tmp.Chmod(0o600); err != nil {
		return err
	}
	if _, err = tmp.Write(b); err != nil {
		return err
	}
	if err = tmp.Sync(); err != nil {
		return err
	}
	if err = tmp.Close(); err != nil {
		return err
	}
	if err = os.Rename(tmp.Name(), f.path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(f.path))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	return dir.Sync()
}

// Create adds a key and returns it with its whole text, which is shown this once
// and kept nowhere. The id, the creation time and the hash are made here.
func (f File) Create(k Key, pepper []byte) (*Key, string, error) {
	if len(pepper) < MinPepper {
		return nil, "", fmt.Errorf("the pepper is shorter than %d bytes", MinPepper)
	}
	k.ID, k.CreatedAt, k.RevokedAt = leaseclient.NewID("key"), time.Now().UTC().Truncate(time.Second), time.Time{}
	secret := newSecret()
	k.Hash = newHash(pepper, secret)
	if err := k.validate(); err != nil {
		return nil, "", err
	}
	if err := f.change(func(c *contents) error {
		c.Keys = append(c.Keys, &k)
		return nil
	}); err != nil {
		return nil, "", err
	}
	return &k, format(k.ID, secret), nil
}

// Revoke ends a key at once. It stays in the file, so that its id is not taken
// for an unknown one by people who look it up. Revoking twice is no error.
func (f File) Revoke(id string) (*Key, error) {
	var out *Key
	err := f.change(func(c *contents) error {
		i := slices.IndexFunc(c.Keys, func(k *Key) bool { return k.ID == id })
		if i < 0 {
			return ErrNoKey
		}
		if out = c.Keys[i]; out.RevokedAt.IsZero() {
			out.RevokedAt = time.Now().UTC().Truncate(time.Second)
		}
		return nil
	})
	return out, err
}

// List returns every key of the file.
func (f File) List() ([]*Key, error) {
	c, _, err := f.load()
	if err != nil {
		return nil, err
	}
	return c.Keys, nil
}
