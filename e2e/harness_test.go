package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"github.com/valkey-io/valkey-go"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/leaseclient/leasetest"
	"github.com/starintel/fencerider/leaseclient/valkeystore"
)

// bin holds the binaries that TestMain built: "guarded" is the sidecar with fail
// points, "open" the same with its gate switched off.
var bin = map[string]string{}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "fencerider-e2e")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for name, tags := range map[string]string{"guarded": "failpoint", "open": "failpoint,gateoff"} {
		bin[name] = filepath.Join(dir, name)
		cmd := exec.Command("go", "build", "-race", "-tags", tags, "-o", bin[name], "../cmd/fencerider")
		cmd.Stderr = os.Stderr
		if err := cmd.Run(); err != nil {
			fmt.Fprintf(os.Stderr, "build %s: %v\n", name, err)
			os.Exit(1)
		}
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// service returns the URL of a real service; without it the test fails.
func service(t testing.TB, name string) *url.URL {
	t.Helper()
	raw := os.Getenv(name)
	if raw == "" {
		t.Fatalf("%s is not set: this test needs real services, `make test` starts them", name)
	}
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// world is one test's corner of the services: a namespace, a database, a queue,
// and links to each service that can be cut.
type world struct {
	t      testing.TB
	ns     string
	db     string
	queue  string
	valkey *url.URL
	couch  *url.URL
	amqp   *url.URL
	admin  valkey.Client
	store  *valkeystore.Store
	ch     *amqp091.Channel
	policy string
}

// The times of the sidecars under test: short, so that a lease is soon over.
const (
	leaseTTL     = 3 * time.Second
	arrivalBound = time.Second
)

// newWorld makes the corner.
func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{
		t: t, valkey: service(t, "FENCERIDER_TEST_VALKEY_URL"), couch: service(t, "FENCERIDER_TEST_COUCHDB_URL"), amqp: service(t, "FENCERIDER_TEST_AMQP_URL"),
		ns: "fencerider-" + strings.ReplaceAll(leaseclient.NewID("t"), "_", "-"),
	}
	w.db = "e" + strings.TrimPrefix(leaseclient.NewID(""), "_")
	w.queue = leaseclient.NewID("q")
	co, err := valkey.ParseURL(service(t, "FENCERIDER_TEST_VALKEY_ADMIN_URL").String())
	if err != nil {
		t.Fatal(err)
	}
	co.DisableCache, co.ForceSingleClient = true, true
	if w.admin, err = valkey.NewClient(co); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.admin.Close)
	w.store, err = valkeystore.Open(valkeystore.Options{URL: w.valkey.String(), Namespace: w.ns, Bound: arrivalBound})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.store.Close)
	conn, err := amqp091.Dial(w.amqp.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if w.ch, err = conn.Channel(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.ch.QueueDeclare(w.queue, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = w.ch.QueueDelete(w.queue, false, false, false) })
	// One shard: the feed of changes has no order between shards, and the tests
	// read the order of writes from it.
	w.direct(http.MethodPut, "?q=1", "", http.StatusCreated)
	t.Cleanup(func() { w.direct(http.MethodDelete, "", "", http.StatusOK) })
	out, err := w.command(nil, "init", "--shards", "2").CombinedOutput()
	if err != nil {
		t.Fatalf("init: %v\n%s", err, out)
	}
	return w
}

// credentials puts the service's user on a request.
func (w *world) credentials(r *http.Request) {
	if u := w.couch.User; u != nil {
		pw, _ := u.Password()
		r.SetBasicAuth(u.Username(), pw)
	}
}

// answer is an HTTP answer that was read.
type answer struct {
	code   int
	header http.Header
	body   string
}

// json reads the body.
func (a answer) json() map[string]any {
	var m map[string]any
	_ = json.Unmarshal([]byte(a.body), &m)
	return m
}

// do sends a request to CouchDB or to a sidecar in front of it.
func (w *world) do(base, method, path, body string) (answer, error) {
	r, err := http.NewRequest(method, strings.TrimSuffix(base, "/")+"/"+w.db+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	w.credentials(r)
	r.Header.Set("Content-Type", "application/json")
	cl := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 60 * time.Second}
	res, err := cl.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return answer{res.StatusCode, res.Header, string(b)}, err
}

// direct asks CouchDB itself.
func (w *world) direct(method, path, body string, want int) answer {
	w.t.Helper()
	bare := *w.couch
	bare.User = nil
	a, err := w.do(bare.String(), method, path, body)
	if err != nil {
		w.t.Fatal(err)
	}
	if a.code != want {
		w.t.Fatalf("%s %s: %d %s", method, path, a.code, a.body)
	}
	return a
}

// received takes everything out of the queue, directly at the broker.
func (w *world) received() []amqp091.Delivery {
	w.t.Helper()
	var out []amqp091.Delivery
	for {
		d, ok, err := w.ch.Get(w.queue, true)
		if err != nil {
			w.t.Fatal(err)
		}
		if !ok {
			return out
		}
		out = append(out, d)
	}
}

// command prepares a run of the binary with this world's settings.
func (w *world) command(more []string, args ...string) *exec.Cmd {
	cmd := exec.Command(bin["guarded"], args...)
	cmd.Env = append(os.Environ(),
		"FENCERIDER_VALKEY_URL="+w.valkey.String(), "FENCERIDER_COUCHDB_URL="+w.couch.String(), "FENCERIDER_AMQP_URL="+w.amqp.String(),
		"FENCERIDER_NAMESPACE="+w.ns, "FENCERIDER_TTL_MIN=200ms", "FENCERIDER_TTL_DEFAULT="+leaseTTL.String(), "FENCERIDER_ARRIVAL_BOUND="+arrivalBound.String(),
		"FENCERIDER_SWEEP_INTERVAL=300ms", "FENCERIDER_LOG_LEVEL=debug",
		"FENCERIDER_LEASE_TENANT_ID=tenant", "FENCERIDER_LEASE_PROGRAM_ID=program", "FENCERIDER_LEASE_TARGET_NAMESPACE=ns", "FENCERIDER_LEASE_ACTOR_NAME=actor",
	)
	if w.policy != "" {
		cmd.Env = append(cmd.Env, "FENCERIDER_POLICY_FILE="+w.policy)
	}
	cmd.Env = append(cmd.Env, more...)
	return cmd
}

// sidecar is one running sidecar.
type sidecar struct {
	w      *world
	cmd    *exec.Cmd
	dir    string
	couch  string
	amqp   string
	admin  string
	points string
	exited chan struct{}
	err    error

	mu  sync.Mutex
	log bytes.Buffer
}

// Write implements io.Writer for the sidecar's log.
func (s *sidecar) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.Write(p)
}

// logs returns what the sidecar has logged.
func (s *sidecar) logs() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.String()
}

// freeAddr returns an address that nothing listens on.
func freeAddr(t testing.TB) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// start runs a sidecar of a build. It is ended with the test.
func (w *world) start(build string, more ...string) *sidecar {
	w.t.Helper()
	// A unix socket's path is short; the test's own folder is not.
	dir, err := os.MkdirTemp("", "fr")
	if err != nil {
		w.t.Fatal(err)
	}
	s := &sidecar{w: w, dir: dir, couch: freeAddr(w.t), amqp: freeAddr(w.t), admin: freeAddr(w.t), points: filepath.Join(dir, "points"), exited: make(chan struct{})}
	if err := os.Mkdir(s.points, 0o700); err != nil {
		w.t.Fatal(err)
	}
	s.cmd = w.command(append([]string{
		"FENCERIDER_COUCH_LISTEN=" + s.couch, "FENCERIDER_AMQP_LISTEN=" + s.amqp, "FENCERIDER_ADMIN_LISTEN=" + s.admin,
		"FENCERIDER_SOCKET_DIR=" + filepath.Join(dir, "s"), "FENCERIDER_TEST_FAILPOINTS=" + s.points,
	}, more...), "run")
	s.cmd.Path = bin[build]
	s.cmd.Stderr = s
	if err := s.cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	go func() {
		s.err = s.cmd.Wait()
		close(s.exited)
	}()
	w.t.Cleanup(func() {
		s.signal(syscall.SIGCONT)
		s.signal(syscall.SIGKILL)
		<-s.exited
		if w.t.Failed() {
			w.t.Logf("log of the sidecar in %s:\n%s", dir, s.logs())
		}
		if strings.Contains(s.logs(), "DATA RACE") {
			w.t.Errorf("data race in the sidecar:\n%s", s.logs())
		}
		_ = os.RemoveAll(dir)
	})
	return s
}

// holding starts a sidecar for a target and waits until it holds its lease.
func (w *world) holding(build, target string, more ...string) *sidecar {
	w.t.Helper()
	s := w.start(build, append(more, "FENCERIDER_LEASE_TARGET_ID="+target)...)
	s.ready()
	return s
}

// signal sends a signal; a process that is gone is no matter.
func (s *sidecar) signal(sig syscall.Signal) { _ = s.cmd.Process.Signal(sig) }

// stop ends the sidecar in order and expects success.
func (s *sidecar) stop() {
	s.w.t.Helper()
	s.signal(syscall.SIGTERM)
	select {
	case <-s.exited:
		if s.err != nil {
			s.w.t.Errorf("sidecar ended with %v", s.err)
		}
	case <-time.After(40 * time.Second):
		s.w.t.Fatal("sidecar does not end")
	}
}

// readiness asks /readyz.
func (s *sidecar) readiness() (bool, string) {
	cl := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	res, err := cl.Get("http://" + s.admin + "/readyz")
	if err != nil {
		return false, err.Error()
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(res.Body)
	return res.StatusCode == http.StatusOK, string(b)
}

// ready waits until the sidecar is ready.
func (s *sidecar) ready() {
	s.w.t.Helper()
	eventually(s.w.t, "the sidecar is ready", func() bool {
		select {
		case <-s.exited:
			s.w.t.Fatalf("sidecar ended: %v\n%s", s.err, s.logs())
		default:
		}
		ok, _ := s.readiness()
		return ok
	})
}

// put writes a document through the sidecar.
func (s *sidecar) put(id, body string) (answer, error) {
	return s.w.do("http://"+s.couch, http.MethodPut, "/"+id, body)
}

// control sends a request to the control socket.
func (s *sidecar) control(path, body string) answer {
	s.w.t.Helper()
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(s.dir, "s", "control.sock"))
	}}
	res, err := (&http.Client{Transport: tr, Timeout: 30 * time.Second}).Post("http://control"+path, "application/json", strings.NewReader(body))
	if err != nil {
		s.w.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		s.w.t.Fatal(err)
	}
	return answer{res.StatusCode, res.Header, string(b)}
}

// events reads the event socket until the test ends; lines arrive on the channel.
func (s *sidecar) events() <-chan map[string]any {
	s.w.t.Helper()
	c, err := net.Dial("unix", filepath.Join(s.dir, "s", "events.sock"))
	if err != nil {
		s.w.t.Fatal(err)
	}
	s.w.t.Cleanup(func() { _ = c.Close() })
	out := make(chan map[string]any, 1000)
	go func() {
		defer close(out)
		sc := bufio.NewScanner(c)
		for sc.Scan() {
			var m map[string]any
			if json.Unmarshal(sc.Bytes(), &m) == nil {
				out <- m
			}
		}
	}()
	return out
}

// until reads events up to the one with the given name.
func until(t testing.TB, events <-chan map[string]any, name string) map[string]any {
	t.Helper()
	limit := time.After(30 * time.Second)
	for {
		select {
		case e, ok := <-events:
			if !ok {
				t.Fatalf("event stream ended before %s", name)
			}
			if e["event"] == name {
				return e
			}
		case <-limit:
			t.Fatalf("no event %s", name)
		}
	}
}

// arm makes the sidecar stop at a fail point, once.
func (s *sidecar) arm(point string) {
	s.w.t.Helper()
	if err := os.WriteFile(filepath.Join(s.points, point+".armed"), nil, 0o600); err != nil {
		s.w.t.Fatal(err)
	}
}

// hit waits until the sidecar has stopped at the point.
func (s *sidecar) hit(point string) {
	s.w.t.Helper()
	eventually(s.w.t, "the sidecar reaches "+point, func() bool {
		_, err := os.Stat(filepath.Join(s.points, point+".hit"))
		return err == nil
	})
}

// let lets the sidecar go on from a point.
func (s *sidecar) let(point string) {
	s.w.t.Helper()
	if err := os.WriteFile(filepath.Join(s.points, point+".release"), nil, 0o600); err != nil {
		s.w.t.Fatal(err)
	}
}

// worker is a client of RabbitMQ that talks through a sidecar, in confirm mode.
type worker struct {
	t    testing.TB
	w    *world
	conn *amqp091.Connection
	ch   *amqp091.Channel
}

// worker connects.
func (s *sidecar) worker() *worker {
	s.w.t.Helper()
	u := *s.w.amqp
	u.Host = s.amqp
	conn, err := amqp091.Dial(u.String())
	if err != nil {
		s.w.t.Fatalf("dial the sidecar: %v", err)
	}
	s.w.t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		s.w.t.Fatal(err)
	}
	if err := ch.Confirm(false); err != nil {
		s.w.t.Fatal(err)
	}
	return &worker{s.w.t, s.w, conn, ch}
}

// publish sends and does not wait.
func (k *worker) publish(body string) (*amqp091.DeferredConfirmation, error) {
	return k.ch.PublishWithDeferredConfirmWithContext(context.Background(), "", k.w.queue, false, false, amqp091.Publishing{Body: []byte(body), DeliveryMode: amqp091.Persistent})
}

// confirmed publishes and expects the confirm.
func (k *worker) confirmed(body string) {
	k.t.Helper()
	d, err := k.publish(body)
	if err != nil {
		k.t.Fatalf("publish %s: %v", body, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 40*time.Second)
	defer cancel()
	if ok, err := d.WaitContext(ctx); err != nil || !ok {
		k.t.Fatalf("publish %s: confirmed %v, %v", body, ok, err)
	}
}

// refused publishes and reports whether it was not confirmed, in whatever way.
func (k *worker) refused(body string) bool {
	d, err := k.publish(body)
	if err != nil {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), 40*time.Second)
	defer cancel()
	ok, err := d.WaitContext(ctx)
	return err != nil || !ok
}

// eventually polls a condition, since the work behind it has no other signal.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(40 * time.Second)
	for !f() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("not in time: %s", what)
		}
	}
}

// link puts a link that can be cut in front of a service.
func link(t testing.TB, u *url.URL) (*leasetest.Link, string) {
	t.Helper()
	l := leasetest.NewLink(t, u.Host)
	via := *u
	via.Host = l.Addr()
	return l, via.String()
}

// token reads the fencing token of a message.
func token(d amqp091.Delivery) int64 {
	n, _ := d.Headers[fence.HeaderToken].(int64)
	return n
}

// commitOf reads the commit id of a message.
func commitOf(d amqp091.Delivery) string {
	s, _ := d.Headers[fence.HeaderCommitID].(string)
	return s
}
