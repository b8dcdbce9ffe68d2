// Package proxy is the running sidecar: its listeners, its leases, the two unix
// sockets that workers talk to, health, metrics, and the order of starting and
// ending.
//
// # What it owns
//
// The [Table] of leases and their keepers; the control socket (HTTP with JSON)
// and the event socket (one JSON object a line); the admin listener; the
// shutdown in named phases.
//
// # What it must never do
//
// It never decides whether a write may pass. It hands the adapters the lease that
// a write presents, lost or not, and the store says whether it counts. It never
// waits for a reader of events, never shows another owner's identity, a lock key
// or a raw error, and never starts anything that it does not wait for.
//
// # Decisions
//
//   - A lost lease stays in the table until another of its identity takes its
//     place, or until it is the oldest of too many. The store is asked about it
//     and answers; no local belief stands in the way or lets anything through.
//   - The sidecar runs while a backend is out of reach. It is not ready then, says
//     so, answers every write with what is wrong, and goes on by itself.
//   - A worker learns of a loss before the sidecar does anything about it.
//   - The control socket trusts the local user: file mode and peer credentials
//     decide who may connect. It offers nothing that needs more than that.
package proxy
