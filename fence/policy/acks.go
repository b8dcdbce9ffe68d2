package policy

import (
	"fmt"
	"slices"

	"go.yaml.in/yaml/v3"
)

// ackRule selects acknowledgements by the queue that a message came from.
type ackRule struct {
	at    string
	queue Glob
	// identity is nil where the rule switches the fence off.
	identity *identityTemplate
}

// Delivery is one message on its way to a worker, as the policy sees it. Its body
// has no say: it may be as large as it likes, and is not kept.
type Delivery struct {
	// Queue is where it came from.
	Queue      string
	Exchange   string
	RoutingKey string
	// Header looks up a header of the message; nil means there are none.
	Header func(name string) Value
}

// FencesAcks reports whether any acknowledgement needs a lease.
func (p *Policy) FencesAcks() bool {
	return p != nil && slices.ContainsFunc(p.rabbit.acks, func(r ackRule) bool { return r.identity != nil })
}

// AcksFenced reports whether acknowledgements of a queue need a lease.
func (p *Policy) AcksFenced(queue string) bool {
	if p == nil {
		return false
	}
	for _, r := range p.rabbit.acks {
		if r.queue.Match(queue) {
			return r.identity != nil
		}
	}
	return false
}

// ResolveAck says which lease the acknowledgement of a message needs. Where no
// rule names the queue it needs none. The error is always a [*ResolveError]; the
// decision beside it denies.
func (p *Policy) ResolveAck(d Delivery) (Decision, error) {
	if p == nil {
		return Decision{Verdict: Off}, nil
	}
	for _, r := range p.rabbit.acks {
		if !r.queue.Match(d.Queue) {
			continue
		}
		if r.identity == nil {
			return Decision{Verdict: Off, Rule: r.at}, nil
		}
		id, err := p.build(r.at, r.identity, d.lookup())
		if err != nil {
			return Decision{Rule: r.at, Reason: err.Error()}, err
		}
		return Decision{Verdict: Fenced, Identity: id, Rule: r.at}, nil
	}
	return Decision{Verdict: Off}, nil
}

// lookup reads the sources of an acknowledgement.
func (d Delivery) lookup() lookup {
	rest := Publish{Exchange: d.Exchange, RoutingKey: d.RoutingKey, Header: d.Header}.lookup(d.RoutingKey, nil)
	return func(s source) (string, error) {
		if s.kind == sourceQueue {
			return d.Queue, nil
		}
		return rest(s)
	}
}

// ackRule reads one rule about acknowledgements.
func (p *parser) ackRule(n *yaml.Node, at string) {
	m := p.object(n, at, "queue", "identity", "fence")
	if m == nil {
		return
	}
	r := ackRule{at: at}
	var ok bool
	if v := m["queue"]; v == nil {
		p.problem(n, at, "queue is missing")
	} else if r.queue, ok = p.glob(v, at+".queue"); ok && r.queue.raw == "" {
		p.problem(v, at+".queue", "is empty")
		ok = false
	}
	r.identity = p.identityOrOff(n, m, at, ackSide)
	if !ok {
		return
	}
	for _, earlier := range p.policy.rabbit.acks {
		if earlier.queue.covers(r.queue) {
			p.problem(n, at, "is never reached, %s matches everything it does", earlier.at)
		}
	}
	p.policy.rabbit.acks = append(p.policy.rabbit.acks, r)
}

// unprotectedAcks lists the queues whose acknowledgements a rule lets through.
func (p rabbitPolicy) unprotectedAcks() []string {
	var list []string
	for _, r := range p.acks {
		if r.identity == nil {
			list = append(list, fmt.Sprintf("%s: acknowledgements of queue %q: off", r.at, r.queue))
		}
	}
	return list
}
