package leaseclient_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/leaseclient/leasetest"
)

// told is a watcher whose notices the test sends.
type told struct{ ch chan leaseclient.Notice }

func (w told) Watch(ctx context.Context, f func(leaseclient.Notice)) error {
	for {
		select {
		case n := <-w.ch:
			f(n)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// watching runs notices inside a bubble until the test function ends.
func watching(t *testing.T, f func(t *testing.T, h *leaseclient.Notices, tell func(leaseclient.Notice))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h, w := new(leaseclient.Notices), told{make(chan leaseclient.Notice)}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _ = h.Run(ctx, w) })
		f(t, h, func(n leaseclient.Notice) { w.ch <- n; synctest.Wait() })
		cancel()
		wg.Wait()
	})
}

func TestKeeperHearsAtOnceThatItsLeaseWasTaken(t *testing.T) {
	mine := leaseclient.Notice{LeaseID: "lease_1", Token: 1, State: leaseclient.StateReleased}
	forced, revoked, other, older := mine, mine, mine, mine
	forced.Forced = true
	revoked.Forced, revoked.State = true, leaseclient.StateRevoked
	other.LeaseID = "lease_2"
	older.Token = 2
	for name, c := range map[string]struct {
		n    leaseclient.Notice
		want leaseclient.LossReason
	}{
		"released":       {mine, leaseclient.LossReleased},
		"force-released": {forced, leaseclient.LossForceReleased},
		"revoked":        {revoked, leaseclient.LossRevoked},
		"another lease":  {other, ""},
		"another token":  {older, ""},
	} {
		t.Run(name, func(t *testing.T) {
			watching(t, func(t *testing.T, h *leaseclient.Notices, tell func(leaseclient.Notice)) {
				s := &scripted{clock: &leasetest.Clock{}}
				k := leaseclient.StartKeeper(t.Context(), leaseclient.KeeperOptions{
					Store: s, Clock: s.clock, Acquired: s.acquired(30*time.Second, time.Hour), Notices: h,
				})
				advance(time.Second)
				start := time.Now()
				tell(c.n)
				if got := k.Loss().Reason; got != c.want || time.Since(start) > 0 {
					t.Errorf("loss %q after %v, want %q at once", got, time.Since(start), c.want)
				}
				k.Stop(leaseclient.LossShuttingDown)
				k.Wait()
			})
		})
	}
}

func TestKeeperAsksAfterAGap(t *testing.T) {
	watching(t, func(t *testing.T, h *leaseclient.Notices, tell func(leaseclient.Notice)) {
		s := &scripted{clock: &leasetest.Clock{}, renew: func(int) error { return &leaseclient.Error{Code: leaseclient.CodeLost} }}
		k := leaseclient.StartKeeper(t.Context(), leaseclient.KeeperOptions{
			Store: s, Clock: s.clock, Acquired: s.acquired(30*time.Second, time.Hour), Notices: h,
		})
		advance(time.Second)
		tell(leaseclient.Notice{Gap: true})
		start := time.Now()
		<-k.Lost()
		if d := time.Since(start); d > 1500*time.Millisecond || k.Loss().Reason != leaseclient.LossRenewalRejected {
			t.Errorf("after %v: %+v", d, k.Loss())
		}
		k.Wait()
	})
}

func TestAdoptedLeaseIsLookedAtAndNeverRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &scripted{clock: &leasetest.Clock{}}
		looks := 0
		s.inspect = func() error { looks++; return nil }
		a := s.acquired(30*time.Second, time.Hour)
		k := leaseclient.StartKeeper(t.Context(), leaseclient.KeeperOptions{Store: s, Clock: s.clock, Acquired: a, Adopted: true})
		// Its acquirer renews now and then.
		for range 20 {
			advance(10 * time.Second)
			s.mu.Lock()
			s.lease.ExpiresAt = s.now().Add(30 * time.Second)
			s.mu.Unlock()
		}
		s.mu.Lock()
		if k.Loss().Reason != "" || len(s.renewals) != 0 || looks < 20 || looks > 60 {
			t.Errorf("%+v, %d renewals, %d looks", k.Loss(), len(s.renewals), looks)
		}
		s.mu.Unlock()
		if _, err := k.Renew(t.Context(), leaseclient.Call{}); leaseclient.CodeOf(err) != leaseclient.CodeLost {
			t.Errorf("renewed: %v", err)
		}
		if _, err := k.Release(t.Context(), leaseclient.Call{}); leaseclient.CodeOf(err) != leaseclient.CodeLost || s.released != 0 {
			t.Errorf("released: %v", err)
		}
		if k.Loss().Reason != "" {
			t.Errorf("lost by a refused release: %+v", k.Loss())
		}
		s.mu.Lock()
		s.lease.State = leaseclient.StateRevoked
		s.mu.Unlock()
		<-k.Lost()
		if k.Loss().Reason != leaseclient.LossRevoked {
			t.Errorf("%+v", k.Loss())
		}
		k.Wait()
	})
}

func TestAdoptedLeaseEndsWithItsRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &scripted{clock: &leasetest.Clock{}}
		k := leaseclient.StartKeeper(t.Context(), leaseclient.KeeperOptions{
			Store: s, Clock: s.clock, Acquired: s.acquired(30*time.Second, time.Hour), Adopted: true,
		})
		start := time.Now()
		<-k.Lost()
		if d := time.Since(start); d < 29*time.Second || d > 31*time.Second || k.Loss().Reason != leaseclient.LossExpired {
			t.Errorf("after %v: %+v", d, k.Loss())
		}
		k.Wait()
	})
}

// contended is a store whose lease is in the way until it is freed.
type contended struct {
	leaseclient.Store
	mu       sync.Mutex
	attempts []string
	answer   func(n int) error
}

func (s *contended) Acquire(_ context.Context, r leaseclient.AcquireRequest) (*leaseclient.Acquired, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attempts = append(s.attempts, r.RequestID)
	if err := s.answer(len(s.attempts)); err != nil {
		return nil, err
	}
	return &leaseclient.Acquired{Current: leaseclient.StateActive}, nil
}

func conflict() error {
	return &leaseclient.Error{Code: leaseclient.CodeConflict, RetryAfter: time.Second}
}

// waitRequest is a valid acquisition.
func waitRequest(deadline time.Duration) leaseclient.AcquireRequest {
	id, err := leaseclient.Identity{TenantID: "t", ProgramID: "p", TargetNamespace: "n", TargetID: "x", ActorName: "a"}.Normalize()
	if err != nil {
		panic(err)
	}
	return leaseclient.AcquireRequest{
		Call: leaseclient.Call{RequestID: "request_1", Deadline: time.Now().Add(deadline)}, Identity: id,
		Owner:       leaseclient.Owner{PrincipalID: "p", ClientID: "c", CredentialID: "k", InstanceID: "i"},
		ExecutionID: "e", JobID: "j", TraceID: "t",
	}
}

func TestWaitingAcquireTakesOverWhenTheReleaseIsTold(t *testing.T) {
	watching(t, func(t *testing.T, h *leaseclient.Notices, tell func(leaseclient.Notice)) {
		free := false
		s := &contended{answer: func(int) error {
			if free {
				return nil
			}
			return conflict()
		}}
		w := leaseclient.NewWaiter(s, h, 0, 0)
		r := waitRequest(time.Minute)
		done := make(chan error, 1)
		go func() { _, err := w.Acquire(t.Context(), r, 20*time.Second); done <- err }()
		advance(9 * time.Second)
		s.mu.Lock()
		free = true
		s.mu.Unlock()
		start := time.Now()
		tell(leaseclient.Notice{LockKey: r.Identity.LockKey(), LeaseID: "lease_0", Token: 1, State: leaseclient.StateReleased})
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d > 100*time.Millisecond {
			t.Errorf("took over after %v", d)
		}
		if n := len(s.attempts); n < 9 || n > 30 {
			t.Errorf("%d attempts in nine seconds", n)
		}
		for _, id := range s.attempts {
			if id != r.RequestID {
				t.Errorf("attempt under request id %s", id)
			}
		}
	})
}

func TestWaitIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		wait, deadline time.Duration
		answer         func(int) error
		want           leaseclient.Code
		after          time.Duration
	}{
		"no wait":         {0, time.Minute, func(int) error { return conflict() }, leaseclient.CodeConflict, 0},
		"wait ends":       {5 * time.Second, time.Minute, func(int) error { return conflict() }, leaseclient.CodeConflict, 5 * time.Second},
		"deadline first":  {20 * time.Second, 3 * time.Second, func(int) error { return conflict() }, leaseclient.CodeDeadlineExceeded, 3 * time.Second},
		"too long":        {31 * time.Second, time.Minute, nil, leaseclient.CodeInvalid, 0},
		"negative":        {-1, time.Minute, nil, leaseclient.CodeInvalid, 0},
		"unknown outcome": {20 * time.Second, time.Minute, func(int) error { return &leaseclient.Error{Code: leaseclient.CodeOutcomeUnknown} }, leaseclient.CodeOutcomeUnknown, 0},
		"unavailable": {20 * time.Second, time.Minute, func(n int) error {
			if n < 3 {
				return conflict()
			}
			return &leaseclient.Error{Code: leaseclient.CodeUnavailable}
		}, leaseclient.CodeUnavailable, -1},
		"free at last": {20 * time.Second, time.Minute, func(n int) error {
			if n < 4 {
				return conflict()
			}
			return nil
		}, "", -1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				w := leaseclient.NewWaiter(&contended{answer: c.answer}, nil, 0, 0)
				_, err := w.Acquire(t.Context(), waitRequest(c.deadline), c.wait)
				if leaseclient.CodeOf(err) != c.want {
					t.Errorf("%v, want %s", err, c.want)
				}
				if d := time.Since(start); c.after >= 0 && d != c.after {
					t.Errorf("after %v, want %v", d, c.after)
				}
			})
		})
	}
}

func TestWaitersAreBoundedAndEndWithTheirContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := leaseclient.NewWaiter(&contended{answer: func(int) error { return conflict() }}, nil, time.Minute, 3)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 3)
		for range 3 {
			go func() { _, err := w.Acquire(ctx, waitRequest(time.Hour), time.Minute); ended <- err }()
		}
		synctest.Wait()
		_, err := w.Acquire(t.Context(), waitRequest(time.Hour), time.Minute)
		if leaseclient.CodeOf(err) != leaseclient.CodeRateLimited {
			t.Errorf("the fourth: %v", err)
		}
		cancel()
		for range 3 {
			if err := <-ended; leaseclient.CodeOf(err) != leaseclient.CodeDeadlineExceeded {
				t.Errorf("cancelled: %v", err)
			}
		}
		if _, err := w.Acquire(t.Context(), waitRequest(time.Hour), time.Second); leaseclient.CodeOf(err) != leaseclient.CodeConflict {
			t.Errorf("afterwards: %v", err)
		}
	})
}

func TestSlowSubscriberLearnsThatThereWasMore(t *testing.T) {
	watching(t, func(t *testing.T, h *leaseclient.Notices, tell func(leaseclient.Notice)) {
		s := &scripted{clock: &leasetest.Clock{}}
		blocked := make(chan struct{})
		s.renew = func(n int) error {
			if n == 1 {
				<-blocked
			}
			return nil
		}
		k := leaseclient.StartKeeper(t.Context(), leaseclient.KeeperOptions{
			Store: s, Clock: s.clock, Acquired: s.acquired(30*time.Second, time.Hour), Notices: h,
		})
		advance(10500 * time.Millisecond)
		for i := range 40 {
			tell(leaseclient.Notice{LeaseID: fmt.Sprint("lease_other_", i), State: leaseclient.StateReleased})
		}
		close(blocked)
		advance(2 * time.Second)
		s.mu.Lock()
		n := len(s.renewals)
		s.mu.Unlock()
		if n < 2 {
			t.Errorf("%d renewals; it did not ask after it had missed notices", n)
		}
		k.Stop(leaseclient.LossShuttingDown)
		k.Wait()
	})
}
