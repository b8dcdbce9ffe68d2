// Package rabbit is the fence on the way to RabbitMQ: a proxy for AMQP 0-9-1 that
// any client can talk through, on the level of frames. Everything passes as the
// bytes it was, save for a publish: that is held until the gate has accepted it,
// stamped, and sent in order.
//
// # What it owns
//
// Connections, one upstream for one of a worker, with the same channels; the two
// numberings of confirms; refusals in the form that clients surface; and the
// [Effector] that publishes accepted messages for somebody else.
//
// # What it must never do
//
// It never sends a fenced message that the gate has not accepted, never sends
// one after its acceptance has run out, and never holds a lock while it writes
// to a socket. It never closes a worker's connection because one lease is lost.
// It never sees the lease store; it sees [fence.Gate].
//
// # How a connection works
//
//	client reader -> decide -> forward -> broker
//	client writer <- broker reader
//
// What one read brought in is a batch. While it is decided (one Begin a lock) the
// next is read, and while it is forwarded the next is decided. Queues between the
// stages are bounded, so a slow side stops the worker and nothing grows. The way
// back is a queue of its own that the stages above may add to without waiting:
// a worker that only publishes and never reads cannot block its own refusals.
//
// # Decisions
//
//   - A channel that publishes fenced messages is in confirm mode upstream
//     whether the worker asked or not; only the broker's confirm says that a
//     message is there.
//   - A broker connection on which an accepted message was not confirmed within
//     its arrival bound is cut, with everything that the kernel still holds of
//     it, and the messages are settled. This is so even while the broker blocks
//     the connection for lack of memory: bytes that wait in a socket would
//     otherwise arrive after a successor's.
//   - One late message ends the connection instead of being skipped: the ones
//     behind it would overtake it.
//   - Closing of a channel or connection waits until what was accepted on it is
//     confirmed. A client that publishes and leaves would otherwise cause every
//     message to be published twice.
//   - The worker is offered a frame size that leaves room for the stamp; frames
//     towards the broker are larger by that. A stamp that does not fit all the same
//     makes that one publish refused.
//   - A transaction is decided at its commit, under one lock, all or nothing. Until
//     then its messages wait in the sidecar: a stamp says when its message was
//     accepted. The commit is not sent unless all of them were, and the end of the
//     channel rolls the broker's half back.
package rabbit
