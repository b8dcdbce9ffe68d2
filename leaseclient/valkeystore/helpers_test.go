package valkeystore

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/valkey-io/valkey-go"
	"go.uber.org/goleak"

	"github.com/starintel/fencerider/leaseclient"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serverURL returns the URL of the real server; without one the test fails.
func serverURL(t testing.TB, name string) string {
	t.Helper()
	u := os.Getenv(name)
	if u == "" {
		t.Fatalf("%s is not set: this test needs a real Valkey, `make test` starts one", name)
	}
	return u
}

// fixture is a store on a namespace of its own, and an administrator's view of
// what the server holds.
type fixture struct {
	*Store
	admin valkey.Client
	ns    string
}

// newFixture makes a namespace.
func newFixture(t testing.TB, mod ...func(*Options)) *fixture {
	t.Helper()
	f := rawFixture(t, mod...)
	if _, err := f.Init(t.Context(), InitOptions{Shards: 4}); err != nil {
		t.Fatalf("init: %v", err)
	}
	return f
}

// rawFixture opens a store whose namespace does not exist yet.
func rawFixture(t testing.TB, mod ...func(*Options)) *fixture {
	t.Helper()
	o := Options{
		URL:       serverURL(t, "FENCERIDER_TEST_VALKEY_URL"),
		Namespace: "fencerider-" + strings.ReplaceAll(leaseclient.NewID("t"), "_", "-"),
	}
	for _, m := range mod {
		m(&o)
	}
	s, err := Open(o)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(s.Close)
	co, err := valkey.ParseURL(serverURL(t, "FENCERIDER_TEST_VALKEY_ADMIN_URL"))
	if err != nil {
		t.Fatalf("admin url: %v", err)
	}
	co.DisableCache, co.ForceSingleClient = true, true
	admin, err := valkey.NewClient(co)
	if err != nil {
		t.Fatalf("admin client: %v", err)
	}
	t.Cleanup(admin.Close)
	return &fixture{Store: s, admin: admin, ns: o.Namespace}
}

// ownServer starts a server for a test that changes the server's own settings,
// and returns a fixture on it. The shared server has other tests on it.
func ownServer(t *testing.T) *fixture {
	t.Helper()
	program := serverURL(t, "FENCERIDER_TEST_VALKEY_SERVER")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	_, port, _ := net.SplitHostPort(addr)
	_ = ln.Close()
	cmd := exec.Command(program, "--bind", "127.0.0.1", "--port", port, "--dir", t.TempDir(), "--appendonly", "yes", "--appendfsync", "always", "--save", "")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for {
		if c, err := net.Dial("tcp", addr); err == nil {
			_ = c.Close()
			break
		}
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("the server does not come up")
		}
	}
	t.Setenv("FENCERIDER_TEST_VALKEY_URL", "valkey://"+addr)
	t.Setenv("FENCERIDER_TEST_VALKEY_ADMIN_URL", "valkey://"+addr)
	return newFixture(t)
}

// addrOf returns host:port of the server.
func addrOf(t testing.TB, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatalf("parse url: %v", err)
	}
	return u.Host
}

// key names a key of an identity's lock.
func (f *fixture) key(t testing.TB, name string, id leaseclient.Identity) string {
	t.Helper()
	d, err := leaseclient.ParseLockKey(id.LockKey())
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("{%s:s%d}:%s:%s", f.ns, shardOf(d, 4), name, digestText(id.LockKey()))
}

// shardKey names a key of an identity's shard.
func (f *fixture) shardKey(t testing.TB, name string, id leaseclient.Identity) string {
	t.Helper()
	d, err := leaseclient.ParseLockKey(id.LockKey())
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("{%s:s%d}:%s", f.ns, shardOf(d, 4), name)
}

// raw runs a command as the administrator.
func (f *fixture) raw(t testing.TB, args ...string) valkey.ValkeyResult {
	t.Helper()
	r := f.admin.Do(t.Context(), f.admin.B().Arbitrary(args...).Build())
	if err := r.Error(); err != nil && !valkey.IsValkeyNil(err) {
		t.Fatalf("%v: %v", args, err)
	}
	return r
}

// hash reads a hash as the administrator.
func (f *fixture) hash(t testing.TB, key string) map[string]string {
	t.Helper()
	m, err := f.raw(t, "HGETALL", key).AsStrMap()
	if err != nil {
		t.Fatalf("HGETALL %s: %v", key, err)
	}
	return m
}

// exists reports whether a key is there.
func (f *fixture) exists(t testing.TB, key string) bool {
	t.Helper()
	n, err := f.raw(t, "EXISTS", key).AsInt64()
	if err != nil {
		t.Fatal(err)
	}
	return n == 1
}

// counter reads the durable token counter.
func (f *fixture) counter(t testing.TB, id leaseclient.Identity) uint64 {
	t.Helper()
	v := f.hash(t, f.key(t, "fence", id))["token"]
	if v == "" {
		return 0
	}
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// testIdentity returns an identity of this test's own.
func testIdentity(name string) leaseclient.Identity {
	id, err := leaseclient.Identity{
		TenantID: "tenant-main", ProgramID: "program-a", TargetNamespace: "ns", TargetID: name, ActorName: "actor",
	}.Normalize()
	if err != nil {
		panic(err)
	}
	return id
}

// soon is a deadline that is far enough.
func soon() time.Time { return time.Now().Add(10 * time.Second) }

// owner returns an owner by name.
func owner(name string) leaseclient.Owner {
	return leaseclient.Owner{PrincipalID: "prn_" + name, ClientID: "client_" + name, CredentialID: "key_" + name, InstanceID: "instance_" + name}
}

// acquireRequest asks for a lease of thirty seconds.
func acquireRequest(id leaseclient.Identity, who string) leaseclient.AcquireRequest {
	return leaseclient.AcquireRequest{
		Call: leaseclient.Call{RequestID: leaseclient.NewID("request"), Deadline: soon()}, Identity: id, Owner: owner(who),
		ExecutionID: "execution_1", JobID: "job_1", TraceID: "trace_1", Metadata: map[string]any{"note": "é <x>", "n": 1.5},
	}
}

// acquire expects a grant.
func (f *fixture) acquire(t testing.TB, id leaseclient.Identity, who string) *leaseclient.Acquired {
	t.Helper()
	a, err := f.Acquire(t.Context(), acquireRequest(id, who))
	if err != nil {
		t.Fatalf("acquire: %v", err)
	}
	return a
}

// releaseRequest gives a lease back as its owner.
func releaseRequest(l leaseclient.Lease) leaseclient.ReleaseRequest {
	return leaseclient.ReleaseRequest{
		Call: leaseclient.Call{RequestID: leaseclient.NewID("request"), Deadline: soon()}, Identity: l.Identity,
		LeaseID: l.LeaseID, PrincipalID: l.PrincipalID, InstanceID: l.InstanceID, Token: l.Token,
	}
}

// renewRequest extends a lease as its owner.
func renewRequest(l leaseclient.Lease) leaseclient.RenewRequest {
	return leaseclient.RenewRequest{
		Call: leaseclient.Call{RequestID: leaseclient.NewID("request"), Deadline: soon()}, Identity: l.Identity,
		LeaseID: l.LeaseID, PrincipalID: l.PrincipalID, InstanceID: l.InstanceID, Token: l.Token,
	}
}

// release expects success.
func (f *fixture) release(t testing.TB, l leaseclient.Lease) {
	t.Helper()
	if _, err := f.Release(t.Context(), releaseRequest(l)); err != nil {
		t.Fatalf("release: %v", err)
	}
}

// expire makes a lease run out at the store, as if time had passed: its times
// are moved back, the record stays as it is otherwise.
func (f *fixture) expire(t testing.TB, l leaseclient.Lease) {
	t.Helper()
	back := func(v leaseclient.StoreTime) string {
		return strconv.FormatInt(int64(v)-l.TTLMillis-l.MaxLifetimeMillis, 10)
	}
	rec := f.hash(t, f.key(t, "lease", l.Identity))
	at := func(name string) leaseclient.StoreTime {
		n, err := strconv.ParseInt(rec[name], 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return leaseclient.StoreTime(n)
	}
	f.raw(t, "HSET", f.key(t, "lease", l.Identity), "acquired_at", back(at("acquired_at")),
		"renewed_at", back(at("renewed_at")), "expires_at", back(at("expires_at")))
}

// wantCode fails unless the error has the code.
func wantCode(t testing.TB, err error, code leaseclient.Code) {
	t.Helper()
	if got := leaseclient.CodeOf(err); got != code {
		t.Fatalf("code %q, want %q (%v)", got, code, err)
	}
}

// dead is a context that has ended.
func dead() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}
