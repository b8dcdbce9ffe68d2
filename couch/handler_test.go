package couch

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/fencetest"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// setup is a handler in front of the real server.
type setup struct {
	t      *testing.T
	gate   *fencetest.Gate
	leases *fencetest.Leases
	policy *policy.Policy
	h      *Handler
	url    string
	direct string
	user   *url.Userinfo
	db     string
	up     *url.URL
}

// couchURL is the real server.
func couchURL(t *testing.T) *url.URL {
	t.Helper()
	raw := os.Getenv("FENCERIDER_TEST_COUCHDB_URL")
	if raw == "" {
		t.Fatal("FENCERIDER_TEST_COUCHDB_URL is not set: this test needs a server with CouchDB's API, `make test` starts one")
	}
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// newSetup makes a database of its own and a handler in front of it.
func newSetup(t *testing.T, mod ...func(*Options)) *setup {
	t.Helper()
	up := couchURL(t)
	s := &setup{t: t, gate: &fencetest.Gate{}, leases: &fencetest.Leases{Refs: []leaseclient.Ref{fencetest.Ref("x", 5)}}, user: up.User, up: up}
	s.db = "t" + strings.TrimPrefix(leaseclient.NewID(""), "_")
	bare := *up
	bare.User = nil
	s.direct = strings.TrimSuffix(bare.String(), "/")
	o := Options{Upstream: up, Policy: func() *policy.Policy { return s.policy }, Leases: s.leases, Gate: s.gate}
	for _, m := range mod {
		m(&o)
	}
	h, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	s.h = h
	srv := httptest.NewServer(h)
	t.Cleanup(func() { srv.Close(); h.Close(); http.DefaultClient.CloseIdleConnections() })
	s.url = srv.URL
	s.must(s.do("PUT", s.direct+"/"+s.db, "", nil), 201)
	t.Cleanup(func() { s.do("DELETE", s.direct+"/"+s.db, "", nil) })
	return s
}

// reply is an answer that was read.
type reply struct {
	code   int
	header http.Header
	body   string
}

// member reads one member of a JSON answer.
func (r reply) member(name string) string {
	var m map[string]any
	if json.Unmarshal([]byte(r.body), &m) != nil {
		return ""
	}
	s, _ := m[name].(string)
	return s
}

// do sends a request with the server's credentials.
func (s *setup) do(method, target, body string, header map[string]string) reply {
	s.t.Helper()
	r, err := http.NewRequest(method, target, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	if body == "" {
		r.Body, r.ContentLength = http.NoBody, 0
	} else {
		r.Header.Set("Content-Type", "application/json")
	}
	if s.user != nil {
		pw, _ := s.user.Password()
		r.SetBasicAuth(s.user.Username(), pw)
	}
	for k, v := range header {
		r.Header.Set(k, v)
	}
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		s.t.Fatalf("%s %s: %v", method, target, err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return reply{res.StatusCode, res.Header, string(b)}
}

// via sends a request through the handler.
func (s *setup) via(method, path, body string, header ...string) reply {
	s.t.Helper()
	m := map[string]string{}
	for i := 0; i+1 < len(header); i += 2 {
		m[header[i]] = header[i+1]
	}
	return s.do(method, s.url+"/"+s.db+path, body, m)
}

// stored reads what the server holds.
func (s *setup) stored(path string) reply {
	s.t.Helper()
	return s.do("GET", s.direct+"/"+s.db+path, "", nil)
}

// must expects a status.
func (s *setup) must(r reply, code int) reply {
	s.t.Helper()
	if r.code != code {
		s.t.Fatalf("status %d, want %d: %s", r.code, code, r.body)
	}
	return r
}

// refused expects a refusal of the sidecar's own.
func (s *setup) refused(r reply, code leaseclient.Code) {
	s.t.Helper()
	if r.code != 403 || r.header.Get("Fencerider-Code") != string(code) || r.member("error") != "forbidden" || !strings.HasPrefix(r.member("reason"), string(code)+": ") || r.member("correlation_id") == "" {
		s.t.Fatalf("status %d, code %q: %s", r.code, r.header.Get("Fencerider-Code"), r.body)
	}
}

// stampOf reads the stamp of a stored document.
func (s *setup) stampOf(path string) fence.Stamp {
	s.t.Helper()
	var m map[string]json.RawMessage
	r := s.must(s.stored(path), 200)
	if err := json.Unmarshal([]byte(r.body), &m); err != nil {
		s.t.Fatal(err)
	}
	st, err := fence.ParseDocument(m["fence"])
	if err != nil {
		s.t.Fatalf("%v in %s", err, r.body)
	}
	return st
}

// closed expects that every accepted commit was given back once.
func (s *setup) closed() {
	s.t.Helper()
	if missing, twice := s.gate.Open(); len(missing)+len(twice) != 0 {
		s.t.Errorf("not given back %v, twice %v", missing, twice)
	}
}

func TestPutIsStampedAndConditioned(t *testing.T) {
	s := newSetup(t)
	r := s.must(s.via("PUT", "/doc", `{"b":1, "a":{"x":[1,2]},"fence":{"fencing_token":99}}`), 201)
	st := s.stampOf("/doc")
	if st.Token != 5 || st.LeaseID != "lease_x_5" || st.CommitID != s.gate.Begun()[0][0].ID || st.ExecutionID != "e" {
		t.Errorf("stamp %+v", st)
	}
	if !strings.HasSuffix(r.header.Get("Location"), "/"+s.db+"/doc") || strings.Contains(r.header.Get("Location"), s.up.Host) {
		t.Errorf("location %q", r.header.Get("Location"))
	}
	rev := r.member("rev")
	s.must(s.via("PUT", "/doc", `{"b":2}`), 409)
	s.must(s.via("PUT", "/doc", `{"b":2,"_rev":"1-abc"}`), 409)
	s.must(s.via("PUT", "/doc", `{"b":2,"_rev":"`+rev+`"}`), 201)
	second := s.stored("/doc").member("_rev")
	s.must(s.via("PUT", "/doc?rev="+second, `{"b":3}`), 201)
	third := s.stored("/doc").member("_rev")
	s.must(s.via("PUT", "/doc", `{"b":4}`, "If-Match", `"`+third+`"`), 201)
	s.must(s.via("PUT", "/doc?rev="+second, `{"_rev":"`+third+`"}`), 400)
	s.must(s.via("PUT", "/doc", `{"_rev":7}`), 400)
	s.must(s.via("PUT", "/doc", `{bad`), 400)
	s.must(s.via("PUT", "/doc", `[1]`), 400)
	if got := s.stored("/doc").body; !strings.Contains(got, `"b":4`) {
		t.Errorf("stored %s", got)
	}
	s.closed()
}

func TestARevisionOfADocumentThatIsNotThere(t *testing.T) {
	s := newSetup(t)
	s.must(s.via("PUT", "/never", `{"_rev":"5-aaaa"}`), 409)
	if got := s.stored("/never"); got.code != 404 {
		t.Errorf("stored %s", got.body)
	}
	s.closed()
}

func TestLostLeaseWritesNothing(t *testing.T) {
	s := newSetup(t)
	s.gate.Refuse = func(leaseclient.Ref, []leaseclient.Commit) error {
		return &leaseclient.Error{Code: leaseclient.CodeLost, Op: "begin"}
	}
	s.refused(s.via("PUT", "/doc", `{}`), leaseclient.CodeLost)
	s.refused(s.via("POST", "", `{"_id":"doc"}`), leaseclient.CodeLost)
	rows := s.must(s.via("POST", "/_bulk_docs", `{"docs":[{"_id":"doc"}]}`), 201)
	if !strings.Contains(rows.body, `"error":"forbidden","reason":"lease_lost: `) {
		t.Errorf("rows %s", rows.body)
	}
	if s.stored("/doc").code != 404 {
		t.Error("something was written")
	}
	s.leases.Refs = nil
	s.refused(s.via("PUT", "/doc", `{}`), leaseclient.CodeLost)
}

func TestStoreOutOfReachIs503(t *testing.T) {
	s := newSetup(t)
	s.gate.Refuse = func(leaseclient.Ref, []leaseclient.Commit) error {
		return &leaseclient.Error{Code: leaseclient.CodeUnavailable, Op: "begin", RetryAfter: 1500 * time.Millisecond, Err: fmt.Errorf("dial tcp 10.0.0.1")}
	}
	r := s.via("PUT", "/doc", `{}`)
	if r.code != 503 || r.header.Get("Fencerider-Code") != "lease_backend_unavailable" || r.header.Get("Retry-After") != "2" || strings.Contains(r.body, "10.0.0.1") {
		t.Errorf("%d %v %s", r.code, r.header, r.body)
	}
}

func TestZombieWrites(t *testing.T) {
	s := newSetup(t)
	s.leases.Refs = []leaseclient.Ref{fencetest.Ref("x", 7)}
	rev := s.must(s.via("PUT", "/doc", `{"v":"later"}`), 201).member("rev")
	// An earlier lease of the same lock, with the right revision in hand.
	s.leases.Refs = []leaseclient.Ref{fencetest.Ref("x", 6)}
	s.refused(s.via("PUT", "/doc", `{"v":"stale","_rev":"`+rev+`"}`), leaseclient.CodeLost)
	s.refused(s.via("DELETE", "/doc?rev="+rev, ""), leaseclient.CodeLost)
	// The same token under another lease.
	other := fencetest.Ref("x", 7)
	other.LeaseID = "lease_other"
	s.leases.Refs = []leaseclient.Ref{other}
	s.refused(s.via("PUT", "/doc", `{"v":"stale","_rev":"`+rev+`"}`), leaseclient.CodeLost)
	// Another lock altogether.
	s.leases.Refs = []leaseclient.Ref{fencetest.Ref("y", 9)}
	s.refused(s.via("PUT", "/doc", `{"v":"foreign","_rev":"`+rev+`"}`), leaseclient.CodeLockMismatch)
	// Deleted by the later lease: the tombstone counts.
	s.leases.Refs = []leaseclient.Ref{fencetest.Ref("x", 7)}
	s.must(s.via("DELETE", "/doc?rev="+rev, ""), 200)
	s.leases.Refs = []leaseclient.Ref{fencetest.Ref("x", 6)}
	s.refused(s.via("PUT", "/doc", `{"v":"stale"}`), leaseclient.CodeLost)
	if s.stored("/doc").code != 404 {
		t.Error("the document came back")
	}
	s.leases.Refs = []leaseclient.Ref{fencetest.Ref("x", 8)}
	s.must(s.via("PUT", "/doc", `{"v":"next"}`), 201)
	s.closed()
}

func TestDeleteBecomesAStampedTombstone(t *testing.T) {
	s := newSetup(t)
	s.must(s.via("DELETE", "/doc", ""), 404)
	rev := s.must(s.via("PUT", "/doc", `{"a":1}`), 201).member("rev")
	s.must(s.via("DELETE", "/doc", ""), 409)
	s.must(s.via("DELETE", "/doc?rev=1-abc", ""), 409)
	r := s.must(s.via("DELETE", "/doc?rev="+rev, ""), 200)
	if r.header.Get("Location") != "" {
		t.Errorf("location %q", r.header.Get("Location"))
	}
	if st := s.stampOf("/doc?rev=" + r.member("rev")); st.Token != 5 {
		t.Errorf("stamp %+v", st)
	}
	if got := s.must(s.via("DELETE", "/doc?rev="+rev, ""), 404); got.member("reason") != "deleted" {
		t.Errorf("%s", got.body)
	}
	s.closed()
}

func TestPostCreatesWithAnIDOfTheSidecars(t *testing.T) {
	s := newSetup(t)
	r := s.must(s.via("POST", "", `{"a":1}`), 201)
	if id := r.member("id"); len(id) != 32 || s.stampOf("/"+id).Token != 5 {
		t.Errorf("%s", r.body)
	}
	s.must(s.via("POST", "", `{"_id":"named"}`), 201)
	s.must(s.via("POST", "", `{"_id":"named"}`), 409)
	s.must(s.via("POST", "", `{"_id":""}`), 400)
	s.must(s.via("POST", "", `{}`, "Content-Type", "text/plain"), 415)
	s.closed()
}

func TestBulkJudgesEveryDocument(t *testing.T) {
	s := newSetup(t)
	rev := s.must(s.via("PUT", "/a", `{}`), 201).member("rev")
	s.leases.Refs = []leaseclient.Ref{fencetest.Ref("x", 9)}
	s.must(s.via("PUT", "/later", `{}`), 201)
	s.leases.Refs = []leaseclient.Ref{fencetest.Ref("x", 5)}
	later := s.stored("/later").member("_rev")
	body := `{"docs":[{"_id":"a","_rev":"` + rev + `","n":1},{"_id":"a"},{"_id":"b"},{"_id":"later","_rev":"` + later + `"},{"_id":"_local/x"},{"n":2},{"_id":"b2","_revisions":{}}]}`
	r := s.must(s.via("POST", "/_bulk_docs", body), 201)
	var rows []map[string]any
	if err := json.Unmarshal([]byte(r.body), &rows); err != nil || len(rows) != 7 {
		t.Fatalf("%v %s", err, r.body)
	}
	want := []string{"", "conflict", "", "forbidden", "forbidden", "", "forbidden"}
	for i, row := range rows {
		if got, _ := row["error"].(string); got != want[i] {
			t.Errorf("row %d: %v", i, row)
		}
	}
	if rows[3]["code"] != "lease_lost" || rows[4]["code"] != "operation_not_fenced" {
		t.Errorf("%s", r.body)
	}
	if s.stampOf("/a").Token != 5 || s.stampOf("/b").Token != 5 || s.stampOf("/later").Token != 9 {
		t.Error("stamps")
	}
	if n := len(s.gate.Begun()); n != 3 {
		t.Errorf("%d begins, want one for the whole bulk", n)
	}
	s.must(s.via("POST", "/_bulk_docs", `{"docs":[1]}`), 400)
	s.must(s.via("POST", "/_bulk_docs", `{}`), 400)
	s.refused(s.via("POST", "/_bulk_docs", `{"docs":[],"new_edits":false}`), leaseclient.CodeUnsupported)
	s.must(s.via("POST", "/_bulk_docs", `{"docs":[]}`), 201)
	s.closed()
}

func TestBulkDeletion(t *testing.T) {
	s := newSetup(t)
	rev := s.must(s.via("PUT", "/a", `{}`), 201).member("rev")
	r := s.must(s.via("POST", "/_bulk_docs", `{"docs":[{"_id":"a","_rev":"`+rev+`","_deleted":true}]}`), 201)
	if !strings.Contains(r.body, `"ok":true`) || s.stored("/a").code != 404 {
		t.Errorf("%s", r.body)
	}
	s.closed()
}

func TestWhatCannotBeFencedIsRefused(t *testing.T) {
	s := newSetup(t)
	for _, tc := range []struct{ method, path, body string }{
		{"PUT", "/doc?new_edits=false", `{}`}, {"PUT", "/doc?batch=ok", `{}`}, {"PUT", "/doc?w=1", `{}`}, {"PUT", "/doc?a=1;new%5Fedits=false", `{}`},
		{"PUT", "/doc/att", "x"}, {"DELETE", "/doc/att", ""}, {"COPY", "/doc", ""}, {"PUT", "/_local/x", `{}`}, {"PUT", "/_design/x", `{}`},
		{"POST", "/_purge", `{}`}, {"PUT", "/_security", `{}`}, {"PUT", "/_revs_limit", "1"}, {"POST", "/_index", `{}`}, {"DELETE", "", ""},
		{"POST", "/_design/d/_update/f", `{}`}, {"GET", "/_design/d/_rewrite/x", ""}, {"PUT", "/doc", `{"_revisions":{"start":1,"ids":["a"]}}`},
		{"PATCH", "/doc", `{}`}, {"PUT", "/doc", `{"_attachments":{"a":{"follows":true}}}`},
	} {
		r := s.via(tc.method, tc.path, tc.body)
		if r.header.Get("Fencerider-Code") != "operation_not_fenced" || r.code != 403 {
			t.Errorf("%s %s: %d %s", tc.method, tc.path, r.code, r.body)
		}
	}
	s.refused(s.via("PUT", "/doc", `x`, "Content-Type", "multipart/related; boundary=x"), leaseclient.CodeUnsupported)
	s.refused(s.do("POST", s.url+"/_replicate", `{}`, nil), leaseclient.CodeUnsupported)
	// An override is judged by what it turns the request into.
	s.must(s.via("POST", "/over", `{"a":1}`, "X-HTTP-Method-Override", "PUT"), 201)
	if s.stampOf("/over").Token != 5 {
		t.Error("an overridden method went round the fence")
	}
	if s.do("GET", s.direct+"/"+s.db, "", nil).code != 200 {
		t.Error("the database is gone")
	}
	s.closed()
}

func TestReadsPassThrough(t *testing.T) {
	s := newSetup(t)
	s.must(s.via("PUT", "/doc", `{"a":1}`), 201)
	direct, through := s.stored("/doc"), s.via("GET", "/doc", "")
	if direct.body != through.body || direct.code != through.code || direct.header.Get("Etag") != through.header.Get("Etag") {
		t.Errorf("%v\n%v", direct, through)
	}
	s.must(s.via("GET", "/_all_docs", ""), 200)
	s.must(s.via("GET", "/missing", ""), 404)
	s.must(s.do("GET", s.url+"/", "", nil), 200)
	c, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET /db/d?a=%zz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || !strings.Contains(string(b), " 400 ") || !strings.Contains(string(b), "invalid_url_encoding") {
		t.Errorf("%v %s", err, b)
	}
}

func TestChangesAreNotHeldBack(t *testing.T) {
	s := newSetup(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "GET", s.url+"/"+s.db+"/_changes?feed=continuous&heartbeat=1000", nil)
	if err != nil {
		t.Fatal(err)
	}
	pw, _ := s.user.Password()
	r.SetBasicAuth(s.user.Username(), pw)
	// PouchDB holds a compressed feed back by itself.
	r.Header.Set("Accept-Encoding", "identity")
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	s.must(s.via("PUT", "/doc", `{"a":1}`), 201)
	buf := make([]byte, 4096)
	var got string
	for !strings.Contains(got, `"id":"doc"`) {
		n, err := res.Body.Read(buf)
		got += string(buf[:n])
		if err != nil {
			t.Fatalf("%v after %q", err, got)
		}
	}
}

func TestGzipBodiesAndLimits(t *testing.T) {
	s := newSetup(t, func(o *Options) { o.MaxBody = 10_000; o.MaxEffect = 1000 })
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, _ = w.Write([]byte(`{"a":1}`))
	_ = w.Close()
	s.must(s.via("PUT", "/doc", z.String(), "Content-Encoding", "gzip"), 201)
	z.Reset()
	w = gzip.NewWriter(&z)
	_, _ = w.Write([]byte(`{"a":"` + strings.Repeat("x", 1<<20) + `"}`))
	_ = w.Close()
	if r := s.via("PUT", "/bomb", z.String(), "Content-Encoding", "gzip"); r.code != 413 || r.header.Get("Fencerider-Code") != "too_large" {
		t.Errorf("%d %s", r.code, r.body)
	}
	s.must(s.via("PUT", "/doc2", "nonsense", "Content-Encoding", "gzip"), 400)
	s.must(s.via("PUT", "/doc2", "{}", "Content-Encoding", "br"), 415)
	s.must(s.via("PUT", "/big", `{"a":"`+strings.Repeat("x", 5000)+`"}`), 201)
	begun := s.gate.Begun()
	if c := begun[len(begun)-1][0]; len(c.Effect) != 0 || c.Target != s.db+"/big" {
		t.Errorf("effect of %d bytes for %s", len(c.Effect), c.Target)
	}
	s.closed()
}

func TestABodyThatNeverComesGivesItsPlaceBack(t *testing.T) {
	s := newSetup(t, func(o *Options) { o.Timeout = 300 * time.Millisecond; o.MaxWrites = 1 })
	c, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "PUT /"+s.db+"/slow HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if b, err := io.ReadAll(c); err != nil || !strings.Contains(string(b), "408") {
		t.Errorf("%v %s", err, b)
	}
	s.must(s.via("PUT", "/doc", `{}`), 201)
	s.closed()
}

func TestALookThatFailsIsNotFinal(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }))
	defer up.Close()
	u, err := url.Parse(up.URL)
	if err != nil {
		t.Fatal(err)
	}
	s := newSetup(t, func(o *Options) { o.Upstream = u })
	s.must(s.via("PUT", "/doc", `{}`, "Idempotency-Key", "k"), 503)
	if o, _ := s.gate.Outcome(s.gate.Begun()[0][0].ID); o != leaseclient.OutcomeCancelled {
		t.Errorf("outcome %q", o)
	}
}

func TestPolicyFindsTheLease(t *testing.T) {
	s := newSetup(t)
	p, err := policy.Parse([]byte(`
version: 1
defaults: {tenant_id: t, program_id: p, target_namespace: n, actor_name: a}
couch:
  rules:
    - {database: `+s.db+`, documents: "free:*", fence: off}
    - {database: `+s.db+`, identity: {target_id: "{doc.target}"}}
`), policy.ParseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.policy = p
	s.leases.Refs = []leaseclient.Ref{fencetest.Ref("x", 5), fencetest.Ref("y", 3)}
	s.must(s.via("PUT", "/a", `{"target":"x"}`), 201)
	s.must(s.via("PUT", "/b", `{"target":"y"}`), 201)
	if s.stampOf("/a").Token != 5 || s.stampOf("/b").Token != 3 {
		t.Error("stamps")
	}
	s.refused(s.via("PUT", "/c", `{"target":"z"}`), leaseclient.CodeLost)
	s.refused(s.via("PUT", "/c", `{}`), leaseclient.CodePolicyDenied)
	// Naming a lease does not widen anything.
	s.refused(s.via("PUT", "/c", `{"target":"x"}`, "Fencerider-Lease", "lease_y_3"), leaseclient.CodeLockMismatch)
	s.must(s.via("PUT", "/c", `{"target":"x"}`, "Fencerider-Lease", "lease_x_5"), 201)
	// Nor does writing its own target into a document of another one, stamped
	// or not.
	s.must(s.do("PUT", s.direct+"/"+s.db+"/old", `{"target":"y"}`, nil), 201)
	old := s.stored("/old").member("_rev")
	s.refused(s.via("PUT", "/old", `{"target":"x","_rev":"`+old+`"}`), leaseclient.CodeLockMismatch)
	rows := s.must(s.via("POST", "/_bulk_docs", `{"docs":[{"_id":"old","target":"x","_rev":"`+old+`"}]}`), 201)
	if !strings.Contains(rows.body, "lock_mismatch") {
		t.Errorf("rows %s", rows.body)
	}
	s.must(s.via("PUT", "/old", `{"target":"y","_rev":"`+old+`"}`), 201)
	s.must(s.do("PUT", s.direct+"/"+s.db+"/legacy", `{}`, nil), 201)
	s.must(s.via("PUT", "/legacy", `{"target":"x","_rev":"`+s.stored("/legacy").member("_rev")+`"}`), 201)
	// A document cannot be moved to another lock.
	rev := s.stored("/a").member("_rev")
	s.refused(s.via("PUT", "/a", `{"target":"y","_rev":"`+rev+`"}`), leaseclient.CodeLockMismatch)
	// A deletion is judged by what it deletes.
	s.must(s.via("DELETE", "/a?rev="+rev, ""), 200)
	free := s.must(s.via("PUT", "/free:1", `{"any":1}`), 201)
	if strings.Contains(s.stored("/free:1").body, "fence") || free.code != 201 {
		t.Error("an unfenced document was stamped")
	}
	s.must(s.via("DELETE", "/free:1?rev="+free.member("rev"), ""), 200)
	s.refused(s.do("PUT", s.url+"/otherdb/doc", `{}`, nil), leaseclient.CodePolicyDenied)
	s.closed()
}

func TestIdempotencyKey(t *testing.T) {
	s := newSetup(t)
	r := s.must(s.via("PUT", "/doc", `{"a":1}`, "Idempotency-Key", "k1"), 201)
	s.gate.Prior = func(string) leaseclient.Outcome { return leaseclient.OutcomeConfirmed }
	again := s.must(s.via("PUT", "/doc", `{"a":1}`, "Idempotency-Key", "k1"), 201)
	if again.member("rev") != r.member("rev") {
		t.Errorf("%s, then %s", r.body, again.body)
	}
	begun := s.gate.Begun()
	if begun[0][0].ID != begun[1][0].ID {
		t.Error("the commit id changed")
	}
}

func TestLateWriteIsNotSent(t *testing.T) {
	s := newSetup(t)
	s.gate.Bound = -time.Second
	s.gate.Settle = func(*fence.Accepted) leaseclient.Outcome { return leaseclient.OutcomeUnknown }
	r := s.via("PUT", "/doc", `{}`)
	if r.code != 503 || r.header.Get("Fencerider-Code") != "lease_outcome_unknown" {
		t.Errorf("%d %s", r.code, r.body)
	}
	if s.stored("/doc").code != 404 || len(s.gate.Abandoned()) != 1 {
		t.Error("a late write was sent")
	}
	s.closed()
}

// cutServer answers looks from the real server and cuts the connection in the
// middle of every PUT, before or after it went through.
func cutServer(t *testing.T, up *url.URL, through bool) *url.URL {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Method != http.MethodPut || through {
			out, err := http.NewRequest(r.Method, "http://"+up.Host+r.RequestURI, bytes.NewReader(body))
			if err != nil {
				panic(err)
			}
			out.Header = r.Header.Clone()
			res, err := http.DefaultClient.Do(out)
			if err != nil {
				panic(http.ErrAbortHandler)
			}
			defer res.Body.Close()
			if r.Method != http.MethodPut {
				for k, v := range res.Header {
					w.Header()[k] = v
				}
				w.WriteHeader(res.StatusCode)
				_, _ = io.Copy(w, res.Body)
				return
			}
		}
		c, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}))
	t.Cleanup(srv.Close)
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestAnswerThatNeverCameIsSettled(t *testing.T) {
	for _, through := range []bool{true, false} {
		t.Run(fmt.Sprint("through=", through), func(t *testing.T) {
			cut := cutServer(t, couchURL(t), through)
			s := newSetup(t, func(o *Options) { o.Upstream = cut })
			e, err := NewEffector(EffectorOptions{Upstream: couchURL(t)})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			s.gate.Settle = func(a *fence.Accepted) leaseclient.Outcome {
				out, err := e.Settle(t.Context(), []leaseclient.Entry{fencetest.EntryOf(a)})
				if err != nil || len(out) != 1 {
					t.Errorf("settle: %v %v", out, err)
					return leaseclient.OutcomeUnknown
				}
				return out[0]
			}
			r := s.must(s.via("PUT", "/doc", `{"a":1}`), 201)
			st := s.stampOf("/doc")
			if st.CommitID != s.gate.Begun()[0][0].ID || r.member("rev") != s.stored("/doc").member("_rev") {
				t.Errorf("%s, stamp %+v", r.body, st)
			}
			if !strings.HasPrefix(r.member("rev"), "1-") {
				t.Errorf("written twice: %s", r.body)
			}
		})
	}
}

func TestCouchDBOutOfReach(t *testing.T) {
	s := newSetup(t)
	dead, err := url.Parse("http://127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	h, err := New(Options{Upstream: dead, Leases: s.leases, Gate: s.gate})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(h)
	defer srv.Close()
	for _, r := range []reply{s.do("GET", srv.URL+"/db/doc", "", nil), s.do("PUT", srv.URL+"/db/doc", "{}", nil)} {
		if r.code != 503 || r.header.Get("Fencerider-Code") != "upstream_unavailable" || strings.Contains(r.body, "127.0.0.1") {
			t.Errorf("%d %s", r.code, r.body)
		}
	}
	s.closed()
}

func TestSettle(t *testing.T) {
	s := newSetup(t)
	e, err := NewEffector(EffectorOptions{Upstream: couchURL(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	entry := func(id, rev, doc, db string, token uint64) leaseclient.Entry {
		b, err := effect{Version: 1, Database: db, ID: id, Rev: rev, Member: "fence", doc: []byte(doc)}.encode()
		if err != nil {
			t.Fatal(err)
		}
		r := fencetest.Ref("x", token)
		return leaseclient.Entry{
			Commit:  leaseclient.Commit{ID: leaseclient.NewID("commit"), Kind: leaseclient.KindDocument, Target: targetOf(db, id), Effect: b},
			LockKey: r.LockKey, LeaseID: r.LeaseID, Token: token, ExecutionID: "e", TraceID: "t", AcceptedAt: 1, NotAfter: 2, ExpiresAt: 3,
		}
	}
	settle := func(en leaseclient.Entry) leaseclient.Outcome {
		t.Helper()
		out, err := e.Settle(t.Context(), []leaseclient.Entry{en})
		if err != nil || len(out) != 1 {
			t.Fatalf("%v %v", out, err)
		}
		return out[0]
	}
	first := entry("doc", "", `{"v":1}`, s.db, 5)
	for range 2 {
		if o := settle(first); o != leaseclient.OutcomeConfirmed {
			t.Fatalf("creation: %s", o)
		}
	}
	rev := s.stored("/doc").member("_rev")
	if s.stampOf("/doc").CommitID != first.ID || !strings.HasPrefix(rev, "1-") {
		t.Fatal("created twice or without its stamp")
	}
	second := entry("doc", rev, `{"v":2}`, s.db, 5)
	if o := settle(second); o != leaseclient.OutcomeConfirmed {
		t.Fatalf("update: %s", o)
	}
	// Its own commit is found behind the winner.
	if o := settle(first); o != leaseclient.OutcomeConfirmed {
		t.Fatalf("replaced since: %s", o)
	}
	if o := settle(entry("doc", rev, `{"v":3}`, s.db, 5)); o != leaseclient.OutcomeRefused {
		t.Fatalf("condition is gone: %s", o)
	}
	now := s.stored("/doc").member("_rev")
	if o := settle(entry("doc", now, `{"v":3}`, s.db, 4)); o != leaseclient.OutcomeRefused {
		t.Fatalf("lower token: %s", o)
	}
	if o := settle(entry("doc", now, `{"_deleted":true}`, s.db, 5)); o != leaseclient.OutcomeConfirmed || s.stored("/doc").code != 404 {
		t.Fatalf("deletion: %s", o)
	}
	if o := settle(entry("doc", "", `{}`, s.db+"gone", 5)); o != leaseclient.OutcomeQuarantined {
		t.Fatalf("no database: %s", o)
	}
	large := entry("doc", "", `{}`, s.db, 5)
	large.Effect = nil
	if o := settle(large); o != leaseclient.OutcomeRefused {
		t.Fatalf("too large and not there: %s", o)
	}
	large.ID = second.ID
	broken := entry("doc", "", `{}`, s.db, 5)
	broken.Effect = []byte("nonsense")
	if o := settle(broken); o != leaseclient.OutcomeQuarantined {
		t.Fatalf("unreadable: %s", o)
	}
	down, err := url.Parse("http://127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	dead, err := NewEffector(EffectorOptions{Upstream: down})
	if err != nil {
		t.Fatal(err)
	}
	if out, err := dead.Settle(t.Context(), []leaseclient.Entry{first}); err == nil || len(out) != 0 {
		t.Fatalf("server down: %v", out)
	}
}
