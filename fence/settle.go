package fence

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// Bounds of settlement.
const (
	// settleEntries and settleBytes bound what one claim hands out.
	settleEntries = 64
	settleBytes   = 8 << 20
	// settlePoll caps the pause while entries are not old enough yet or
	// another settler has the claim.
	settlePoll  = 250 * time.Millisecond
	settleFirst = 100 * time.Millisecond
	settleMax   = 2 * time.Second
	settleCall  = 5 * time.Second
	// settleMargin is given up at the end of a claim, for the time between the
	// last look and the arrival of the effect.
	settleMargin = 500 * time.Millisecond
)

// cutoffKey carries the end of the right to settle through a context.
type cutoffKey struct{}

// cutoff is a boot time and its clock.
type cutoff struct {
	clock leaseclient.Clock
	at    time.Duration
}

// SettleLate is the last look of an [Effector], directly before it sends an
// effect: it is true when the right to settle has run out, on the boot clock.
// Another settler may be at work by then. A context that does not come from a
// settlement is never late.
func SettleLate(ctx context.Context) bool {
	c, ok := ctx.Value(cutoffKey{}).(cutoff)
	return ok && c.clock.Boot() >= c.at
}

// ErrSettleLate is the error an [Effector] returns when [SettleLate] is true.
var ErrSettleLate = errors.New("the claim on this commit log has run out")

// errNoEffector says that this sidecar cannot finish a kind of commit.
var errNoEffector = errors.New("this sidecar cannot finish commits of this kind")

// settlement is one settler's work on one lock under one claim.
type settlement struct {
	c       *Coordinator
	lockKey string
	claimer string
	mode    leaseclient.ClaimMode
}

// newSettlement names a claimer of its own: two settlements of one process must
// not share a claim.
func (c *Coordinator) newSettlement(lockKey string, mode leaseclient.ClaimMode) *settlement {
	return &settlement{c: c, lockKey: lockKey, mode: mode, claimer: leaseclient.NewID(c.name)}
}

// claim asks for entries.
func (s *settlement) claim(ctx context.Context, r leaseclient.ClaimRequest) (*leaseclient.Claimed, error) {
	ctx, cancel := context.WithTimeout(ctx, settleCall)
	defer cancel()
	r.LockKey, r.Mode, r.Claimer = s.lockKey, s.mode, s.claimer
	r.MaxEntries, r.MaxBytes = settleEntries, settleBytes
	r.Deadline = time.Now().Add(settleCall)
	return s.c.opts.Log.Claim(ctx, r)
}

// unclaim lets others at the log before the claim runs out. A failure costs
// them that time and nothing else.
func (s *settlement) unclaim() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.c.work), settleCall)
	defer cancel()
	if err := s.c.opts.Log.Unclaim(ctx, s.lockKey, s.claimer); err != nil {
		s.c.failed("give a claim up", err)
	}
}

// finish carries claimed entries through their effectors, in order, and takes
// those that are decided out of the log. It returns their outcomes, a prefix of
// the entries, and why it stopped early.
func (s *settlement) finish(ctx context.Context, claimed *leaseclient.Claimed) ([]leaseclient.Outcome, error) {
	at := claimed.Until - settleMargin
	ctx, cancel := context.WithTimeout(context.WithValue(ctx, cutoffKey{}, cutoff{s.c.opts.Clock, at}), at-s.c.opts.Clock.Boot())
	defer cancel()
	var outcomes []leaseclient.Outcome
	var failure error
	for rest := claimed.Entries; len(rest) > 0 && failure == nil; {
		n := 1
		for n < len(rest) && rest[n].Kind == rest[0].Kind {
			n++
		}
		var got []leaseclient.Outcome
		got, failure = s.run(ctx, rest[:n])
		outcomes = append(outcomes, got...)
		if failure == nil && len(got) < n {
			failure = errors.New("effector stopped without saying why")
		}
		rest = rest[n:]
	}
	if len(outcomes) == 0 {
		return nil, failure
	}
	endings := make([]leaseclient.Ending, len(outcomes))
	for i, o := range outcomes {
		endings[i] = leaseclient.Ending{ID: claimed.Entries[i].ID, Outcome: o}
	}
	end, cancelEnd := context.WithTimeout(context.WithoutCancel(ctx), settleCall)
	defer cancelEnd()
	err := s.c.opts.Log.End(end, s.lockKey, s.claimer, endings)
	if leaseclient.CodeOf(err) == leaseclient.CodeRateLimited {
		// The quarantine is full. A lock that is blocked for good is worse than
		// one more effect that cannot be delivered: it is given up, loudly.
		s.c.failed("set a commit aside, its effect is given up", err)
		for i := range endings {
			if endings[i].Outcome == leaseclient.OutcomeQuarantined {
				endings[i].Outcome, outcomes[i] = leaseclient.OutcomeRefused, leaseclient.OutcomeRefused
			}
		}
		err = s.c.opts.Log.End(end, s.lockKey, s.claimer, endings)
	}
	if err != nil {
		return nil, errors.Join(failure, fmt.Errorf("end settled commits: %w", err))
	}
	for i, o := range outcomes {
		if s.c.opts.Events.Settled != nil {
			s.c.opts.Events.Settled(claimed.Entries[i], s.mode, o)
		}
	}
	return outcomes, failure
}

// run hands entries of one kind to their effector and keeps what is decided.
func (s *settlement) run(ctx context.Context, entries []leaseclient.Entry) ([]leaseclient.Outcome, error) {
	effector := s.c.opts.Effectors[entries[0].Kind]
	if effector == nil {
		return nil, errNoEffector
	}
	if SettleLate(ctx) {
		return nil, ErrSettleLate
	}
	outcomes, err := effector.Settle(ctx, entries)
	if len(outcomes) > len(entries) {
		return nil, errors.New("effector answered for more commits than there are")
	}
	for i, o := range outcomes {
		switch o {
		case leaseclient.OutcomeConfirmed, leaseclient.OutcomeRefused, leaseclient.OutcomeCancelled, leaseclient.OutcomeQuarantined:
		case leaseclient.OutcomeUnknown:
			return outcomes[:i], errors.Join(err, errors.New("effector could not tell an outcome"))
		default:
			return outcomes[:i], errors.Join(err, errors.New("effector answered with something else than an outcome"))
		}
	}
	return outcomes, err
}

// job is the settlement of a predecessor, which all Begins of a lane wait for.
type job struct {
	done chan struct{}
	// token is the highest one that asked.
	token uint64
	// waiters counts Begins; without any, a failing job ends.
	waiters int
	// failure is why the last step did not get on.
	failure error
}

// settlePredecessor waits until nothing of an earlier lease is left. The work
// itself is not bound to the caller's deadline: a worker with short deadlines
// must not start it over and over.
func (c *Coordinator) settlePredecessor(ctx context.Context, l *lane, ref leaseclient.Ref, _ *leaseclient.UnsettledError) error {
	l.mu.Lock()
	j, fresh := l.job, l.job == nil
	if fresh {
		j = &job{done: make(chan struct{}), token: ref.Token}
		l.job = j
	}
	j.waiters++
	l.mu.Unlock()
	// The coordinator's lock is taken before a lane's, never after it.
	if fresh && !c.goes(func() { c.runJob(l, j) }) {
		l.finish(j)
	}
	defer func() {
		l.mu.Lock()
		j.waiters--
		l.mu.Unlock()
	}()
	select {
	case <-j.done:
		return c.work.Err()
	case <-ctx.Done():
		l.mu.Lock()
		defer l.mu.Unlock()
		return errors.Join(ctx.Err(), j.failure)
	}
}

// finish ends a job and lets its waiters go.
func (l *lane) finish(j *job) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.job = nil
	close(j.done)
}

// runJob settles until the store says that nothing is left.
func (c *Coordinator) runJob(l *lane, j *job) {
	s := c.newSettlement(l.lockKey, leaseclient.ClaimBefore)
	defer func() {
		l.finish(j)
		// The lane may have been kept only for this job.
		c.leave(c.lane(l.lockKey))
	}()
	pause := settleFirst
	for {
		claimed, err := s.claim(c.work, leaseclient.ClaimRequest{Token: j.token})
		if err == nil && claimed.Settled {
			return
		}
		switch {
		case err == nil && len(claimed.Entries) == 0:
			if !wait(c.work, min(claimed.Wait, settlePoll)) {
				return
			}
			continue
		case err == nil:
			_, err = s.finish(c.work, claimed)
		}
		if err == nil {
			pause = settleFirst
			continue
		}
		c.failed("settle a predecessor's commits", err)
		l.mu.Lock()
		j.failure = err
		alone := j.waiters == 0
		l.mu.Unlock()
		if alone || !wait(c.work, pause) {
			s.unclaim()
			return
		}
		pause = min(2*pause, settleMax)
	}
}

// settleOwn finds out what became of commits that this sidecar accepted and will
// not send any more, finishing them where they are open. It writes the outcomes
// at the given places.
func (c *Coordinator) settleOwn(lockKey string, as []*Accepted, at []int, outcomes []leaseclient.Outcome) {
	open := make(map[string]int, len(at))
	for _, i := range at {
		outcomes[i] = leaseclient.OutcomeUnknown
		open[as[i].Commit.ID] = i
	}
	s := c.newSettlement(lockKey, leaseclient.ClaimOwn)
	pause := settleFirst
	for len(open) > 0 {
		ids := make([]string, 0, settleEntries)
		for _, i := range at {
			if _, ok := open[as[i].Commit.ID]; ok && len(ids) < settleEntries {
				ids = append(ids, as[i].Commit.ID)
			}
		}
		claimed, err := s.claim(c.work, leaseclient.ClaimRequest{IDs: ids})
		if err == nil {
			err = s.takeOwn(c.work, claimed, ids, open, outcomes)
		}
		if err == nil {
			pause = settleFirst
			if len(open) > 0 && len(claimed.Entries) == 0 && !wait(c.work, min(max(claimed.Wait, settleFirst), settlePoll)) {
				return
			}
			continue
		}
		c.failed("settle abandoned commits", err)
		if !wait(c.work, pause) {
			s.unclaim()
			return
		}
		pause = min(2*pause, settleMax)
	}
	s.unclaim()
}

// takeOwn notes what a claim on the own entries brought.
func (s *settlement) takeOwn(ctx context.Context, claimed *leaseclient.Claimed, ids []string, open map[string]int, outcomes []leaseclient.Outcome) error {
	note := func(id string, o leaseclient.Outcome) {
		if i, ok := open[id]; ok {
			outcomes[i] = o
			delete(open, id)
		}
	}
	for id, o := range claimed.Ended {
		note(id, o)
	}
	if claimed.Settled {
		// An id that is neither open nor remembered ended longer ago than
		// endings are kept. Nobody can tell any more.
		for _, id := range ids {
			note(id, leaseclient.OutcomeUnknown)
		}
		return nil
	}
	if len(claimed.Entries) == 0 {
		return nil
	}
	got, err := s.finish(ctx, claimed)
	for i, o := range got {
		note(claimed.Entries[i].ID, o)
	}
	return err
}
