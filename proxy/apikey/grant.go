package apikey

import (
	"fmt"
	"slices"
	"strings"

	"github.com/starintel/fencerider/leaseclient"
)

// Capability is one thing that a principal may do.
type Capability string

// The closed set of capabilities.
const (
	// Lease: acquire, renew, release and adopt.
	Lease Capability = "targets:lease"
	// Read: inspect and list.
	Read Capability = "targets:read"
	// ForceRelease: force-release and revoke.
	ForceRelease Capability = "targets:force-release"
	// AuditRead: history.
	AuditRead Capability = "audit:read"
)

// Capabilities returns the closed set.
func Capabilities() []Capability { return []Capability{Lease, Read, ForceRelease, AuditRead} }

// Rule names targets. Every part must match; a part is a text, a text that ends
// with "*" for everything that begins so, or "*" for everything. An empty part
// matches nothing.
type Rule struct {
	Tenant  string `json:"tenant"`
	Program string `json:"program"`
	Actor   string `json:"actor"`
	// Target is "<namespace>/<id>".
	Target string `json:"target"`
}

// Grant is what a principal may do.
type Grant struct {
	Capabilities []Capability `json:"capabilities"`
	Allow        []Rule       `json:"allow"`
	Deny         []Rule       `json:"deny,omitempty"`
}

// Validate says what is wrong with a grant.
func (g Grant) Validate() error {
	for _, c := range g.Capabilities {
		if !slices.Contains(Capabilities(), c) {
			return &leaseclient.InvalidError{Field: "capabilities", Reason: fmt.Sprintf("%.64q is not one of %v", string(c), Capabilities())}
		}
	}
	for _, list := range [...]struct {
		name  string
		rules []Rule
	}{{"allow", g.Allow}, {"deny", g.Deny}} {
		for _, r := range list.rules {
			for _, part := range [...]struct{ name, value string }{
				{"tenant", r.Tenant}, {"program", r.Program}, {"actor", r.Actor}, {"target", r.Target},
			} {
				if len(part.value) > 2*leaseclient.MaxIdentifierBytes+1 {
					return &leaseclient.InvalidError{Field: list.name + "." + part.name, Reason: "is too long"}
				}
				if i := strings.IndexByte(part.value, '*'); i >= 0 && i != len(part.value)-1 {
					return &leaseclient.InvalidError{Field: list.name + "." + part.name, Reason: `may hold "*" at its end only`}
				}
				if part.value != strings.ToLower(part.value) {
					return &leaseclient.InvalidError{Field: list.name + "." + part.name, Reason: "must be lower case, as identities are"}
				}
			}
			if t := r.Target; t != "" && t != "*" && !strings.Contains(t, "/") {
				return &leaseclient.InvalidError{Field: list.name + ".target", Reason: `must be "<namespace>/<id>" or "*"`}
			}
		}
	}
	return nil
}

// May reports whether the grant has a capability.
func (g Grant) May(c Capability) bool { return slices.Contains(g.Capabilities, c) }

// Covers reports whether an identity is in scope. A denial wins.
func (g Grant) Covers(id leaseclient.Identity) bool {
	match := func(r Rule) bool {
		return part(r.Tenant, id.TenantID) && part(r.Program, id.ProgramID) && part(r.Actor, id.ActorName) &&
			part(r.Target, id.TargetNamespace+"/"+id.TargetID)
	}
	return slices.ContainsFunc(g.Allow, match) && !slices.ContainsFunc(g.Deny, match)
}

// Reaches reports whether anything of a program can be in scope, so that a
// listing of it may be asked for; its rows are judged one by one.
func (g Grant) Reaches(tenant, program string) bool {
	return slices.ContainsFunc(g.Allow, func(r Rule) bool { return part(r.Tenant, tenant) && part(r.Program, program) })
}

// part matches one part of a rule.
func part(pattern, value string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(value, prefix)
	}
	return pattern != "" && pattern == value
}
