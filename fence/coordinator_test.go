package fence

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/leaseclient/leasetest"
	"github.com/starintel/fencerider/leaseclient/valkeystore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bound is short here, so that a predecessor is soon past it.
const bound = 300 * time.Millisecond

// quarantined is how many commits a lock may have set aside here.
const quarantined = 2

// recorder is an effector that remembers what it was asked to finish.
type recorder struct {
	mu      sync.Mutex
	ids     []string
	answer  func(e leaseclient.Entry) (leaseclient.Outcome, error)
	blocked chan struct{}
}

// Settle implements [Effector].
func (r *recorder) Settle(ctx context.Context, entries []leaseclient.Entry) ([]leaseclient.Outcome, error) {
	if r.blocked != nil {
		select {
		case <-r.blocked:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []leaseclient.Outcome
	for _, e := range entries {
		if SettleLate(ctx) {
			return out, ErrSettleLate
		}
		o := leaseclient.OutcomeConfirmed
		if r.answer != nil {
			var err error
			if o, err = r.answer(e); err != nil {
				return out, err
			}
		}
		r.ids = append(r.ids, e.ID)
		out = append(out, o)
	}
	return out, nil
}

// settled returns what was finished so far.
func (r *recorder) settled() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.ids)
}

// bench is a namespace on the real store.
type bench struct {
	store *valkeystore.Store
	link  *leasetest.Link
	ns    string
}

// newBench makes a namespace that is reached over a link which can be cut.
func newBench(t *testing.T) *bench {
	t.Helper()
	raw := os.Getenv("FENCERIDER_TEST_VALKEY_URL")
	if raw == "" {
		t.Fatal("FENCERIDER_TEST_VALKEY_URL is not set: this test needs a real Valkey, `make test` starts one")
	}
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{ns: "fencerider-" + strings.ReplaceAll(leaseclient.NewID("t"), "_", "-"), link: leasetest.NewLink(t, u.Host)}
	u.Host = b.link.Addr()
	b.store, err = valkeystore.Open(valkeystore.Options{URL: u.String(), Namespace: b.ns, Bound: bound, ClaimTime: 3 * time.Second, MaxQuarantined: quarantined, CallTimeout: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.store.Close)
	if _, err := b.store.Init(t.Context(), valkeystore.InitOptions{Shards: 2}); err != nil {
		t.Fatal(err)
	}
	return b
}

// coordinator starts one that runs until the returned function is called, or the
// test ends.
func (b *bench) coordinator(t *testing.T, e Effector, sweep time.Duration) (*Coordinator, func()) {
	t.Helper()
	c, err := New(Options{
		Log: b.store, Bound: bound, SweepInterval: sweep,
		Effectors: map[leaseclient.Kind]Effector{leaseclient.KindPublish: e, leaseclient.KindDocument: e},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := c.Run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	}()
	stop := sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(stop)
	return c, stop
}

// acquire grants a lease on the test's target.
func (b *bench) acquire(t *testing.T, who string) leaseclient.Lease {
	t.Helper()
	return b.acquireOn(t, "x", who)
}

// acquireOn grants a lease on a target of its own.
func (b *bench) acquireOn(t *testing.T, target, who string) leaseclient.Lease {
	t.Helper()
	id, err := leaseclient.Identity{TenantID: "t", ProgramID: "p", TargetNamespace: "n", TargetID: target, ActorName: "a"}.Normalize()
	if err != nil {
		t.Fatal(err)
	}
	a, err := b.store.Acquire(t.Context(), leaseclient.AcquireRequest{
		Call: leaseclient.Call{RequestID: leaseclient.NewID("request"), Deadline: time.Now().Add(5 * time.Second)}, Identity: id,
		Owner:       leaseclient.Owner{PrincipalID: who, ClientID: who, CredentialID: who, InstanceID: who},
		ExecutionID: "e", JobID: "j", TraceID: "t",
	})
	if err != nil {
		t.Fatal(err)
	}
	return a.Lease
}

// release gives a lease back.
func (b *bench) release(t *testing.T, l leaseclient.Lease) {
	t.Helper()
	if _, err := b.store.Release(t.Context(), leaseclient.ReleaseRequest{
		Call: leaseclient.Call{RequestID: leaseclient.NewID("request"), Deadline: time.Now().Add(5 * time.Second)}, Identity: l.Identity,
		LeaseID: l.LeaseID, PrincipalID: l.PrincipalID, InstanceID: l.InstanceID, Token: l.Token,
	}); err != nil {
		t.Fatal(err)
	}
}

// publishes makes commits with the given ids.
func publishes(ids ...string) []leaseclient.Commit {
	var out []leaseclient.Commit
	for _, id := range ids {
		out = append(out, leaseclient.Commit{ID: id, Kind: leaseclient.KindPublish, Target: "t", Effect: []byte(id)})
	}
	return out
}

// begin expects acceptance.
func begin(t *testing.T, c *Coordinator, l leaseclient.Lease, ids ...string) []*Accepted {
	t.Helper()
	as, err := c.Begin(t.Context(), l.Ref(), publishes(ids...))
	if err != nil {
		t.Fatalf("begin %v: %v", ids, err)
	}
	return as
}

// eventually polls a condition, since the work behind it has no other signal.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for !f() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("not in time: %s", what)
		}
	}
}

// open counts the entries of a lock that others could settle, whatever their age.
func (b *bench) open(t *testing.T, l leaseclient.Lease, ids ...string) int {
	t.Helper()
	c, err := b.store.Claim(t.Context(), leaseclient.ClaimRequest{LockKey: l.LockKey, Mode: leaseclient.ClaimOwn, Claimer: "probe", IDs: ids, Deadline: time.Now().Add(5 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.store.Unclaim(t.Context(), l.LockKey, "probe"); err != nil {
		t.Fatal(err)
	}
	return len(c.Entries)
}

func TestBeginAndEnd(t *testing.T) {
	b := newBench(t)
	c, _ := b.coordinator(t, &recorder{}, -1)
	l := b.acquire(t, "one")
	as := begin(t, c, l, "c1", "c2")
	for _, a := range as {
		if a.Late() || a.Remaining() > bound || a.Stamp.Token != l.Token || a.Stamp.CommitID != a.Commit.ID || a.Stamp.NotAfter != a.Stamp.AcceptedAt.Add(bound) {
			t.Errorf("accepted %+v, remaining %v", a.Stamp, a.Remaining())
		}
		c.End(a, leaseclient.OutcomeConfirmed)
		c.End(a, leaseclient.OutcomeRefused)
	}
	if err := c.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := b.open(t, l, "c1", "c2"); n != 0 {
		t.Errorf("%d entries are left", n)
	}
	again := begin(t, c, l, "c1")
	if o, ok := again[0].Prior(); !ok || o != leaseclient.OutcomeConfirmed {
		t.Errorf("prior %q %v", o, ok)
	}
	eventually(t, "acceptance runs out", as[0].Late)
}

func TestSuccessorSettlesFirstAndInOrder(t *testing.T) {
	b := newBench(t)
	dead, stop := b.coordinator(t, &recorder{}, -1)
	first := b.acquire(t, "one")
	begin(t, dead, first, "a1", "a2", "a3")
	stop()
	b.release(t, first)

	r := &recorder{}
	c, _ := b.coordinator(t, r, -1)
	second := b.acquire(t, "two")
	as := begin(t, c, second, "b1")
	if got := r.settled(); !slices.Equal(got, []string{"a1", "a2", "a3"}) {
		t.Fatalf("settled %v before the first commit", got)
	}
	c.End(as[0], leaseclient.OutcomeConfirmed)
	// The former holder stays out.
	_, err := c.Begin(t.Context(), first.Ref(), publishes("a4"))
	if leaseclient.CodeOf(err) != leaseclient.CodeLost {
		t.Fatalf("former holder: %v", err)
	}
}

func TestSuccessorWaitsForAnEffectorThatFailsAtFirst(t *testing.T) {
	b := newBench(t)
	dead, stop := b.coordinator(t, &recorder{}, -1)
	first := b.acquire(t, "one")
	begin(t, dead, first, "a1", "a2")
	stop()
	b.release(t, first)

	failures := 3
	r := &recorder{}
	r.answer = func(e leaseclient.Entry) (leaseclient.Outcome, error) {
		if e.ID == "a2" && failures > 0 {
			failures--
			return "", errors.New("down")
		}
		if e.ID == "a2" {
			return leaseclient.OutcomeQuarantined, nil
		}
		return leaseclient.OutcomeConfirmed, nil
	}
	c, _ := b.coordinator(t, r, -1)
	second := b.acquire(t, "two")
	begin(t, c, second, "b1")
	if got := r.settled(); !slices.Equal(got, []string{"a1", "a2"}) {
		t.Fatalf("settled %v", got)
	}
}

func TestBeginGivesUpWithItsContextWhileAPredecessorIsUnsettled(t *testing.T) {
	b := newBench(t)
	dead, stop := b.coordinator(t, &recorder{}, -1)
	first := b.acquire(t, "one")
	begin(t, dead, first, "a1")
	stop()
	b.release(t, first)
	r := &recorder{blocked: make(chan struct{})}
	c, _ := b.coordinator(t, r, -1)
	second := b.acquire(t, "two")
	ctx, cancel := context.WithTimeout(t.Context(), bound+200*time.Millisecond)
	defer cancel()
	_, err := c.Begin(ctx, second.Ref(), publishes("b1"))
	if leaseclient.CodeOf(err) != leaseclient.CodeDeadlineExceeded {
		t.Fatalf("begin: %v", err)
	}
	if n := b.open(t, second, "b1"); n != 0 {
		t.Error("something was accepted")
	}
	close(r.blocked)
	begin(t, c, second, "b2")
}

func TestLostAnswerOfBeginIsResolvedByItsIDs(t *testing.T) {
	b := newBench(t)
	c, _ := b.coordinator(t, &recorder{}, -1)
	l := b.acquire(t, "one")
	b.link.LoseAnswers(true)
	go func() {
		<-b.link.Dropped()
		b.link.LoseAnswers(false)
	}()
	as := begin(t, c, l, "c1")
	if n := b.open(t, l, "c1"); n != 1 {
		t.Fatalf("%d entries", n)
	}
	if as[0].Remaining() > bound {
		t.Errorf("remaining %v", as[0].Remaining())
	}
	c.End(as[0], leaseclient.OutcomeConfirmed)
}

func TestUnknownBeginIsWithdrawnBeforeAnythingElse(t *testing.T) {
	b := newBench(t)
	r := &recorder{}
	c, _ := b.coordinator(t, r, -1)
	l := b.acquire(t, "one")
	b.link.LoseAnswers(true)
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	_, err := c.Begin(ctx, l.Ref(), publishes("c1"))
	if leaseclient.CodeOf(err) != leaseclient.CodeOutcomeUnknown {
		t.Fatalf("begin: %v", err)
	}
	b.link.LoseAnswers(false)
	as := begin(t, c, l, "c2")
	if n := b.open(t, l, "c1"); n != 0 {
		t.Error("the withdrawn commit is still in the log after a later one began")
	}
	c.End(as[0], leaseclient.OutcomeConfirmed)
	if got := r.settled(); len(got) != 0 {
		t.Errorf("settled %v", got)
	}
}

func TestUnknownBeginIsNotAskedAboutForLongerThanItCouldBeSent(t *testing.T) {
	b := newBench(t)
	c, _ := b.coordinator(t, &recorder{}, -1)
	l := b.acquire(t, "one")
	b.link.LoseAnswers(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := c.Begin(ctx, l.Ref(), publishes("c1"))
	if leaseclient.CodeOf(err) != leaseclient.CodeOutcomeUnknown || ctx.Err() != nil {
		t.Fatalf("begin: %v", err)
	}
	b.link.LoseAnswers(false)
	begin(t, c, l, "c2")
}

func TestStoreDownIsUnavailable(t *testing.T) {
	b := newBench(t)
	c, _ := b.coordinator(t, &recorder{}, -1)
	l := b.acquire(t, "one")
	b.link.Down(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	// The first call may still find the old connection breaking under it.
	_, err := c.Begin(ctx, l.Ref(), publishes("c1"))
	if code := leaseclient.CodeOf(err); code != leaseclient.CodeUnavailable && code != leaseclient.CodeOutcomeUnknown {
		t.Fatalf("begin: %v", err)
	}
	b.link.Down(false)
	eventually(t, "the store takes commits again", func() bool {
		as, err := c.Begin(t.Context(), l.Ref(), publishes(leaseclient.NewID("c")))
		if err != nil {
			return false
		}
		c.End(as[0], leaseclient.OutcomeConfirmed)
		return true
	})
}

func TestAbandonSettlesAtOnceAndHoldsLaterCommits(t *testing.T) {
	b := newBench(t)
	r := &recorder{blocked: make(chan struct{})}
	c, _ := b.coordinator(t, r, -1)
	l := b.acquire(t, "one")
	as := begin(t, c, l, "c1", "c2")
	s := c.Abandon(as...)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if got := s.Wait(ctx); !slices.Equal(got, []leaseclient.Outcome{leaseclient.OutcomeUnknown, leaseclient.OutcomeUnknown}) {
		t.Fatalf("outcomes %v", got)
	}
	if _, err := c.Begin(ctx, l.Ref(), publishes("c3")); leaseclient.CodeOf(err) != leaseclient.CodeDeadlineExceeded {
		t.Fatalf("a later commit overtook: %v", err)
	}
	close(r.blocked)
	if got := s.Wait(t.Context()); !slices.Equal(got, []leaseclient.Outcome{leaseclient.OutcomeConfirmed, leaseclient.OutcomeConfirmed}) {
		t.Fatalf("outcomes %v", got)
	}
	begin(t, c, l, "c4")
	if got := r.settled(); !slices.Equal(got, []string{"c1", "c2"}) {
		t.Errorf("settled %v", got)
	}
}

func TestAbandonedCommitThatASuccessorFinished(t *testing.T) {
	b := newBench(t)
	mine := &recorder{}
	c, _ := b.coordinator(t, mine, -1)
	l := b.acquire(t, "one")
	as := begin(t, c, l, "c1")
	b.release(t, l)
	theirs := &recorder{}
	d, _ := b.coordinator(t, theirs, -1)
	begin(t, d, b.acquire(t, "two"), "d1")
	if got := c.Abandon(as...).Wait(t.Context()); got[0] != leaseclient.OutcomeConfirmed {
		t.Errorf("outcome %v", got)
	}
	if len(mine.settled()) != 0 || !slices.Equal(theirs.settled(), []string{"c1"}) {
		t.Errorf("finished by itself %v, by the successor %v", mine.settled(), theirs.settled())
	}
}

func TestAFullQuarantineDoesNotBlockTheLock(t *testing.T) {
	b := newBench(t)
	r := &recorder{answer: func(leaseclient.Entry) (leaseclient.Outcome, error) { return leaseclient.OutcomeQuarantined, nil }}
	c, _ := b.coordinator(t, r, -1)
	l := b.acquire(t, "one")
	var got []leaseclient.Outcome
	for i := range quarantined + 2 {
		got = append(got, c.Abandon(begin(t, c, l, fmt.Sprint("c", i))...).Wait(t.Context())...)
	}
	want := []leaseclient.Outcome{leaseclient.OutcomeQuarantined, leaseclient.OutcomeQuarantined, leaseclient.OutcomeRefused, leaseclient.OutcomeRefused}
	if !slices.Equal(got, want) {
		t.Errorf("outcomes %v", got)
	}
	begin(t, c, l, "next")
}

func TestSweeperFinishesWhatNobodyTakes(t *testing.T) {
	b := newBench(t)
	dead, stop := b.coordinator(t, &recorder{}, -1)
	l := b.acquire(t, "one")
	begin(t, dead, l, "a1", "a2")
	stop()
	r := &recorder{}
	b.coordinator(t, r, 50*time.Millisecond)
	b.coordinator(t, r, 50*time.Millisecond)
	eventually(t, "acceptance is past its bound", func() bool {
		keys := 0
		for shard := range 2 {
			ks, _, err := b.store.Unsettled(t.Context(), shard, leaseclient.UnsettledCursor{}, 10)
			if err != nil {
				t.Fatal(err)
			}
			keys += len(ks)
		}
		return keys == 1 || len(r.settled()) > 0 || b.lookedAt(t, l)
	})
	if got := r.settled(); len(got) != 0 {
		t.Fatalf("swept while the lease stands: %v", got)
	}
	b.release(t, l)
	// The lease ended early, so its place in the list is after its natural end.
	// A successor would not wait for the sweeper; here the list is what the
	// sweeper would see then.
	d, _ := b.coordinator(t, r, -1)
	begin(t, d, b.acquire(t, "two"), "b1")
	if got := r.settled(); !slices.Equal(got, []string{"a1", "a2"}) {
		t.Fatalf("settled %v", got)
	}
}

// lookedAt reports whether the sweeper has put the lock off to its lease's end.
func (b *bench) lookedAt(t *testing.T, l leaseclient.Lease) bool {
	t.Helper()
	c, err := b.store.Claim(t.Context(), leaseclient.ClaimRequest{LockKey: l.LockKey, Mode: leaseclient.ClaimSweep, Claimer: "probe", Deadline: time.Now().Add(5 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	return c.Wait > 5*time.Second
}

func TestSweeperAfterRelease(t *testing.T) {
	b := newBench(t)
	dead, stop := b.coordinator(t, &recorder{}, -1)
	l := b.acquire(t, "one")
	var want []string
	for i := range 150 {
		id := fmt.Sprintf("a%03d", i)
		want = append(want, id)
		begin(t, dead, l, id)
	}
	stop()
	b.release(t, l)
	r := &recorder{}
	b.coordinator(t, r, 50*time.Millisecond)
	b.coordinator(t, r, 50*time.Millisecond)
	eventually(t, "everything is swept", func() bool { return len(r.settled()) >= len(want) })
	if got := r.settled(); !slices.Equal(got, want) {
		t.Fatalf("swept %d in another order or twice", len(got))
	}
}

func TestLocksThatCannotBeSettledDoNotKeepTheSweeperFromOthers(t *testing.T) {
	b := newBench(t)
	dead, stop := b.coordinator(t, &recorder{}, -1)
	// Two shards get more of them than one page holds, and they wait longest.
	for i := range 2*sweepPage + 50 {
		l := b.acquireOn(t, fmt.Sprint("stuck", i), "one")
		begin(t, dead, l, fmt.Sprint("stuck", i))
		b.release(t, l)
	}
	var want []string
	for i := range 4 {
		l := b.acquireOn(t, fmt.Sprint("good", i), "one")
		want = append(want, fmt.Sprint("good", i))
		begin(t, dead, l, want[i])
		b.release(t, l)
	}
	stop()
	r := &recorder{answer: func(e leaseclient.Entry) (leaseclient.Outcome, error) {
		if strings.HasPrefix(e.ID, "stuck") {
			return "", errors.New("down")
		}
		return leaseclient.OutcomeConfirmed, nil
	}}
	b.coordinator(t, r, 50*time.Millisecond)
	eventually(t, "those that can be settled are", func() bool { return len(r.settled()) >= len(want) })
	got := r.settled()
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("settled %v", got)
	}
}

func TestConcurrentBeginsKeepTheirOrder(t *testing.T) {
	b := newBench(t)
	c, _ := b.coordinator(t, &recorder{}, -1)
	l := b.acquire(t, "one")
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			as, err := c.Begin(t.Context(), l.Ref(), publishes(fmt.Sprint("c", i)))
			if err != nil {
				t.Error(err)
				return
			}
			c.End(as[0], leaseclient.OutcomeConfirmed)
		})
	}
	wg.Wait()
	if err := c.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c.Open() != 0 || len(c.lanes) != 0 {
		t.Errorf("%d open, %d lanes left", c.Open(), len(c.lanes))
	}
}
