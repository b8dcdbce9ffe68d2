package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/starintel/fencerider/leaseclient"
)

// Bounds of a policy file.
const (
	// MaxBytes bounds the file.
	MaxBytes = 1 << 20
	// maxRules bounds each list of rules.
	maxRules = 1000
	// maxProblems bounds how many are told at once.
	maxProblems = 20
)

// ParseOptions are what the deployment adds to a policy file.
type ParseOptions struct {
	// Classes is the closed list of operation classes; empty means only
	// "default".
	Classes []string
}

// ParseError holds everything that is wrong with a file, in its order.
type ParseError struct {
	// Problems are lines such as "line 7: couch.rules[0]: ...".
	Problems []string
}

// Error joins the problems.
func (e *ParseError) Error() string { return strings.Join(e.Problems, "\n") }

// Parse reads a policy file. The error is a [*ParseError]; a policy is returned
// only when nothing at all is wrong, since half a policy is a hole.
func Parse(data []byte, o ParseOptions) (*Policy, error) {
	if len(data) > MaxBytes {
		return nil, &ParseError{Problems: []string{fmt.Sprintf("file is longer than %d bytes", MaxBytes)}}
	}
	dec := yaml.NewDecoder(strings.NewReader(string(data)))
	var doc, more yaml.Node
	if err := dec.Decode(&doc); err != nil {
		return nil, &ParseError{Problems: []string{"not a YAML document: " + strings.TrimPrefix(err.Error(), "yaml: ")}}
	}
	p := &parser{policy: &Policy{classes: o.Classes}}
	if len(p.policy.classes) == 0 {
		p.policy.classes = []string{leaseclient.DefaultComponent}
	}
	if dec.Decode(&more) == nil {
		p.problem(&more, "", "a second document; a policy is one")
	}
	p.root(doc.Content[0])
	if len(p.problems) > 0 {
		return nil, &ParseError{Problems: p.problems}
	}
	return p.policy, nil
}

// parser collects problems instead of stopping at the first.
type parser struct {
	policy   *Policy
	defaults [7]Template
	problems []string
}

// problem notes what is wrong at a place.
func (p *parser) problem(n *yaml.Node, at, format string, args ...any) {
	if len(p.problems) >= maxProblems {
		return
	}
	text := fmt.Sprintf("line %d: ", n.Line)
	if at != "" {
		text += at + ": "
	}
	p.problems = append(p.problems, text+fmt.Sprintf(format, args...))
}

// join makes the path of a member.
func join(at, key string) string {
	if at == "" {
		return key
	}
	return at + "." + key
}

// plain refuses what makes a text depend on another place.
func (p *parser) plain(n *yaml.Node, at string) bool {
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		p.problem(n, at, "anchors and aliases are not allowed in a policy")
		return false
	}
	return true
}

// object walks a mapping with a closed set of keys. It returns the values by key.
func (p *parser) object(n *yaml.Node, at string, known ...string) map[string]*yaml.Node {
	if !p.plain(n, at) {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		p.problem(n, at, "must be a mapping of %s", strings.Join(known, ", "))
		return nil
	}
	out := make(map[string]*yaml.Node, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if !p.plain(k, at) || !p.plain(v, join(at, k.Value)) {
			continue
		}
		switch {
		case k.Kind != yaml.ScalarNode || k.Tag == "!!merge":
			p.problem(k, at, "merge keys and keys that are not text are not allowed in a policy")
		case !slices.Contains(known, k.Value):
			hint := ""
			if near := Nearest(k.Value[:min(len(k.Value), 64)], known); near != "" {
				hint = fmt.Sprintf(", did you mean %q", near)
			}
			p.problem(k, at, "unknown key %q%s; known are %s", k.Value, hint, strings.Join(known, ", "))
		case out[k.Value] != nil:
			p.problem(k, at, "key %q is there twice", k.Value)
		default:
			out[k.Value] = v
		}
	}
	return out
}

// text reads a scalar that is meant as text. A number or a boolean is read as it
// is written: "fence: off" is one to YAML.
func (p *parser) text(n *yaml.Node, at string) (string, bool) {
	if !p.plain(n, at) {
		return "", false
	}
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		p.problem(n, at, "must be a text")
		return "", false
	}
	return n.Value, true
}

// list reads a sequence.
func (p *parser) list(n *yaml.Node, at string) []*yaml.Node {
	if !p.plain(n, at) {
		return nil
	}
	if n.Kind != yaml.SequenceNode {
		p.problem(n, at, "must be a list")
		return nil
	}
	if len(n.Content) > maxRules {
		p.problem(n, at, "has more than %d entries", maxRules)
		return nil
	}
	return n.Content
}

// root reads the whole file.
func (p *parser) root(n *yaml.Node) {
	m := p.object(n, "", "version", "defaults", "couch", "rabbit")
	if m == nil {
		return
	}
	if v := m["version"]; v == nil {
		p.problem(n, "", "version is missing; this is version 1")
	} else if s, ok := p.text(v, "version"); ok && s != "1" {
		p.problem(v, "version", "unknown version %q; known is 1", s)
	}
	if v := m["defaults"]; v != nil {
		p.defaultIdentity(v)
	}
	if v := m["couch"]; v != nil {
		p.couch(v)
	}
	if v := m["rabbit"]; v != nil {
		p.rabbit(v)
	}
}

// defaultIdentity reads the components that rules may leave out. They are
// literal: a default that reads the write would be a surprise in every rule.
func (p *parser) defaultIdentity(n *yaml.Node) {
	m := p.object(n, "defaults", componentNames[:]...)
	for i, name := range componentNames {
		v := m[name]
		if v == nil {
			continue
		}
		at := "defaults." + name
		if s, ok := p.text(v, at); ok {
			if s == "" || strings.ContainsAny(s, "{}") {
				p.problem(v, at, "must be a plain text that is not empty")
				continue
			}
			p.defaults[i] = literalTemplate(s)
		}
	}
}

// unmatched reads "deny" or "pass".
func (p *parser) unmatched(n *yaml.Node, at string) unmatched {
	if n == nil {
		return unmatchedDeny
	}
	switch s, ok := p.text(n, at); {
	case !ok || s == "deny":
	case s == "pass":
		return unmatchedPass
	default:
		p.problem(n, at, "must be deny or pass")
	}
	return unmatchedDeny
}

// couch reads the half about documents.
func (p *parser) couch(n *yaml.Node) {
	m := p.object(n, "couch", "unmatched", "stamp", "rules", "open")
	c := &p.policy.couch
	c.unmatched = p.unmatched(m["unmatched"], "couch.unmatched")
	if v := m["stamp"]; v != nil {
		if s, ok := p.text(v, "couch.stamp"); ok {
			if s == "" || s[0] == '_' || len(s) > leaseclient.MaxIdentifierBytes {
				p.problem(v, "couch.stamp", "must be the name of a member that does not begin with an underscore")
			}
			c.stampMember = s
		}
	}
	if v := m["rules"]; v != nil {
		for i, r := range p.list(v, "couch.rules") {
			p.couchRule(r, fmt.Sprintf("couch.rules[%d]", i))
		}
	}
	if v := m["open"]; v != nil {
		for i, r := range p.list(v, "couch.open") {
			p.opening(r, fmt.Sprintf("couch.open[%d]", i))
		}
	}
}

// glob reads a pattern.
func (p *parser) glob(n *yaml.Node, at string) (Glob, bool) {
	s, ok := p.text(n, at)
	if !ok {
		return Glob{}, false
	}
	g, err := ParseGlob(s)
	if err != nil {
		p.problem(n, at, "%v", err)
		return Glob{}, false
	}
	return g, true
}

// couchRule reads one rule about documents.
func (p *parser) couchRule(n *yaml.Node, at string) {
	m := p.object(n, at, "database", "documents", "identity", "fence", "locks")
	if m == nil {
		return
	}
	r := couchRule{at: at}
	var ok bool
	if v := m["database"]; v == nil {
		p.problem(n, at, "database is missing")
	} else if r.database, ok = p.glob(v, at+".database"); ok && r.database.raw == "" {
		p.problem(v, at+".database", "is empty")
		ok = false
	}
	r.documents, _ = ParseGlob("*")
	if v := m["documents"]; v != nil {
		var fine bool
		r.documents, fine = p.glob(v, at+".documents")
		ok = ok && fine
	}
	r.identity = p.identityOrOff(n, m, at, couchSide)
	if v := m["locks"]; v != nil {
		switch s, _ := p.text(v, at+".locks"); s {
		case "exclusive":
		case "shared":
			r.shared = true
		default:
			p.problem(v, at+".locks", "must be exclusive or shared")
		}
	}
	if !ok {
		return
	}
	for _, earlier := range p.policy.couch.rules {
		if earlier.database.covers(r.database) && earlier.documents.covers(r.documents) &&
			(earlier.documents.reserved() || !r.documents.reserved()) {
			p.problem(n, at, "is never reached, %s matches everything it does", earlier.at)
		}
	}
	p.policy.couch.rules = append(p.policy.couch.rules, r)
}

// opening reads one entry of couch.open.
func (p *parser) opening(n *yaml.Node, at string) {
	m := p.object(n, at, "database", "endpoints")
	if m == nil {
		return
	}
	o := opening{at: at}
	if v := m["database"]; v == nil {
		p.problem(n, at, "database is missing")
	} else {
		o.database, _ = p.glob(v, at+".database")
	}
	v := m["endpoints"]
	if v == nil {
		p.problem(n, at, "endpoints is missing")
		return
	}
	known := make([]string, 0, len(Endpoints()))
	for _, e := range Endpoints() {
		known = append(known, string(e))
	}
	for i, item := range p.list(v, at+".endpoints") {
		s, ok := p.text(item, fmt.Sprintf("%s.endpoints[%d]", at, i))
		if !ok {
			continue
		}
		if !slices.Contains(known, s) {
			p.problem(item, at+".endpoints", "unknown endpoint %q; known are %s", s, strings.Join(known, ", "))
			continue
		}
		o.endpoints = append(o.endpoints, Endpoint(s))
	}
	p.policy.couch.opened = append(p.policy.couch.opened, o)
}

// rabbit reads the half about messages.
func (p *parser) rabbit(n *yaml.Node) {
	m := p.object(n, "rabbit", "unmatched", "rules", "acks")
	p.policy.rabbit.unmatched = p.unmatched(m["unmatched"], "rabbit.unmatched")
	if v := m["rules"]; v != nil {
		for i, r := range p.list(v, "rabbit.rules") {
			p.rabbitRule(r, fmt.Sprintf("rabbit.rules[%d]", i))
		}
	}
	if v := m["acks"]; v != nil {
		for i, r := range p.list(v, "rabbit.acks") {
			p.ackRule(r, fmt.Sprintf("rabbit.acks[%d]", i))
		}
	}
}

// rabbitRule reads one rule about messages.
func (p *parser) rabbitRule(n *yaml.Node, at string) {
	m := p.object(n, at, "exchange", "routing_key", "identity", "fence")
	if m == nil {
		return
	}
	r := rabbitRule{at: at}
	var ok bool
	if v := m["exchange"]; v == nil {
		p.problem(n, at, `exchange is missing; the default exchange is ""`)
	} else {
		r.exchange, ok = p.glob(v, at+".exchange")
	}
	r.routingKey, _ = ParseTopic("#")
	if v := m["routing_key"]; v != nil {
		if s, fine := p.text(v, at+".routing_key"); fine {
			t, err := ParseTopic(s)
			if err != nil {
				p.problem(v, at+".routing_key", "%v", err)
				ok = false
			}
			r.routingKey = t
		}
	}
	r.identity = p.identityOrOff(n, m, at, rabbitSide)
	if !ok {
		return
	}
	for _, earlier := range p.policy.rabbit.rules {
		if earlier.exchange.covers(r.exchange) && earlier.routingKey.covers(r.routingKey) {
			p.problem(n, at, "is never reached, %s matches everything it does", earlier.at)
		}
	}
	p.policy.rabbit.rules = append(p.policy.rabbit.rules, r)
}

// identityOrOff reads the one of "identity" and "fence: off" that a rule has.
func (p *parser) identityOrOff(n *yaml.Node, m map[string]*yaml.Node, at string, where side) *identityTemplate {
	identity, fence := m["identity"], m["fence"]
	switch {
	case identity != nil && fence != nil:
		p.problem(n, at, "has both identity and fence; a rule has one of them")
	case identity != nil:
		return p.identity(identity, at+".identity", where)
	case fence != nil:
		if s, ok := p.text(fence, at+".fence"); ok && s != "off" {
			p.problem(fence, at+".fence", "must be off; a rule that fences has an identity")
		}
	default:
		p.problem(n, at, "has neither an identity nor fence: off")
	}
	return nil
}

// identity reads the templates of an identity and fills in the defaults. Literal
// components are judged now, so that a mistake does not wait for the first write.
func (p *parser) identity(n *yaml.Node, at string, where side) *identityTemplate {
	m := p.object(n, at, componentNames[:]...)
	if m == nil {
		return nil
	}
	t := identityTemplate(p.defaults)
	for i, name := range componentNames {
		v := m[name]
		if v == nil {
			continue
		}
		s, ok := p.text(v, at+"."+name)
		if !ok {
			continue
		}
		parsed, err := parseTemplate(s, where)
		if err != nil {
			p.problem(v, at+"."+name, "%v", err)
			continue
		}
		t[i] = parsed
	}
	var probe leaseclient.Identity
	for i, field := range componentsOf(&probe) {
		name := componentNames[i]
		if len(t[i].parts) == 0 {
			if name == "workflow_name" || name == "operation_class" {
				t[i] = literalTemplate(leaseclient.DefaultComponent)
			} else {
				p.problem(n, at, "%s is missing, here and in defaults", name)
			}
		}
		*field = "x"
		if text, ok := t[i].Literal(); ok && text != "" {
			*field = text
		}
	}
	canonical, err := probe.Normalize()
	if err != nil {
		p.problem(n, at, "%v", err)
		return &t
	}
	if _, ok := t[6].Literal(); ok && !slices.Contains(p.policy.classes, canonical.OperationClass) {
		p.problem(n, at, "operation_class %q is not one of this deployment's: %s", canonical.OperationClass, strings.Join(p.policy.classes, ", "))
	}
	return &t
}

// resolveErrorOf says which component of a resolved identity is not canonical.
func resolveErrorOf(rule string, err error) error {
	if e, ok := errors.AsType[*leaseclient.InvalidError](err); ok {
		return &ResolveError{Rule: rule, Component: e.Field, Problem: e.Reason}
	}
	return &ResolveError{Rule: rule, Component: "identity", Problem: "is not valid"}
}
