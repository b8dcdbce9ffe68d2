package valkeystore

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// ErrClock is wrapped by the error of an operation that was refused because the
// server's clock has jumped or stood still. Leases are granted by that clock, so
// nothing is granted until it has run steadily again for a while.
var ErrClock = errors.New("clock of the lease store is not steady")

// Bounds of what a server's clock may do.
const (
	// clockSlack is by how much it may be set at once.
	clockSlack = time.Second
	// clockDrift is the share of the time by which it may run differently, in
	// the long run. A clock that is being corrected runs faster or slower for a
	// while; the slack covers that.
	clockDrift = 1e-3
	// clockSteady is how long it must have run steadily after it did not.
	clockSteady = 5 * time.Second
)

// timekeeper compares the server's clock with the boot clock. Every answer says
// that at some instant between sending and receiving the server's clock showed
// its time; so the difference of the two clocks lies within bounds, and the
// bounds of successive answers must fit together. Its owner locks.
type timekeeper struct {
	// known says that there was an answer; lo and hi bound the difference as
	// of the boot time at.
	known  bool
	lo, hi time.Duration
	at     time.Duration
	// slack is what is left of clockSlack; it grows back with the drift.
	slack time.Duration
	// unsteady says that the clock is not to be trusted, and since when it has
	// run steadily.
	unsteady bool
	since    time.Duration
}

// observe takes one reading. It reports whether the clock has jumped, or stood
// still, since the reading before; what it saw is in the error's text.
func (k *timekeeper) observe(now leaseclient.StoreTime, sent, received time.Duration) error {
	t := time.Duration(now) * time.Millisecond
	lo, hi := t-received, t+time.Millisecond-sent
	if !k.known {
		*k = timekeeper{known: true, lo: lo, hi: hi, at: received, slack: clockSlack}
		return nil
	}
	elapsed := max(0, received-k.at)
	drift := time.Duration(float64(elapsed) * clockDrift)
	k.slack = min(clockSlack, k.slack+drift)
	wideLo, wideHi := k.lo-drift, k.hi+drift
	var gap time.Duration
	var what string
	switch {
	case lo > wideHi:
		gap, what = lo-wideHi, "ahead"
	case hi < wideLo:
		gap, what = wideLo-hi, "behind"
	}
	k.at = max(k.at, received)
	if gap == 0 {
		k.lo, k.hi = max(lo, wideLo), min(hi, wideHi)
		if k.unsteady && received-k.since >= clockSteady {
			k.unsteady = false
		}
		return nil
	}
	k.lo, k.hi = lo, hi
	if gap <= k.slack {
		k.slack -= gap
		return nil
	}
	k.unsteady, k.since, k.slack = true, received, clockSlack
	return fmt.Errorf("%w: it is %v %s of where it should be", ErrClock, gap.Round(time.Millisecond), what)
}

// observe ties the two clocks together once more and reports whether the
// server's clock has jumped or stood still.
func (s *Store) observe(now leaseclient.StoreTime, sent, received time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seenTime, s.seenBoot = now, received
	return s.time.observe(now, sent, received)
}

// unsteady reports whether the server's clock is not to be trusted.
func (s *Store) unsteady() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.time.unsteady
}

// storeDeadline carries a caller's deadline over to the store's clock. It may
// come out early by as long as an answer was under way, never late.
func (s *Store) storeDeadline(deadline time.Time) string {
	if deadline.IsZero() {
		return strconv.FormatInt(leaseclient.MaxToken, 10)
	}
	boot := s.opts.Clock.Boot() + time.Until(deadline)
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.seenTime.Add(boot - s.seenBoot)
	return strconv.FormatInt(max(0, min(int64(at), leaseclient.MaxToken)), 10)
}
