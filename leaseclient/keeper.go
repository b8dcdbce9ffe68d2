package leaseclient

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// Bounds of the keeper's times.
const (
	// minMargin is the least safety margin before the end of a lease.
	minMargin = 500 * time.Millisecond
	// maxSleep caps every wait of the keeper. A timer of the runtime stands
	// still while the machine is suspended; a keeper that wakes often and asks
	// the boot clock notices within this time of waking.
	maxSleep = 250 * time.Millisecond
	// retryFirst and retryMax bound the pause after a failed renewal.
	retryFirst = 100 * time.Millisecond
	retryMax   = 2 * time.Second
	// maxGapSpread bounds how long a keeper waits before it asks the store what
	// it may have missed.
	maxGapSpread = time.Second
)

// Margin is the safety margin of a TTL: a tenth of it, at least half a second,
// and never more than half of the TTL.
func Margin(ttl time.Duration) time.Duration {
	return min(max(ttl/10, minMargin), ttl/2)
}

// KeeperOptions say what a keeper keeps.
type KeeperOptions struct {
	// Store renews and releases.
	Store Store
	// Clock must count suspension; nil means [SystemClock].
	Clock Clock
	// Acquired is the grant. A replayed one is taken over too: its end is
	// counted from what the store said now.
	Acquired *Acquired
	// Adopted says that the lease is another process's: it is looked at by its
	// lease id instead of being renewed, and not released.
	Adopted bool
	// Notices, when set, tell the keeper at once that its lease was taken.
	Notices *Notices
	// OnRenewed and OnFailed, when set, are told about every renewal. They are
	// called from the keeper's own goroutine and must not block.
	OnRenewed func(l Lease)
	OnFailed  func(l Lease, err error)
}

// Keeper renews one lease and says, once, when it is lost. It authorizes
// nothing: what it tells a worker is advice to stop, and whether a commit is
// accepted is decided at the store every time.
//
// Its methods are safe for concurrent use.
type Keeper struct {
	opts KeeperOptions
	stop context.CancelFunc
	done chan struct{}
	lost chan struct{}
	sub  *subscription

	// releasing keeps renewals away while a release is on its way: the script
	// would refuse one of the two, and the wrong reason would be told.
	releasing sync.Mutex

	mu    sync.Mutex
	lease Lease
	// end is the boot time at which the lease is over at the latest, as far as
	// this process knows.
	end  time.Duration
	loss Loss
	over bool
}

// StartKeeper starts to keep a lease. The keeper ends when the lease is lost or
// [Keeper.Stop] is called; [Keeper.Wait] waits for its goroutine. ctx carries
// values and the end of the process; when it ends, the lease counts as lost for
// [LossShuttingDown].
func StartKeeper(ctx context.Context, o KeeperOptions) *Keeper {
	if o.Clock == nil {
		o.Clock = SystemClock()
	}
	ctx, stop := context.WithCancel(ctx)
	k := &Keeper{
		opts: o, stop: stop, done: make(chan struct{}), lost: make(chan struct{}),
		lease: o.Acquired.Lease,
		end:   localEnd(o.Acquired.Lease.ExpiresAt, o.Acquired.Now, o.Acquired.Sent),
	}
	// Subscribed before the keeper is known to anybody.
	k.sub = o.Notices.subscribe(k.lease.LockKey)
	go k.run(ctx)
	return k
}

// localEnd counts the end of a lease from the moment its request was sent. The
// store took its decision later than that, so the lease at the store ends no
// sooner than this.
func localEnd(expires, now StoreTime, sent time.Duration) time.Duration {
	return sent + expires.Sub(now)
}

// Lost is closed when the lease is lost.
func (k *Keeper) Lost() <-chan struct{} { return k.lost }

// Loss returns why the lease was lost; its reason is empty while it is not.
func (k *Keeper) Loss() Loss {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.loss
}

// Lease returns the lease as the last answer of the store showed it.
func (k *Keeper) Lease() Lease {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lease
}

// Remaining is how long the lease certainly still has, by the boot clock. It is
// zero after a loss. It is for display and for deadlines, never a permission.
func (k *Keeper) Remaining() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.over {
		return 0
	}
	return max(0, k.end-k.opts.Clock.Boot())
}

// Stop ends the keeper with a reason that others decided on. The first reason
// counts; later calls do nothing.
func (k *Keeper) Stop(reason LossReason) { k.lose(reason, nil) }

// Wait returns when the keeper's goroutine has ended.
func (k *Keeper) Wait() { <-k.done }

// Release gives the lease back. The worker is told that it is lost, with
// [LossReleased], before the request leaves: from then on nobody should rely on
// it. A lease that is not this owner's any more is an [*Error] with [CodeLost].
func (k *Keeper) Release(ctx context.Context, call Call) (*Released, error) {
	if k.opts.Adopted {
		return nil, adoptedOnly("release")
	}
	k.Stop(LossReleased)
	k.releasing.Lock()
	defer k.releasing.Unlock()
	l := k.Lease()
	return k.opts.Store.Release(ctx, ReleaseRequest{
		Call: call, Identity: l.Identity, LeaseID: l.LeaseID,
		PrincipalID: l.PrincipalID, InstanceID: l.InstanceID, Token: l.Token,
	})
}

// Renew extends the lease now, on a worker's wish. The keeper goes on from its
// result. It never revives a lease that the keeper has called lost.
func (k *Keeper) Renew(ctx context.Context, call Call) (*Renewed, error) {
	if k.opts.Adopted {
		return nil, adoptedOnly("renew")
	}
	k.releasing.Lock()
	defer k.releasing.Unlock()
	select {
	case <-k.lost:
		return nil, &Error{Code: CodeLost, Op: "renew"}
	default:
	}
	l := k.Lease()
	r, err := k.opts.Store.Renew(ctx, RenewRequest{
		Call: call, Identity: l.Identity, LeaseID: l.LeaseID, PrincipalID: l.PrincipalID,
		InstanceID: l.InstanceID, Token: l.Token,
	})
	if err != nil {
		if CodeOf(err) == CodeLost {
			k.lose(LossRenewalRejected, err)
		}
		return nil, err
	}
	k.extend(r.Lease, localEnd(r.Lease.ExpiresAt, r.Now, r.Sent))
	return r, nil
}

// Adopted reports whether the lease is another process's.
func (k *Keeper) Adopted() bool { return k.opts.Adopted }

// adoptedOnly refuses what only the acquirer of a lease may do.
func adoptedOnly(op string) error {
	return &Error{Code: CodeLost, Op: op, Detail: "an adopted lease is renewed and released by the process that acquired it"}
}

// lose records the first reason and wakes everybody.
func (k *Keeper) lose(reason LossReason, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.over {
		return
	}
	k.over = true
	k.loss = Loss{Reason: reason, Err: err}
	close(k.lost)
	k.stop()
}

// run renews until the lease is lost.
func (k *Keeper) run(ctx context.Context) {
	defer close(k.done)
	defer k.stop()
	defer k.opts.Notices.unsubscribe(k.sub)
	pause := retryFirst
	var lastErr error
	next := k.schedule()
	for {
		l, end := k.snapshot()
		deadline := end - Margin(l.TTL())
		switch now := k.opts.Clock.Boot(); {
		case now >= end:
			k.lose(k.endReason(l), lastErr)
			return
		case now >= deadline && lastErr != nil:
			k.lose(LossBackendUnavailable, lastErr)
			return
		case now < next:
			until := min(next, end)
			if lastErr != nil {
				until = min(until, deadline)
			}
			switch k.wait(ctx, min(until-now, maxSleep), l) {
			case waitedOut:
			case heardGap:
				// A notice may have been missed: the store is asked, though not
				// by every keeper in the same instant.
				next = min(next, now+rand.N(min(maxGapSpread, l.TTL()/10)+1))
			case ended:
				k.lose(LossShuttingDown, ctx.Err())
				return
			}
			continue
		}
		err := k.renew(ctx, l, end)
		switch {
		case err == nil:
			lastErr, pause = nil, retryFirst
			next = k.schedule()
		case ctx.Err() != nil:
			k.lose(LossShuttingDown, ctx.Err())
			return
		case CodeOf(err) == CodeLost:
			k.lose(LossRenewalRejected, err)
			return
		default:
			// One failed renewal never ends the loop; the next uses a request
			// id of its own, since a renewal that was done twice harms nobody.
			lastErr = err
			if k.opts.OnFailed != nil {
				k.opts.OnFailed(l, err)
			}
			next = k.opts.Clock.Boot() + pause + rand.N(pause/2)
			pause = min(2*pause, retryMax)
		}
	}
}

// endReason tells a lease that has reached its maximum lifetime from one that
// was not renewed in time.
func (k *Keeper) endReason(l Lease) LossReason {
	if l.ExpiresAt >= l.LastInstant() {
		return LossMaxLifetime
	}
	return LossExpired
}

// snapshot returns the lease and its local end.
func (k *Keeper) snapshot() (Lease, time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lease, k.end
}

// schedule returns the boot time of the next renewal: a third of the TTL from
// the start of what is left, up to a tenth earlier, so that sidecars which were
// started together do not renew together. A lease that cannot be extended any
// more is not renewed.
func (k *Keeper) schedule() time.Duration {
	l, end := k.snapshot()
	if l.ExpiresAt >= l.LastInstant() {
		return end
	}
	third := l.TTL() / 3
	if k.opts.Adopted {
		// Its end moves when its acquirer renews, not when it is looked at.
		now := k.opts.Clock.Boot()
		left := (end - Margin(l.TTL()) - now) / 2
		return now + min(third, max(left, retryFirst)) - rand.N(retryFirst/2)
	}
	return end - l.TTL() + third - rand.N(third/10+1)
}

// waited is what ended a wait of the keeper.
type waited int

const (
	waitedOut waited = iota
	heardGap
	ended
)

// wait sleeps until its time is over, the context ends, or a notice comes. A
// notice that is about this lease ends the lease.
func (k *Keeper) wait(ctx context.Context, d time.Duration, l Lease) waited {
	t := time.NewTimer(max(d, time.Millisecond))
	defer t.Stop()
	select {
	case <-t.C:
		return waitedOut
	case <-ctx.Done():
		return ended
	case <-k.sub.ready:
	}
	out := waitedOut
	for _, n := range k.sub.take() {
		switch {
		case n.Gap:
			out = heardGap
		case n.LeaseID != l.LeaseID || n.Token != l.Token:
		case n.State == StateRevoked:
			k.lose(LossRevoked, nil)
		case n.Forced:
			k.lose(LossForceReleased, nil)
		default:
			k.lose(LossReleased, nil)
		}
	}
	if ctx.Err() != nil {
		return ended
	}
	return out
}

// look is the renewal of an adopted lease: it reads what its acquirer has made
// of it.
func (k *Keeper) look(ctx context.Context, l Lease) error {
	in, err := k.inspect(ctx, l)
	if CodeOf(err) == CodeNotFound {
		return &Error{Code: CodeLost, Op: "look at adopted lease", Err: err}
	}
	if err != nil {
		return err
	}
	switch in.Lease.State {
	case StateActive:
		k.extend(in.Lease, localEnd(in.Lease.ExpiresAt, in.Now, in.Sent))
		return nil
	case StateRevoked:
		k.lose(LossRevoked, nil)
	case StateReleased:
		k.lose(LossReleased, nil)
	default:
		k.lose(LossExpired, nil)
	}
	return nil
}

// renew sends one renewal, bounded by the local end of the lease.
func (k *Keeper) renew(ctx context.Context, l Lease, end time.Duration) error {
	k.releasing.Lock()
	defer k.releasing.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	// An attempt may use half of what is left before the margin, so that a
	// store which does not answer leaves time for another.
	left := end - Margin(l.TTL()) - k.opts.Clock.Boot()
	wait := max(left/2, minMargin/2)
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	if k.opts.Adopted {
		return k.look(ctx, l)
	}
	r, err := k.opts.Store.Renew(ctx, RenewRequest{
		Call:     Call{RequestID: NewID("request"), Deadline: time.Now().Add(wait)},
		Identity: l.Identity, LeaseID: l.LeaseID, PrincipalID: l.PrincipalID,
		InstanceID: l.InstanceID, Token: l.Token, Once: true,
	})
	if err != nil {
		return err
	}
	granted := localEnd(r.Lease.ExpiresAt, r.Now, r.Sent)
	if k.opts.Clock.Boot() >= end {
		// The answer came after the end that was known: it grants nothing
		// until an inspection confirms it.
		if granted, err = k.confirm(ctx, r.Lease); err != nil {
			return err
		}
	}
	k.extend(r.Lease, granted)
	return nil
}

// extend takes over what a renewal granted.
func (k *Keeper) extend(l Lease, end time.Duration) {
	k.mu.Lock()
	if !k.over {
		k.lease = l
		k.end = max(k.end, end)
	}
	k.mu.Unlock()
	if k.opts.OnRenewed != nil {
		k.opts.OnRenewed(l)
	}
}

// confirm asks the store whether a lease is still the current one, and returns
// its local end.
func (k *Keeper) confirm(ctx context.Context, l Lease) (time.Duration, error) {
	in, err := k.inspect(ctx, l)
	if err != nil {
		return 0, err
	}
	if in.Lease.LeaseID != l.LeaseID || in.Lease.Token != l.Token || in.Lease.State != StateActive {
		return 0, &Error{Code: CodeLost, Op: "confirm renewal"}
	}
	return localEnd(in.Lease.ExpiresAt, in.Now, in.Sent), nil
}

// inspect reads the record of a lease, whatever became of it.
func (k *Keeper) inspect(ctx context.Context, l Lease) (*Inspected, error) {
	return k.opts.Store.Inspect(ctx, InspectRequest{LeaseID: l.LeaseID, Deadline: time.Now().Add(minMargin)})
}
