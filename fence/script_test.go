package fence

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// scriptedLog is a commit log that says what a test wants, for moments that a real
// store cannot be brought to. What the store itself does is tested on a real one.
type scriptedLog struct {
	begin func(ctx context.Context, r leaseclient.BeginRequest) (*leaseclient.Begun, error)
	end   func(lockKey string) error
	claim func(ctx context.Context, r leaseclient.ClaimRequest) (*leaseclient.Claimed, error)

	mu     sync.Mutex
	ended  []leaseclient.Ending
	endsAt []time.Time
}

// Begin implements [leaseclient.CommitLog].
func (s *scriptedLog) Begin(ctx context.Context, r leaseclient.BeginRequest) (*leaseclient.Begun, error) {
	return s.begin(ctx, r)
}

// End implements [leaseclient.CommitLog].
func (s *scriptedLog) End(_ context.Context, lockKey, _ string, endings []leaseclient.Ending) error {
	if s.end != nil {
		if err := s.end(lockKey); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = append(s.ended, endings...)
	s.endsAt = append(s.endsAt, time.Now())
	return nil
}

// Claim implements [leaseclient.CommitLog].
func (s *scriptedLog) Claim(ctx context.Context, r leaseclient.ClaimRequest) (*leaseclient.Claimed, error) {
	return s.claim(ctx, r)
}

// Unclaim implements [leaseclient.CommitLog].
func (s *scriptedLog) Unclaim(context.Context, string, string) error { return nil }

// Unsettled implements [leaseclient.CommitLog].
func (s *scriptedLog) Unsettled(context.Context, int, leaseclient.UnsettledCursor, int) ([]string, leaseclient.UnsettledCursor, error) {
	return nil, leaseclient.UnsettledCursor{}, nil
}

// Shards implements [leaseclient.CommitLog].
func (s *scriptedLog) Shards(context.Context) (int, error) { return 1, nil }

// bubbleClock is a clock inside a bubble of virtual time.
type bubbleClock struct{ start time.Time }

// Boot implements [leaseclient.Clock].
func (c bubbleClock) Boot() time.Duration { return time.Since(c.start) }

// scripted runs a test with a coordinator in virtual time.
func scripted(t *testing.T, log *scriptedLog, e Effector, f func(t *testing.T, c *Coordinator)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c, err := New(Options{
			Log: log, Clock: bubbleClock{time.Now()}, SweepInterval: -1,
			Effectors: map[leaseclient.Kind]Effector{leaseclient.KindPublish: e},
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- c.Run(ctx) }()
		f(t, c)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
}

// begins accepts everything.
func begins(_ context.Context, r leaseclient.BeginRequest) (*leaseclient.Begun, error) {
	out := &leaseclient.Begun{Now: 1000}
	for range r.Commits {
		out.Commits = append(out.Commits, leaseclient.BegunCommit{AcceptedAt: 1000, NotAfter: 6000, ExpiresAt: 31_000})
	}
	return out, nil
}

func refOf(key string) leaseclient.Ref { return leaseclient.Ref{LockKey: key, LeaseID: "l", Token: 1} }

func TestWithdrawalWaitsUntilTheStoreCannotAcceptAnyMore(t *testing.T) {
	var deadlines []time.Time
	lost := true
	log := &scriptedLog{}
	log.begin = func(ctx context.Context, r leaseclient.BeginRequest) (*leaseclient.Begun, error) {
		deadlines = append(deadlines, r.Deadline)
		if lost {
			return nil, &leaseclient.Error{Code: leaseclient.CodeOutcomeUnknown, Op: "begin"}
		}
		return begins(ctx, r)
	}
	scripted(t, log, nil, func(t *testing.T, c *Coordinator) {
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.Begin(ctx, refOf("k"), publishes("c1")); leaseclient.CodeOf(err) != leaseclient.CodeOutcomeUnknown {
			t.Fatalf("begin: %v", err)
		}
		for _, d := range deadlines {
			if d.Sub(start) != time.Second {
				t.Errorf("the store may accept it for %v, the caller had a second", d.Sub(start))
			}
		}
		deadlines, start = nil, time.Now()
		if _, err := c.Begin(t.Context(), refOf("k"), publishes("c2")); leaseclient.CodeOf(err) != leaseclient.CodeOutcomeUnknown {
			t.Fatalf("begin: %v", err)
		}
		for _, d := range deadlines {
			if d.Sub(start) > DefaultBound {
				t.Errorf("the store may accept it for %v, past the arrival bound", d.Sub(start))
			}
		}
		given := time.Now()
		lost = false
		if _, err := c.Begin(t.Context(), refOf("k"), publishes("c3")); err != nil {
			t.Fatalf("begin: %v", err)
		}
		log.mu.Lock()
		defer log.mu.Unlock()
		if len(log.endsAt) != 2 || log.endsAt[1].Sub(start) < DefaultBound || given.Sub(start) > DefaultBound+askMax {
			t.Errorf("withdrawn after %v, the answer came after %v; want the withdrawal past %v", log.endsAt, given.Sub(start), DefaultBound)
		}
		if id := log.ended[1].ID; id != "c2" || log.ended[1].Attempt == "" {
			t.Errorf("withdrew %+v", log.ended[1])
		}
	})
}

func TestEndingNamesItsAttempt(t *testing.T) {
	var attempts []string
	log := &scriptedLog{}
	log.begin = func(ctx context.Context, r leaseclient.BeginRequest) (*leaseclient.Begun, error) {
		attempts = append(attempts, r.Attempt)
		return begins(ctx, r)
	}
	scripted(t, log, nil, func(t *testing.T, c *Coordinator) {
		for range 2 {
			as, err := c.Begin(t.Context(), refOf("k"), publishes("c1"))
			if err != nil {
				t.Fatal(err)
			}
			c.End(as[0], leaseclient.OutcomeCancelled)
			synctest.Wait()
		}
		log.mu.Lock()
		defer log.mu.Unlock()
		if len(log.ended) != 2 || attempts[0] == attempts[1] || log.ended[0].Attempt != attempts[0] || log.ended[1].Attempt != attempts[1] {
			t.Errorf("attempts %v ended as %+v", attempts, log.ended)
		}
	})
}

func TestAnAttemptUnderWayIsNotJoined(t *testing.T) {
	asked := 0
	log := &scriptedLog{}
	log.begin = func(context.Context, leaseclient.BeginRequest) (*leaseclient.Begun, error) {
		asked++
		return nil, &leaseclient.Error{Code: leaseclient.CodeOutcomeUnknown, Op: "begin", Err: &leaseclient.InFlightError{}}
	}
	scripted(t, log, nil, func(t *testing.T, c *Coordinator) {
		_, err := c.Begin(t.Context(), refOf("k"), publishes("c1"))
		if _, ok := errors.AsType[*leaseclient.InFlightError](err); !ok || asked != 1 {
			t.Errorf("asked %d times: %v", asked, err)
		}
		synctest.Wait()
		if len(log.ended) != 0 {
			t.Errorf("withdrew what belongs to another attempt: %+v", log.ended)
		}
	})
}

func TestDamagedLockDoesNotHoldUpTheEndingsOfOthers(t *testing.T) {
	log := &scriptedLog{begin: begins}
	log.end = func(key string) error {
		if key != "good" {
			return &leaseclient.Error{Code: leaseclient.CodeUnavailable, Op: "end"}
		}
		return nil
	}
	scripted(t, log, nil, func(t *testing.T, c *Coordinator) {
		for _, key := range []string{"bad1", "bad2", "bad3", "bad4", "bad5", "bad6"} {
			as, err := c.Begin(t.Context(), refOf(key), publishes("c"))
			if err != nil {
				t.Fatal(err)
			}
			c.End(as[0], leaseclient.OutcomeConfirmed)
		}
		synctest.Wait()
		start := time.Now()
		as, err := c.Begin(t.Context(), refOf("good"), publishes("c"))
		if err != nil {
			t.Fatal(err)
		}
		c.End(as[0], leaseclient.OutcomeConfirmed)
		synctest.Wait()
		if len(log.ended) != 1 || time.Since(start) != 0 {
			t.Errorf("%d ended after %v", len(log.ended), time.Since(start))
		}
	})
}

func TestAbandonedCommitsAreSettledInOrder(t *testing.T) {
	// The first look at the log fails, so a settlement that does not wait for the
	// one before it would be through first.
	first := true
	log := &scriptedLog{begin: begins}
	log.claim = func(_ context.Context, r leaseclient.ClaimRequest) (*leaseclient.Claimed, error) {
		if first {
			first = false
			return nil, &leaseclient.Error{Code: leaseclient.CodeUnavailable, Op: "claim"}
		}
		out := &leaseclient.Claimed{Until: time.Hour}
		for _, id := range r.IDs {
			out.Entries = append(out.Entries, leaseclient.Entry{Commit: leaseclient.Commit{ID: id, Kind: leaseclient.KindPublish}})
		}
		return out, nil
	}
	r := &recorder{}
	scripted(t, log, r, func(t *testing.T, c *Coordinator) {
		var as []*Accepted
		for _, id := range []string{"c1", "c2", "c3"} {
			a, err := c.Begin(t.Context(), refOf("k"), publishes(id))
			if err != nil {
				t.Fatal(err)
			}
			as = append(as, a...)
		}
		var settlements []*Settlement
		for _, a := range as {
			settlements = append(settlements, c.Abandon(a))
		}
		for _, s := range settlements {
			s.Wait(t.Context())
		}
		if got := r.settled(); !slices.Equal(got, []string{"c1", "c2", "c3"}) {
			t.Errorf("settled %v", got)
		}
	})
}
