package fence

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// Gate is the only way to write. Around every effect stand two steps:
//
//	accepted, err := gate.Begin(ctx, ref, commits)   // from here on accepted
//	... stamp, look at Late, send ...
//	gate.End(accepted[i], outcome)                    // or gate.Abandon(...)
//
// Every [*Accepted] must be given back exactly once, through End or Abandon.
// A Gate is safe for concurrent use; calls for one lock are decided in the
// order in which Begin was called.
type Gate interface {
	// Begin asks the store to accept the commits, all of one lock, all or
	// none, in order. The error is a [*leaseclient.Error]:
	//
	//   - lease_lost: the lease is not the current one; nothing was accepted.
	//   - lease_backend_unavailable: nothing was accepted.
	//   - lease_rate_limited: the commit log is full; nothing was accepted.
	//   - deadline_exceeded: a predecessor's commits were not settled in time;
	//     nothing was accepted.
	//   - lease_outcome_unknown: the store may have accepted them; the gate
	//     withdraws them in the background. The caller sends nothing.
	//
	// Begin settles what a predecessor left before it accepts, so it may
	// take up to the arrival bound; ctx bounds it.
	Begin(ctx context.Context, ref leaseclient.Ref, commits []leaseclient.Commit) ([]*Accepted, error)

	// End takes a commit out of the log with its outcome. It returns at once;
	// the gate repeats it in the background until it is through.
	End(a *Accepted, outcome leaseclient.Outcome)

	// Abandon hands accepted commits over to settlement: the caller does not
	// know whether their effects arrived, and promises not to send them any
	// more (it has closed the connection, or never sent). New commits of the
	// lock wait until they are settled, so that order is kept.
	Abandon(as ...*Accepted) *Settlement
}

// Accepted is one commit that the store has accepted.
type Accepted struct {
	// Commit is what was asked for.
	Commit leaseclient.Commit
	// Stamp is what the effect must carry.
	Stamp Stamp

	// prior is the outcome of an earlier run of the same commit id.
	prior leaseclient.Outcome
	// cutoff is the boot time from which nothing may be sent any more.
	cutoff time.Duration
	clock  leaseclient.Clock
	// lockKey says which log the entry is in, and attempt which attempt at the
	// commit id made it.
	lockKey, attempt string
	// returned is set by the first End or Abandon.
	returned atomic.Bool
}

// NewAccepted builds an accepted commit. It exists for implementations of
// [Gate]; adapters get theirs from Begin. cutoff is boot time of the clock; a
// prior outcome that is not empty says that the commit ended before.
func NewAccepted(c leaseclient.Commit, s Stamp, clock leaseclient.Clock, cutoff time.Duration, prior leaseclient.Outcome) *Accepted {
	return &Accepted{Commit: c, Stamp: s, clock: clock, cutoff: cutoff, prior: prior, lockKey: s.LockKey}
}

// Prior returns the outcome of an earlier run of the same commit id, if it has
// ended already. The caller then answers by it and sends nothing; End and
// Abandon do nothing.
func (a *Accepted) Prior() (leaseclient.Outcome, bool) { return a.prior, a.prior != "" }

// Remaining is how long the effect may still be sent: the arrival bound,
// counted from the moment Begin was sent, on a clock that counts suspension.
// Use it as the deadline of the upstream call.
func (a *Accepted) Remaining() time.Duration { return a.cutoff - a.clock.Boot() }

// Late is the last look, directly before the first byte is sent. When it is
// true the caller must not send; it calls Abandon, and the log says what
// became of the commit.
func (a *Accepted) Late() bool { return a.Remaining() <= 0 }

// Settlement is the pending fate of abandoned commits.
type Settlement struct {
	done     chan struct{}
	outcomes []leaseclient.Outcome
}

// NewSettlement returns a settlement of n commits and the function that
// resolves it, once. It exists for implementations of [Gate].
func NewSettlement(n int) (*Settlement, func([]leaseclient.Outcome)) {
	s := &Settlement{done: make(chan struct{}), outcomes: make([]leaseclient.Outcome, n)}
	for i := range s.outcomes {
		s.outcomes[i] = leaseclient.OutcomeUnknown
	}
	return s, func(o []leaseclient.Outcome) {
		copy(s.outcomes, o)
		close(s.done)
	}
}

// Wait returns the outcomes in the order of the commits given to Abandon. When
// ctx ends first, they are all OutcomeUnknown: settlement goes on without the
// caller.
func (s *Settlement) Wait(ctx context.Context) []leaseclient.Outcome {
	select {
	case <-s.done:
		return append([]leaseclient.Outcome(nil), s.outcomes...)
	case <-ctx.Done():
		unknown := make([]leaseclient.Outcome, len(s.outcomes))
		for i := range unknown {
			unknown[i] = leaseclient.OutcomeUnknown
		}
		return unknown
	}
}

// Effector finishes accepted commits that their own sidecar did not finish. An
// adapter implements it for its kind and rebuilds exactly the bytes that the
// adapter would have sent, stamp included.
type Effector interface {
	// Settle finishes the entries in order and returns the outcomes of those
	// it got through, from the first on. It may be called for entries whose
	// effect has arrived already, and must find that out where its store
	// allows it. An error says why it stopped early; the rest is tried again
	// later, so an effect that can never be delivered must be answered with
	// OutcomeQuarantined instead of an error.
	//
	// The right to settle runs out: directly before each effect is sent, the
	// effector asks [SettleLate] and stops with an error when it is true.
	Settle(ctx context.Context, entries []leaseclient.Entry) ([]leaseclient.Outcome, error)
}
