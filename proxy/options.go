package proxy

import (
	"context"
	"net"
	"net/http"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/leaseclient"
)

// Gate is the fence as the sidecar runs it: [fence.Coordinator], or a stand-in in
// tests of this package.
type Gate interface {
	fence.Gate
	// Run owns the background work until ctx ends.
	Run(ctx context.Context) error
	// Drain waits until accepted commits are finished.
	Drain(ctx context.Context) error
}

// Rabbit is the server for AMQP.
type Rabbit interface {
	Serve(ctx context.Context, ln net.Listener) error
	Shutdown(ctx context.Context) error
}

// Check is one part of readiness.
type Check struct {
	Name  string
	Probe func(ctx context.Context) error
}

// EnvLease is the lease that the configuration names.
type EnvLease struct {
	Request leaseclient.AcquireRequest
	// Again acquires anew, with a new token, when the lease was lost. Without
	// it a lost lease stays lost: a worker that has not noticed would otherwise
	// write what it still has in hand under the new one.
	Again bool
	// Wait bounds how long the first acquisition is tried; zero: for ever.
	Wait time.Duration
}

// Options are what a sidecar is made of. Collaborators are built by the caller;
// an adapter that is nil is off.
type Options struct {
	Store  leaseclient.Store
	Gate   Gate
	Table  *Table
	Clock  leaseclient.Clock
	Logger *zap.Logger

	Couch       http.Handler
	CouchListen string
	Rabbit      Rabbit
	AMQPListen  string
	AdminListen string

	SocketDir  string
	SocketMode os.FileMode

	// Identity holds the components that requests on the control socket may
	// leave out.
	Identity leaseclient.Identity
	Owner    leaseclient.Owner
	// Classes is the closed list of operation classes.
	Classes  []string
	EnvLease *EnvLease

	// Deadline and DeadlineCeiling bound operations of the control socket.
	Deadline, DeadlineCeiling time.Duration
	// Drain bounds how long accepted commits may take at the end, Shutdown the
	// whole of it.
	Drain, Shutdown time.Duration

	Checks []Check
	// Unprotected lists what the policy lets through without a lease.
	Unprotected []string
	Metrics     *Metrics
	Version     string
}
