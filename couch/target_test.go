package couch

import (
	"net/http"
	"strings"
	"testing"
)

func TestParseTarget(t *testing.T) {
	for _, tc := range []struct{ raw, path, query string }{
		{"/", "/", ""},
		{"/db/doc", "/db/doc", ""},
		{"//db///doc", "/db/doc", ""},
		{"/db/doc/", "/db/doc/", ""},
		{"/db/x+y", "/db/x%20y", ""},
		{"/db/x%2By", "/db/x%2By", ""},
		{"/db/a%2Fb", "/db/a%2Fb", ""},
		{"/db/%61", "/db/a", ""},
		{"/db/%5fbulk_docs", "/db/_bulk_docs", ""},
		{"/db/a;b", "/db/a%3Bb", ""},
		{"/db/doc#x?rev=1", "/db/doc", ""},
		{"/db/./..", "/db/./..", ""},
		{"/db/d?a=1;new%5Fedits=f%61lse&b", "/db/d", "a=1&new_edits=false&b="},
		{"http://evil/db/doc?x=1", "/db/doc", "x=1"},
		{"http://evil", "/", ""},
	} {
		got, err := parseTarget(tc.raw)
		if err != nil || got.path() != tc.path || got.rawQuery() != tc.query {
			t.Errorf("%q: %q ? %q, %v", tc.raw, got.path(), got.rawQuery(), err)
		}
	}
	for _, raw := range []string{"", "*", "db", "/db/%zz", "/db/%2", "/db/%ff", "/db?a=%zz", "/db/\xff", "/" + strings.Repeat("a/", maxSegments+1), "/" + strings.Repeat("a", maxTargetBytes)} {
		if _, err := parseTarget(raw); err == nil {
			t.Errorf("%.40q was read", raw)
		}
	}
}

// FuzzParseTarget holds that what is sent reads the same as what was judged.
func FuzzParseTarget(f *testing.F) {
	for _, s := range []string{"/db/a+b?x=1;y=2", "/%2F/%00", "//a//", "http://h/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		a, err := parseTarget(raw)
		if err != nil {
			return
		}
		sent := a.path()
		if q := a.rawQuery(); q != "" {
			sent += "?" + q
		}
		b, err := parseTarget(sent)
		if err != nil {
			if len(sent) > maxTargetBytes {
				return
			}
			t.Fatalf("%q is sent as %q, which is malformed", raw, sent)
		}
		if b.path() != a.path() || b.rawQuery() != a.rawQuery() {
			t.Fatalf("%q: %q and %q", raw, a.path(), b.path())
		}
	})
}

func TestClassify(t *testing.T) {
	const (
		read, put, del, create, bulk, unf, end, unk = classRead, classPut, classDelete, classCreate, classBulk, classUnfenceable, classEndpoint, classUnknown
	)
	for _, tc := range []struct {
		method, target string
		want           class
	}{
		{"GET", "/", read}, {"HEAD", "/", read}, {"POST", "/", unk}, {"GET", "/_up", read}, {"GET", "/_all_dbs", read},
		{"POST", "/_dbs_info", read}, {"POST", "/_all_dbs", unk}, {"POST", "/_session", read}, {"DELETE", "/_session", read},
		{"POST", "/_replicate", end}, {"GET", "/_node/_local", read}, {"GET", "/_node/_local/_stats/x", read}, {"PUT", "/_node/_local/_config/a/b", end},
		{"GET", "/_node/n/shards%2F00-ff%2Fdb/doc", end}, {"PUT", "/_node/n/x", end}, {"POST", "/_cluster_setup", end}, {"GET", "/_unknown", unk},
		{"GET", "/db", read}, {"PUT", "/db", end}, {"DELETE", "/db/", end}, {"POST", "/db", create}, {"POST", "//db", create}, {"PATCH", "/db", unk},
		{"POST", "/db/_bulk_docs", bulk}, {"POST", "/db/%5fbulk_docs/", bulk}, {"PUT", "/db/_bulk_docs", unk}, {"POST", "/db/_bulk_docs/x", unk},
		{"POST", "/db/_bulk_get", read}, {"POST", "/db/_revs_diff", read}, {"POST", "/db/_all_docs", read}, {"POST", "/db/_all_docs/queries", read},
		{"PUT", "/db/_all_docs", unk}, {"POST", "/db/_find", read}, {"POST", "/db/_find/x", unk}, {"GET", "/db/_index", read}, {"POST", "/db/_index", end},
		{"DELETE", "/db/_index/d/json/n", end}, {"GET", "/db/_changes", read}, {"POST", "/db/_changes", read}, {"POST", "/db/_purge", end},
		{"GET", "/db/_security", read}, {"PUT", "/db/_security", end}, {"PUT", "/db/_revs_limit", end}, {"POST", "/db/_compact", end},
		{"POST", "/db/_ensure_full_commit", read}, {"PUT", "/db/_anything", unk}, {"GET", "/db/_local/x", read}, {"PUT", "/db/_local/x", end},
		{"PUT", "/db/_local%2Fx", end}, {"PUT", "/db/_local%2Fx/att", end}, {"DELETE", "/db/_local/x", end},
		{"GET", "/db/doc", read}, {"PUT", "/db/doc", put}, {"DELETE", "/db/doc", del}, {"COPY", "/db/doc", unf}, {"POST", "/db/doc", unf},
		{"put", "/db/doc", unk}, {"PATCH", "/db/doc", unk}, {"PUT", "/db/doc/att", unf}, {"DELETE", "/db/doc/a/b", unf}, {"GET", "/db/doc/att", read},
		{"GET", "/db/_design/d", read}, {"PUT", "/db/_design/d", put}, {"PUT", "/db/_design%2Fd", put}, {"DELETE", "/db/_design/d", del},
		{"GET", "/db/_design/d/_view/v", read}, {"POST", "/db/_design/d/_view/v", read}, {"POST", "/db/_design/d/_update/f", end},
		{"OPTIONS", "/db/_design/d/_update/f", end}, {"GET", "/db/_design/d/_update/f", end}, {"GET", "/db/_design/d/_rewrite/x", end},
		{"GET", "/db/_design%2Fd/_rewrite/x", end}, {"PUT", "/db/_design/d/att", unf}, {"COPY", "/db/_design/d", unf},
		{"GET", "/db/_partition/p", read}, {"POST", "/db/_partition/p/_find", read}, {"POST", "/db/_partition/p/_index", end},
		{"GET", "/db/_partition/p/_design/d/_rewrite/x", end}, {"GET", "/db/_partition/p/_design%2Fd/_rewrite/x", end}, {"POST", "/db/_partition/p/_design/d/_update/x", end}, {"PUT", "/db/_partition/p/x", unk},
		{"PUT", "/_replicator/x", end}, {"POST", "/_replicator", end}, {"POST", "/x%2F_replicator/_bulk_docs", end}, {"GET", "/_replicator/x", read},
		{"POST", "/_replicator/_find", read}, {"PUT", "/_users/org.couchdb.user:x", put},
	} {
		target, err := parseTarget(tc.target)
		if err != nil {
			t.Fatal(err)
		}
		if got := classify(tc.method, target); got.class != tc.want {
			t.Errorf("%s %s: class %d, want %d", tc.method, tc.target, got.class, tc.want)
		}
	}
}

// FuzzClassify holds that nothing which changes state by its method alone is
// taken for a read, whatever its target.
func FuzzClassify(f *testing.F) {
	f.Add("PUT", "/db/doc")
	f.Add("DELETE", "/db/_design/x/_show/y")
	f.Add("POST", "/db/_design/x/_rewrite")
	f.Fuzz(func(t *testing.T, method, raw string) {
		target, err := parseTarget(raw)
		if err != nil {
			return
		}
		j := classify(method, target)
		if j.class != classRead {
			return
		}
		switch method {
		case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodOptions:
		case http.MethodDelete:
			if len(target.segments) != 1 || target.segments[0] != "_session" {
				t.Fatalf("%s %q is classed as a read", method, raw)
			}
		default:
			t.Fatalf("%s %q is classed as a read", method, raw)
		}
		for _, s := range target.segments {
			if s == "_rewrite" || s == "_update" {
				if len(target.segments) > 3 && (target.segments[1] == "_design" && target.segments[3] == s) {
					t.Fatalf("%s %q is classed as a read", method, raw)
				}
			}
		}
	})
}

func TestEffectiveMethod(t *testing.T) {
	for _, tc := range []struct{ method, override, want string }{
		{"POST", "", "POST"}, {"POST", "PUT", "PUT"}, {"POST", "DELETE; x", "DELETE"}, {"POST", "put", "POST"}, {"GET", "PUT", "GET"}, {"POST", "COPY", "COPY"},
	} {
		r, err := http.NewRequest(tc.method, "http://x/", nil)
		if err != nil {
			t.Fatal(err)
		}
		if tc.override != "" {
			r.Header.Set("X-HTTP-Method-Override", tc.override)
		}
		if got := effectiveMethod(r); got != tc.want {
			t.Errorf("%s overridden by %q: %s", tc.method, tc.override, got)
		}
	}
}

func TestParseRevision(t *testing.T) {
	a, _ := parseRevision("3-ABC")
	b, _ := parseRevision("+003-abc")
	if a != b || a.String() != "3-abc" {
		t.Errorf("%v %v", a, b)
	}
	for _, s := range []string{"", "3", "x-1", "0-a", "-1-a", "3-", "3-g", "3-a-b"} {
		if _, ok := parseRevision(s); ok {
			t.Errorf("%q is a revision", s)
		}
	}
}

func FuzzDecodeEffect(f *testing.F) {
	b, err := effect{Version: 1, Database: "d", ID: "i", Rev: "1-a", Member: "fence", doc: []byte("{}")}.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := decodeEffect(b)
		if err != nil {
			return
		}
		c, err := e.encode()
		if err != nil {
			t.Fatal(err)
		}
		if d, err := decodeEffect(c); err != nil || string(d.doc) != string(e.doc) || d.ID != e.ID {
			t.Fatalf("%+v %v", d, err)
		}
	})
}
