package e2e

import (
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// talk sends bytes to an address and returns everything that comes back.
func talk(t *testing.T, addr string, in []byte) string {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	_, _ = c.Write(in)
	if tc, ok := c.(*net.TCPConn); ok {
		_ = tc.CloseWrite()
	}
	out, _ := io.ReadAll(c)
	return string(out)
}

func TestBadInputHurtsNobodyElse(t *testing.T) {
	w := newWorld(t)
	s := w.holding("guarded", "target", "FENCERIDER_LEASE_TTL=30s")
	k := s.worker()
	k.confirmed("before")

	handshake := "AMQP\x00\x00\x09\x01"
	for in, want := range map[string]string{
		"GET / HTTP/1.1\r\n\r\n":                                 handshake,
		"\x16\x03\x01\x02\x00\x01\xfc":                           handshake,
		"AMQP\x03\x01\x00\x00":                                   handshake,
		handshake + "\xff\xff\xff\xff\xff\xff\xff\xff":           "FRAME_ERROR",
		handshake + "\x01\x00\x00\xff\xff\xff\xff" + "oversized": "frame_too_large",
	} {
		if got := talk(t, s.amqp, []byte(in)); !strings.Contains(got, want) {
			t.Errorf("%q was answered %q", in, got)
		}
	}
	// Half a frame, and then nothing.
	talk(t, s.amqp, []byte(handshake+"\x01\x00\x00\x00"))
	if got := talk(t, s.couch, []byte("\x00\x01\x02garbage\r\n\r\n")); !strings.Contains(got, "400") {
		t.Errorf("garbage on the CouchDB port was answered %q", got)
	}
	for body, want := range map[string]int{`{"a":`: 400, `[]`: 400, `"x"`: 400, "{\"a\":\"\xff\"}": 400, `{"_rev":1}`: 400} {
		if a, err := s.put("bad", body); err != nil || a.code != want {
			t.Errorf("%q: %v %+v", body, err, a)
		}
	}
	for body, field := range map[string]string{
		`{`: "body", `[]`: "body", `{"target_id":7}`: "target_id", `{"target_id":"x","nonsense":1}`: "nonsense", `{"target_id":"x","target_id":"y"}`: "twice",
		`{"target_id":"a b"}`: "target_id", `{"target_id":"x","deadline_at":"soon"}`: "deadline_at", `{"target_id":"x","ttl_ms":1}`: "ttl_ms",
	} {
		if a := s.control("/v1/leases/acquire", body); a.code != http.StatusBadRequest || !strings.Contains(a.body, field) {
			t.Errorf("%s: %+v", body, a)
		}
	}
	if a := s.control("/v1/nothing", `{}`); a.code != http.StatusNotFound {
		t.Errorf("%+v", a)
	}
	k.confirmed("after")
	if ms := w.received(); len(ms) != 2 {
		t.Errorf("%s", bodies(ms))
	}
	s.stop()
}

func TestDocumentWithoutAnIdentityIsRefusedByName(t *testing.T) {
	w := newWorld(t)
	w.policy = filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(w.policy, []byte(`
version: 1
defaults: {tenant_id: tenant, program_id: program, target_namespace: ns, actor_name: actor}
couch:
  rules:
    - {database: `+w.db+`, identity: {target_id: "{doc.target}"}}
rabbit:
  rules:
    - {exchange: "", routing_key: `+w.queue+`, identity: {target_id: "{body.target}"}}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	s := w.holding("guarded", "target")
	a, err := s.put("doc", `{"nothing":1}`)
	if err != nil || a.code != 403 || a.header.Get("Fencerider-Code") != "policy_denied" || !strings.Contains(a.body, "doc.target") {
		t.Errorf("%v %+v", err, a)
	}
	if a, err = s.put("doc", `{"target":"target"}`); err != nil || a.code != http.StatusCreated {
		t.Errorf("%v %+v", err, a)
	}
	if a, err = s.put("doc2", `{"target":"another"}`); err != nil || a.header.Get("Fencerider-Code") != "lease_lost" {
		t.Errorf("%v %+v", err, a)
	}
	k := s.worker()
	returns := k.ch.NotifyReturn(make(chan amqp091.Return, 1))
	if !k.refused("not json") {
		t.Error("a message without an identity was confirmed")
	}
	if r := <-returns; !strings.Contains(r.ReplyText, "policy_denied") {
		t.Errorf("%s", r.ReplyText)
	}
	k.confirmed(`{"target":"target"}`)
	s.stop()
}

// silent is an address where nobody listens.
func silent(t *testing.T, u *url.URL) string {
	t.Helper()
	v := *u
	v.Host = freeAddr(t)
	return v.String()
}

func TestServicesOutOfReach(t *testing.T) {
	w := newWorld(t)
	vk, viaValkey := link(t, w.valkey)
	cd, viaCouch := link(t, w.couch)
	mq, viaAMQP := link(t, w.amqp)
	vk.Down(true)
	cd.Down(true)
	mq.Down(true)
	s := w.start("guarded", "FENCERIDER_VALKEY_URL="+viaValkey, "FENCERIDER_COUCHDB_URL="+viaCouch, "FENCERIDER_AMQP_URL="+viaAMQP,
		"FENCERIDER_LEASE_TARGET_ID=target", "FENCERIDER_LEASE_AGAIN=true", "FENCERIDER_WRITE_TIMEOUT=3s")
	eventually(t, "the sidecar listens", func() bool { _, err := net.Dial("tcp", s.admin); return err == nil })
	ok, body := s.readiness()
	if ok || !strings.Contains(body, `"lease_store","ok":false`) || strings.Contains(body, "127.0.0.1") {
		t.Errorf("readiness without any service: %v %s", ok, body)
	}
	if a := s.control("/v1/leases/acquire", `{"target_id":"x"}`); a.code != 503 || a.json()["retryable"] != true {
		t.Errorf("%+v", a)
	}
	if a, err := s.put("doc", `{}`); err != nil || a.header.Get("Fencerider-Code") == "" || a.code < 400 {
		t.Errorf("%v %+v", err, a)
	}
	u := *w.amqp
	u.Host = s.amqp
	if _, err := amqp091.Dial(u.String()); err == nil {
		t.Error("connected without a broker")
	}

	// Everything comes back, and nobody has to do anything.
	vk.Down(false)
	cd.Down(false)
	mq.Down(false)
	s.ready()
	if a, err := s.put("doc", `{}`); err != nil || a.code != http.StatusCreated {
		t.Errorf("%v %+v", err, a)
	}
	k := s.worker()
	k.confirmed("alive")

	// The store goes away under a held lease: told apart from a lost one.
	vk.Down(true)
	a, err := s.put("doc2", `{}`)
	if c := a.header.Get("Fencerider-Code"); err != nil || a.code != 503 || (c != "lease_backend_unavailable" && c != "lease_outcome_unknown") {
		t.Errorf("%v %+v", err, a)
	}
	vk.Down(false)
	s.ready()
	cd.Down(true)
	if a, err := s.put("doc3", `{}`); err != nil || a.code != 503 {
		t.Errorf("%v %+v", err, a)
	}
	cd.Down(false)
	mq.Down(true)
	if !k.refused("cut") {
		t.Error("confirmed without a broker")
	}
	mq.Down(false)
	s.worker().confirmed("again")
	s.stop()
	if !strings.Contains(s.logs(), "shutdown phase done") {
		t.Error("no orderly end")
	}
}

func TestAddressWhereNobodyListens(t *testing.T) {
	w := newWorld(t)
	s := w.holding("guarded", "target", "FENCERIDER_LEASE_TTL=30s")
	s.stop()
	b := w.start("guarded", "FENCERIDER_COUCHDB_URL="+silent(t, w.couch), "FENCERIDER_AMQP_URL="+silent(t, w.amqp), "FENCERIDER_LEASE_TARGET_ID=target")
	eventually(t, "the lease is held", func() bool { _, body := b.readiness(); return strings.Contains(body, `"state":"held"`) })
	if a, err := b.put("doc", `{}`); err != nil || a.code != 503 || a.header.Get("Fencerider-Code") != "upstream_unavailable" {
		t.Errorf("%v %+v", err, a)
	}
	u := *w.amqp
	u.Host = b.amqp
	_, err := amqp091.Dial(u.String())
	if err == nil || !strings.Contains(err.Error(), "upstream_unavailable") {
		t.Errorf("worker heard %v", err)
	}
	b.stop()
}

func TestUnknownSettingOrPolicyKeyStopsTheStart(t *testing.T) {
	w := newWorld(t)
	out, err := w.command([]string{"FENCERIDER_ARRIVAL_BOUNDS=1s"}, "run").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "did you mean FENCERIDER_ARRIVAL_BOUND?") {
		t.Errorf("%v %s", err, out)
	}
	w.policy = filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(w.policy, []byte("version: 1\nrabit: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err = w.command(nil, "run").CombinedOutput()
	if err == nil || !strings.Contains(string(out), `did you mean "rabbit"`) {
		t.Errorf("%v %s", err, out)
	}
}
