package apikey

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

var pepper = []byte(strings.Repeat("p", MinPepper))

// newFile makes a file with one key.
func newFile(t *testing.T) (File, *Key, string) {
	t.Helper()
	f := OpenFile(filepath.Join(t.TempDir(), "keys.json"))
	k, text, err := f.Create(Key{
		PrincipalID: "prn_1", ClientID: "client_1",
		Grant: Grant{Capabilities: []Capability{Lease}, Allow: []Rule{{"*", "*", "*", "*"}}},
	}, pepper)
	if err != nil {
		t.Fatal(err)
	}
	return f, k, text
}

// verifier opens a verifier.
func verifier(t *testing.T, f File) *Verifier {
	t.Helper()
	v, err := NewVerifier(f, pepper)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestKeyIsVerifiedAndItsSecretIsKeptNowhere(t *testing.T) {
	f, k, text := newFile(t)
	v := verifier(t, f)
	for range 2 {
		got, err := v.Verify(t.Context(), text)
		if err != nil || got.ID != k.ID || got.PrincipalID != "prn_1" {
			t.Fatalf("%+v %v", got, err)
		}
	}
	b, err := os.ReadFile(f.path)
	if err != nil {
		t.Fatal(err)
	}
	_, secret, _ := split(text)
	if strings.Contains(string(b), secret) || !strings.Contains(string(b), "$argon2id$") {
		t.Errorf("the file holds %s", b)
	}
	for name := range v.cached {
		if strings.Contains(string(name[:]), secret[:8]) {
			t.Error("the memory holds the secret")
		}
	}
	if len(v.cached) != 1 {
		t.Errorf("%d remembered", len(v.cached))
	}
}

func TestEveryBadCredentialGetsOneAnswer(t *testing.T) {
	f, k, text := newFile(t)
	old, oldText, err := f.Create(Key{PrincipalID: "p", ClientID: "c", ExpiresAt: time.Now().Add(-time.Second)}, pepper)
	if err != nil {
		t.Fatal(err)
	}
	gone, goneText, err := f.Create(Key{PrincipalID: "p", ClientID: "c"}, pepper)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Revoke(gone.ID); err != nil {
		t.Fatal(err)
	}
	v := verifier(t, f)
	_, secret, _ := split(text)
	for name, bad := range map[string]string{
		"empty": "", "other form": "Bearer x", "prefix only": Prefix, "no secret": Prefix + k.ID + "_", "no id": Prefix + "_" + secret,
		"unknown id": format("key_unknown", secret), "wrong secret": format(k.ID, newSecret()), "longer": text + "a", "shorter": text[:len(text)-1],
		"another key's secret": format(old.ID, secret), "expired": oldText, "revoked": goneText,
		"upper case": strings.ToUpper(text), "too long": text + strings.Repeat("a", 1000), "next version": strings.Replace(text, "_v1_", "_v2_", 1),
	} {
		if k, err := v.Verify(t.Context(), bad); !errors.Is(err, ErrInvalid) || err.Error() != ErrInvalid.Error() || k != nil {
			t.Errorf("%s: %v %v", name, k, err)
		}
	}
}

func TestRevocationCountsForTheNextRequest(t *testing.T) {
	f, k, text := newFile(t)
	v := verifier(t, f)
	if _, err := v.Verify(t.Context(), text); err != nil {
		t.Fatal(err)
	}
	first, err := f.Revoke(k.ID)
	if err != nil || first.RevokedAt.IsZero() {
		t.Fatalf("%+v %v", first, err)
	}
	if _, err := v.Verify(t.Context(), text); !errors.Is(err, ErrInvalid) {
		t.Errorf("after revocation: %v", err)
	}
	again, err := f.Revoke(k.ID)
	if err != nil || !again.RevokedAt.Equal(first.RevokedAt) {
		t.Errorf("twice: %+v %v", again, err)
	}
	if _, err := f.Revoke("key_none"); !errors.Is(err, ErrNoKey) {
		t.Errorf("unknown: %v", err)
	}
}

func TestRememberedKeyRunsOut(t *testing.T) {
	f, _, text := newFile(t)
	v := verifier(t, f)
	now := time.Now()
	v.now = func() time.Time { return now }
	if _, err := v.Verify(t.Context(), text); err != nil {
		t.Fatal(err)
	}
	for name, e := range v.cached {
		e.hash = "another"
		v.cached[name] = e
	}
	// The memory is of another hash, so the key is verified anew.
	if _, err := v.Verify(t.Context(), text); err != nil {
		t.Error(err)
	}
	v.mu.Lock()
	for _, k := range v.keys {
		k.ExpiresAt = now.Add(time.Minute)
	}
	v.mu.Unlock()
	now = now.Add(2 * time.Minute)
	if _, err := v.Verify(t.Context(), text); !errors.Is(err, ErrInvalid) {
		t.Errorf("after its end: %v", err)
	}
}

func TestUnsafeFileRefusesEverybody(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"mode":    func(p string) error { return os.Chmod(p, 0o640) },
		"gone":    os.Remove,
		"garbage": func(p string) error { return os.WriteFile(p, []byte("{"), 0o600) },
		"unknown member": func(p string) error {
			return os.WriteFile(p, []byte(`{"version":1,"keys":[],"extra":1}`), 0o600)
		},
		"version":  func(p string) error { return os.WriteFile(p, []byte(`{"version":2,"keys":[]}`), 0o600) },
		"trailing": func(p string) error { return os.WriteFile(p, []byte(`{"version":1,"keys":[]} x`), 0o600) },
		"null key": func(p string) error { return os.WriteFile(p, []byte(`{"version":1,"keys":[null]}`), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			f, _, text := newFile(t)
			v := verifier(t, f)
			if _, err := v.Verify(t.Context(), text); err != nil {
				t.Fatal(err)
			}
			if err := damage(f.path); err != nil {
				t.Fatal(err)
			}
			if k, err := v.Verify(t.Context(), text); err == nil || errors.Is(err, ErrInvalid) || k != nil {
				t.Errorf("%v %v", k, err)
			}
			if _, err := NewVerifier(f, pepper); err == nil {
				t.Error("a new verifier takes it")
			}
		})
	}
	if _, err := NewVerifier(OpenFile("/nowhere"), pepper[:8]); err == nil || !strings.Contains(err.Error(), "pepper") {
		t.Errorf("short pepper: %v", err)
	}
}

func TestAnotherPepperMatchesNothing(t *testing.T) {
	f, _, text := newFile(t)
	v, err := NewVerifier(f, []byte(strings.Repeat("q", MinPepper)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.Verify(t.Context(), text); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
}

func TestVerificationIsBoundedAndEndsWithItsContext(t *testing.T) {
	f, _, text := newFile(t)
	v := verifier(t, f)
	for range maxVerifying {
		v.slots <- struct{}{}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := v.Verify(ctx, text); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestConcurrentChangesAreAllKept(t *testing.T) {
	f, _, _ := newFile(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, _, err := f.Create(Key{PrincipalID: "p", ClientID: "c"}, pepper); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	keys, err := f.List()
	if err != nil || len(keys) != 5 {
		t.Errorf("%d keys, %v", len(keys), err)
	}
	fi, err := os.Stat(f.path)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
}

func TestScopesGrantNothingByDefaultAndDenialWins(t *testing.T) {
	id, err := leaseclient.Identity{TenantID: "t1", ProgramID: "p1", TargetNamespace: "ns", TargetID: "x-1", ActorName: "a1"}.Normalize()
	if err != nil {
		t.Fatal(err)
	}
	all := Rule{"*", "*", "*", "*"}
	for name, c := range map[string]struct {
		allow, deny []Rule
		want        bool
	}{
		"nothing":          {nil, nil, false},
		"everything":       {[]Rule{all}, nil, true},
		"exact":            {[]Rule{{"t1", "p1", "a1", "ns/x-1"}}, nil, true},
		"begins":           {[]Rule{{"t*", "p1", "a*", "ns/x-*"}}, nil, true},
		"namespace":        {[]Rule{{"t1", "p1", "a1", "ns/*"}}, nil, true},
		"other tenant":     {[]Rule{{"t2", "*", "*", "*"}}, nil, false},
		"other program":    {[]Rule{{"*", "p2", "*", "*"}}, nil, false},
		"other actor":      {[]Rule{{"*", "*", "a2", "*"}}, nil, false},
		"other target":     {[]Rule{{"*", "*", "*", "ns/x-2"}}, nil, false},
		"empty part":       {[]Rule{{"t1", "p1", "", "*"}}, nil, false},
		"denied":           {[]Rule{all}, []Rule{{"*", "*", "*", "ns/x-*"}}, false},
		"other denied":     {[]Rule{all}, []Rule{{"*", "*", "*", "ns/y"}}, true},
		"second rule":      {[]Rule{{"t2", "*", "*", "*"}, {"t1", "*", "*", "*"}}, nil, true},
		"prefix of tenant": {[]Rule{{"t", "*", "*", "*"}}, nil, false},
	} {
		if got := (Grant{Allow: c.allow, Deny: c.deny}).Covers(id); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	for name, g := range map[string]Grant{
		"capability": {Capabilities: []Capability{"targets:everything"}},
		"star":       {Allow: []Rule{{"a*b", "*", "*", "*"}}},
		"upper case": {Allow: []Rule{{"T1", "*", "*", "*"}}},
		"target":     {Allow: []Rule{{"*", "*", "*", "x"}}},
		"long":       {Deny: []Rule{{strings.Repeat("x", 1000), "*", "*", "*"}}},
	} {
		if err := g.Validate(); leaseclient.CodeOf(err) != leaseclient.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzSplit(f *testing.F) {
	f.Add("star_sk_v1_key_abc_secret")
	f.Add("star_sk_v1__")
	f.Fuzz(func(t *testing.T, text string) {
		if id, secret, ok := split(text); ok && format(id, secret) != text {
			t.Errorf("%q became %q and %q", text, id, secret)
		}
	})
}
