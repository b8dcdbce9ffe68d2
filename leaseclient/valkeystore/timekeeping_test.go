package valkeystore

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// readings feeds a timekeeper: each answer is on its way for two milliseconds
// and was taken in their middle.
type readings struct {
	k    timekeeper
	boot time.Duration
	// store is the server's clock.
	store time.Duration
}

// pass lets time pass on both clocks and takes a reading.
func (r *readings) pass(boot, store time.Duration) error {
	r.boot += boot
	r.store += store
	return r.k.observe(leaseclient.StoreTime(r.store.Milliseconds()), r.boot-time.Millisecond, r.boot+time.Millisecond)
}

func TestClockThatRunsSteadilyIsTrusted(t *testing.T) {
	for name, rate := range map[string]float64{"exactly": 1, "slow": 0.9995, "fast": 1.0005} {
		r := readings{boot: time.Hour, store: 1e6 * time.Hour}
		for i := range 10_000 {
			step := time.Duration(1+i%2000) * time.Millisecond
			if err := r.pass(step, time.Duration(float64(step)*rate)); err != nil {
				t.Fatalf("%s, reading %d: %v", name, i, err)
			}
		}
		// A correction of half a second is normal.
		if err := r.pass(time.Second, 1500*time.Millisecond); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestClockThatJumpsOrStandsStillIsNot(t *testing.T) {
	for name, c := range map[string]struct{ boot, store time.Duration }{
		"ahead":     {time.Second, 3 * time.Second},
		"far ahead": {time.Second, 24 * time.Hour},
		"back":      {time.Second, -time.Hour},
		"stands":    {2 * time.Second, 0},
		"half":      {20 * time.Second, 10 * time.Second},
	} {
		r := readings{boot: time.Hour, store: 1e6 * time.Hour}
		for range 10 {
			if err := r.pass(time.Second, time.Second); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.pass(c.boot, c.store); !errors.Is(err, ErrClock) || !r.k.unsteady {
			t.Errorf("%s: %v", name, err)
		}
		// It must run steadily for a while.
		for range 4 {
			if err := r.pass(time.Second, time.Second); err != nil || !r.k.unsteady {
				t.Fatalf("%s: trusted too early: %v", name, err)
			}
		}
		if err := r.pass(2*time.Second, 2*time.Second); err != nil || r.k.unsteady {
			t.Errorf("%s: not trusted again: %v", name, err)
		}
	}
}

func TestClockThatStandsStillIsNoticedHoweverOftenItIsRead(t *testing.T) {
	r := readings{boot: time.Hour, store: 1e6 * time.Hour}
	for i := range 1000 {
		if err := r.pass(10*time.Millisecond, 0); err != nil {
			if took := time.Duration(i) * 10 * time.Millisecond; took > 2*clockSlack {
				t.Errorf("noticed after %v", took)
			}
			return
		}
	}
	t.Fatal("never noticed")
}

func TestSlowAnswersProveNothing(t *testing.T) {
	r := readings{boot: time.Hour, store: 1e6 * time.Hour}
	if err := r.pass(0, 0); err != nil {
		t.Fatal(err)
	}
	// The answer took ten seconds; it was given at their start.
	r.boot += 10 * time.Second
	r.store += 5 * time.Millisecond
	if err := r.k.observe(leaseclient.StoreTime(r.store.Milliseconds()), r.boot-10*time.Second, r.boot); err != nil {
		t.Error(err)
	}
}

// skewedClock is a boot clock that a test moves against the server's.
type skewedClock struct {
	leaseclient.Clock
	skew *time.Duration
}

func (c skewedClock) Boot() time.Duration { return c.Clock.Boot() + *c.skew }

func TestUnsteadyClockClosesTheStoreForGrants(t *testing.T) {
	var skew time.Duration
	var alerts []Alert
	f := newFixture(t, func(o *Options) {
		o.Clock = skewedClock{leaseclient.SystemClock(), &skew}
		o.OnAlert = func(a Alert) { alerts = append(alerts, a) }
	})
	id := testIdentity("a")
	l := f.acquire(t, id, "one").Lease
	gone := f.acquire(t, testIdentity("gone"), "one").Lease
	// The server's clock stands for a minute, as this process sees it.
	skew += time.Minute
	_, err := f.Inspect(t.Context(), leaseclient.InspectRequest{Identity: id, Deadline: soon()})
	if err != nil {
		t.Fatalf("inspect: %v", err)
	}
	if len(alerts) != 1 || alerts[0].Kind != AlertClock || !strings.Contains(alerts[0].Err.Error(), "behind") {
		t.Errorf("alerts %+v", alerts)
	}
	for name, do := range map[string]func() error{
		"acquire": func() error { _, err := f.Acquire(t.Context(), acquireRequest(testIdentity("b"), "one")); return err },
		"renew":   func() error { _, err := f.Renew(t.Context(), renewRequest(l)); return err },
		"begin":   func() error { _, err := f.Begin(t.Context(), beginRequest(l, commit("x"))); return err },
		"adopt":   func() error { _, err := f.Adopt(t.Context(), adoptRequest(l)); return err },
		"claim": func() error {
			_, err := f.Claim(t.Context(), leaseclient.ClaimRequest{LockKey: l.LockKey, Mode: leaseclient.ClaimSweep, Claimer: "c", Deadline: soon()})
			return err
		},
	} {
		if err := do(); leaseclient.CodeOf(err) != leaseclient.CodeUnavailable || !errors.Is(err, ErrClock) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if f.counter(t, testIdentity("b")) != 0 {
		t.Error("something was granted")
	}
	// What takes away goes on.
	f.release(t, gone)
	if _, err := f.Invalidate(t.Context(), invalidateRequest(l, leaseclient.StateRevoked)); err != nil {
		t.Errorf("revoke: %v", err)
	}
	// It opens again by itself once readings have fitted together for a while;
	// the attempts themselves are the readings.
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(30 * time.Second)
	for {
		_, err := f.Acquire(t.Context(), acquireRequest(testIdentity("b"), "one"))
		if err == nil {
			break
		}
		if !errors.Is(err, ErrClock) {
			t.Fatal(err)
		}
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("it stays closed")
		}
	}
}

func TestGrantThatRevealsTheJumpIsUnknown(t *testing.T) {
	var skew time.Duration
	f := newFixture(t, func(o *Options) { o.Clock = skewedClock{leaseclient.SystemClock(), &skew} })
	f.acquire(t, testIdentity("a"), "one")
	skew += time.Minute
	r := acquireRequest(testIdentity("b"), "one")
	_, err := f.Acquire(t.Context(), r)
	if leaseclient.CodeOf(err) != leaseclient.CodeOutcomeUnknown || !errors.Is(err, ErrClock) {
		t.Fatalf("%v", err)
	}
}
