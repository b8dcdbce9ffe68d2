// Package fence makes a write safe: it is the one place where an authoritative
// effect is accepted, followed to its end, or finished for somebody else.
//
// # What it owns
//
// The [Gate], through which couch and rabbit write; the [Stamp], the one
// definition of what an accepted effect carries; settlement of what a
// predecessor left, and the sweeper for locks that nobody takes again.
//
// # What it must never do
//
// It never decides by a local belief. No cache, no timer and no keeper may let
// a write through: the store's script decides about every commit, at its own
// instant. It never talks to CouchDB or RabbitMQ itself; adapters hand in an
// [Effector] for their kind.
//
// # Why a log and not a check
//
// A check followed by a write is not fencing: the process can be stopped
// between the two for as long as the machine likes. Here the acceptance is the
// commit. Begin appends the commit, with its effect, to the lock's log in the
// same step that judges the lease, so that anybody can finish it. A successor
// finishes what is left before its own first commit, and the store's script
// holds it to that order. So every effect that arrives was accepted under a
// valid lease, every accepted effect arrives, and those of a predecessor come
// before those of a successor.
//
// # The arrival bound
//
// An effect may be sent for a fixed time after its Begin was sent, measured on
// the boot clock, and is looked at once more directly before the first byte.
// Past the bound nobody but a settler sends it, and its own sidecar reads the
// log to learn what became of it. What remains is a process that is stopped in
// the few instructions between that look and the system call: a message can
// then arrive late and twice, with the same commit id; a document write is
// refused by its revision.
package fence
