package valkeystore

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/leaseclient/leasetest"
)

// watch subscribes until the test ends and waits until the subscription stands.
func watch(t *testing.T, s *Store) <-chan leaseclient.Notice {
	t.Helper()
	notices := make(chan leaseclient.Notice, 64)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Watch(ctx, func(n leaseclient.Notice) { notices <- n }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("watch ended with %v", err)
		}
	})
	if n := next(t, notices); !n.Gap {
		t.Fatalf("the first notice is %+v", n)
	}
	return notices
}

// next returns the next notice.
func next(t *testing.T, notices <-chan leaseclient.Notice) leaseclient.Notice {
	t.Helper()
	select {
	case n := <-notices:
		return n
	case <-time.After(20 * time.Second):
		t.Fatal("no notice")
		return leaseclient.Notice{}
	}
}

func TestNoticesTellWhatEnded(t *testing.T) {
	f := newFixture(t)
	notices := watch(t, f.Store)
	want := func(l leaseclient.Lease, state leaseclient.State, forced bool) {
		t.Helper()
		n := next(t, notices)
		if n != (leaseclient.Notice{LockKey: l.LockKey, LeaseID: l.LeaseID, Token: l.Token, State: state, Forced: forced}) {
			t.Errorf("notice %+v", n)
		}
	}
	id := testIdentity("a")
	l := f.acquire(t, id, "one").Lease
	f.release(t, l)
	want(l, leaseclient.StateReleased, false)
	for _, to := range []leaseclient.State{leaseclient.StateReleased, leaseclient.StateRevoked} {
		l = f.acquire(t, id, "one").Lease
		if _, err := f.Invalidate(t.Context(), invalidateRequest(l, to)); err != nil {
			t.Fatal(err)
		}
		want(l, to, true)
	}
	// Another namespace on the same server is not heard.
	g := newFixture(t)
	g.release(t, g.acquire(t, id, "one").Lease)
	l = f.acquire(t, id, "one").Lease
	f.release(t, l)
	want(l, leaseclient.StateReleased, false)
}

func TestBrokenSubscriptionStandsAgainAndSaysSo(t *testing.T) {
	raw := serverURL(t, "FENCERIDER_TEST_VALKEY_URL")
	link := leasetest.NewLink(t, addrOf(t, raw))
	f := newFixture(t, func(o *Options) { o.URL = strings.Replace(raw, addrOf(t, raw), link.Addr(), 1) })
	notices := watch(t, f.Store)
	for range 3 {
		link.Down(true)
		link.Down(false)
		if n := next(t, notices); !n.Gap {
			t.Fatalf("after a cut: %+v", n)
		}
	}
	l := f.acquire(t, testIdentity("a"), "one").Lease
	f.release(t, l)
	if n := next(t, notices); n.LeaseID != l.LeaseID {
		t.Errorf("notice %+v", n)
	}
}

func TestWatchEndsWithItsStore(t *testing.T) {
	f := newFixture(t)
	done := make(chan error, 1)
	stands := make(chan struct{}, 8)
	go func() { done <- f.Watch(t.Context(), func(leaseclient.Notice) { stands <- struct{}{} }) }()
	<-stands
	f.Close()
	select {
	case err := <-done:
		if err == nil {
			t.Error("no error")
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it goes on")
	}
}

func FuzzParseNotice(f *testing.F) {
	key := testIdentity("a").LockKey()
	f.Add("1 released " + key + " lease_000_a 1")
	f.Add("1 revoke " + key + " lease_000_a 18446744073709551616")
	f.Add("2 x")
	f.Fuzz(func(t *testing.T, text string) {
		n, ok := parseNotice(text)
		if ok && (n.Gap || n.State == "" || !strings.HasPrefix(n.LockKey, leaseclient.LockKeyPrefix)) {
			t.Errorf("%q became %+v", text, n)
		}
	})
}
