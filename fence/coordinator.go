package fence

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// Defaults of [Options].
const (
	// DefaultBound is the arrival bound.
	DefaultBound = 5 * time.Second
	// DefaultSweepInterval is the pause between two rounds of the sweeper.
	DefaultSweepInterval = 5 * time.Second
	// DefaultBeginTimeout bounds a Begin whose context has no end of its own.
	DefaultBeginTimeout = 15 * time.Second
)

// Options configure a [Coordinator].
type Options struct {
	// Log is the store's half of the fence.
	Log leaseclient.CommitLog
	// Effectors finish what was left; a kind without one is left to sidecars
	// that have it.
	Effectors map[leaseclient.Kind]Effector
	// Clock must count suspension; nil means the machine's boot clock.
	Clock leaseclient.Clock
	// Bound is the arrival bound, at most what the store was told; zero means
	// [DefaultBound].
	Bound time.Duration
	// SweepInterval is the pause between two rounds of the sweeper; zero means
	// [DefaultSweepInterval], a negative one switches the sweeper off.
	SweepInterval time.Duration
	// Name is the prefix under which this process claims logs; it should be
	// unique. Empty means a random one.
	Name string
	// Events are told what happens.
	Events Events
}

// Events are hooks for logs and metrics. Any may be nil; they are called from
// the coordinator's goroutines and must not block.
type Events struct {
	// Begun is told about every Begin: how many commits, with which code (empty
	// when accepted), and how long it took.
	Begun func(n int, code leaseclient.Code, took time.Duration)
	// Ended is told about every commit that left the log through End.
	Ended func(outcome leaseclient.Outcome)
	// Settled is told about every commit that was finished for somebody else,
	// or by a second look.
	Settled func(e leaseclient.Entry, mode leaseclient.ClaimMode, outcome leaseclient.Outcome)
	// Failed is told what the background work could not do; it is tried again.
	Failed func(what string, err error)
}

// Coordinator is the [Gate] of production. It owns the background work of the
// fence: endings on their way, settlements, and the sweeper.
type Coordinator struct {
	opts  Options
	name  string
	ender *ender

	// work is the context of everything in the background; group waits for it.
	work   context.Context
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu     sync.Mutex
	lanes  map[string]*lane
	closed bool
	// open counts accepted commits that were not given back yet, and idle is
	// closed and renewed when it falls to zero.
	open int
	idle chan struct{}
}

var _ Gate = (*Coordinator)(nil)

// New returns a coordinator. It works at once; [Coordinator.Run] adds the
// sweeper and ends everything.
func New(o Options) (*Coordinator, error) {
	if o.Log == nil {
		return nil, errors.New("fence: options name no commit log")
	}
	if o.Clock == nil {
		o.Clock = leaseclient.SystemClock()
	}
	if o.Bound == 0 {
		o.Bound = DefaultBound
	}
	if o.Bound < 0 {
		return nil, &leaseclient.InvalidError{Field: "arrival_bound", Reason: "negative"}
	}
	if o.SweepInterval == 0 {
		o.SweepInterval = DefaultSweepInterval
	}
	if o.Name == "" {
		o.Name = leaseclient.NewID("settler")
	}
	c := &Coordinator{opts: o, name: o.Name, lanes: make(map[string]*lane), idle: make(chan struct{})}
	c.work, c.cancel = context.WithCancel(context.Background())
	c.ender = newEnder(c)
	return c, nil
}

// Run sweeps until ctx ends, then stops all background work and waits for it.
// Call [Coordinator.Drain] first to let accepted commits finish. What is left
// stays in the log, where others find it.
func (c *Coordinator) Run(ctx context.Context) error {
	sweep(ctx, c)
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	c.group.Wait()
	return nil
}

// Drain waits until every accepted commit was given back and has left the log.
func (c *Coordinator) Drain(ctx context.Context) error {
	for {
		c.mu.Lock()
		open, idle := c.open, c.idle
		c.mu.Unlock()
		if open == 0 {
			return c.ender.drain(ctx)
		}
		select {
		case <-idle:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Open returns how many accepted commits were not given back yet.
func (c *Coordinator) Open() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open
}

// goes starts background work unless the coordinator has ended, and reports
// whether it did.
func (c *Coordinator) goes(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.group.Go(f)
	return true
}

// addOpen counts accepted commits.
func (c *Coordinator) addOpen(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open += n
	if c.open == 0 {
		close(c.idle)
		c.idle = make(chan struct{})
	}
}

// failed reports a failure of background work.
func (c *Coordinator) failed(what string, err error) {
	if c.opts.Events.Failed != nil {
		c.opts.Events.Failed(what, err)
	}
}

// Begin implements [Gate].
func (c *Coordinator) Begin(ctx context.Context, ref leaseclient.Ref, commits []leaseclient.Commit) ([]*Accepted, error) {
	if gateOff {
		return c.waveThrough(ref, commits), nil
	}
	start := c.opts.Clock.Boot()
	as, err := c.begin(ctx, ref, commits)
	if c.opts.Events.Begun != nil {
		c.opts.Events.Begun(len(commits), leaseclient.CodeOf(err), c.opts.Clock.Boot()-start)
	}
	return as, err
}

// begin takes its turn on the lock and asks the store.
func (c *Coordinator) begin(ctx context.Context, ref leaseclient.Ref, commits []leaseclient.Commit) ([]*Accepted, error) {
	if len(commits) == 0 {
		return nil, &leaseclient.InvalidError{Field: "commits", Reason: "none"}
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(DefaultBeginTimeout)
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline)
		defer cancel()
	}
	l := c.lane(ref.LockKey)
	defer c.leave(l)
	done, err := c.turn(ctx, l)
	if err != nil {
		return nil, beginTimeout(err)
	}
	defer done()
	if err := l.settled(ctx, commits[0].Kind); err != nil {
		return nil, beginTimeout(err)
	}
	req := leaseclient.BeginRequest{Ref: ref, Deadline: deadline, Commits: commits, Attempt: leaseclient.NewID("attempt")}
	begun, err := c.ask(ctx, l, req)
	if err != nil {
		return nil, err
	}
	return c.accept(req, begun), nil
}

// beginTimeout is the refusal of a Begin whose time ran out before the store
// was asked.
func beginTimeout(err error) error {
	return &leaseclient.Error{
		Code: leaseclient.CodeDeadlineExceeded, Op: "begin",
		Detail: "earlier commits of this lock were not finished in time; nothing was accepted", Err: err,
	}
}

// Pauses between two attempts at one Begin whose answer was lost.
const (
	askFirst = 20 * time.Millisecond
	askMax   = time.Second
)

// ask sends a Begin until its outcome is known or the caller's time is up. The
// commit ids make the repetition safe.
func (c *Coordinator) ask(ctx context.Context, l *lane, req leaseclient.BeginRequest) (*leaseclient.Begun, error) {
	maybe := false
	var limit time.Duration
	pause := askFirst
	last := req.Deadline
	for {
		if !maybe {
			// A request whose answer is lost may be under way for as long as the
			// network likes. The store takes it up to this deadline only, so it is
			// known then that it can be withdrawn for good.
			limit = c.opts.Clock.Boot() + c.opts.Bound
			req.Deadline = time.Now().Add(c.opts.Bound)
			if last.Before(req.Deadline) {
				limit -= req.Deadline.Sub(last)
				req.Deadline = last
			}
		}
		begun, err := c.opts.Log.Begin(ctx, req)
		if err == nil {
			return begun, nil
		}
		code := leaseclient.CodeOf(err)
		if unsettled, ok := errors.AsType[*leaseclient.UnsettledError](err); ok {
			if err := c.settlePredecessor(ctx, l, req.Ref, unsettled); err != nil {
				return nil, beginTimeout(err)
			}
			continue
		}
		if _, inFlight := errors.AsType[*leaseclient.InFlightError](err); inFlight {
			return nil, err
		}
		maybe = maybe || code == leaseclient.CodeOutcomeUnknown
		if !maybe && code == leaseclient.CodeDeadlineExceeded && time.Now().Before(last) && wait(ctx, pause) {
			// Its own short deadline had passed by the time it was there.
			continue
		}
		// A store that could not be reached says nothing about the attempt
		// before, and neither does a deadline that passed on the way.
		if !maybe || (code != leaseclient.CodeOutcomeUnknown && code != leaseclient.CodeUnavailable && code != leaseclient.CodeDeadlineExceeded) {
			return nil, err
		}
		if code == leaseclient.CodeDeadlineExceeded || c.opts.Clock.Boot() >= limit || !wait(ctx, pause) {
			c.withdraw(l, req, limit)
			return nil, &leaseclient.Error{
				Code: leaseclient.CodeOutcomeUnknown, Op: "begin", RetryAfter: time.Second,
				Detail: "the lease store did not answer; the write is being withdrawn and nothing was sent", Err: err,
			}
		}
		pause = min(2*pause, askMax)
	}
}

// withdraw takes back commits that the store may have accepted, or may still
// accept up to the limit. New commits of the lock wait for it: were the withdrawn
// ones finished by somebody else later, they would come out of order.
func (c *Coordinator) withdraw(l *lane, req leaseclient.BeginRequest, limit time.Duration) {
	release := l.hold(req.Commits[0].Kind)
	c.lane(l.lockKey)
	after := func() {
		release()
		c.leave(l)
	}
	endings := make([]leaseclient.Ending, len(req.Commits))
	for i, cm := range req.Commits {
		endings[i] = leaseclient.Ending{ID: cm.ID, Outcome: leaseclient.OutcomeCancelled, Attempt: req.Attempt}
	}
	started := c.goes(func() {
		if left := limit - c.opts.Clock.Boot(); left > 0 && !wait(c.work, left) {
			after()
			return
		}
		c.ender.add(req.Ref.LockKey, endings, after)
	})
	if !started {
		after()
	}
}

// sendMargin is given up at the end of the arrival bound, for the time between the
// last look and the arrival of the effect. It is a tenth of the bound where the
// bound is short.
const sendMargin = 500 * time.Millisecond

// accept turns the store's word into what the adapter works with.
func (c *Coordinator) accept(req leaseclient.BeginRequest, begun *leaseclient.Begun) []*Accepted {
	ref, out := req.Ref, make([]*Accepted, len(req.Commits))
	open := 0
	for i, b := range begun.Commits {
		// Counted from when the request left: the store accepted later than
		// that, so this cutoff is before not_after.
		bound := min(c.opts.Bound, b.NotAfter.Sub(begun.Now)) - min(sendMargin, c.opts.Bound/10)
		out[i] = NewAccepted(req.Commits[i], Stamp{
			LockKey: ref.LockKey, LeaseID: ref.LeaseID, Token: ref.Token,
			ExecutionID: ref.ExecutionID, TraceID: ref.TraceID, CommitID: req.Commits[i].ID,
			AcceptedAt: b.AcceptedAt, NotAfter: b.NotAfter, ExpiresAt: b.ExpiresAt,
		}, c.opts.Clock, begun.Sent+bound, b.Prior)
		out[i].attempt = req.Attempt
		if b.Prior == "" {
			open++
		}
	}
	c.addOpen(open)
	return out
}

// End implements [Gate].
func (c *Coordinator) End(a *Accepted, outcome leaseclient.Outcome) {
	if gateOff || a.prior != "" || a.returned.Swap(true) {
		return
	}
	if outcome == leaseclient.OutcomeUnknown {
		a.returned.Store(false)
		c.Abandon(a)
		return
	}
	// The attempt keeps a late repetition of this ending from taking out what a
	// later attempt at the same commit id has put in.
	c.ender.add(a.lockKey, []leaseclient.Ending{{ID: a.Commit.ID, Outcome: outcome, Attempt: a.attempt}}, nil)
	c.addOpen(-1)
	if c.opts.Events.Ended != nil {
		c.opts.Events.Ended(outcome)
	}
}

// Abandon implements [Gate].
func (c *Coordinator) Abandon(as ...*Accepted) *Settlement {
	s, resolve := NewSettlement(len(as))
	outcomes := make([]leaseclient.Outcome, len(as))
	byLock := make(map[string][]int)
	for i, a := range as {
		switch {
		case gateOff:
			outcomes[i] = leaseclient.OutcomeConfirmed
		case a.prior != "":
			outcomes[i] = a.prior
		case a.returned.Swap(true):
			outcomes[i] = leaseclient.OutcomeUnknown
		default:
			byLock[a.lockKey] = append(byLock[a.lockKey], i)
		}
	}
	if len(byLock) == 0 {
		resolve(outcomes)
		return s
	}
	// The lanes are held before this returns, so that no later Begin overtakes.
	var pending sync.WaitGroup
	n := 0
	for key, at := range byLock {
		n += len(at)
		l := c.lane(key)
		release := l.hold(as[at[0]].Commit.Kind)
		before, done := l.next()
		pending.Add(1)
		finish := func() {
			close(done)
			release()
			c.leave(l)
			c.addOpen(-len(at))
			pending.Done()
		}
		started := c.goes(func() {
			defer finish()
			// What was abandoned earlier is settled earlier.
			select {
			case <-before:
			case <-c.work.Done():
			}
			c.settleOwn(key, as, at, outcomes)
		})
		if !started {
			for _, i := range at {
				outcomes[i] = leaseclient.OutcomeUnknown
			}
			finish()
		}
	}
	if !c.goes(func() { pending.Wait(); resolve(outcomes) }) {
		pending.Wait()
		resolve(outcomes)
	}
	return s
}

// wait pauses and reports whether the context still stands.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(max(d, time.Millisecond))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
