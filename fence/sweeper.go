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
	// sweepPage is how many locks are listed at a time, and sweepLocks bounds
	// what one round lists.
	sweepPage  = 100
	sweepLocks = 10_000
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
	// resume is where the next round goes on in a shard that the last one did
	// not get through.
	resume map[int]leaseclient.UnsettledCursor
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
	s := &sweeper{c: c, failures: make(map[string]failure), resume: make(map[int]leaseclient.UnsettledCursor)}
	for {
		// The jitter keeps sidecars that were started together apart.
		pause := c.opts.SweepInterval
		if !wait(ctx, pause-rand.N(pause/4+1)) {
			return
		}
		s.round(ctx)
	}
}

// round looks at every shard once. It looks at all locks of a shard, not only
// at those that wait longest: those may be the ones that cannot be settled.
func (s *sweeper) round(ctx context.Context) {
	shards, err := s.c.opts.Log.Shards(ctx)
	if err != nil {
		s.report(ctx, err)
		return
	}
	// A random start keeps several sweepers out of each other's way.
	start, left := rand.N(shards), sweepLocks
	for i := range shards {
		n, err := s.shard(ctx, (start+i)%shards, left)
		if err != nil {
			s.report(ctx, err)
			return
		}
		if left -= n; left <= 0 || ctx.Err() != nil {
			return
		}
	}
}

// shard goes through the locks of one shard, page by page, until it has seen as
// many as it may. It returns how many it saw.
func (s *sweeper) shard(ctx context.Context, shard, limit int) (int, error) {
	var end leaseclient.UnsettledCursor
	at, seen := s.resume[shard], 0
	for {
		keys, next, err := s.c.opts.Log.Unsettled(ctx, shard, at, min(sweepPage, limit-seen))
		if err != nil {
			return seen, err
		}
		for _, key := range keys {
			if ctx.Err() != nil {
				return seen, nil
			}
			s.lock(ctx, key)
		}
		seen += len(keys)
		if next == end {
			delete(s.resume, shard)
			return seen, nil
		}
		s.resume[shard], at = next, next
		if seen >= limit {
			return seen, nil
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
