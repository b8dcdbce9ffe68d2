package policy

import (
	"errors"
	"strings"
	"testing"

	"github.com/starintel/fencerider/leaseclient"
)

const sample = `
version: 1
defaults: {tenant_id: tenant-main, program_id: program-a, actor_name: usernamegen}
couch:
  unmatched: deny
  rules:
    - database: starintel
      documents: "target:*"
      identity: {target_namespace: starintel-target, target_id: "{doc._id}"}
    - database: results
      identity: {target_namespace: starintel-target, target_id: "{doc.target_id}"}
      locks: shared
    - database: hashed
      identity: {target_namespace: url, target_id: "{sha256:doc.url}", workflow_name: "{database}"}
    - database: scratch
      fence: off
  open:
    - database: results
      endpoints: [_local, _index]
rabbit:
  unmatched: deny
  rules:
    - exchange: documents
      routing_key: "documents.new.#"
      identity: {target_namespace: starintel-target, target_id: "{header.x-target-id}"}
    - exchange: bodies
      identity: {target_namespace: "{routing_key[1]}", target_id: "{body.target.id}"}
    - exchange: ""
      routing_key: "amq.rabbitmq.reply-to.#"
      fence: off
`

// parsed returns the sample.
func parsed(t testing.TB) *Policy {
	t.Helper()
	p, err := Parse([]byte(sample), ParseOptions{})
	if err != nil {
		t.Fatalf("parse sample: %v", err)
	}
	return p
}

func target(ns, id string) leaseclient.Identity {
	return leaseclient.Identity{
		TenantID: "tenant-main", ProgramID: "program-a", TargetNamespace: ns, TargetID: id,
		ActorName: "usernamegen", WorkflowName: "default", OperationClass: "default",
	}
}

func TestResolveDocument(t *testing.T) {
	p := parsed(t)
	hashed := target("url", "95a8d1d2fca4e7d0f5ad4d9ea3b7eaf6e9b9d1b8ab5b9b6d55c0f6ce9c0c6b11")
	for _, tc := range []struct {
		name    string
		w       DocumentWrite
		verdict Verdict
		id      leaseclient.Identity
		reason  string
	}{
		{"by id", DocumentWrite{Database: "starintel", ID: "target:1"}, Fenced, target("starintel-target", "target:1"), ""},
		{"normalized", DocumentWrite{Database: "starintel", ID: "target:ABC"}, Fenced, target("starintel-target", "target:abc"), ""},
		{"bad id", DocumentWrite{Database: "starintel", ID: "target:a b"}, Deny, leaseclient.Identity{}, "target_id"},
		{"unmatched document", DocumentWrite{Database: "starintel", ID: "other"}, Deny, leaseclient.Identity{}, "no rule"},
		{"design document", DocumentWrite{Database: "results", ID: "_design/x", Doc: []byte(`{"target_id":"1"}`)}, Deny, leaseclient.Identity{}, "no rule"},
		{"member", DocumentWrite{Database: "results", ID: "r", Doc: []byte(`{"target_id":"t-1"}`)}, Fenced, target("starintel-target", "t-1"), ""},
		{"integer", DocumentWrite{Database: "results", ID: "r", Doc: []byte(`{"target_id":42}`)}, Fenced, target("starintel-target", "42"), ""},
		{"another spelling of a number", DocumentWrite{Database: "results", ID: "r", Doc: []byte(`{"target_id":42.0}`)}, Deny, leaseclient.Identity{}, "neither a string nor an integer"},
		{"absent", DocumentWrite{Database: "results", ID: "r", Doc: []byte(`{}`)}, Deny, leaseclient.Identity{}, "is absent"},
		{"twice", DocumentWrite{Database: "results", ID: "r", Doc: []byte(`{"target_id":"a","target\u005fid":"b"}`)}, Deny, leaseclient.Identity{}, "more than once"},
		{"not JSON", DocumentWrite{Database: "results", ID: "r", Doc: []byte(`{`)}, Deny, leaseclient.Identity{}, "JSON"},
		{"no body", DocumentWrite{Database: "results", ID: "r"}, Deny, leaseclient.Identity{}, "is absent"},
		{"off", DocumentWrite{Database: "scratch", ID: "x"}, Off, leaseclient.Identity{}, ""},
		{"unknown database", DocumentWrite{Database: "other", ID: "x"}, Deny, leaseclient.Identity{}, "no rule"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, err := p.ResolveDocument(tc.w)
			if d.Verdict != tc.verdict || d.Identity != tc.id || !strings.Contains(d.Reason, tc.reason) {
				t.Errorf("%+v (%v)", d, err)
			}
			if _, ok := errors.AsType[*ResolveError](err); err != nil && !ok {
				t.Errorf("error %T", err)
			}
			if strings.Contains(d.Reason, "42.0") || strings.Contains(d.Reason, "a b") {
				t.Errorf("reason shows a value: %s", d.Reason)
			}
		})
	}
	d, err := p.ResolveDocument(DocumentWrite{Database: "hashed", ID: "x", Doc: []byte(`{"url":"https://a/b?c"}`)})
	if err != nil || len(d.Identity.TargetID) != len(hashed.TargetID) || d.Identity.WorkflowName != "hashed" || !d.FromBody {
		t.Errorf("hashed: %+v %v", d, err)
	}
	if d, _ := p.ResolveDocument(DocumentWrite{Database: "results", ID: "x", Doc: []byte(`{"target_id":"1"}`)}); !d.Shared || !d.FromBody {
		t.Errorf("shared: %+v", d)
	}
}

func TestResolvePublish(t *testing.T) {
	p := parsed(t)
	header := func(name string) Value {
		if name == "x-target-id" {
			return Value{Kind: Text, Text: "t-1"}
		}
		return Value{}
	}
	for _, tc := range []struct {
		name    string
		m       Publish
		verdict Verdict
		id      leaseclient.Identity
	}{
		{"header", Publish{Exchange: "documents", RoutingKey: "documents.new.person", Header: header}, Fenced, target("starintel-target", "t-1")},
		{"no header", Publish{Exchange: "documents", RoutingKey: "documents.new.person"}, Deny, leaseclient.Identity{}},
		{"unmatched key", Publish{Exchange: "documents", RoutingKey: "documents.old", Header: header}, Deny, leaseclient.Identity{}},
		{"body and word", Publish{Exchange: "bodies", RoutingKey: "a.people.c", Body: []byte(`{"target":{"id":"T"}}`)}, Fenced, target("people", "t")},
		{"word is missing", Publish{Exchange: "bodies", RoutingKey: "a", Body: []byte(`{"target":{"id":"T"}}`)}, Deny, leaseclient.Identity{}},
		{"off", Publish{RoutingKey: "amq.rabbitmq.reply-to.x"}, Off, leaseclient.Identity{}},
		{"another key agrees", Publish{Exchange: "documents", RoutingKey: "documents.new.a", MoreKeys: []string{"documents.new.b"}, Header: header}, Fenced, target("starintel-target", "t-1")},
		{"another key is unmatched", Publish{Exchange: "documents", RoutingKey: "documents.new.a", MoreKeys: []string{"x"}, Header: header}, Deny, leaseclient.Identity{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, err := p.ResolvePublish(tc.m)
			if d.Verdict != tc.verdict || d.Identity != tc.id {
				t.Errorf("%+v (%v)", d, err)
			}
		})
	}
}

func TestWithoutAPolicyEverythingNeedsTheSingleLease(t *testing.T) {
	var p *Policy
	d, err := p.ResolveDocument(DocumentWrite{Database: "x", ID: "y"})
	if err != nil || d.Verdict != SingleLease {
		t.Errorf("%+v %v", d, err)
	}
	if d, _ := p.ResolvePublish(Publish{}); d.Verdict != SingleLease {
		t.Errorf("%+v", d)
	}
	if !p.Fenced("any") || p.Opened("any", EndpointLocal) || p.StampMember() != "fence" || len(p.Unprotected()) != 0 {
		t.Error("without a policy everything is fenced")
	}
}

func TestFencedOpenedUnprotected(t *testing.T) {
	p := parsed(t)
	for db, want := range map[string]bool{"starintel": true, "results": true, "scratch": false, "other": false} {
		if p.Fenced(db) != want {
			t.Errorf("Fenced(%s) = %v", db, !want)
		}
	}
	if !p.Opened("results", EndpointLocal) || p.Opened("results", EndpointPurge) || p.Opened("starintel", EndpointLocal) || p.Opened("", EndpointNode) {
		t.Error("opened endpoints")
	}
	if got := p.Unprotected(); len(got) != 4 {
		t.Errorf("unprotected %q", got)
	}
}

func TestParseRefuses(t *testing.T) {
	rule := "version: 1\ndefaults: {tenant_id: a, program_id: b, actor_name: c, target_namespace: n}\n"
	for _, tc := range []struct{ name, file, want string }{
		{"unknown key", "version: 1\ncouhc: {}\n", `did you mean "couch"`},
		{"unknown key in a rule", rule + "couch: {rules: [{databse: x, fence: off}]}\n", `did you mean "database"`},
		{"no version", "couch: {}\n", "version is missing"},
		{"other version", "version: 2\n", "unknown version"},
		{"twice", "version: 1\nversion: 1\n", "twice"},
		{"empty", "", "not a YAML document"},
		{"list", "- a\n", "must be a mapping"},
		{"two documents", "version: 1\n---\nversion: 1\n", "second document"},
		{"anchor", "version: 1\ndefaults: &x {tenant_id: a}\n", "anchors"},
		{"both", rule + "couch: {rules: [{database: x, fence: off, identity: {target_id: a}}]}\n", "both identity and fence"},
		{"neither", rule + "couch: {rules: [{database: x}]}\n", "neither"},
		{"fence on", rule + "couch: {rules: [{database: x, fence: on}]}\n", "must be off"},
		{"missing component", "version: 1\ncouch: {rules: [{database: x, identity: {target_id: a}}]}\n", "tenant_id is missing"},
		{"source of the other side", rule + "couch: {rules: [{database: x, identity: {target_id: \"{routing_key}\"}}]}\n", "no such source here"},
		{"unknown source", rule + "couch: {rules: [{database: x, identity: {target_id: \"{nonsense}\"}}]}\n", "no such source here"},
		{"open brace", rule + "couch: {rules: [{database: x, identity: {target_id: \"{doc._id\"}}]}\n", "never closed"},
		{"class", rule + "couch: {rules: [{database: x, identity: {target_id: a, operation_class: other}}]}\n", "operation_class"},
		{"unreachable", rule + "couch: {rules: [{database: \"*\", fence: off}, {database: x, fence: off}]}\n", "never reached"},
		{"unreachable publish", rule + "rabbit: {rules: [{exchange: x, fence: off}, {exchange: x, routing_key: a, fence: off}]}\n", "never reached"},
		{"no exchange", rule + "rabbit: {rules: [{routing_key: a, fence: off}]}\n", "exchange is missing"},
		{"bad topic", rule + "rabbit: {rules: [{exchange: x, routing_key: \"a*\", fence: off}]}\n", "stand alone"},
		{"unmatched", "version: 1\ncouch: {unmatched: allow}\n", "deny or pass"},
		{"endpoint", "version: 1\ncouch: {open: [{database: x, endpoints: [_everything]}]}\n", "unknown endpoint"},
		{"stamp", "version: 1\ncouch: {stamp: _fence}\n", "underscore"},
		{"literal is not canonical", rule + "couch: {rules: [{database: x, identity: {target_id: \"a b\"}}]}\n", "target_id"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, err := Parse([]byte(tc.file), ParseOptions{})
			if err == nil || p != nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
	if _, err := Parse(make([]byte, MaxBytes+1), ParseOptions{}); err == nil {
		t.Error("a file over the limit was read")
	}
}

func TestGlobAndTopic(t *testing.T) {
	for _, tc := range []struct {
		pattern, name string
		want          bool
	}{
		{"*", "", true}, {"a*c", "abc", true}, {"a*c", "ab", false}, {"a?c", "aéc", true}, {`a\*`, "a*", true}, {`a\*`, "ab", false},
		{"*a*b*", "xxaybz", true}, {"", "", true}, {"", "x", false}, {"target:*", "target:a/b", true},
	} {
		g, err := ParseGlob(tc.pattern)
		if err != nil || g.Match(tc.name) != tc.want {
			t.Errorf("glob %q on %q: %v %v", tc.pattern, tc.name, !tc.want, err)
		}
	}
	for _, tc := range []struct {
		pattern, key string
		want         bool
	}{
		{"#", "", true}, {"a.#", "a", true}, {"a.#", "a.b.c", true}, {"a.*", "a", false}, {"a.*.c", "a.b.c", true}, {"#.c", "a.b.c", true},
		{"a.#.c", "a.c", true}, {"*", "", false}, {"a", "b", false}, {"", "", true},
	} {
		p, err := ParseTopic(tc.pattern)
		if err != nil || p.Match(tc.key) != tc.want {
			t.Errorf("topic %q on %q: %v %v", tc.pattern, tc.key, !tc.want, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(sample)
	f.Add("version: 1\n")
	f.Add("a: &a [*a]")
	f.Fuzz(func(t *testing.T, file string) {
		p, err := Parse([]byte(file), ParseOptions{})
		if (p == nil) == (err == nil) {
			t.Fatalf("policy %v, error %v", p, err)
		}
	})
}

func FuzzResolve(f *testing.F) {
	p, err := Parse([]byte(sample), ParseOptions{})
	if err != nil {
		f.Fatal(err)
	}
	f.Add("results", "id", []byte(`{"target_id":"x"}`))
	f.Fuzz(func(t *testing.T, db, id string, doc []byte) {
		d, err := p.ResolveDocument(DocumentWrite{Database: db, ID: id, Doc: doc})
		if err != nil && d.Verdict != Deny {
			t.Fatalf("error %v with verdict %v", err, d.Verdict)
		}
		if d.Verdict == Fenced {
			if n, err := d.Identity.Normalize(); err != nil || n != d.Identity {
				t.Fatalf("identity %+v is not canonical: %v", d.Identity, err)
			}
		}
	})
}
