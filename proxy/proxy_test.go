package proxy

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/starintel/fencerider/fence/fencetest"
	"github.com/starintel/fencerider/leaseclient"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory is a store of one process, for tests of handlers. It guarantees nothing.
type memory struct {
	mu     sync.Mutex
	leases map[string]leaseclient.Lease
	byReq  map[string]leaseclient.Lease
	tokens map[string]uint64
	err    error
}

func newMemory() *memory {
	return &memory{leases: map[string]leaseclient.Lease{}, byReq: map[string]leaseclient.Lease{}, tokens: map[string]uint64{}}
}

func (m *memory) Acquire(_ context.Context, r leaseclient.AcquireRequest) (*leaseclient.Acquired, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return nil, m.err
	}
	if err := r.Validate(); err != nil {
		return nil, err
	}
	now := leaseclient.StoreTime(time.Now().UnixMilli())
	sent := leaseclient.SystemClock().Boot()
	if l, ok := m.byReq[r.RequestID]; ok {
		return &leaseclient.Acquired{Lease: l, Replayed: true, Current: leaseclient.StateActive, Now: now, Sent: sent}, nil
	}
	key := r.Identity.LockKey()
	if _, held := m.leases[key]; held {
		return nil, &leaseclient.Error{Code: leaseclient.CodeConflict, Op: "acquire", RetryAfter: time.Second}
	}
	m.tokens[key]++
	l := leaseclient.Lease{
		LockKey: key, Identity: r.Identity, LeaseID: leaseclient.NewID("lease"), Owner: r.Owner, Token: m.tokens[key], AcquiredAt: now, RenewedAt: now,
		ExpiresAt: now.Add(30 * time.Second), TTLMillis: 30_000, MaxLifetimeMillis: 3_600_000, ExecutionID: r.ExecutionID, TraceID: r.TraceID, State: leaseclient.StateActive,
	}
	m.leases[key], m.byReq[r.RequestID] = l, l
	return &leaseclient.Acquired{Lease: l, Current: leaseclient.StateActive, Now: now, Sent: sent}, nil
}

func (m *memory) Renew(_ context.Context, r leaseclient.RenewRequest) (*leaseclient.Renewed, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, ok := m.leases[r.Identity.LockKey()]
	if !ok || l.LeaseID != r.LeaseID {
		return nil, &leaseclient.Error{Code: leaseclient.CodeLost, Op: "renew"}
	}
	return &leaseclient.Renewed{Lease: l, Now: l.AcquiredAt, Sent: leaseclient.SystemClock().Boot()}, nil
}

func (m *memory) Release(_ context.Context, r leaseclient.ReleaseRequest) (*leaseclient.Released, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, ok := m.leases[r.Identity.LockKey()]
	if !ok || l.LeaseID != r.LeaseID {
		return nil, &leaseclient.Error{Code: leaseclient.CodeLost, Op: "release"}
	}
	delete(m.leases, r.Identity.LockKey())
	l.State = leaseclient.StateReleased
	return &leaseclient.Released{Lease: l}, nil
}

func (m *memory) Inspect(_ context.Context, r leaseclient.InspectRequest) (*leaseclient.Inspected, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l, ok := m.leases[r.Identity.LockKey()]
	if !ok {
		return nil, &leaseclient.Error{Code: leaseclient.CodeNotFound, Op: "inspect"}
	}
	return &leaseclient.Inspected{Lease: l}, nil
}

// gate is a fence that has nothing to do.
type gate struct{ fencetest.Gate }

func (g *gate) Run(ctx context.Context) error { <-ctx.Done(); return nil }
func (g *gate) Drain(context.Context) error   { return nil }

// running is a sidecar with its store.
type running struct {
	*Sidecar
	store *memory
	dir   string
	stop  func() error
}

// start runs a sidecar until the test ends.
func start(t *testing.T, mod ...func(*Options)) *running {
	t.Helper()
	dir, err := os.MkdirTemp("", "fr") //nolint:usetesting // the path of a unix socket must be short
	if err != nil {
		t.Fatal(err)
	}
	r := &running{store: newMemory(), dir: filepath.Join(dir, "s")}
	o := Options{
		Store: r.store, Gate: &gate{}, Table: NewTable(), Logger: zap.NewNop(), Metrics: NewMetrics("test"), Version: "test",
		Couch: http.NotFoundHandler(), CouchListen: "127.0.0.1:0", AdminListen: "127.0.0.1:0", SocketDir: r.dir,
		Identity: leaseclient.Identity{TenantID: "t", ProgramID: "p", TargetNamespace: "n", ActorName: "a"},
		Owner:    leaseclient.Owner{PrincipalID: "prn", ClientID: "c", CredentialID: "k", InstanceID: "i"},
		Classes:  []string{"default"},
	}
	for _, m := range mod {
		m(&o)
	}
	if r.Sidecar, err = New(o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	var once sync.Once
	var result error
	r.stop = func() error {
		once.Do(func() { cancel(); result = <-done })
		return result
	}
	t.Cleanup(func() { _ = r.stop(); _ = os.RemoveAll(dir) })
	select {
	case <-r.Started():
	case err := <-done:
		done <- err
		t.Fatalf("run: %v", err)
	}
	return r
}

// post sends a request to the control socket.
func (r *running) post(t *testing.T, path, body string, header ...string) (int, map[string]any) {
	t.Helper()
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", filepath.Join(r.dir, "control.sock"))
	}}
	req, err := http.NewRequest(http.MethodPost, "http://x"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	return res.StatusCode, m
}

func TestEnvelopes(t *testing.T) {
	r := start(t)
	code, m := r.post(t, "/v1/leases/acquire", `{"target_id":"X","request_id":"req-1"}`, "X-Correlation-ID", "corr-mine")
	lease, _ := m["lease"].(map[string]any)
	identity, _ := lease["lock_identity"].(map[string]any)
	if code != 200 || m["status"] != "success" || m["code"] != "lease_acquired" || m["correlation_id"] != "corr-mine" || identity["target_id"] != "x" || lease["fencing_token"] != 1.0 || lease["state"] != "active" {
		t.Fatalf("%d %v", code, m)
	}
	if lease["lock_key"] != nil || lease["owner_principal_id"] != nil {
		t.Errorf("shows too much: %v", lease)
	}
	code, m = r.post(t, "/v1/leases/acquire", `{"target_id":"x"}`)
	if code != 409 || m["status"] != "error" || m["code"] != "lease_conflict" || m["retryable"] != true || m["retry_after_ms"] != 1000.0 || m["correlation_id"] == "" || m["request_id"] == "" {
		t.Errorf("%d %v", code, m)
	}
	code, m = r.post(t, "/v1/leases/acquire", `{"target_id":"x","request_id":"req-1"}`)
	if code != 200 || m["replayed"] != true || len(r.opts.Table.held()) != 1 {
		t.Errorf("%d %v", code, m)
	}
	code, m = r.post(t, "/v1/leases/release", fmt.Sprintf(`{"lease_id":%q,"fencing_token":9}`, lease["lease_id"]))
	if code != 409 || m["code"] != "lease_lost" {
		t.Errorf("wrong token: %d %v", code, m)
	}
	code, m = r.post(t, "/v1/leases/release", fmt.Sprintf(`{"lease_id":%q}`, lease["lease_id"]))
	if code != 200 || m["code"] != "lease_released" {
		t.Errorf("%d %v", code, m)
	}
	r.store.err = &leaseclient.Error{Code: leaseclient.CodeUnavailable, Op: "acquire", Err: fmt.Errorf("dial tcp 10.0.0.1:6379")}
	code, m = r.post(t, "/v1/leases/acquire", `{"target_id":"x"}`)
	if text := fmt.Sprint(m); code != 503 || strings.Contains(text, "10.0.0.1") || strings.Contains(text, "dial") {
		t.Errorf("%d %v", code, m)
	}
	for _, tc := range []struct {
		body, header string
		code         int
	}{
		{`{"target_id":"x"}`, "text/xml", 415}, {strings.Repeat("x", maxRequest+1), "", 413}, {`{"operation_class":"other","target_id":"x"}`, "", 400},
		{`{}`, "", 400}, {`{"target_id":"x","ttl_ms":-1}`, "", 400}, {`{"metadata":7}`, "", 400},
	} {
		if code, m := r.post(t, "/v1/leases/acquire", tc.body, "Content-Type", tc.header); code != tc.code || m["status"] != "error" {
			t.Errorf("%.40s: %d %v", tc.body, code, m)
		}
	}
}

func TestEventsTellInOrderAndDropSlowReaders(t *testing.T) {
	r := start(t)
	c, err := net.Dial("unix", filepath.Join(r.dir, "events.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	lines := bufio.NewScanner(c)
	next := func() map[string]any {
		t.Helper()
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		for lines.Scan() {
			var m map[string]any
			if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
				t.Fatalf("%s: %v", lines.Text(), err)
			}
			if m["event"] != eventHeartbeat {
				return m
			}
		}
		return nil
	}
	if e := next(); e["event"] != eventSnapshot {
		t.Fatalf("%v", e)
	}
	_, m := r.post(t, "/v1/leases/acquire", `{"target_id":"x"}`)
	lease, _ := m["lease"].(map[string]any)
	if e := next(); e["event"] != eventAcquired {
		t.Fatalf("%v", e)
	}
	fmt.Fprintf(c, "nonsense\n{\"ack\":%q}\n", lease["lease_id"])
	// Another owner has it now, as far as the store is concerned.
	r.store.mu.Lock()
	clear(r.store.leases)
	r.store.mu.Unlock()
	id, _ := lease["lease_id"].(string)
	if code, _ := r.post(t, "/v1/leases/renew", fmt.Sprintf(`{"lease_id":%q}`, id)); code != 409 {
		t.Fatalf("renewed: %d", code)
	}
	e := next()
	if l, _ := e["lease"].(map[string]any); e["event"] != eventLost || e["reason"] != "renewal_rejected" || e["code"] != "lease_lost" || l["lease_id"] != id {
		t.Fatalf("%v", e)
	}
	if _, ok := r.opts.Table.Named(id); !ok {
		t.Error("a lost lease is not presented any more")
	}

	slow, err := net.Dial("unix", filepath.Join(r.dir, "events.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	pad := newEvent(eventHeartbeat)
	pad.Reason = leaseclient.LossReason(strings.Repeat("x", 4096))
	for range 20 * eventBacklog {
		r.hub.publish(pad)
	}
	r.hub.mu.Lock()
	dropped := r.hub.dropped
	r.hub.mu.Unlock()
	if dropped == 0 {
		t.Error("a reader that never reads was waited for")
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}

func TestSocketFiles(t *testing.T) {
	r := start(t)
	for _, name := range []string{"control.sock", "events.sock"} {
		fi, err := os.Stat(filepath.Join(r.dir, name))
		if err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", name, fi.Mode(), err)
		}
	}
	if fi, err := os.Stat(r.dir); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v", err)
	}
	if _, err := listenUnix(filepath.Join(r.dir, "control.sock"), 0o600); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a live socket was taken over: %v", err)
	}
	stale := filepath.Join(r.dir, "stale.sock")
	ln, err := net.Listen("unix", stale)
	if err != nil {
		t.Fatal(err)
	}
	ln.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = ln.Close()
	again, err := listenUnix(stale, 0o600)
	if err != nil {
		t.Fatalf("a stale socket stands in the way: %v", err)
	}
	_ = again.Close()
	file := filepath.Join(r.dir, "file")
	if err := os.WriteFile(file, []byte("keep"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listenUnix(file, 0o600); err == nil {
		t.Error("a file was replaced")
	}
	if b, _ := os.ReadFile(file); string(b) != "keep" {
		t.Error("the file is gone")
	}
}

func TestHealth(t *testing.T) {
	var mu sync.Mutex
	var down error
	r := start(t, func(o *Options) {
		o.Checks = []Check{{"lease_store", func(context.Context) error { mu.Lock(); defer mu.Unlock(); return down }}}
		o.EnvLease = &EnvLease{Request: leaseclient.AcquireRequest{
			Identity: leaseclient.Identity{TenantID: "t", ProgramID: "p", TargetNamespace: "n", TargetID: "env", ActorName: "a", WorkflowName: "default", OperationClass: "default"},
			Owner:    o.Owner, ExecutionID: "e", JobID: "j", TraceID: "t",
		}}
	})
	get := func(path string) (int, string) {
		t.Helper()
		cl := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		res, err := cl.Get("http://" + r.Addr("admin") + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, _ := io.ReadAll(res.Body)
		return res.StatusCode, string(b)
	}
	limit := time.Now().Add(10 * time.Second)
	for {
		code, body := get("/readyz")
		if code == 200 {
			break
		}
		if time.Now().After(limit) {
			t.Fatalf("not ready: %s", body)
		}
	}
	mu.Lock()
	down = &leaseclient.Error{Code: leaseclient.CodeUnavailable, Err: fmt.Errorf("dial tcp 10.0.0.1")}
	mu.Unlock()
	if code, body := get("/readyz"); code != 503 || !strings.Contains(body, "lease_backend_unavailable") || strings.Contains(body, "10.0.0.1") {
		t.Errorf("%d %s", code, body)
	}
	if code, _ := get("/livez"); code != 200 {
		t.Errorf("livez %d", code)
	}
	if code, body := get("/metrics"); code != 200 || !strings.Contains(body, "fencerider_leases_held 1") {
		t.Errorf("metrics %d", code)
	}
}

func TestTableKeepsLostLeasesWithinBounds(t *testing.T) {
	store := newMemory()
	table := NewTable()
	ctx, cancel := context.WithCancel(t.Context())
	var keepers []*leaseclient.Keeper
	for i := range maxLost + 10 {
		id, err := leaseclient.Identity{TenantID: "t", ProgramID: "p", TargetNamespace: "n", TargetID: fmt.Sprint("x", i), ActorName: "a"}.Normalize()
		if err != nil {
			t.Fatal(err)
		}
		a, err := store.Acquire(ctx, leaseclient.AcquireRequest{
			Call: leaseclient.Call{RequestID: fmt.Sprint("r", i), Deadline: time.Now().Add(time.Minute)}, Identity: id,
			Owner: leaseclient.Owner{PrincipalID: "a", ClientID: "a", CredentialID: "a", InstanceID: "a"}, ExecutionID: "e", JobID: "j", TraceID: "t",
		})
		if err != nil {
			t.Fatal(err)
		}
		k := leaseclient.StartKeeper(ctx, leaseclient.KeeperOptions{Store: store, Acquired: a})
		keepers = append(keepers, k)
		table.add(k)
		k.Stop(leaseclient.LossExpired)
	}
	cancel()
	for _, k := range keepers {
		k.Wait()
	}
	if n := len(table.byID); n > maxLost+2 {
		t.Errorf("%d lost leases are remembered", n)
	}
	if _, n := table.Single(); n != 1 {
		t.Errorf("the latest lost lease is not presented: %d", n)
	}
}
