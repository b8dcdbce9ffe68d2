// Package couch is the fence on the way to CouchDB: a reverse proxy that is
// transparent for everything that is not a write into a fenced database, and
// that turns every such write into one revision-conditioned document write which
// the gate has accepted and which carries the stamp.
//
// # What it owns
//
// The parsing of a request's target the way CouchDB parses it, the table that
// says of every endpoint whether it can write, the look at a document's current
// winner, the shape of refusals, and the [Effector] that finishes accepted
// document writes for somebody else.
//
// # What it must never do
//
// It never forwards a target that it has not parsed: what was judged is what is
// sent. It never classes as a read what it does not know. It never answers a
// lost lease with 409, which clients take for "already there" and go on. It
// never sees the lease store; it sees [fence.Gate].
//
// # Decisions
//
//   - A write is sent with the deadline of its acceptance, and the body is what
//     is held back until the last look: CouchDB commits nothing before it has
//     the whole body, so a sidecar that was stopped on the way sends a request
//     that is cut short instead of one that is late.
//   - A worker that hangs up after its write was accepted does not stop it.
//   - An answer that never came is not repeated by the transport. The commit is
//     abandoned to settlement, which looks for its commit id first.
//   - A document is looked at before it is replaced, in parallel with Begin. The
//     write must extend the current winner: CouchDB itself takes any leaf, even
//     a deleted one, and takes any revision for a document that is not there.
//   - DELETE becomes a tombstone that carries the stamp, since CouchDB ignores
//     the body of a DELETE.
//   - The worker's credentials pass through and are used for the look. Those in
//     the upstream URL are for settlement only: lending them to workers would
//     give every local process the rights of the sidecar.
//   - The header X-Forwarded-Host and CouchDB's own path headers are dropped:
//     with virtual hosts they choose another path than the one that was judged.
package couch
