// Package e2e holds the proof: the whole sidecar, as a process, against a real
// Valkey, a real RabbitMQ and a server with CouchDB's API, stopped and killed
// where it hurts most. What counts is what the stores hold afterwards.
//
// It owns the harness and nothing that is built into a binary. Nothing here may
// stand in for a service, and a service that is missing fails the run.
//
// The checks themselves are checked: the same scenario runs with a build whose
// gate accepts everything, and must fail.
package e2e
