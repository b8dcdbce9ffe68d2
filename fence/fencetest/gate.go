// Package fencetest has a gate for unit tests of the adapters. It owns nothing
// that runs in production, and it must never stand in for the store where a
// guarantee is tested: those tests run against a real Valkey.
package fencetest

import (
	"context"
	"sync"
	"time"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/leaseclient"
)

// Gate is a scripted [fence.Gate] that remembers what was asked of it. The
// zero value accepts everything with an arrival bound of five seconds. It is
// safe for concurrent use; the fields are set before it is used.
type Gate struct {
	// Refuse, when set, is asked about every Begin; an error refuses it.
	Refuse func(ref leaseclient.Ref, commits []leaseclient.Commit) error
	// Delay, when set, is called first and may wait, at most for ctx.
	Delay func(ctx context.Context, ref leaseclient.Ref)
	// Bound is the arrival bound; zero means five seconds, negative means
	// that every accepted commit is late at once.
	Bound time.Duration
	// Prior, when set, gives the outcome of an earlier run of a commit id.
	Prior func(id string) leaseclient.Outcome
	// Settle, when set, gives the outcome of an abandoned commit; without it
	// abandoned commits are confirmed.
	Settle func(a *fence.Accepted) leaseclient.Outcome

	mu        sync.Mutex
	begun     [][]leaseclient.Commit
	ended     map[string]leaseclient.Outcome
	abandoned []string
	twice     []string
	seq       int64
}

var _ fence.Gate = (*Gate)(nil)

// Begin implements [fence.Gate].
func (g *Gate) Begin(ctx context.Context, ref leaseclient.Ref, commits []leaseclient.Commit) ([]*fence.Accepted, error) {
	if g.Delay != nil {
		g.Delay(ctx, ref)
	}
	if err := ctx.Err(); err != nil {
		return nil, &leaseclient.Error{Code: leaseclient.CodeDeadlineExceeded, Op: "begin", Err: err}
	}
	if g.Refuse != nil {
		if err := g.Refuse(ref, commits); err != nil {
			return nil, err
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.begun = append(g.begun, append([]leaseclient.Commit(nil), commits...))
	bound := g.Bound
	if bound == 0 {
		bound = 5 * time.Second
	}
	clock := leaseclient.SystemClock()
	out := make([]*fence.Accepted, len(commits))
	for i, c := range commits {
		g.seq++
		at := leaseclient.StoreTime(1_750_000_000_000 + g.seq)
		var prior leaseclient.Outcome
		if g.Prior != nil {
			prior = g.Prior(c.ID)
		}
		out[i] = fence.NewAccepted(c, fence.Stamp{
			LockKey: ref.LockKey, LeaseID: ref.LeaseID, Token: ref.Token,
			ExecutionID: ref.ExecutionID, TraceID: ref.TraceID, CommitID: c.ID,
			AcceptedAt: at, NotAfter: at.Add(5 * time.Second), ExpiresAt: at.Add(30 * time.Second),
		}, clock, clock.Boot()+bound, prior)
	}
	return out, nil
}

// End implements [fence.Gate].
func (g *Gate) End(a *fence.Accepted, outcome leaseclient.Outcome) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.finish(a.Commit.ID, outcome)
}

// Abandon implements [fence.Gate].
func (g *Gate) Abandon(as ...*fence.Accepted) *fence.Settlement {
	g.mu.Lock()
	defer g.mu.Unlock()
	outcomes := make([]leaseclient.Outcome, len(as))
	for i, a := range as {
		outcomes[i] = leaseclient.OutcomeConfirmed
		if g.Settle != nil {
			outcomes[i] = g.Settle(a)
		}
		g.abandoned = append(g.abandoned, a.Commit.ID)
		g.finish(a.Commit.ID, outcomes[i])
	}
	s, resolve := fence.NewSettlement(len(as))
	resolve(outcomes)
	return s
}

// finish records an outcome and notices a commit that is given back twice.
func (g *Gate) finish(id string, o leaseclient.Outcome) {
	if g.ended == nil {
		g.ended = make(map[string]leaseclient.Outcome)
	}
	if _, ok := g.ended[id]; ok {
		g.twice = append(g.twice, id)
	}
	g.ended[id] = o
}

// Begun returns the accepted batches.
func (g *Gate) Begun() [][]leaseclient.Commit {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([][]leaseclient.Commit(nil), g.begun...)
}

// Outcome returns how a commit ended, and whether it did.
func (g *Gate) Outcome(id string) (leaseclient.Outcome, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	o, ok := g.ended[id]
	return o, ok
}

// Abandoned returns the ids of abandoned commits in order.
func (g *Gate) Abandoned() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]string(nil), g.abandoned...)
}

// Open returns the ids of accepted commits that were never given back, and
// those given back more than once. Both are bugs of the adapter.
func (g *Gate) Open() (missing, twice []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, batch := range g.begun {
		for _, c := range batch {
			if _, ok := g.ended[c.ID]; !ok {
				missing = append(missing, c.ID)
			}
		}
	}
	return missing, append([]string(nil), g.twice...)
}
