package fence

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// Bounds of the sweeper.
const (
	// sweepLocks bounds the locks that one round takes from a shard.
	sweepLocks = 100
	// sweepBackoff and sweepBackoffMax space attempts at a lock that failed.
	sweepBackoff    = 2 * time.Second
	sweepBackoffMax = time.Minute
	// sweepRemembered bounds the locks whose failures are remembered.
	sweepRemembered = 10_000
)

// sweeper finishes what was left on locks that nobody takes again. Every
// sidecar sweeps; claims keep them from working on one lock together.
type sweeper struct {
	c *Coordinator
	// failures spaces attempts, by lock.
	failures map[string]failure
}

// failure is when a lock may be tried again, on the boot clock.
type failure struct {
	pause time.Duration
	next  time.Duration
}

// sweep makes rounds until ctx ends.
func sweep(ctx context.Context, c *Coordinator) {
	if c.opts.SweepInterval < 0 || gateOff {
		<-ctx.Done()
		return
	}
	s := &sweeper{c: c, failures: make(map[string]failure)}
	for {
		// The jitter keeps sidecars that were started together apart.
		pause := c.opts.SweepInterval
		if !wait(ctx, pause-rand.N(pause/4+1)) {
			return
		}
		s.round(ctx)
	}
}

// round looks at every shard once.
func (s *sweeper) round(ctx context.Context) {
	shards, err := s.c.opts.Log.Shards(ctx)
	if err != nil {
		s.report(ctx, err)
		return
	}
	// A random start keeps several sweepers out of each other's way.
	start := rand.N(shards)
	for i := range shards {
		keys, err := s.c.opts.Log.Unsettled(ctx, (start+i)%shards, sweepLocks)
		if err != nil {
			s.report(ctx, err)
			return
		}
		for _, key := range keys {
			if ctx.Err() != nil {
				return
			}
			s.lock(ctx, key)
		}
	}
}

// report tells about a failure that is not the end of the process.
func (s *sweeper) report(ctx context.Context, err error) {
	if ctx.Err() == nil {
		s.c.failed("sweep", err)
	}
}

// lock settles one lock as far as it goes.
func (s *sweeper) lock(ctx context.Context, key string) {
	now := s.c.opts.Clock.Boot()
	if f, ok := s.failures[key]; ok && now < f.next {
		return
	}
	work := s.c.newSettlement(key, leaseclient.ClaimSweep)
	took := false
	for ctx.Err() == nil {
		claimed, err := work.claim(ctx, leaseclient.ClaimRequest{})
		if err == nil && (claimed.Settled || len(claimed.Entries) == 0) {
			// Settled, or not the sweeper's turn: the next round looks again. A
			// claim from the step before would keep a successor waiting.
			if took {
				work.unclaim()
			}
			delete(s.failures, key)
			return
		}
		if err == nil {
			took = true
			_, err = work.finish(ctx, claimed)
		}
		if err == nil {
			continue
		}
		if !errors.Is(err, errNoEffector) {
			s.report(ctx, err)
		}
		work.unclaim()
		s.postpone(key)
		return
	}
	work.unclaim()
}

// postpone spaces the attempts at a lock that cannot be settled now.
func (s *sweeper) postpone(key string) {
	if len(s.failures) >= sweepRemembered {
		clear(s.failures)
	}
	f := s.failures[key]
	f.pause = min(max(2*f.pause, sweepBackoff), sweepBackoffMax)
	f.next = s.c.opts.Clock.Boot() + f.pause
	s.failures[key] = f
}
