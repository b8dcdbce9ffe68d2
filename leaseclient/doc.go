// Package leaseclient is the lease contract: who may work on a target, for how
// long, and how that is known.
//
// # What it owns
//
// The [Identity] of mutually exclusive work and its lock key; the lease record
// and its states; the closed table of results ([Codes]); the [Store] and
// [CommitLog] interfaces, whose one implementation for production is package
// valkeystore; and the [Keeper], which renews a lease and says when it is lost.
//
// # What it must never do
//
// It never authorizes a write. A [Keeper] tells a worker to stop; whether a
// commit is accepted is decided by the store, in one step, every time. It knows
// nothing of proxies, and it never repeats an operation whose outcome is not
// known: that is answered as [CodeOutcomeUnknown], and the same request id
// resolves it.
//
// # Time
//
// There are three clocks and they are never mixed. The store's clock decides
// about leases ([StoreTime]). The boot clock ([Clock]) measures locally, from
// the moment a request was sent, and counts suspension. The wall clock is for
// deadlines that a caller names, and for nothing else.
package leaseclient
