package policy

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestAcks(t *testing.T) {
	p, err := Parse([]byte(`
version: 1
defaults: {tenant_id: t, program_id: p, target_namespace: n, actor_name: a}
rabbit:
  acks:
    - {queue: "jobs.free.*", fence: off}
    - {queue: "jobs.*", identity: {target_id: "{header.target}-{routing_key[1]}"}}
    - {queue: "*.results", identity: {target_id: "{sha256:queue}"}}
`), ParseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	header := func(string) Value { return Value{Kind: Text, Text: "h"} }
	for _, tc := range []struct {
		d       Delivery
		verdict Verdict
		target  string
	}{
		{Delivery{Queue: "jobs.free.x", Header: header}, Off, ""},
		{Delivery{Queue: "jobs.x", RoutingKey: "a.b", Header: header}, Fenced, "h-b"},
		{Delivery{Queue: "jobs.x", RoutingKey: "a", Header: header}, Deny, ""},
		{Delivery{Queue: "jobs.x", RoutingKey: "a.b"}, Deny, ""},
		{Delivery{Queue: "elsewhere"}, Off, ""},
	} {
		d, err := p.ResolveAck(tc.d)
		if d.Verdict != tc.verdict || d.Identity.TargetID != tc.target || (err != nil) != (tc.verdict == Deny) {
			t.Errorf("%+v: %+v %v", tc.d, d, err)
		}
	}
	if d, err := p.ResolveAck(Delivery{Queue: "x.results"}); err != nil || len(d.Identity.TargetID) != 64 {
		t.Errorf("%+v %v", d, err)
	}
	if !p.FencesAcks() || !p.AcksFenced("jobs.x") || p.AcksFenced("jobs.free.x") || p.AcksFenced("y") {
		t.Error("which queues are fenced is told wrong")
	}
	if !slices.Equal(p.Unprotected(), []string{`rabbit.acks[0]: acknowledgements of queue "jobs.free.*": off`}) {
		t.Errorf("%v", p.Unprotected())
	}
	var none *Policy
	if d, err := none.ResolveAck(Delivery{Queue: "q"}); err != nil || d.Verdict != Off || none.FencesAcks() || none.AcksFenced("q") {
		t.Error("without a policy an acknowledgement needs nothing")
	}
}

func TestAcksRefused(t *testing.T) {
	for _, tc := range []struct{ in, want string }{
		{"- {identity: {target_id: x}}", "queue is missing"},
		{`- {queue: "", identity: {target_id: x}}`, "is empty"},
		{`- {queue: q}`, "neither an identity nor fence: off"},
		{`- {queue: q, identity: {target_id: "{body.x}"}}`, "no such source here"},
		{"- {queue: \"*\", fence: off}\n    - {queue: q, fence: off}", "is never reached"},
		{`- {queues: q, fence: off}`, `did you mean "queue"`},
	} {
		_, err := Parse([]byte("version: 1\ndefaults: {tenant_id: t, program_id: p, target_namespace: n, actor_name: a}\nrabbit:\n  acks:\n    "+tc.in+"\n"), ParseOptions{})
		if pe, ok := errors.AsType[*ParseError](err); !ok || !strings.Contains(pe.Error(), tc.want) {
			t.Errorf("%s: %v, want %s", tc.in, err, tc.want)
		}
	}
	if _, err := Parse([]byte("version: 1\ndefaults: {tenant_id: t, program_id: p, target_namespace: n, actor_name: a}\nrabbit:\n  rules:\n    - {exchange: e, identity: {target_id: \"{queue}\"}}\n"), ParseOptions{}); err == nil {
		t.Error("a publish has no queue")
	}
}
