package valkeystore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/leaseclient/leasetest"
)

func TestAcquireGrantsAndKeepsTheWholeRecord(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	r := acquireRequest(id, "one")
	a, err := f.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	l := a.Lease
	if a.Replayed || a.Current != leaseclient.StateActive || l.Token != 1 || l.Identity != id || l.Owner != r.Owner {
		t.Fatalf("unexpected grant %+v", a)
	}
	if l.ExpiresAt != l.AcquiredAt.Add(30*time.Second) || l.RenewedAt != l.AcquiredAt || l.AcquiredAt != a.Now {
		t.Errorf("times %v %v %v now %v", l.AcquiredAt, l.RenewedAt, l.ExpiresAt, a.Now)
	}
	if l.TTLMillis != 30_000 || l.MaxLifetimeMillis != 3_600_000 || !reflect.DeepEqual(l.Metadata, r.Metadata) {
		t.Errorf("record %+v", l)
	}
	in, err := f.Inspect(t.Context(), leaseclient.InspectRequest{Identity: id, Deadline: soon()})
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(in.Lease, l) {
		t.Errorf("inspected %+v, want %+v", in.Lease, l)
	}
	if got := len(f.hash(t, f.key(t, "lease", id))); got != recordFields {
		t.Errorf("record has %d fields, want %d", got, recordFields)
	}
	pttl, err := f.raw(t, "PTTL", f.key(t, "lease", id)).AsInt64()
	if err != nil || pttl < 30_000 || pttl > 30_000+reclamation.Milliseconds() {
		t.Errorf("physical TTL %d ms, %v", pttl, err)
	}
	if pttl, _ := f.raw(t, "PTTL", f.key(t, "fence", id)).AsInt64(); pttl != -1 {
		t.Errorf("the counter has a TTL of %d ms", pttl)
	}
}

func TestAcquireConflictChangesNothing(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	f.acquire(t, id, "one")
	before := f.hash(t, f.key(t, "lease", id))
	r := acquireRequest(id, "two")
	_, err := f.Acquire(t.Context(), r)
	wantCode(t, err, leaseclient.CodeConflict)
	if ra := leaseclient.AsError(err).RetryAfter; ra <= 0 || ra > 500*time.Millisecond {
		t.Errorf("retry after %v", ra)
	}
	if got := f.hash(t, f.key(t, "lease", id)); !reflect.DeepEqual(got, before) {
		t.Errorf("record changed: %v", got)
	}
	if n := f.counter(t, id); n != 1 {
		t.Errorf("counter %d, want 1", n)
	}
	if strings.Contains(err.Error(), "prn_one") {
		t.Errorf("conflict names the owner: %v", err)
	}
}

func TestTokensGrowAndSurviveEveryEnd(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	var last uint64
	ids := map[string]bool{}
	for i := range 6 {
		a := f.acquire(t, id, fmt.Sprint("w", i))
		if a.Lease.Token <= last || ids[a.Lease.LeaseID] {
			t.Fatalf("token %d after %d, lease %s", a.Lease.Token, last, a.Lease.LeaseID)
		}
		last, ids[a.Lease.LeaseID] = a.Lease.Token, true
		switch i % 3 {
		case 0:
			f.release(t, a.Lease)
		case 1:
			f.expire(t, a.Lease)
		case 2: // reclaimed by the server
			f.raw(t, "DEL", f.key(t, "lease", id))
		}
	}
	if n := f.counter(t, id); n != last {
		t.Errorf("counter %d, want %d", n, last)
	}
}

func TestAcquireReplayReturnsTheFirstResult(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	r := acquireRequest(id, "one")
	first, err := f.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	renewed, err := f.Renew(t.Context(), renewRequest(first.Lease))
	if err != nil {
		t.Fatal(err)
	}
	again, err := f.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if !again.Replayed || again.Current != leaseclient.StateActive || !reflect.DeepEqual(again.Lease, first.Lease) {
		t.Errorf("replay %+v, want %+v", again, first)
	}
	// The replay renewed nothing.
	in, err := f.Inspect(t.Context(), leaseclient.InspectRequest{Identity: id, Deadline: soon()})
	if err != nil || in.Lease.ExpiresAt != renewed.Lease.ExpiresAt {
		t.Errorf("after replay expires %v, want %v (%v)", in.Lease.ExpiresAt, renewed.Lease.ExpiresAt, err)
	}
	// A deadline that has passed does not hide a mutation that has happened.
	late := r
	late.Deadline = time.Now().Add(-time.Minute)
	if again, err := f.Acquire(t.Context(), late); err != nil || again.Lease.LeaseID != first.Lease.LeaseID {
		t.Errorf("late replay: %v", err)
	}
	other := r
	other.JobID = "job_2"
	_, err = f.Acquire(t.Context(), other)
	wantCode(t, err, leaseclient.CodeIdempotencyConflict)

	f.release(t, first.Lease)
	again, err = f.Acquire(t.Context(), r)
	if err != nil || again.Current != leaseclient.StateReleased || again.Lease.Token != first.Lease.Token {
		t.Fatalf("replay after release: %+v %v", again, err)
	}
	if f.exists(t, f.key(t, "lease", id)) {
		t.Error("a replay made a record")
	}
	// A successor is not touched by it either.
	second := f.acquire(t, id, "two")
	again, err = f.Acquire(t.Context(), r)
	if err != nil || again.Current != leaseclient.StateReleased {
		t.Fatalf("replay beside a successor: %+v %v", again, err)
	}
	if n := f.counter(t, id); n != second.Lease.Token {
		t.Errorf("counter %d, want %d", n, second.Lease.Token)
	}
}

func TestAcquireReplayProvesThatTheGrantIsOnDisk(t *testing.T) {
	f := ownServer(t)
	id := testIdentity("a")
	// This server never says that its log is on disk.
	f.raw(t, "CONFIG", "SET", "appendfsync", "no")
	// Each has connections of its own, as after a connection was lost, and the
	// last of them is used twice.
	var stores []*Store
	for range 2 {
		s, err := Open(Options{URL: f.opts.URL, Namespace: f.ns})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		if err := s.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		stores = append(stores, s)
	}
	r := acquireRequest(id, "one")
	for i, s := range []*Store{f.Store, stores[0], stores[1], stores[1]} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := s.Acquire(ctx, r)
		cancel()
		if leaseclient.CodeOf(err) != leaseclient.CodeOutcomeUnknown {
			t.Fatalf("attempt %d on a server that does not write to disk: %v", i, err)
		}
		if f.counter(t, id) != 1 {
			t.Fatalf("attempt %d: counter %d", i, f.counter(t, id))
		}
	}
	key := f.shardKey(t, "idem:"+requestName("acquire", digestText(id.LockKey()), r.Owner.PrincipalID, r.RequestID), id)
	result, ends := f.hash(t, key), f.ends(t, key)
	f.raw(t, "CONFIG", "SET", "appendfsync", "always")
	a, err := stores[1].Acquire(t.Context(), r)
	if err != nil || !a.Replayed || a.Lease.Token != 1 || a.Lease.LeaseID != result["lease_id"] {
		t.Fatalf("once it does: %+v %v", a, err)
	}
	// The replay wrote, and nothing is different.
	if got := f.hash(t, key); !reflect.DeepEqual(got, result) || f.ends(t, key) != ends {
		t.Errorf("the first result is %v, was %v", got, result)
	}
}

func TestAcquireReplayOfAnExpiredLease(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	r := acquireRequest(id, "one")
	first, err := f.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	f.expire(t, first.Lease)
	again, err := f.Acquire(t.Context(), r)
	if err != nil || !again.Replayed || again.Current != leaseclient.StateExpired {
		t.Fatalf("%+v %v", again, err)
	}
	f.acquire(t, id, "two")
	again, err = f.Acquire(t.Context(), r)
	if err != nil || again.Current != leaseclient.StateExpired {
		t.Fatalf("%+v %v", again, err)
	}
}

func TestConcurrentAcquiresHaveOneWinner(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	const workers = 20
	for round := range 10 {
		var wg sync.WaitGroup
		var mu sync.Mutex
		var won []leaseclient.Lease
		for w := range workers {
			wg.Go(func() {
				a, err := f.Acquire(t.Context(), acquireRequest(id, fmt.Sprint("w", w)))
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					won = append(won, a.Lease)
				} else if leaseclient.CodeOf(err) != leaseclient.CodeConflict {
					t.Errorf("acquire: %v", err)
				}
			})
		}
		wg.Wait()
		if len(won) != 1 {
			t.Fatalf("round %d: %d winners", round, len(won))
		}
		if want := uint64(round + 1); won[0].Token != want || f.counter(t, id) != want {
			t.Fatalf("round %d: token %d, counter %d", round, won[0].Token, f.counter(t, id))
		}
		f.release(t, won[0])
	}
}

func TestRenewExtendsWithinTheLifetimeOnly(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	r := acquireRequest(id, "one")
	r.TTL, r.MaxLifetime = 20*time.Second, 25*time.Second
	a, err := f.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	// Move the record into the past, so that the next renewal meets the limit.
	for _, name := range []string{"acquired_at", "renewed_at", "expires_at"} {
		f.raw(t, "HINCRBY", f.key(t, "lease", id), name, "-10000")
	}
	q := renewRequest(a.Lease)
	n, err := f.Renew(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	if n.Lease.ExpiresAt != a.Lease.AcquiredAt.Add(15*time.Second) || n.Lease.Token != a.Lease.Token || n.Lease.RenewedAt != n.Now {
		t.Errorf("renewed %+v", n.Lease)
	}
	again, err := f.Renew(t.Context(), q)
	if err != nil || !again.Replayed || again.Lease.ExpiresAt != n.Lease.ExpiresAt || again.Lease.RenewedAt != n.Lease.RenewedAt || again.Lease.LeaseID != n.Lease.LeaseID {
		t.Errorf("replay %+v %v", again, err)
	}
	other := q
	other.Token++
	_, err = f.Renew(t.Context(), other)
	wantCode(t, err, leaseclient.CodeIdempotencyConflict)

	results := f.shardKey(t, "rnw:"+a.Lease.LeaseID, id)
	before := len(f.hash(t, results))
	once := renewRequest(a.Lease)
	once.Once = true
	if _, err := f.Renew(t.Context(), once); err != nil {
		t.Fatal(err)
	}
	if n := len(f.hash(t, results)); n != before || n != 1 {
		t.Errorf("%d results are remembered, then %d", before, n)
	}
}

func TestRenewAndReleaseNeedEveryField(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	before := f.hash(t, f.key(t, "lease", id))
	for name, change := range map[string]func(*leaseclient.RenewRequest){
		"lease id":  func(r *leaseclient.RenewRequest) { r.LeaseID = "lease_000_other" },
		"principal": func(r *leaseclient.RenewRequest) { r.PrincipalID = "prn_two" },
		"instance":  func(r *leaseclient.RenewRequest) { r.InstanceID = "instance_two" },
		"token":     func(r *leaseclient.RenewRequest) { r.Token++ },
		"identity":  func(r *leaseclient.RenewRequest) { r.Identity = testIdentity("b") },
	} {
		r := renewRequest(a.Lease)
		change(&r)
		_, err := f.Renew(t.Context(), r)
		if leaseclient.CodeOf(err) != leaseclient.CodeLost {
			t.Errorf("renew with another %s: %v", name, err)
		}
		q := leaseclient.ReleaseRequest{
			Call: leaseclient.Call{RequestID: leaseclient.NewID("request"), Deadline: soon()}, Identity: r.Identity,
			LeaseID: r.LeaseID, PrincipalID: r.PrincipalID, InstanceID: r.InstanceID, Token: r.Token,
		}
		_, err = f.Release(t.Context(), q)
		if leaseclient.CodeOf(err) != leaseclient.CodeLost {
			t.Errorf("release with another %s: %v", name, err)
		}
	}
	if got := f.hash(t, f.key(t, "lease", id)); !reflect.DeepEqual(got, before) {
		t.Errorf("record changed: %v", got)
	}
}

func TestNothingRevivesAnExpiredLease(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.expire(t, a.Lease)
	_, err := f.Renew(t.Context(), renewRequest(a.Lease))
	wantCode(t, err, leaseclient.CodeLost)
	_, err = f.Release(t.Context(), releaseRequest(a.Lease))
	wantCode(t, err, leaseclient.CodeLost)
	in, err := f.Inspect(t.Context(), leaseclient.InspectRequest{Identity: id, Deadline: soon()})
	if err != nil || in.Lease.State != leaseclient.StateExpired {
		t.Fatalf("inspect: %+v %v", in, err)
	}
	b := f.acquire(t, id, "two")
	_, err = f.Release(t.Context(), releaseRequest(a.Lease))
	wantCode(t, err, leaseclient.CodeLost)
	_, err = f.Renew(t.Context(), renewRequest(a.Lease))
	wantCode(t, err, leaseclient.CodeLost)
	in, err = f.Inspect(t.Context(), leaseclient.InspectRequest{Identity: id, Deadline: soon()})
	if err != nil || in.Lease.LeaseID != b.Lease.LeaseID || in.Lease.State != leaseclient.StateActive {
		t.Fatalf("successor: %+v %v", in, err)
	}
}

func TestReleaseKeepsEvidence(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	r := releaseRequest(a.Lease)
	first, err := f.Release(t.Context(), r)
	if err != nil || first.Lease.State != leaseclient.StateReleased || first.Replayed {
		t.Fatalf("%+v %v", first, err)
	}
	if f.exists(t, f.key(t, "lease", id)) {
		t.Error("the record is still there")
	}
	ev := f.hash(t, f.shardKey(t, "lid:"+a.Lease.LeaseID, id))
	if ev["state"] != "released" || ev["ended_at"] != strconv.FormatInt(int64(first.Now), 10) {
		t.Errorf("evidence %v", ev)
	}
	if n, _ := f.raw(t, "LLEN", f.key(t, "hist", id)).AsInt64(); n != 1 {
		t.Errorf("history has %d entries", n)
	}
	b := f.acquire(t, id, "two")
	again, err := f.Release(t.Context(), r)
	if err != nil || !again.Replayed || again.Lease.LeaseID != a.Lease.LeaseID {
		t.Fatalf("replay %+v %v", again, err)
	}
	if got := f.hash(t, f.key(t, "lease", id))["lease_id"]; got != b.Lease.LeaseID {
		t.Errorf("replayed release touched the successor: %s", got)
	}
}

// ends returns when a key leaves the server by itself.
func (f *fixture) ends(t testing.TB, key string) int64 {
	t.Helper()
	at, err := f.raw(t, "PEXPIRETIME", key).AsInt64()
	if err != nil || at < 0 {
		t.Fatalf("%s ends at %d, %v", key, at, err)
	}
	return at
}

func TestEvidenceOutlivesEveryResultThatPointsAtIt(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	idem := func(op, principal, request string) string {
		return f.shardKey(t, "idem:"+requestName(op, digestText(id.LockKey()), principal, request), id)
	}
	r := acquireRequest(id, "one")
	a, err := f.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	evidence := f.shardKey(t, "lid:"+a.Lease.LeaseID, id)
	check := func(what, result string) {
		t.Helper()
		if lid, res := f.ends(t, evidence), f.ends(t, result); lid < res {
			t.Errorf("%s: the evidence ends %v before the result", what, time.Duration(res-lid)*time.Millisecond)
		}
	}
	check("acquired", idem("acquire", r.Owner.PrincipalID, r.RequestID))
	if _, err := f.Renew(t.Context(), renewRequest(a.Lease)); err != nil {
		t.Fatal(err)
	}
	check("renewed", f.shardKey(t, "rnw:"+a.Lease.LeaseID, id))
	long := f.ends(t, evidence) + 1_000_000
	f.raw(t, "PEXPIREAT", evidence, strconv.FormatInt(long, 10))
	if _, err := f.Renew(t.Context(), renewRequest(a.Lease)); err != nil {
		t.Fatal(err)
	}
	if got := f.ends(t, evidence); got != long {
		t.Errorf("a renewal moved the end of the evidence from %d to %d", long, got)
	}
	// As if most of the lease's life had passed.
	f.raw(t, "PEXPIRE", evidence, "60000")
	q := releaseRequest(a.Lease)
	if _, err := f.Release(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	check("released", idem("release", q.PrincipalID, q.RequestID))
}

func TestEvidenceThatIsMadeAnewEnds(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	for name, end := range map[string]func(l leaseclient.Lease){
		"expired":  func(l leaseclient.Lease) { f.expire(t, l); f.release(t, f.acquire(t, id, "two").Lease) },
		"released": func(l leaseclient.Lease) { f.release(t, l) },
	} {
		a := f.acquire(t, id, "one")
		evidence := f.shardKey(t, "lid:"+a.Lease.LeaseID, id)
		f.raw(t, "DEL", evidence)
		end(a.Lease)
		if got := f.hash(t, evidence)["state"]; got != name {
			t.Errorf("%s: evidence of state %q", name, got)
		}
		f.ends(t, evidence)
	}
}

func TestHistoryIsBounded(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	for range 105 {
		f.release(t, f.acquire(t, id, "one").Lease)
	}
	if n, _ := f.raw(t, "LLEN", f.key(t, "hist", id)).AsInt64(); n != 100 {
		t.Errorf("history has %d entries, want 100", n)
	}
}

func TestDeadlineIsJudgedByTheScript(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	r := acquireRequest(id, "one")
	r.Deadline = time.Now().Add(-time.Millisecond)
	_, err := f.Acquire(t.Context(), r)
	wantCode(t, err, leaseclient.CodeDeadlineExceeded)
	if f.counter(t, id) != 0 {
		t.Error("the counter moved")
	}
	_, err = f.Acquire(dead(), acquireRequest(id, "one"))
	wantCode(t, err, leaseclient.CodeDeadlineExceeded)
	a := f.acquire(t, id, "one")
	q := renewRequest(a.Lease)
	q.Deadline = time.Now().Add(-time.Second)
	_, err = f.Renew(t.Context(), q)
	wantCode(t, err, leaseclient.CodeDeadlineExceeded)
	late := releaseRequest(a.Lease)
	late.Deadline = q.Deadline
	_, err = f.Release(t.Context(), late)
	wantCode(t, err, leaseclient.CodeDeadlineExceeded)
}

func TestLostAnswerIsUnknownAndTheRequestIDResolvesIt(t *testing.T) {
	raw := serverURL(t, "FENCERIDER_TEST_VALKEY_URL")
	link := leasetest.NewLink(t, addrOf(t, raw))
	f := newFixture(t, func(o *Options) { o.URL = strings.Replace(raw, addrOf(t, raw), link.Addr(), 1) })
	id := testIdentity("a")
	for i := range 5 {
		r := acquireRequest(id, "one")
		// The connections stand; only the answer of this call gets lost.
		if err := f.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		link.LoseAnswers(true)
		_, err := f.Acquire(t.Context(), r)
		link.LoseAnswers(false)
		if code := leaseclient.CodeOf(err); code != leaseclient.CodeOutcomeUnknown {
			// The very first dedicated connection is lost in its handshake.
			if code != leaseclient.CodeUnavailable {
				t.Fatalf("round %d: %v", i, err)
			}
		}
		a, err := f.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		if want := uint64(i + 1); a.Lease.Token != want || f.counter(t, id) != want {
			t.Fatalf("round %d: token %d, counter %d", i, a.Lease.Token, f.counter(t, id))
		}
		b, err := f.Acquire(t.Context(), r)
		if err != nil || b.Lease.LeaseID != a.Lease.LeaseID || b.Lease.Token != a.Lease.Token {
			t.Fatalf("round %d: %+v %v", i, b, err)
		}
		f.release(t, a.Lease)
	}
}

func TestStoreOutOfReach(t *testing.T) {
	raw := serverURL(t, "FENCERIDER_TEST_VALKEY_URL")
	link := leasetest.NewLink(t, addrOf(t, raw))
	f := newFixture(t, func(o *Options) {
		o.URL = strings.Replace(raw, addrOf(t, raw), link.Addr(), 1)
		o.CallTimeout = 2 * time.Second
	})
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	link.Down(true)
	_, err := f.Acquire(t.Context(), acquireRequest(id, "two"))
	if c := leaseclient.CodeOf(err); c != leaseclient.CodeUnavailable && c != leaseclient.CodeOutcomeUnknown {
		t.Fatalf("acquire while down: %v", err)
	}
	for _, text := range []string{leaseclient.AsError(err).Public()} {
		if strings.Contains(text, "127.0.0.1") || strings.Contains(text, "dial") {
			t.Errorf("public text shows the backend: %s", text)
		}
	}
	if err := f.Ready(t.Context()); err == nil {
		t.Error("ready while down")
	}
	link.Down(false)
	if _, err := f.Renew(t.Context(), renewRequest(a.Lease)); err != nil {
		t.Fatalf("renew after the link came back: %v", err)
	}
	// An address where nothing listens is refused before anything was sent.
	o := Options{URL: "valkey://127.0.0.1:1", Namespace: f.ns}
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = s.Acquire(t.Context(), acquireRequest(id, "two"))
	wantCode(t, err, leaseclient.CodeUnavailable)
}

func TestNamespaceMustExistAndBeReady(t *testing.T) {
	f := rawFixture(t)
	id := testIdentity("a")
	_, err := f.Acquire(t.Context(), acquireRequest(id, "one"))
	wantCode(t, err, leaseclient.CodeUnavailable)
	made, err := f.Init(t.Context(), InitOptions{Shards: 4})
	if err != nil || !made {
		t.Fatalf("init: %v %v", made, err)
	}
	made, err = f.Init(t.Context(), InitOptions{Shards: 4})
	if err != nil || made {
		t.Fatalf("init again: %v %v", made, err)
	}
	_, err = f.Init(t.Context(), InitOptions{Shards: 8})
	if !errors.Is(err, ErrInitConflict) {
		t.Fatalf("init with other settings: %v", err)
	}
	a := f.acquire(t, id, "one")
	marker := f.shardKey(t, "marker", id)
	whole := f.hash(t, marker)
	for name, change := range map[string]func(){
		"recovering": func() { f.raw(t, "HSET", marker, "state", "recovering") },
		"version":    func() { f.raw(t, "HSET", marker, "version", "2") },
		"no epoch":   func() { f.raw(t, "HDEL", marker, "epoch") },
		"gone":       func() { f.raw(t, "DEL", marker) },
		"wrong type": func() { f.raw(t, "DEL", marker); f.raw(t, "SET", marker, "x") },
	} {
		change()
		if _, err := f.Renew(t.Context(), renewRequest(a.Lease)); leaseclient.CodeOf(err) != leaseclient.CodeUnavailable {
			t.Errorf("renew with marker %s: %v", name, err)
		}
		if _, err := f.Acquire(t.Context(), acquireRequest(testIdentity("a"), "two")); leaseclient.CodeOf(err) != leaseclient.CodeUnavailable {
			t.Errorf("acquire with marker %s: %v", name, err)
		}
		f.raw(t, "DEL", marker)
		for k, v := range whole {
			f.raw(t, "HSET", marker, k, v)
		}
	}
	if _, err := f.Renew(t.Context(), renewRequest(a.Lease)); err != nil {
		t.Errorf("renew after the marker is whole again: %v", err)
	}
}

func TestHalfMadeNamespaceIsFinished(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	gen := f.hash(t, fmt.Sprintf("{%s:s3}:marker", f.ns))["generation"]
	f.raw(t, "DEL", fmt.Sprintf("{%s:s0}:marker", f.ns), fmt.Sprintf("{%s:s0}:marker", f.ns))
	f.forgetLayout(nil)
	_, err := f.Acquire(t.Context(), acquireRequest(id, "one"))
	wantCode(t, err, leaseclient.CodeUnavailable)
	if made, err := f.Init(t.Context(), InitOptions{Shards: 4}); err != nil || !made {
		t.Fatalf("init: %v %v", made, err)
	}
	if got := f.hash(t, fmt.Sprintf("{%s:s0}:marker", f.ns))["generation"]; got != gen {
		t.Errorf("generation %s, want %s", got, gen)
	}
	f.acquire(t, id, "one")
}

// damages are ways to break one field of a record.
var damages = map[string]func(t *testing.T, f *fixture, key, field string){
	"missing":   func(t *testing.T, f *fixture, key, field string) { f.raw(t, "HDEL", key, field) },
	"malformed": func(t *testing.T, f *fixture, key, field string) { f.raw(t, "HSET", key, field, "-1x\x00") },
}

func TestDamagedRecordsAreLeftAloneAndNothingIsGranted(t *testing.T) {
	f := newFixture(t)
	// A malformed opaque text is a valid text; these are compared or computed.
	opaque := map[string]bool{
		"lease_id": true, "owner_principal_id": true, "owner_client_id": true, "owner_credential_id": true,
		"service_instance_id": true, "execution_id": true, "job_id": true, "trace_id": true, "request_id": true, "metadata": true,
	}
	n := 0
	check := func(t *testing.T, kind, field, damage string) {
		n++
		id := testIdentity(fmt.Sprint("d", n))
		a := f.acquire(t, id, "one")
		key := f.key(t, kind, id)
		damages[damage](t, f, key, field)
		before := f.hash(t, key)
		_, err := f.Acquire(t.Context(), acquireRequest(id, "two"))
		if leaseclient.CodeOf(err) != leaseclient.CodeUnavailable || !errors.Is(err, ErrCorrupt) {
			t.Errorf("acquire: %v", err)
		}
		if _, err := f.Renew(t.Context(), renewRequest(a.Lease)); !errors.Is(err, ErrCorrupt) {
			t.Errorf("renew: %v", err)
		}
		if _, err := f.Release(t.Context(), releaseRequest(a.Lease)); !errors.Is(err, ErrCorrupt) {
			t.Errorf("release: %v", err)
		}
		if _, err := f.Inspect(t.Context(), leaseclient.InspectRequest{Identity: id, Deadline: soon()}); !errors.Is(err, ErrCorrupt) {
			t.Errorf("inspect: %v", err)
		}
		if _, err := f.Begin(t.Context(), beginRequest(a.Lease, commit("x"))); !errors.Is(err, ErrCorrupt) {
			t.Errorf("begin: %v", err)
		}
		if got := f.hash(t, key); !reflect.DeepEqual(got, before) {
			t.Errorf("the record was changed: %v", got)
		}
		if f.hash(t, f.shardKey(t, "corrupt", id))[digestText(id.LockKey())] == "" {
			t.Error("not listed as corrupt")
		}
	}
	for _, field := range wireFields(t) {
		for damage := range damages {
			if damage == "malformed" && opaque[field] {
				continue
			}
			t.Run("lease/"+field+"/"+damage, func(t *testing.T) { check(t, "lease", field, damage) })
		}
	}
	for _, field := range []string{"v", "lock_key", "identity", "token", "hwm", "hwm_lease", "seq", "log_bytes", "created_at"} {
		for damage := range damages {
			if field == "hwm_lease" && damage == "malformed" {
				continue
			}
			t.Run("fence/"+field+"/"+damage, func(t *testing.T) { check(t, "fence", field, damage) })
		}
	}
}

func TestOtherDamages(t *testing.T) {
	f := newFixture(t)
	for name, c := range map[string]func(t *testing.T, id leaseclient.Identity, l leaseclient.Lease){
		"record never expires": func(t *testing.T, id leaseclient.Identity, _ leaseclient.Lease) {
			f.raw(t, "PERSIST", f.key(t, "lease", id))
		},
		"unknown field": func(t *testing.T, id leaseclient.Identity, _ leaseclient.Lease) {
			f.raw(t, "HSET", f.key(t, "lease", id), "extra", "1")
		},
		"wrong type": func(t *testing.T, id leaseclient.Identity, _ leaseclient.Lease) {
			f.raw(t, "SET", f.key(t, "lease", id), "x")
		},
		"counter of wrong type": func(t *testing.T, id leaseclient.Identity, _ leaseclient.Lease) {
			f.raw(t, "SET", f.key(t, "fence", id), "x")
		},
		"counter gone": func(t *testing.T, id leaseclient.Identity, _ leaseclient.Lease) {
			f.raw(t, "DEL", f.key(t, "fence", id))
		},
		"counter behind the record": func(t *testing.T, id leaseclient.Identity, _ leaseclient.Lease) {
			f.raw(t, "HSET", f.key(t, "fence", id), "token", "9")
		},
		"lives too long": func(t *testing.T, id leaseclient.Identity, l leaseclient.Lease) {
			f.raw(t, "HSET", f.key(t, "lease", id), "expires_at", strconv.FormatInt(int64(l.AcquiredAt)+l.MaxLifetimeMillis+1, 10))
		},
		"terminal state in place": func(t *testing.T, id leaseclient.Identity, _ leaseclient.Lease) {
			f.raw(t, "HSET", f.key(t, "lease", id), "state", "released")
		},
	} {
		t.Run(name, func(t *testing.T) {
			id := testIdentity(strings.ReplaceAll(name, " ", "-"))
			a := f.acquire(t, id, "one")
			c(t, id, a.Lease)
			_, err := f.Acquire(t.Context(), acquireRequest(id, "two"))
			if !errors.Is(err, ErrCorrupt) {
				t.Errorf("acquire: %v", err)
			}
			if _, err := f.Begin(t.Context(), beginRequest(a.Lease, commit("x"))); !errors.Is(err, ErrCorrupt) {
				t.Errorf("begin: %v", err)
			}
		})
	}
	t.Run("idempotency result", func(t *testing.T) {
		id := testIdentity("idem")
		r := acquireRequest(id, "one")
		if _, err := f.Acquire(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		key := f.shardKey(t, "idem:"+requestName("acquire", digestText(id.LockKey()), r.Owner.PrincipalID, r.RequestID), id)
		for _, field := range []string{"op", "digest", "lease_id", "acquired_at", "expires_at"} {
			whole := f.hash(t, key)[field]
			f.raw(t, "HDEL", key, field)
			if _, err := f.Acquire(t.Context(), r); !errors.Is(err, ErrCorrupt) {
				t.Errorf("%s missing: %v", field, err)
			}
			f.raw(t, "HSET", key, field, whole)
		}
		if ttl, _ := f.raw(t, "PTTL", key).AsInt64(); time.Duration(ttl)*time.Millisecond < 24*time.Hour {
			t.Errorf("result is kept for %d ms only", ttl)
		}
	})
}

func TestTokenCeilingAndEpochs(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.release(t, a.Lease)
	f.raw(t, "HSET", f.key(t, "fence", id), "token", strconv.FormatUint(leaseclient.MaxToken-1, 10))
	a = f.acquire(t, id, "one")
	if a.Lease.Token != leaseclient.MaxToken {
		t.Fatalf("token %d, want the last one", a.Lease.Token)
	}
	f.release(t, a.Lease)
	_, err := f.Acquire(t.Context(), acquireRequest(id, "one"))
	if leaseclient.CodeOf(err) != leaseclient.CodeUnavailable || !errors.Is(err, ErrExhausted) {
		t.Fatalf("at the ceiling: %v", err)
	}
	if f.counter(t, id) != leaseclient.MaxToken {
		t.Error("the counter moved past the ceiling")
	}

	g := rawFixture(t)
	if _, err := g.Init(t.Context(), InitOptions{Shards: 4, Epoch: 3}); err != nil {
		t.Fatal(err)
	}
	if got := g.acquire(t, id, "one").Lease.Token; got != 3<<leaseclient.EpochShift+1 {
		t.Errorf("token %d in epoch 3", got)
	}
}

func TestVolatileServerIsRefused(t *testing.T) {
	f := ownServer(t)
	id := testIdentity("a")
	was, err := f.raw(t, "CONFIG", "GET", "maxmemory-policy").AsStrMap()
	if err != nil {
		t.Fatal(err)
	}
	f.raw(t, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
	err = f.Ready(t.Context())
	f.raw(t, "CONFIG", "SET", "maxmemory-policy", was["maxmemory-policy"])
	if leaseclient.CodeOf(err) != leaseclient.CodeUnavailable || !errors.Is(err, ErrVolatile) {
		t.Fatalf("ready on an evicting server: %v", err)
	}
	f.acquire(t, id, "one")
}

func TestPolicyBoundsTimes(t *testing.T) {
	f := newFixture(t)
	for name, change := range map[string]func(*leaseclient.AcquireRequest){
		"too short":       func(r *leaseclient.AcquireRequest) { r.TTL = time.Second },
		"too long":        func(r *leaseclient.AcquireRequest) { r.TTL = 301 * time.Second },
		"lifetime":        func(r *leaseclient.AcquireRequest) { r.MaxLifetime = 25 * time.Hour },
		"no deadline":     func(r *leaseclient.AcquireRequest) { r.Deadline = time.Time{} },
		"no request id":   func(r *leaseclient.AcquireRequest) { r.RequestID = "" },
		"raw identity":    func(r *leaseclient.AcquireRequest) { r.Identity.TargetID = "Upper" },
		"secret metadata": func(r *leaseclient.AcquireRequest) { r.Metadata = map[string]any{"api_key": "x"} },
	} {
		r := acquireRequest(testIdentity("a"), "one")
		change(&r)
		if _, err := f.Acquire(t.Context(), r); leaseclient.CodeOf(err) != leaseclient.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTimesAreWholeMilliseconds(t *testing.T) {
	p := leaseclient.DefaultTimePolicy()
	p.MinTTL = 0
	f := newFixture(t, func(o *Options) { o.Policy = p })
	id := testIdentity("a")
	for name, change := range map[string]func(*leaseclient.AcquireRequest){
		"ttl":               func(r *leaseclient.AcquireRequest) { r.TTL = time.Millisecond - 1 },
		"ttl and lifetime":  func(r *leaseclient.AcquireRequest) { r.TTL, r.MaxLifetime = time.Microsecond, time.Microsecond },
		"negative ttl":      func(r *leaseclient.AcquireRequest) { r.TTL = -1 },
		"negative lifetime": func(r *leaseclient.AcquireRequest) { r.MaxLifetime = -1 },
	} {
		r := acquireRequest(id, "one")
		change(&r)
		if _, err := f.Acquire(t.Context(), r); leaseclient.CodeOf(err) != leaseclient.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
		if f.exists(t, f.key(t, "lease", id)) || f.counter(t, id) != 0 {
			t.Fatalf("%s: something was written", name)
		}
	}
	r := acquireRequest(id, "one")
	r.TTL, r.MaxLifetime = 2*time.Millisecond-1, 2*time.Millisecond-1
	a, err := f.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if a.Lease.TTLMillis != 1 || a.Lease.MaxLifetimeMillis != 1 || a.Lease.ExpiresAt != a.Lease.AcquiredAt+1 {
		t.Errorf("%+v", a.Lease)
	}
	if _, err := f.Inspect(t.Context(), leaseclient.InspectRequest{Identity: id, Deadline: soon()}); err != nil {
		t.Errorf("inspect: %v", err)
	}
	if f.exists(t, f.shardKey(t, "corrupt", id)) {
		t.Error("listed as corrupt")
	}
}

// wireFields reads the order of fields out of the prelude.
func wireFields(t *testing.T) []string {
	t.Helper()
	b, err := os.ReadFile("scripts/prelude.lua")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?s)local FIELDS = \{(.*?)\}`).FindSubmatch(b)
	if m == nil {
		t.Fatal("prelude has no FIELDS")
	}
	var out []string
	for _, q := range regexp.MustCompile(`'([a-z_]+)'`).FindAllSubmatch(m[1], -1) {
		out = append(out, string(q[1]))
	}
	if len(out) != recordFields {
		t.Fatalf("prelude names %d fields, decodeLease reads %d", len(out), recordFields)
	}
	return out
}

func TestCallsEndWithTheirContext(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	<-ctx.Done()
	_, err := f.Renew(ctx, renewRequest(f.acquire(t, testIdentity("a"), "one").Lease))
	wantCode(t, err, leaseclient.CodeDeadlineExceeded)
}

// busy occupies every dedicated connection until the returned function is
// called: acquisitions whose answers do not come.
func busy(t *testing.T, f *fixture) func() {
	t.Helper()
	f.raw(t, "CLIENT", "PAUSE", "60000", "WRITE")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range maxDedicated {
		wg.Go(func() { _, _ = f.Acquire(ctx, acquireRequest(testIdentity(fmt.Sprint("busy", i)), "one")) })
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for {
		info, err := f.raw(t, "INFO", "clients").ToString()
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(info, fmt.Sprintf("\nblocked_clients:%d\r", maxDedicated)) {
			break
		}
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("the connections are not all occupied: %s", info)
		}
	}
	return func() {
		cancel()
		wg.Wait()
		f.raw(t, "CLIENT", "UNPAUSE")
	}
}

func TestAcquireWaitsForAConnectionOnlyAsLongAsItMay(t *testing.T) {
	f := ownServer(t)
	id := testIdentity("a")
	free := busy(t, f)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	sent := time.Now()
	_, err := f.Acquire(ctx, acquireRequest(id, "one"))
	took := time.Since(sent)
	free()
	// Nothing was sent, so nothing is unknown.
	wantCode(t, err, leaseclient.CodeDeadlineExceeded)
	if took > 2*time.Second {
		t.Errorf("it took %v", took)
	}
	if f.counter(t, id) != 0 {
		t.Error("something was granted")
	}
	f.acquire(t, id, "one")
}
