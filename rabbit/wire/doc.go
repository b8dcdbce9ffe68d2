// Package wire reads and writes AMQP 0-9-1 as RabbitMQ speaks it.
//
//	frame:    type(1) channel(2) size(4) payload(size) 0xCE
//	method:   class(2) method(2) arguments
//	content:  a method, then one header frame, then body frames until the
//	          announced size is reached; contiguous within its channel
//	header:   class(2) weight(2) body size(8) property flags(2) properties
//
// # What it owns
//
// The bytes: frames, the few methods that the sidecar acts on, property lists,
// and field tables with RabbitMQ's own types. Everything else stays the bytes it
// was.
//
// # What it must never do
//
// It never does I/O but through the reader it is given, never holds state
// between frames, and never re-encodes a table: a member is taken out or put in
// while every other byte stays, because clients see the difference.
//
// Every length is checked before anything is made of that length.
package wire
