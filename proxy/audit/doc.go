// Package audit says what was asked of leases, by whom, and what came of it.
//
// # What it owns
//
// [Event] with its closed sets; [Log], whose Record is the one function that
// makes events; and the sinks: the process log, where a flood of one kind is
// counted instead of repeated, a file that is synced and rotated, and a CouchDB
// database. File and database get every event.
//
// # What it must never do
//
// An event never holds a credential's secret, metadata, a request's body, a lock
// key, a backend's command or text, or another owner's fields. So an event has no
// free member but an administrator's reason, and everything that goes into it is
// a checked identifier or one of a closed set.
//
// # Decisions
//
//   - Operations that take a lease away are recorded before they report success,
//     by [Log.RecordDurably], and are not begun while a sink is broken
//     ([Log.Healthy]). Their event at the lease store, written in the step of the
//     operation itself, is the one that cannot be lost; those here are for reading.
//   - For everything else a broken sink is an alert: work does not stop because a
//     disk is full, but it does not go unnoticed either.
//   - The time of an event is the lease store's where it decided, else this
//     machine's; which one is said.
package audit
