package policy

import (
	"fmt"
	"slices"

	"github.com/starintel/fencerider/leaseclient"
)

// DefaultStampMember is the member of a document that carries the stamp where
// the policy names no other.
const DefaultStampMember = "fence"

// Policy is a parsed policy file. It is made by [Parse], immutable and safe for
// concurrent use. A nil *Policy is the case without a file: every document write
// and every publish needs the sidecar's single lease.
type Policy struct {
	couch   couchPolicy
	rabbit  rabbitPolicy
	classes []string
}

// couchPolicy is the half of the file about CouchDB.
type couchPolicy struct {
	unmatched   unmatched
	stampMember string
	rules       []couchRule
	opened      []opening
}

// rabbitPolicy is the half of the file about RabbitMQ.
type rabbitPolicy struct {
	unmatched unmatched
	rules     []rabbitRule
	acks      []ackRule
}

// unmatched says what happens to a write that no rule matches.
type unmatched uint8

const (
	unmatchedDeny unmatched = iota
	unmatchedPass
)

// String returns the word of the file.
func (u unmatched) String() string {
	if u == unmatchedPass {
		return "pass"
	}
	return "deny"
}

// couchRule selects document writes.
type couchRule struct {
	// at is the rule's place in the file, "couch.rules[0]".
	at        string
	database  Glob
	documents Glob
	// identity is nil where the rule switches the fence off.
	identity *identityTemplate
	// shared lets documents of this rule carry stamps of several locks.
	shared bool
}

// matches reports whether the rule speaks about this document. A reserved id is
// spoken about only by a pattern that begins with an underscore.
func (r couchRule) matches(database, id string) bool {
	if !r.database.Match(database) {
		return false
	}
	if len(id) > 0 && id[0] == '_' && !r.documents.reserved() {
		return false
	}
	return r.documents.Match(id)
}

// rabbitRule selects publishes.
type rabbitRule struct {
	at         string
	exchange   Glob
	routingKey Topic
	identity   *identityTemplate
}

// opening lets endpoints through that cannot be fenced.
type opening struct {
	at        string
	database  Glob
	endpoints []Endpoint
}

// Endpoint names something that CouchDB offers and that a fenced database
// refuses, because it cannot be conditioned on a revision or goes past the
// documents altogether.
type Endpoint string

// The closed set of endpoints that a policy can open, in CouchDB's own words
// where it has one.
const (
	EndpointNewEdits       Endpoint = "new_edits"
	EndpointRevisions      Endpoint = "_revisions"
	EndpointBatch          Endpoint = "batch"
	EndpointQuorum         Endpoint = "w"
	EndpointLocal          Endpoint = "_local"
	EndpointUpdate         Endpoint = "_update"
	EndpointRewrite        Endpoint = "_rewrite"
	EndpointIndex          Endpoint = "_index"
	EndpointReplicate      Endpoint = "_replicate"
	EndpointPurge          Endpoint = "_purge"
	EndpointRevsLimit      Endpoint = "_revs_limit"
	EndpointPurgedLimit    Endpoint = "_purged_infos_limit"
	EndpointSecurity       Endpoint = "_security"
	EndpointCompact        Endpoint = "_compact"
	EndpointCleanup        Endpoint = "_view_cleanup"
	EndpointSyncShards     Endpoint = "_sync_shards"
	EndpointCreateDatabase Endpoint = "create_database"
	EndpointDeleteDatabase Endpoint = "delete_database"
	EndpointNode           Endpoint = "_node"
)

// Endpoints returns the closed set, in the order of the documentation.
func Endpoints() []Endpoint {
	return []Endpoint{
		EndpointNewEdits, EndpointRevisions, EndpointBatch, EndpointQuorum, EndpointLocal,
		EndpointUpdate, EndpointRewrite, EndpointIndex, EndpointReplicate, EndpointPurge,
		EndpointRevsLimit, EndpointPurgedLimit, EndpointSecurity, EndpointCompact, EndpointCleanup,
		EndpointSyncShards, EndpointCreateDatabase, EndpointDeleteDatabase, EndpointNode,
	}
}

// componentNames are the seven components in contract order.
var componentNames = [7]string{
	"tenant_id", "program_id", "target_namespace", "target_id",
	"actor_name", "workflow_name", "operation_class",
}

// componentsOf returns the seven fields of an identity in contract order.
func componentsOf(id *leaseclient.Identity) [7]*string {
	return [7]*string{
		&id.TenantID, &id.ProgramID, &id.TargetNamespace, &id.TargetID,
		&id.ActorName, &id.WorkflowName, &id.OperationClass,
	}
}

// identityTemplate builds an identity; defaults are merged in already.
type identityTemplate [7]Template

// fromBody reports whether the worker's payload has a say in the identity.
func (t *identityTemplate) fromBody() bool {
	return slices.ContainsFunc(t[:], Template.fromBody)
}

// StampMember is the member of a document that carries the stamp.
func (p *Policy) StampMember() string {
	if p == nil || p.couch.stampMember == "" {
		return DefaultStampMember
	}
	return p.couch.stampMember
}

// Fenced reports whether a database is fenced: whether a rule with an identity
// speaks about it, or there is no policy. In a fenced database everything that
// is not known to be harmless is refused.
func (p *Policy) Fenced(database string) bool {
	if p == nil {
		return true
	}
	return slices.ContainsFunc(p.couch.rules, func(r couchRule) bool {
		return r.identity != nil && r.database.Match(database)
	})
}

// Opened reports whether the policy lets an endpoint of a fenced database
// through unfenced. Endpoints of the server as a whole are asked for with an
// empty database, which only the pattern "*" opens.
func (p *Policy) Opened(database string, e Endpoint) bool {
	if p == nil {
		return false
	}
	return slices.ContainsFunc(p.couch.opened, func(o opening) bool {
		return o.database.Match(database) && slices.Contains(o.endpoints, e)
	})
}

// Unprotected lists, in the order of the file, everything that the policy lets
// through without a lease, for status pages and logs. It is empty without a
// policy.
func (p *Policy) Unprotected() []string {
	if p == nil {
		return nil
	}
	var list []string
	for _, r := range p.couch.rules {
		if r.identity == nil {
			list = append(list, fmt.Sprintf("%s: database %q documents %q: off", r.at, r.database, r.documents))
		}
	}
	if p.couch.unmatched == unmatchedPass {
		list = append(list, "couch.unmatched: pass")
	}
	for _, o := range p.couch.opened {
		for _, e := range o.endpoints {
			list = append(list, fmt.Sprintf("%s: database %q: %s is opened", o.at, o.database, e))
		}
	}
	for _, r := range p.rabbit.rules {
		if r.identity == nil {
			list = append(list, fmt.Sprintf("%s: exchange %q routing key %q: off", r.at, r.exchange, r.routingKey))
		}
	}
	if p.rabbit.unmatched == unmatchedPass {
		list = append(list, "rabbit.unmatched: pass")
	}
	return append(list, p.rabbit.unprotectedAcks()...)
}

// Free reports whether everything in a database may pass without a lease: it is
// not fenced, and the policy says of all its documents that they are off or
// pass. In a database that is neither free nor fenced each document is judged by
// itself and everything else that writes is refused.
func (p *Policy) Free(database string) bool {
	if p == nil || p.Fenced(database) {
		return false
	}
	if p.couch.unmatched == unmatchedPass {
		return true
	}
	return slices.ContainsFunc(p.couch.rules, func(r couchRule) bool {
		return r.identity == nil && r.documents.everything() && r.database.Match(database)
	})
}
