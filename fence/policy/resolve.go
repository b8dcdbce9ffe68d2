package policy

import (
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/starintel/fencerider/leaseclient"
)

// Verdict is what the policy says about one write.
type Verdict uint8

// The verdicts. The zero value denies.
const (
	// Deny: the write goes nowhere; Reason says why.
	Deny Verdict = iota
	// Fenced: the write needs the lease of Identity.
	Fenced
	// SingleLease: the write needs the one lease that the sidecar holds.
	SingleLease
	// Off: a rule says that this write needs no lease.
	Off
	// Pass: no rule matched and the policy lets such writes through.
	Pass
)

// String returns the word used in logs and metrics.
func (v Verdict) String() string {
	switch v {
	case Deny:
		return "deny"
	case Fenced:
		return "fenced"
	case SingleLease:
		return "single_lease"
	case Off:
		return "off"
	case Pass:
		return "pass"
	}
	return "deny"
}

// Decision is the policy's answer. It is comparable, so that the answers for
// several routing keys of one message can be held against each other.
type Decision struct {
	Verdict Verdict
	// Identity is canonical and set for [Fenced] only.
	Identity leaseclient.Identity
	// Rule is the place in the file that decided, "couch.rules[0]"; empty
	// without a policy.
	Rule string
	// Reason is set for [Deny] only, in words for the worker.
	Reason string
	// Shared: documents under this rule may carry stamps of several locks.
	Shared bool
	// FromBody: the worker's payload had a say in the identity, so the stored
	// document must agree with it.
	FromBody bool
}

// DocumentWrite is one change of one document, as the policy sees it.
type DocumentWrite struct {
	Database string
	// ID is the id under which the document will be stored, whatever its body
	// says.
	ID string
	// Doc is the JSON object that {doc.<path>} reads. For a deletion the
	// caller hands in the document that is deleted, because a tombstone has
	// nothing to read. It is not kept.
	Doc []byte
	// Header looks up a header of the request; nil means there are none.
	Header func(name string) Value
}

// Publish is one message on its way to an exchange, as the policy sees it.
type Publish struct {
	Exchange   string
	RoutingKey string
	// MoreKeys are the routing keys of the CC and BCC headers.
	MoreKeys []string
	// Header looks up a header of the message; nil means there are none.
	Header func(name string) Value
	// Body is what {body.<path>} reads. It is not kept.
	Body []byte
}

// ResolveError says that a rule matched but its identity cannot be built from
// this write. It names the rule and the source and never a value. The write is
// refused.
type ResolveError struct {
	// Rule is the place of the rule in the file.
	Rule string
	// Component is the part of the identity, "target_id".
	Component string
	// Source is what the template reads, "doc.target_id"; empty when the
	// assembled component is at fault.
	Source string
	// Problem is what is wrong, in words for the worker.
	Problem string
}

// Error returns one line with all four parts.
func (e *ResolveError) Error() string {
	if e.Source == "" {
		return fmt.Sprintf("%s: %s: %s", e.Rule, e.Component, e.Problem)
	}
	return fmt.Sprintf("%s: %s: {%s} %s", e.Rule, e.Component, e.Source, e.Problem)
}

// ResolveDocument says which lease a document write needs. The error is always
// a [*ResolveError]; the decision beside it denies.
func (p *Policy) ResolveDocument(w DocumentWrite) (Decision, error) {
	if p == nil {
		return Decision{Verdict: SingleLease}, nil
	}
	if !utf8.ValidString(w.Database) || !utf8.ValidString(w.ID) {
		return Decision{Reason: "database and document id must be valid UTF-8"}, nil
	}
	for _, r := range p.couch.rules {
		if !r.matches(w.Database, w.ID) {
			continue
		}
		if r.identity == nil {
			return Decision{Verdict: Off, Rule: r.at}, nil
		}
		id, err := p.build(r.at, r.identity, w.lookup())
		if err != nil {
			return Decision{Rule: r.at, Reason: err.Error()}, err
		}
		return Decision{
			Verdict: Fenced, Identity: id, Rule: r.at,
			Shared: r.shared, FromBody: r.identity.fromBody(),
		}, nil
	}
	reserved := len(w.ID) > 0 && w.ID[0] == '_'
	if p.couch.unmatched == unmatchedPass && (!reserved || !p.Fenced(w.Database)) {
		return Decision{Verdict: Pass, Rule: "couch.unmatched"}, nil
	}
	return Decision{Rule: "couch.unmatched", Reason: "no rule of the policy matches this document"}, nil
}

// ResolvePublish says which lease a message needs. Every routing key is judged,
// and all must come to the same answer: one message cannot be fenced for one
// queue and unfenced for another. The error is always a [*ResolveError]; the
// decision beside it denies.
func (p *Policy) ResolvePublish(m Publish) (Decision, error) {
	if p == nil {
		return Decision{Verdict: SingleLease}, nil
	}
	if !utf8.ValidString(m.Exchange) || !utf8.ValidString(m.RoutingKey) ||
		!allValid(m.MoreKeys) {
		return Decision{Reason: "exchange and routing keys must be valid UTF-8"}, nil
	}
	body := &payload{raw: m.Body}
	first, err := p.resolveKey(m, m.RoutingKey, body)
	if err != nil || first.Verdict == Deny {
		return first, err
	}
	for _, key := range m.MoreKeys {
		d, err := p.resolveKey(m, key, body)
		if err != nil || d.Verdict == Deny {
			return d, err
		}
		if !sameLease(first, d) {
			return Decision{
				Rule:   d.Rule,
				Reason: "the routing keys in CC or BCC need another lease than the message itself",
			}, nil
		}
	}
	return first, nil
}

// allValid reports whether every key is valid UTF-8.
func allValid(keys []string) bool {
	return !slices.ContainsFunc(keys, func(k string) bool { return !utf8.ValidString(k) })
}

// sameLease reports whether two decisions ask for the same thing, by whatever
// rule. "off" and "pass" both mean that no lease is asked for.
func sameLease(a, b Decision) bool {
	free := func(d Decision) bool { return d.Verdict == Off || d.Verdict == Pass }
	if free(a) || free(b) {
		return free(a) && free(b)
	}
	return a.Verdict == b.Verdict && a.Identity == b.Identity
}

// resolveKey judges a message under one of its routing keys.
func (p *Policy) resolveKey(m Publish, key string, body *payload) (Decision, error) {
	for _, r := range p.rabbit.rules {
		if !r.exchange.Match(m.Exchange) || !r.routingKey.Match(key) {
			continue
		}
		if r.identity == nil {
			return Decision{Verdict: Off, Rule: r.at}, nil
		}
		id, err := p.build(r.at, r.identity, m.lookup(key, body))
		if err != nil {
			return Decision{Rule: r.at, Reason: err.Error()}, err
		}
		return Decision{Verdict: Fenced, Identity: id, Rule: r.at, FromBody: r.identity.fromBody()}, nil
	}
	if p.rabbit.unmatched == unmatchedPass {
		return Decision{Verdict: Pass, Rule: "rabbit.unmatched"}, nil
	}
	return Decision{Rule: "rabbit.unmatched", Reason: "no rule of the policy matches this exchange and routing key"}, nil
}

// build fills an identity and makes it canonical.
func (p *Policy) build(rule string, t *identityTemplate, get lookup) (leaseclient.Identity, error) {
	var id leaseclient.Identity
	for i, field := range componentsOf(&id) {
		text, src, err := t[i].render(get)
		if err != nil {
			return leaseclient.Identity{}, &ResolveError{Rule: rule, Component: componentNames[i], Source: src, Problem: err.Error()}
		}
		// A component that came out empty must not turn into its default:
		// the rule asked for something that is not there.
		if text == "" {
			return leaseclient.Identity{}, &ResolveError{Rule: rule, Component: componentNames[i], Problem: "comes out empty"}
		}
		*field = text
	}
	canonical, err := id.Normalize()
	if err != nil {
		return leaseclient.Identity{}, resolveErrorOf(rule, err)
	}
	if !slices.Contains(p.classes, canonical.OperationClass) {
		return leaseclient.Identity{}, &ResolveError{
			Rule: rule, Component: "operation_class", Problem: "is not one of this deployment's operation classes",
		}
	}
	return canonical, nil
}

// lookup reads the sources of the couch side.
func (w DocumentWrite) lookup() lookup {
	doc := &payload{raw: w.Doc}
	return func(s source) (string, error) {
		switch s.kind {
		case sourceDatabase:
			return w.Database, nil
		case sourceDocID:
			return w.ID, nil
		case sourceDoc:
			if len(w.Doc) == 0 {
				return "", problemAbsent
			}
			return doc.member(s.path)
		case sourceHeader:
			return header(w.Header, s.name)
		case sourceExchange, sourceRoutingKey, sourceRoutingWord, sourceBody, sourceQueue:
		}
		return "", problemAbsent
	}
}

// lookup reads the sources of the rabbit side under one routing key.
func (m Publish) lookup(key string, body *payload) lookup {
	return func(s source) (string, error) {
		switch s.kind {
		case sourceExchange:
			return m.Exchange, nil
		case sourceRoutingKey:
			return key, nil
		case sourceRoutingWord:
			words := routingWords(key)
			if s.index >= len(words) {
				return "", problemAbsent
			}
			return words[s.index], nil
		case sourceBody:
			if len(m.Body) == 0 {
				return "", problemAbsent
			}
			return body.member(s.path)
		case sourceHeader:
			return header(m.Header, s.name)
		case sourceDatabase, sourceDocID, sourceDoc, sourceQueue:
		}
		return "", problemAbsent
	}
}

// header asks a lookup that may be missing.
func header(get func(string) Value, name string) (string, error) {
	if get == nil {
		return "", problemAbsent
	}
	return get(name).text()
}
