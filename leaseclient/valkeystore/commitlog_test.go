package valkeystore

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// commit is a small publish.
func commit(id string) leaseclient.Commit {
	return leaseclient.Commit{ID: "commit_" + id, Kind: leaseclient.KindPublish, Target: "ex key with spaces", Effect: []byte("effect \x00 of " + id)}
}

// beginRequest presents a lease.
func beginRequest(l leaseclient.Lease, commits ...leaseclient.Commit) leaseclient.BeginRequest {
	return leaseclient.BeginRequest{Ref: l.Ref(), Deadline: soon(), Commits: commits}
}

// begin expects acceptance.
func (f *fixture) begin(t testing.TB, l leaseclient.Lease, ids ...string) *leaseclient.Begun {
	t.Helper()
	var cs []leaseclient.Commit
	for _, id := range ids {
		cs = append(cs, commit(id))
	}
	b, err := f.Begin(t.Context(), beginRequest(l, cs...))
	if err != nil {
		t.Fatalf("begin %v: %v", ids, err)
	}
	return b
}

// end expects success.
func (f *fixture) end(t testing.TB, l leaseclient.Lease, claimer string, outcome leaseclient.Outcome, ids ...string) {
	t.Helper()
	var es []leaseclient.Ending
	for _, id := range ids {
		es = append(es, leaseclient.Ending{ID: "commit_" + id, Outcome: outcome})
	}
	if err := f.End(t.Context(), l.LockKey, claimer, es); err != nil {
		t.Fatalf("end %v: %v", ids, err)
	}
}

// claim asks for entries of a lease's lock.
func (f *fixture) claim(t testing.TB, l leaseclient.Lease, mode leaseclient.ClaimMode, claimer string, token uint64, ids ...string) *leaseclient.Claimed {
	t.Helper()
	var cs []string
	for _, id := range ids {
		cs = append(cs, "commit_"+id)
	}
	c, err := f.Claim(t.Context(), leaseclient.ClaimRequest{
		LockKey: l.LockKey, Mode: mode, Claimer: claimer, Token: token, IDs: cs, Deadline: soon(),
	})
	if err != nil {
		t.Fatalf("claim: %v", err)
	}
	return c
}

// logged returns what the log of a lock holds, in order.
func (f *fixture) logged(t testing.TB, id leaseclient.Identity) []string {
	t.Helper()
	v, err := f.raw(t, "ZRANGE", f.key(t, "logq", id), "0", "-1").AsStrSlice()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// age moves the not_after of every entry into the past.
func (f *fixture) age(t testing.TB, id leaseclient.Identity) {
	t.Helper()
	for cid, meta := range f.hash(t, f.key(t, "logm", id)) {
		p := strings.SplitN(meta, " ", 13)
		for _, i := range []int{3, 4} {
			n, err := strconv.ParseInt(p[i], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			p[i] = strconv.FormatInt(n-10_000, 10)
		}
		f.raw(t, "HSET", f.key(t, "logm", id), cid, strings.Join(p, " "))
	}
	f.raw(t, "ZADD", f.shardKey(t, "unsettled", id), "XX", "1", digestText(id.LockKey()))
}

func TestBeginAcceptsAndLogsTheEffect(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	b := f.begin(t, a.Lease, "1", "2")
	for i, c := range b.Commits {
		if c.Seq != uint64(i+1) || c.AcceptedAt != b.Now || c.NotAfter != b.Now.Add(5*time.Second) || c.ExpiresAt != a.Lease.ExpiresAt || c.Repeated || c.Prior != "" {
			t.Errorf("commit %d: %+v", i, c)
		}
	}
	fence := f.hash(t, f.key(t, "fence", id))
	if fence["hwm"] != "1" || fence["hwm_lease"] != a.Lease.LeaseID || fence["seq"] != "2" {
		t.Errorf("fence %v", fence)
	}
	if got := f.logged(t, id); !reflect.DeepEqual(got, []string{"commit_1", "commit_2"}) {
		t.Errorf("log %v", got)
	}
	f.age(t, id)
	c := f.claim(t, a.Lease, leaseclient.ClaimOwn, "me", 0, "1", "2")
	if len(c.Entries) != 2 {
		t.Fatalf("claimed %+v", c)
	}
	e := c.Entries[0]
	if e.ID != "commit_1" || string(e.Effect) != string(commit("1").Effect) || e.Target != commit("1").Target || e.Kind != leaseclient.KindPublish ||
		e.Identity != id || e.Token != 1 || e.LeaseID != a.Lease.LeaseID || e.ExecutionID != "execution_1" || e.TraceID != "trace_1" || e.ExpiresAt != a.Lease.ExpiresAt {
		t.Errorf("entry %+v", e)
	}
	f.end(t, a.Lease, "", leaseclient.OutcomeConfirmed, "1", "2")
	if got := f.logged(t, id); len(got) != 0 {
		t.Errorf("log %v", got)
	}
	if f.hash(t, f.key(t, "fence", id))["log_bytes"] != "0" || f.exists(t, f.key(t, "loge", id)) || f.exists(t, f.key(t, "logm", id)) {
		t.Error("something is left of the log")
	}
	if n, _ := f.raw(t, "ZCARD", f.shardKey(t, "unsettled", id)).AsInt64(); n != 0 {
		t.Error("the lock is still listed as unsettled")
	}
}

func TestBeginNeedsTheExactActiveLease(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	for name, change := range map[string]func(*leaseclient.Ref){
		"lease id":  func(r *leaseclient.Ref) { r.LeaseID = "lease_000_other" },
		"principal": func(r *leaseclient.Ref) { r.OwnerPrincipalID = "prn_two" },
		"token":     func(r *leaseclient.Ref) { r.Token = 2 },
		"identity":  func(r *leaseclient.Ref) { r.Identity = testIdentity("b"); r.LockKey = r.Identity.LockKey() },
	} {
		r := beginRequest(a.Lease, commit(name[:2]))
		change(&r.Ref)
		_, err := f.Begin(t.Context(), r)
		if leaseclient.CodeOf(err) != leaseclient.CodeLost {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := beginRequest(a.Lease, commit("x"))
	r.Ref.LockKey = testIdentity("b").LockKey()
	if _, err := f.Begin(t.Context(), r); leaseclient.CodeOf(err) != leaseclient.CodeInvalid {
		t.Errorf("foreign lock key: %v", err)
	}
	f.expire(t, a.Lease)
	_, err := f.Begin(t.Context(), beginRequest(a.Lease, commit("x")))
	wantCode(t, err, leaseclient.CodeLost)
	b := f.acquire(t, id, "two")
	_, err = f.Begin(t.Context(), beginRequest(a.Lease, commit("x")))
	wantCode(t, err, leaseclient.CodeLost)
	f.begin(t, b.Lease, "y")
	_, err = f.Begin(t.Context(), beginRequest(a.Lease, commit("x")))
	wantCode(t, err, leaseclient.CodeLost)
	if got := f.logged(t, id); !reflect.DeepEqual(got, []string{"commit_y"}) {
		t.Errorf("log %v", got)
	}
	f.release(t, b.Lease)
	_, err = f.Begin(t.Context(), beginRequest(b.Lease, commit("z")))
	wantCode(t, err, leaseclient.CodeLost)
}

func TestBeginIsIdempotentByCommitID(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	first := f.begin(t, a.Lease, "1", "2")
	again := f.begin(t, a.Lease, "1", "2")
	for i := range first.Commits {
		x, y := first.Commits[i], again.Commits[i]
		if !y.Repeated || x.Seq != y.Seq || x.AcceptedAt != y.AcceptedAt || x.NotAfter != y.NotAfter {
			t.Errorf("repeated %+v, want %+v", y, x)
		}
	}
	if got := f.logged(t, id); len(got) != 2 {
		t.Errorf("log %v", got)
	}
	other := commit("1")
	other.Effect = []byte("something else")
	_, err := f.Begin(t.Context(), beginRequest(a.Lease, other))
	wantCode(t, err, leaseclient.CodeIdempotencyConflict)

	// After its lease is gone it is still accepted, since it was.
	f.expire(t, a.Lease)
	if b := f.begin(t, a.Lease, "1"); !b.Commits[0].Repeated {
		t.Errorf("%+v", b.Commits[0])
	}
	_, err = f.Begin(t.Context(), beginRequest(a.Lease, commit("1"), commit("3")))
	wantCode(t, err, leaseclient.CodeLost)
	f.end(t, a.Lease, "", leaseclient.OutcomeConfirmed, "1")
	f.end(t, a.Lease, "", leaseclient.OutcomeCancelled, "2")
	c := f.acquire(t, id, "two")
	b := f.begin(t, c.Lease, "1", "2")
	if b.Commits[0].Prior != leaseclient.OutcomeConfirmed || b.Commits[1].Prior != "" || b.Commits[1].Repeated {
		t.Errorf("prior %+v", b.Commits)
	}
}

func TestFormerHolderCannotRideOnItsSuccessorsEntry(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.release(t, a.Lease)
	b := f.acquire(t, id, "two")
	f.begin(t, b.Lease, "shared")
	_, err := f.Begin(t.Context(), beginRequest(a.Lease, commit("shared")))
	wantCode(t, err, leaseclient.CodeLost)
}

func TestSuccessorBeginsOnlyWhenThePredecessorIsSettled(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.begin(t, a.Lease, "1", "2", "3")
	f.release(t, a.Lease)
	b := f.acquire(t, id, "two")
	_, err := f.Begin(t.Context(), beginRequest(b.Lease, commit("4")))
	u, ok := errors.AsType[*leaseclient.UnsettledError](err)
	if !ok || u.Count != 3 || u.Wait <= 0 || u.Wait > 5*time.Second {
		t.Fatalf("begin over unsettled: %v %+v", err, u)
	}
	// Nobody takes them before their time.
	c := f.claim(t, b.Lease, leaseclient.ClaimBefore, "x", b.Lease.Token)
	if len(c.Entries) != 0 || c.Settled || c.Wait <= 0 {
		t.Fatalf("claimed too early: %+v", c)
	}
	f.age(t, id)
	c = f.claim(t, b.Lease, leaseclient.ClaimBefore, "x", b.Lease.Token)
	var got []string
	for _, e := range c.Entries {
		got = append(got, e.ID)
	}
	if !reflect.DeepEqual(got, []string{"commit_1", "commit_2", "commit_3"}) {
		t.Fatalf("claimed %v", got)
	}
	// A claim keeps others away, and only its holder ends under it.
	if c := f.claim(t, b.Lease, leaseclient.ClaimSweep, "y", 0); len(c.Entries) != 0 || c.Wait <= 0 {
		t.Fatalf("two claims: %+v", c)
	}
	err = f.End(t.Context(), b.Lease.LockKey, "y", []leaseclient.Ending{{ID: "commit_1", Outcome: leaseclient.OutcomeConfirmed}})
	wantCode(t, err, leaseclient.CodeLost)
	f.end(t, b.Lease, "x", leaseclient.OutcomeConfirmed, "1", "2")
	if _, err := f.Begin(t.Context(), beginRequest(b.Lease, commit("4"))); err == nil {
		t.Fatal("began while one entry is left")
	}
	f.end(t, b.Lease, "x", leaseclient.OutcomeQuarantined, "3")
	if f.hash(t, f.key(t, "qtn", id))["commit_3"] == "" || f.hash(t, f.key(t, "qte", id))["commit_3"] != string(commit("3").Effect) {
		t.Error("the quarantined commit is not kept")
	}
	if c := f.claim(t, b.Lease, leaseclient.ClaimBefore, "x", b.Lease.Token); !c.Settled {
		t.Fatalf("not settled: %+v", c)
	}
	f.begin(t, b.Lease, "4")
}

func TestStaleHolderHearsThatItsLeaseIsLostBeforeAnythingElse(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.begin(t, a.Lease, "1", "2")
	f.end(t, a.Lease, "", leaseclient.OutcomeConfirmed, "1")
	f.release(t, a.Lease)
	b := f.acquire(t, id, "two")
	f.release(t, b.Lease)
	before := f.hash(t, f.key(t, "fence", id))
	for name, commits := range map[string][]leaseclient.Commit{
		"fresh":                         {commit("3")},
		"fresh beside one that ended":   {commit("1"), commit("3")},
		"an entry of its predecessor's": {commit("2")},
	} {
		if _, err := f.Begin(t.Context(), beginRequest(b.Lease, commits...)); leaseclient.CodeOf(err) != leaseclient.CodeLost {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What ended is still answered: the effect is where it is.
	if g := f.begin(t, b.Lease, "1"); g.Commits[0].Prior != leaseclient.OutcomeConfirmed {
		t.Errorf("%+v", g.Commits[0])
	}
	// The current holder settles first, also where it repeats only.
	c := f.acquire(t, id, "three")
	for name, commits := range map[string][]leaseclient.Commit{
		"fresh":                         {commit("3")},
		"an entry of its predecessor's": {commit("2")},
		"one that ended":                {commit("1")},
	} {
		_, err := f.Begin(t.Context(), beginRequest(c.Lease, commits...))
		if _, ok := errors.AsType[*leaseclient.UnsettledError](err); !ok {
			t.Errorf("%s of the current holder: %v", name, err)
		}
	}
	if got := f.logged(t, id); !reflect.DeepEqual(got, []string{"commit_2"}) {
		t.Errorf("log %v", got)
	}
	if got := f.hash(t, f.key(t, "fence", id)); got["hwm"] != before["hwm"] || got["seq"] != before["seq"] {
		t.Errorf("fence %v, want %v", got, before)
	}
}

func TestSweepLeavesAStandingLeaseAlone(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.begin(t, a.Lease, "1")
	listed := func() bool {
		d, err := leaseclient.ParseLockKey(id.LockKey())
		if err != nil {
			t.Fatal(err)
		}
		keys, _, err := f.Unsettled(t.Context(), shardOf(d, 4), leaseclient.UnsettledCursor{}, 10)
		if err != nil {
			t.Fatal(err)
		}
		return reflect.DeepEqual(keys, []string{id.LockKey()})
	}
	if listed() {
		t.Fatal("listed before its time")
	}
	f.age(t, id)
	if !listed() {
		t.Fatal("not listed")
	}
	c := f.claim(t, a.Lease, leaseclient.ClaimSweep, "s", 0)
	if len(c.Entries) != 0 || c.Settled || c.Wait <= 0 {
		t.Fatalf("swept a standing lease: %+v", c)
	}
	if listed() {
		t.Error("still listed after the sweeper looked: it would look at it for ever")
	}
	f.release(t, a.Lease)
	f.age(t, id)
	c = f.claim(t, a.Lease, leaseclient.ClaimSweep, "s", 0)
	if len(c.Entries) != 1 {
		t.Fatalf("not swept: %+v", c)
	}
	f.end(t, a.Lease, "s", leaseclient.OutcomeConfirmed, "1")
	// The sidecar that abandoned it learns how it ended.
	own := f.claim(t, a.Lease, leaseclient.ClaimOwn, "me", 0, "1", "never")
	if !own.Settled || own.Ended["commit_1"] != leaseclient.OutcomeConfirmed || len(own.Ended) != 1 {
		t.Errorf("own: %+v", own)
	}
}

func TestUnsettledLocksArePagedThrough(t *testing.T) {
	f := newFixture(t)
	list := fmt.Sprintf("{%s:s0}:unsettled", f.ns)
	// Most are of one time, more than a page holds, and stand in the order of
	// their bytes; the last is not due yet.
	var want []string
	for i := range 40 {
		key := testIdentity(fmt.Sprint("l", i)).LockKey()
		score := "1000"
		switch {
		case i < 3:
			score = fmt.Sprint(500 + i)
		case i >= 37:
			score = fmt.Sprint(1_700_000_000_000 + i)
		}
		f.raw(t, "ZADD", list, score, digestText(key))
	}
	f.raw(t, "ZADD", list, "9000000000000000", digestText(testIdentity("later").LockKey()))
	in, err := f.raw(t, "ZRANGE", list, "0", "39").AsStrSlice()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range in {
		want = append(want, leaseclient.LockKeyPrefix+d)
	}
	pages := func(size int, between func(page []string)) []string {
		t.Helper()
		var got []string
		var at leaseclient.UnsettledCursor
		for {
			page, next, err := f.Unsettled(t.Context(), 0, at, size)
			if err != nil {
				t.Fatal(err)
			}
			if len(page) > size {
				t.Fatalf("%d keys on a page of %d", len(page), size)
			}
			got = append(got, page...)
			if next == (leaseclient.UnsettledCursor{}) {
				return got
			}
			between(page)
			at = next
		}
	}
	for _, size := range []int{1, 7, 20, 40, 1000} {
		if got := pages(size, func([]string) {}); !reflect.DeepEqual(got, want) {
			t.Errorf("pages of %d: %d keys, want %d in their order", size, len(got), len(want))
		}
	}
	// What was settled leaves the list, and the next page is still the next.
	if got := pages(7, func(page []string) {
		for _, key := range page {
			f.raw(t, "ZREM", list, digestText(key))
		}
	}); !reflect.DeepEqual(got, want) {
		t.Errorf("with settled ones taken out: %d keys, want %d in their order", len(got), len(want))
	}
	_, _, err = f.Unsettled(t.Context(), 0, leaseclient.UnsettledCursor{Since: "x"}, 7)
	wantCode(t, err, leaseclient.CodeInvalid)
}

func TestClaimsRunOutAndAreGivenUp(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.ClaimTime = 50 * time.Millisecond })
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.begin(t, a.Lease, "1")
	f.release(t, a.Lease)
	f.age(t, id)
	if c := f.claim(t, a.Lease, leaseclient.ClaimSweep, "x", 0); len(c.Entries) != 1 {
		t.Fatalf("%+v", c)
	}
	deadline := time.Now().Add(5 * time.Second)
	for {
		c := f.claim(t, a.Lease, leaseclient.ClaimSweep, "y", 0)
		if len(c.Entries) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the claim never ran out")
		}
	}
	err := f.End(t.Context(), a.Lease.LockKey, "x", []leaseclient.Ending{{ID: "commit_1", Outcome: leaseclient.OutcomeConfirmed}})
	wantCode(t, err, leaseclient.CodeLost)
	if err := f.Unclaim(t.Context(), a.Lease.LockKey, "y"); err != nil {
		t.Fatal(err)
	}
	if c := f.claim(t, a.Lease, leaseclient.ClaimSweep, "z", 0); len(c.Entries) != 1 {
		t.Fatalf("%+v", c)
	}
}

func TestWithdrawalSparesAnotherAttempt(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	r := beginRequest(a.Lease, commit("1"))
	r.Attempt = "attempt_2"
	if _, err := f.Begin(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	withdraw := func(attempt string) {
		if err := f.End(t.Context(), a.Lease.LockKey, "", []leaseclient.Ending{{ID: "commit_1", Outcome: leaseclient.OutcomeCancelled, Attempt: attempt}}); err != nil {
			t.Fatal(err)
		}
	}
	withdraw("attempt_1")
	if got := f.logged(t, id); len(got) != 1 {
		t.Fatalf("log %v", got)
	}
	withdraw("attempt_2")
	if got := f.logged(t, id); len(got) != 0 {
		t.Fatalf("log %v", got)
	}
}

func TestEndedIDIsNotTakenForAnotherEffect(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.begin(t, a.Lease, "1", "2")
	f.end(t, a.Lease, "", leaseclient.OutcomeConfirmed, "1")
	f.end(t, a.Lease, "", leaseclient.OutcomeCancelled, "2")
	for name, change := range map[string]func(*leaseclient.Commit){
		"kind":   func(c *leaseclient.Commit) { c.Kind = leaseclient.KindDocument },
		"target": func(c *leaseclient.Commit) { c.Target += "x" },
		"effect": func(c *leaseclient.Commit) { c.Effect = append(c.Effect, 'x') },
		// The same bytes, cut elsewhere.
		"border": func(c *leaseclient.Commit) { c.Target, c.Effect = c.Target+string(c.Effect[:1]), c.Effect[1:] },
	} {
		c := commit("1")
		change(&c)
		if _, err := f.Begin(t.Context(), beginRequest(a.Lease, c, commit("3"))); leaseclient.CodeOf(err) != leaseclient.CodeIdempotencyConflict {
			t.Errorf("another %s: %v", name, err)
		}
	}
	if got := f.logged(t, id); len(got) != 0 {
		t.Errorf("log %v", got)
	}
	if b := f.begin(t, a.Lease, "1"); b.Commits[0].Prior != leaseclient.OutcomeConfirmed {
		t.Errorf("the same one: %+v", b.Commits[0])
	}
	// What was withdrawn was never done, so its id is free.
	withdrawn := commit("2")
	withdrawn.Effect = []byte("other")
	if _, err := f.Begin(t.Context(), beginRequest(a.Lease, withdrawn)); err != nil {
		t.Errorf("withdrawn: %v", err)
	}
	// Whose lease it was does not matter.
	f.end(t, a.Lease, "", leaseclient.OutcomeConfirmed, "2")
	f.release(t, a.Lease)
	b := f.acquire(t, id, "two")
	_, err := f.Begin(t.Context(), beginRequest(b.Lease, commit("2")))
	wantCode(t, err, leaseclient.CodeIdempotencyConflict)
}

func TestOpenIDIsNotTakenForAnotherEffect(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.begin(t, a.Lease, "1")
	before := f.hash(t, f.key(t, "logm", id))
	for name, change := range map[string]func(*leaseclient.Commit){
		"kind":   func(c *leaseclient.Commit) { c.Kind = leaseclient.KindDocument },
		"target": func(c *leaseclient.Commit) { c.Target += "x" },
		"effect": func(c *leaseclient.Commit) { c.Effect = nil },
	} {
		for _, attempt := range []string{"", "attempt_2"} {
			c := commit("1")
			change(&c)
			r := beginRequest(a.Lease, commit("2"), c)
			r.Attempt = attempt
			if _, err := f.Begin(t.Context(), r); leaseclient.CodeOf(err) != leaseclient.CodeIdempotencyConflict {
				t.Errorf("another %s of attempt %q: %v", name, attempt, err)
			}
		}
	}
	if got := f.hash(t, f.key(t, "logm", id)); !reflect.DeepEqual(got, before) {
		t.Errorf("log %v, want %v", got, before)
	}
}

func TestAnotherAttemptWaitsForTheOneInFlight(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	begin := func(attempt string, commits ...leaseclient.Commit) (*leaseclient.Begun, error) {
		r := beginRequest(a.Lease, commits...)
		r.Attempt = attempt
		return f.Begin(t.Context(), r)
	}
	if _, err := begin("attempt_1", commit("1")); err != nil {
		t.Fatal(err)
	}
	before := f.hash(t, f.key(t, "logm", id))
	inFlight := func(attempt string) *leaseclient.InFlightError {
		t.Helper()
		_, err := begin(attempt, commit("2"), commit("1"))
		wantCode(t, err, leaseclient.CodeOutcomeUnknown)
		e, ok := errors.AsType[*leaseclient.InFlightError](err)
		if !ok {
			t.Fatalf("another attempt: %v", err)
		}
		if ra := leaseclient.AsError(err).RetryAfter; ra < 100*time.Millisecond || ra > time.Second {
			t.Errorf("retry after %v", ra)
		}
		if got := f.hash(t, f.key(t, "logm", id)); len(got) != 1 {
			t.Errorf("log %v", got)
		}
		return e
	}
	if e := inFlight("attempt_2"); e.Wait <= 0 || e.Wait > 5*time.Second {
		t.Errorf("wait %v", e.Wait)
	}
	inFlight("")
	if got := f.hash(t, f.key(t, "logm", id)); !reflect.DeepEqual(got, before) {
		t.Errorf("log %v, want %v", got, before)
	}
	if b, err := begin("attempt_1", commit("1")); err != nil || !b.Commits[0].Repeated || b.Commits[0].Prior != "" {
		t.Errorf("the same attempt: %+v %v", b, err)
	}
	// The end of its time does not give it to the other one: whether it was sent
	// is for a settler to find out.
	f.age(t, id)
	if e := inFlight("attempt_2"); e.Wait != 0 {
		t.Errorf("wait %v", e.Wait)
	}
	c := f.claim(t, a.Lease, leaseclient.ClaimOwn, "me", 0, "1")
	if len(c.Entries) != 1 || c.Entries[0].Attempt != "attempt_1" {
		t.Fatalf("claimed %+v", c)
	}
	f.end(t, a.Lease, "me", leaseclient.OutcomeConfirmed, "1")
	b, err := begin("attempt_2", commit("2"), commit("1"))
	if err != nil || b.Commits[0].Repeated || b.Commits[1].Prior != leaseclient.OutcomeConfirmed {
		t.Fatalf("after its end: %+v %v", b, err)
	}
	// A withdrawn one is begun anew, by whoever asks.
	if err := f.End(t.Context(), a.Lease.LockKey, "", []leaseclient.Ending{{ID: "commit_2", Outcome: leaseclient.OutcomeCancelled, Attempt: "attempt_2"}}); err != nil {
		t.Fatal(err)
	}
	if b, err := begin("attempt_3", commit("2")); err != nil || b.Commits[0].Repeated {
		t.Fatalf("after its withdrawal: %+v %v", b, err)
	}
}

func TestLogIsBounded(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.MaxEntries, o.MaxBytes = 3, 1000 })
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.begin(t, a.Lease, "1", "2")
	_, err := f.Begin(t.Context(), beginRequest(a.Lease, commit("3"), commit("4")))
	wantCode(t, err, leaseclient.CodeRateLimited)
	if full, ok := errors.AsType[*leaseclient.LogFullError](err); !ok || full.Entries != 2 {
		t.Errorf("%v", err)
	}
	if got := f.logged(t, id); len(got) != 2 {
		t.Errorf("a refused batch left %v", got)
	}
	f.begin(t, a.Lease, "3")
	f.end(t, a.Lease, "", leaseclient.OutcomeConfirmed, "1", "2", "3")
	big := commit("big")
	big.Effect = make([]byte, 1001)
	_, err = f.Begin(t.Context(), beginRequest(a.Lease, big))
	wantCode(t, err, leaseclient.CodeRateLimited)
}

func TestClaimIsBoundedInBytesButNeverStuck(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	for i := range 5 {
		c := commit(fmt.Sprint(i))
		c.Effect = make([]byte, 1000)
		if _, err := f.Begin(t.Context(), beginRequest(a.Lease, c)); err != nil {
			t.Fatal(err)
		}
	}
	f.release(t, a.Lease)
	f.age(t, id)
	for _, tc := range []struct {
		bytes int64
		want  int
	}{{10, 1}, {2500, 2}, {1 << 20, 5}} {
		c, err := f.Claim(t.Context(), leaseclient.ClaimRequest{LockKey: a.Lease.LockKey, Mode: leaseclient.ClaimSweep, Claimer: "x", MaxBytes: tc.bytes, Deadline: soon()})
		if err != nil || len(c.Entries) != tc.want {
			t.Errorf("%d bytes: %d entries, %v", tc.bytes, len(c.Entries), err)
		}
	}
}

func TestEndingsAreForgottenInTime(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.begin(t, a.Lease, "old")
	f.end(t, a.Lease, "", leaseclient.OutcomeConfirmed, "old")
	f.raw(t, "ZADD", f.key(t, "doneq", id), "1", "commit_old")
	f.begin(t, a.Lease, "new")
	f.end(t, a.Lease, "", leaseclient.OutcomeConfirmed, "new")
	done := f.hash(t, f.key(t, "done", id))
	if len(done) != 1 || done["commit_new"] == "" {
		t.Errorf("remembered %v", done)
	}
}

func TestEndingsGoThroughWhenMemoryIsFull(t *testing.T) {
	f := ownServer(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.begin(t, a.Lease, "1")
	f.raw(t, "CONFIG", "SET", "maxmemory", "1")
	_, beginErr := f.Begin(t.Context(), beginRequest(a.Lease, commit("2")))
	_, acquireErr := f.Acquire(t.Context(), acquireRequest(testIdentity("b"), "one"))
	_, renewErr := f.Renew(t.Context(), renewRequest(a.Lease))
	endErr := f.End(t.Context(), a.Lease.LockKey, "", []leaseclient.Ending{{ID: "commit_1", Outcome: leaseclient.OutcomeConfirmed}})
	_, releaseErr := f.Release(t.Context(), releaseRequest(a.Lease))
	f.raw(t, "CONFIG", "SET", "maxmemory", "0")
	wantCode(t, beginErr, leaseclient.CodeUnavailable)
	wantCode(t, acquireErr, leaseclient.CodeUnavailable)
	for name, err := range map[string]error{"renew": renewErr, "end": endErr, "release": releaseErr} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := f.logged(t, id); len(got) != 0 {
		t.Errorf("log %v", got)
	}
}

func TestDamagedLogIsLeftAlone(t *testing.T) {
	f := newFixture(t)
	for name, damage := range map[string]func(id leaseclient.Identity){
		"meta missing": func(id leaseclient.Identity) { f.raw(t, "HDEL", f.key(t, "logm", id), "commit_1") },
		"digest malformed": func(id leaseclient.Identity) {
			key := f.key(t, "logm", id)
			p := strings.SplitN(f.hash(t, key)["commit_1"], " ", 14)
			p[8] = "x"
			f.raw(t, "HSET", key, "commit_1", strings.Join(p, " "))
		},
		"meta malformed": func(id leaseclient.Identity) { f.raw(t, "HSET", f.key(t, "logm", id), "commit_1", "1 x") },
		"queue type":     func(id leaseclient.Identity) { f.raw(t, "SET", f.key(t, "logq", id), "x") },
		"effects type":   func(id leaseclient.Identity) { f.raw(t, "SET", f.key(t, "loge", id), "x") },
	} {
		t.Run(name, func(t *testing.T) {
			id := testIdentity(strings.ReplaceAll(name, " ", "-"))
			a := f.acquire(t, id, "one")
			f.begin(t, a.Lease, "1", "2")
			f.age(t, id)
			damage(id)
			if _, err := f.Begin(t.Context(), beginRequest(a.Lease, commit("3"))); !errors.Is(err, ErrCorrupt) {
				t.Errorf("begin: %v", err)
			}
			_, err := f.Claim(t.Context(), leaseclient.ClaimRequest{LockKey: a.Lease.LockKey, Mode: leaseclient.ClaimBefore, Claimer: "x", Token: 9, Deadline: soon()})
			if !errors.Is(err, ErrCorrupt) {
				t.Errorf("claim: %v", err)
			}
		})
	}
	t.Run("counter gone", func(t *testing.T) {
		id := testIdentity("gone")
		a := f.acquire(t, id, "one")
		f.begin(t, a.Lease, "1")
		f.raw(t, "DEL", f.key(t, "fence", id), f.key(t, "lease", id))
		if _, err := f.Acquire(t.Context(), acquireRequest(id, "two")); !errors.Is(err, ErrCorrupt) {
			t.Errorf("acquire over a log without a counter: %v", err)
		}
	})
}

func TestHighWaterMarkOfAnotherLeaseUnderOneToken(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.raw(t, "HSET", f.key(t, "fence", id), "hwm", "1", "hwm_lease", "lease_000_other")
	_, err := f.Begin(t.Context(), beginRequest(a.Lease, commit("1")))
	if !errors.Is(err, ErrCorrupt) {
		t.Fatalf("begin: %v", err)
	}
}

func BenchmarkBegin(b *testing.B) {
	f := newFixture(b)
	a := f.acquire(b, testIdentity("bench"), "one")
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		id := fmt.Sprint("b", i)
		f.begin(b, a.Lease, id)
		f.end(b, a.Lease, "", leaseclient.OutcomeConfirmed, id)
	}
}
