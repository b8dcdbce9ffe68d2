package leaseclient

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"
)

// The pauses of a waiting acquisition between two attempts. A release that is
// told wakes it at once; the pauses are for everything that is not.
const (
	waitFirst = 100 * time.Millisecond
	waitMax   = time.Second
	// wakeSpread keeps several waiters for one lock from meeting at the store.
	wakeSpread = 10 * time.Millisecond
)

// Waiter acquires with a bounded wait. It keeps no queue: whoever asks first
// after a release gets the lease, and nobody waits longer than they said.
// It is safe for concurrent use.
type Waiter struct {
	store   Store
	notices *Notices
	maxWait time.Duration
	slots   chan struct{}
}

// NewWaiter bounds every wait to maxWait, and those that go on at one time to
// maxWaiters; zero means 30 s and 256. notices may be nil: then only the pauses
// end a wait.
func NewWaiter(store Store, notices *Notices, maxWait time.Duration, maxWaiters int) *Waiter {
	if maxWait <= 0 {
		maxWait = 30 * time.Second
	}
	if maxWaiters <= 0 {
		maxWaiters = 256
	}
	return &Waiter{store: store, notices: notices, maxWait: maxWait, slots: make(chan struct{}, maxWaiters)}
}

// Acquire is [Store.Acquire], repeated for up to wait while another lease stands
// in the way. It ends with [CodeConflict] when the wait is over, with
// [CodeDeadlineExceeded] when the request's deadline comes before that, and with
// [CodeRateLimited] when too many wait already. Every other answer, above all
// [CodeOutcomeUnknown], is returned at once. A conflict is not remembered by the
// store, so all attempts have one request id.
func (w *Waiter) Acquire(ctx context.Context, r AcquireRequest, wait time.Duration) (*Acquired, error) {
	const op = "acquire"
	if wait < 0 || wait > w.maxWait {
		return nil, &InvalidError{Field: "wait_ms", Reason: fmt.Sprintf("must be from 0 to %d", w.maxWait.Milliseconds())}
	}
	if wait == 0 {
		return w.store.Acquire(ctx, r)
	}
	if err := r.Validate(); err != nil {
		return nil, err
	}
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	default:
		return nil, &Error{Code: CodeRateLimited, Op: op, RetryAfter: waitMax, Detail: "too many acquisitions are waiting"}
	}
	end := time.Now().Add(wait)
	// Subscribed before the first attempt, so that no release falls in between.
	sub := w.notices.subscribe(r.Identity.LockKey())
	defer w.notices.unsubscribe(sub)
	for pause := waitFirst; ; pause = min(2*pause, waitMax) {
		a, err := w.store.Acquire(ctx, r)
		if CodeOf(err) != CodeConflict {
			return a, err
		}
		now := time.Now()
		if !now.Before(end) {
			return nil, err
		}
		late := &Error{Code: CodeDeadlineExceeded, Op: op, RetryAfter: AsError(err).RetryAfter}
		if !now.Before(r.Deadline) {
			return nil, late
		}
		// A lease that is about to run out is asked for when it does.
		next := min(pause/2+rand.N(pause/2+1), max(AsError(err).RetryAfter, time.Millisecond))
		next = min(next, end.Sub(now), r.Deadline.Sub(now))
		t := time.NewTimer(next)
		select {
		case <-t.C:
		case <-sub.ready:
			sub.take()
			t.Reset(rand.N(wakeSpread))
			select {
			case <-t.C:
			case <-ctx.Done():
			}
			pause = waitFirst / 2
		case <-ctx.Done():
		}
		t.Stop()
		if ctx.Err() != nil {
			// Nothing is under way; the last answer was a refusal.
			late.Err = ctx.Err()
			return nil, late
		}
	}
}
