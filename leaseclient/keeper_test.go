package leaseclient_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/leaseclient/leasetest"
)

// scripted is a store whose renewals are scripted. It keeps its own time.
type scripted struct {
	leaseclient.Store
	clock *leasetest.Clock

	mu       sync.Mutex
	renewals []time.Duration
	renew    func(n int) error
	inspect  func() error
	released int
	lease    leaseclient.Lease
}

func (s *scripted) now() leaseclient.StoreTime {
	return leaseclient.StoreTime(1_700_000_000_000 + s.clock.Boot().Milliseconds())
}

func (s *scripted) acquired(ttl, life time.Duration) *leaseclient.Acquired {
	now := s.now()
	s.lease = leaseclient.Lease{
		LeaseID: "lease_1", Token: 1, AcquiredAt: now, RenewedAt: now, ExpiresAt: now.Add(min(ttl, life)),
		TTLMillis: ttl.Milliseconds(), MaxLifetimeMillis: life.Milliseconds(), State: leaseclient.StateActive,
	}
	return &leaseclient.Acquired{Lease: s.lease, Current: leaseclient.StateActive, Now: now, Sent: s.clock.Boot()}
}

func (s *scripted) Renew(ctx context.Context, _ leaseclient.RenewRequest) (*leaseclient.Renewed, error) {
	sent := s.clock.Boot()
	s.mu.Lock()
	s.renewals = append(s.renewals, sent)
	n, f := len(s.renewals), s.renew
	s.mu.Unlock()
	if f != nil {
		if err := f(n); err != nil {
			if errors.Is(err, context.DeadlineExceeded) {
				<-ctx.Done()
			}
			return nil, err
		}
	}
	now := s.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lease.RenewedAt = now
	s.lease.ExpiresAt = min(now.Add(s.lease.TTL()), s.lease.LastInstant())
	return &leaseclient.Renewed{Lease: s.lease, Now: now, Sent: sent}, nil
}

func (s *scripted) Inspect(context.Context, leaseclient.InspectRequest) (*leaseclient.Inspected, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inspect != nil {
		if err := s.inspect(); err != nil {
			return nil, err
		}
	}
	return &leaseclient.Inspected{Lease: s.lease, Now: s.now(), Sent: s.clock.Boot()}, nil
}

func (s *scripted) Release(context.Context, leaseclient.ReleaseRequest) (*leaseclient.Released, error) {
	s.released++
	return &leaseclient.Released{}, nil
}

// advance lets the bubble's time pass.
func advance(d time.Duration) { <-time.After(d) }

// keep runs a keeper inside a bubble.
func keep(t *testing.T, ttl, life time.Duration, s *scripted, f func(k *leaseclient.Keeper)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s.clock = &leasetest.Clock{}
		k := leaseclient.StartKeeper(t.Context(), leaseclient.KeeperOptions{Store: s, Clock: s.clock, Acquired: s.acquired(ttl, life)})
		f(k)
		k.Stop(leaseclient.LossShuttingDown)
		k.Wait()
	})
}

func TestKeeperRenewsAtAThird(t *testing.T) {
	s := &scripted{}
	keep(t, 30*time.Second, time.Hour, s, func(k *leaseclient.Keeper) {
		advance(100 * time.Second)
		select {
		case <-k.Lost():
			t.Fatalf("lost: %v", k.Loss())
		default:
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		last := time.Hour
		for i, at := range s.renewals {
			if d := at - last; d < 8900*time.Millisecond || d > 10500*time.Millisecond {
				t.Errorf("renewal %d came after %v", i, d)
			}
			last = at
		}
		if len(s.renewals) < 9 || k.Remaining() < 19*time.Second {
			t.Errorf("%d renewals, %v remaining", len(s.renewals), k.Remaining())
		}
	})
}

func TestKeeperSurvivesFailedRenewals(t *testing.T) {
	s := &scripted{renew: func(n int) error {
		if n%2 == 1 {
			return &leaseclient.Error{Code: leaseclient.CodeUnavailable}
		}
		return nil
	}}
	keep(t, 30*time.Second, time.Hour, s, func(k *leaseclient.Keeper) {
		advance(10 * time.Minute)
		if k.Loss().Reason != "" {
			t.Errorf("lost: %v", k.Loss())
		}
	})
}

func TestKeeperLosses(t *testing.T) {
	for _, tc := range []struct {
		name      string
		ttl, life time.Duration
		renew     func(n int) error
		want      leaseclient.LossReason
		after     [2]time.Duration
	}{
		{"rejected", 30 * time.Second, time.Hour, func(int) error { return &leaseclient.Error{Code: leaseclient.CodeLost} },
			leaseclient.LossRenewalRejected, [2]time.Duration{9 * time.Second, 10500 * time.Millisecond}},
		{"unavailable", 30 * time.Second, time.Hour, func(int) error { return &leaseclient.Error{Code: leaseclient.CodeUnavailable} },
			leaseclient.LossBackendUnavailable, [2]time.Duration{26900 * time.Millisecond, 27300 * time.Millisecond}},
		{"no answer", 30 * time.Second, time.Hour, func(int) error { return context.DeadlineExceeded },
			leaseclient.LossBackendUnavailable, [2]time.Duration{26900 * time.Millisecond, 27600 * time.Millisecond}},
		{"lifetime", 30 * time.Second, 45 * time.Second, nil,
			leaseclient.LossMaxLifetime, [2]time.Duration{45 * time.Second, 45300 * time.Millisecond}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &scripted{renew: tc.renew}
			keep(t, tc.ttl, tc.life, s, func(k *leaseclient.Keeper) {
				start := time.Now()
				<-k.Lost()
				if d := time.Since(start); d < tc.after[0] || d > tc.after[1] {
					t.Errorf("lost after %v", d)
				}
				k.Stop(leaseclient.LossReleased)
				if k.Loss().Reason != tc.want || k.Remaining() != 0 {
					t.Errorf("loss %+v", k.Loss())
				}
			})
		})
	}
}

func TestKeeperCountsSuspension(t *testing.T) {
	s := &scripted{renew: func(int) error { return &leaseclient.Error{Code: leaseclient.CodeLost} }}
	keep(t, 300*time.Second, time.Hour, s, func(k *leaseclient.Keeper) {
		advance(time.Second)
		s.clock.Leap(10 * time.Minute)
		start := time.Now()
		<-k.Lost()
		if d := time.Since(start); d > 300*time.Millisecond || k.Loss().Reason != leaseclient.LossExpired {
			t.Errorf("lost %v after waking, %+v", d, k.Loss())
		}
	})
}

func TestRenewalThatCameTooLateNeedsAnInspection(t *testing.T) {
	for _, gone := range []bool{false, true} {
		s := &scripted{}
		s.renew = func(int) error { s.clock.Leap(time.Minute); s.renew = nil; return nil }
		if gone {
			s.inspect = func() error { return &leaseclient.Error{Code: leaseclient.CodeNotFound} }
		}
		keep(t, 30*time.Second, time.Hour, s, func(k *leaseclient.Keeper) {
			advance(11 * time.Second)
			if lost := k.Loss().Reason != ""; lost != gone {
				t.Errorf("gone=%v: %+v", gone, k.Loss())
			}
		})
	}
}

func TestKeeperReleasesOnce(t *testing.T) {
	s := &scripted{}
	keep(t, 30*time.Second, time.Hour, s, func(k *leaseclient.Keeper) {
		if _, err := k.Release(t.Context(), leaseclient.Call{RequestID: "r", Deadline: time.Now().Add(time.Second)}); err != nil {
			t.Fatal(err)
		}
		<-k.Lost()
		k.Wait()
		if s.released != 1 || k.Loss().Reason != leaseclient.LossReleased || len(s.renewals) != 0 {
			t.Errorf("released %d times, %+v", s.released, k.Loss())
		}
		if _, err := k.Renew(t.Context(), leaseclient.Call{}); leaseclient.CodeOf(err) != leaseclient.CodeLost {
			t.Errorf("renewed after release: %v", err)
		}
	})
}
