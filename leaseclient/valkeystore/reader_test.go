package valkeystore

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

func TestInspectByLeaseIDFollowsItToItsEnd(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	inspect := func(leaseID string) (*leaseclient.Inspected, error) {
		return f.Inspect(t.Context(), leaseclient.InspectRequest{LeaseID: leaseID, Deadline: soon()})
	}
	a := f.acquire(t, id, "one")
	n, err := f.Renew(t.Context(), renewRequest(a.Lease))
	if err != nil {
		t.Fatal(err)
	}
	in, err := inspect(a.Lease.LeaseID)
	if err != nil || !reflect.DeepEqual(in.Lease, n.Lease) {
		t.Fatalf("active: %+v %v, want %+v", in, err, n.Lease)
	}
	f.release(t, a.Lease)
	b := f.acquire(t, id, "two")
	if in, err = inspect(a.Lease.LeaseID); err != nil || in.Lease.State != leaseclient.StateReleased || in.Lease.Token != a.Lease.Token {
		t.Fatalf("released: %+v %v", in, err)
	}
	f.expire(t, b.Lease)
	if in, err = inspect(b.Lease.LeaseID); err != nil || in.Lease.State != leaseclient.StateExpired {
		t.Fatalf("expired: %+v %v", in, err)
	}
	for _, none := range []string{"lease_000_nothinghere", "lease_fff_nothinghere", "other"} {
		_, err = inspect(none)
		wantCode(t, err, leaseclient.CodeNotFound)
	}
	_, err = f.Inspect(t.Context(), leaseclient.InspectRequest{LeaseID: a.Lease.LeaseID, Identity: id, Deadline: soon()})
	wantCode(t, err, leaseclient.CodeInvalid)
	f.raw(t, "HDEL", f.shardKey(t, "lid:"+a.Lease.LeaseID, id), "lock_key")
	if _, err := inspect(a.Lease.LeaseID); leaseclient.CodeOf(err) != leaseclient.CodeUnavailable {
		t.Errorf("evidence without a lock key: %v", err)
	}
}

// adoptRequest is what a dispatch envelope says of a lease.
func adoptRequest(l leaseclient.Lease) leaseclient.AdoptRequest {
	return leaseclient.AdoptRequest{
		LockKey: l.LockKey, LeaseID: l.LeaseID, Token: l.Token, ExpiresAt: l.ExpiresAt,
		ExecutionID: l.ExecutionID, TraceID: l.TraceID, Deadline: soon(),
	}
}

func TestAdoptComparesEveryPartOfTheEnvelope(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	before := f.hash(t, f.key(t, "lease", id))
	got, err := f.Adopt(t.Context(), adoptRequest(a.Lease))
	if err != nil || !reflect.DeepEqual(got.Lease, a.Lease) {
		t.Fatalf("adopt: %+v %v", got, err)
	}
	for name, change := range map[string]func(*leaseclient.AdoptRequest){
		"lock":       func(r *leaseclient.AdoptRequest) { r.LockKey = testIdentity("b").LockKey() },
		"lease id":   func(r *leaseclient.AdoptRequest) { r.LeaseID = "lease_000_other" },
		"token":      func(r *leaseclient.AdoptRequest) { r.Token++ },
		"expires_at": func(r *leaseclient.AdoptRequest) { r.ExpiresAt++ },
		"execution":  func(r *leaseclient.AdoptRequest) { r.ExecutionID = "execution_2" },
		"trace":      func(r *leaseclient.AdoptRequest) { r.TraceID = "trace_2" },
	} {
		r := adoptRequest(a.Lease)
		change(&r)
		if _, err := f.Adopt(t.Context(), r); leaseclient.CodeOf(err) != leaseclient.CodeLost {
			t.Errorf("with another %s: %v", name, err)
		}
	}
	// A renewal since the envelope was sent is no difference.
	f.raw(t, "HINCRBY", f.key(t, "lease", id), "expires_at", "-5")
	if _, err := f.Renew(t.Context(), renewRequest(a.Lease)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Adopt(t.Context(), adoptRequest(a.Lease)); err != nil {
		t.Errorf("after a renewal: %v", err)
	}
	after := f.hash(t, f.key(t, "lease", id))
	delete(before, "renewed_at")
	delete(before, "expires_at")
	delete(after, "renewed_at")
	delete(after, "expires_at")
	if !reflect.DeepEqual(after, before) {
		t.Errorf("adoption changed the record: %v", after)
	}
	f.expire(t, a.Lease)
	_, err = f.Adopt(t.Context(), adoptRequest(a.Lease))
	wantCode(t, err, leaseclient.CodeLost)
}

func TestAdoptRefusesARecordOfAnotherIdentity(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.raw(t, "HSET", f.key(t, "lease", id), "target_id", "b")
	if _, err := f.Adopt(t.Context(), adoptRequest(a.Lease)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("adopt: %v", err)
	}
}

// collect reads a listing page by page.
func (f *fixture) collect(t *testing.T, r leaseclient.ListRequest) (leases []leaseclient.Lease, pages int) {
	t.Helper()
	for {
		r.Deadline = soon()
		p, err := f.List(t.Context(), r)
		if err != nil {
			t.Fatalf("list: %v", err)
		}
		pages++
		leases = append(leases, p.Leases...)
		if r.Limit > 0 && len(p.Leases) > r.Limit {
			t.Fatalf("page of %d, want at most %d", len(p.Leases), r.Limit)
		}
		if p.Next == "" {
			return leases, pages
		}
		r.Cursor = p.Next
	}
}

func TestListingsAreCompleteStableAndPaged(t *testing.T) {
	f := newFixture(t)
	const n = 23
	var all []leaseclient.Lease
	for i := range n {
		id := testIdentity(fmt.Sprint("t", i%5))
		id.ActorName = fmt.Sprint("actor-", i)
		all = append(all, f.acquire(t, id, fmt.Sprint("w", i%3)).Lease)
	}
	other := testIdentity("t1")
	other.ProgramID = "program-b"
	f.acquire(t, other, "w1")

	program := leaseclient.ListRequest{By: leaseclient.ListByProgram, TenantID: "tenant-main", ProgramID: "program-a"}
	owner := program
	owner.By, owner.PrincipalID = leaseclient.ListByOwner, "prn_w1"
	target := program
	target.By, target.TargetNamespace, target.TargetID = leaseclient.ListByTarget, "ns", "t2"
	for name, c := range map[string]struct {
		r    leaseclient.ListRequest
		want func(l leaseclient.Lease) bool
	}{
		"program": {program, func(leaseclient.Lease) bool { return true }},
		"owner":   {owner, func(l leaseclient.Lease) bool { return l.PrincipalID == "prn_w1" }},
		"target":  {target, func(l leaseclient.Lease) bool { return l.TargetID == "t2" }},
	} {
		t.Run(name, func(t *testing.T) {
			want := map[string]leaseclient.Lease{}
			for _, l := range all {
				if c.want(l) {
					want[l.LeaseID] = l
				}
			}
			whole, _ := f.collect(t, c.r)
			c.r.Limit = 2
			paged, pages := f.collect(t, c.r)
			if !reflect.DeepEqual(whole, paged) {
				t.Errorf("the order depends on the size of the page")
			}
			if pages < len(want)/2 {
				t.Errorf("%d leases in %d pages of 2", len(want), pages)
			}
			if len(whole) != len(want) {
				t.Fatalf("%d leases, want %d", len(whole), len(want))
			}
			for _, l := range whole {
				if !reflect.DeepEqual(l, want[l.LeaseID]) {
					t.Errorf("listed %+v, want %+v", l, want[l.LeaseID])
				}
			}
		})
	}

	// What is over or damaged is not listed, and the rest is.
	f.expire(t, all[0])
	f.release(t, all[1])
	f.raw(t, "HDEL", f.key(t, "lease", all[2].Identity), "trace_id")
	f.raw(t, "DEL", f.key(t, "lease", all[3].Identity))
	got, _ := f.collect(t, program)
	if len(got) != n-4 {
		t.Errorf("%d leases, want %d", len(got), n-4)
	}
	if f.hash(t, f.shardKey(t, "corrupt", all[2].Identity))[digestText(all[2].LockKey)] == "" {
		t.Error("the damaged one is not listed as corrupt")
	}
}

func TestListedIsBoundedAndRefusesForeignCursors(t *testing.T) {
	f := newFixture(t)
	good := leaseclient.ListRequest{By: leaseclient.ListByProgram, TenantID: "tenant-main", ProgramID: "program-a", Deadline: soon()}
	for name, change := range map[string]func(*leaseclient.ListRequest){
		"page too large":    func(r *leaseclient.ListRequest) { r.Limit = leaseclient.MaxPage + 1 },
		"negative page":     func(r *leaseclient.ListRequest) { r.Limit = -1 },
		"raw pattern":       func(r *leaseclient.ListRequest) { r.ProgramID = "*" },
		"another form":      func(r *leaseclient.ListRequest) { r.TenantID = "Tenant-Main" },
		"no tenant":         func(r *leaseclient.ListRequest) { r.TenantID = "" },
		"no filter":         func(r *leaseclient.ListRequest) { r.By = "" },
		"no owner":          func(r *leaseclient.ListRequest) { r.By = leaseclient.ListByOwner },
		"no target":         func(r *leaseclient.ListRequest) { r.By = leaseclient.ListByTarget },
		"cursor of nothing": func(r *leaseclient.ListRequest) { r.Cursor = "x" },
		"cursor digest":     func(r *leaseclient.ListRequest) { r.Cursor = "0.[a" },
		"cursor shard":      func(r *leaseclient.ListRequest) { r.Cursor = "-1." },
		"no deadline":       func(r *leaseclient.ListRequest) { r.Deadline = time.Time{} },
	} {
		r := good
		change(&r)
		if _, err := f.List(t.Context(), r); leaseclient.CodeOf(err) != leaseclient.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	late := good
	late.Deadline = time.Now().Add(-time.Second)
	_, err := f.List(t.Context(), late)
	wantCode(t, err, leaseclient.CodeDeadlineExceeded)
	id := testIdentity("a")
	l := f.acquire(t, id, "one").Lease
	for _, key := range []string{"lease"} {
		f.raw(t, "DEL", f.key(t, key, id))
		f.raw(t, "SET", f.key(t, key, id), "x")
	}
	if got, _ := f.collect(t, good); len(got) != 0 {
		t.Errorf("listed %v", got)
	}
	_ = l
}

func TestHistoryTellsEveryEndOnceNewestFirst(t *testing.T) {
	f := newFixture(t)
	id := testIdentity("a")
	var want []leaseclient.State
	for i := range 7 {
		a := f.acquire(t, id, fmt.Sprint("w", i))
		switch i % 3 {
		case 0:
			f.release(t, a.Lease)
			want = append([]leaseclient.State{leaseclient.StateReleased}, want...)
		case 1:
			f.expire(t, a.Lease)
			want = append([]leaseclient.State{leaseclient.StateExpired}, want...)
		case 2:
			if _, err := f.Invalidate(t.Context(), invalidateRequest(a.Lease, leaseclient.StateRevoked)); err != nil {
				t.Fatal(err)
			}
			want = append([]leaseclient.State{leaseclient.StateRevoked}, want...)
		}
	}
	var got []leaseclient.Ended
	r := leaseclient.HistoryRequest{Identity: id, Limit: 3, Deadline: soon()}
	for {
		p, err := f.History(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Entries) > 3 {
			t.Fatalf("page of %d", len(p.Entries))
		}
		got = append(got, p.Entries...)
		if p.Next == "" {
			break
		}
		r.Cursor = p.Next
	}
	if len(got) != len(want) {
		t.Fatalf("%d entries, want %d", len(got), len(want))
	}
	for i, e := range got {
		if e.Lease.State != want[i] || e.Lease.Token != uint64(len(want)-i) {
			t.Errorf("entry %d: %s of token %d, want %s", i, e.Lease.State, e.Lease.Token, want[i])
		}
		switch e.Lease.State {
		case leaseclient.StateRevoked:
			if e.Reason != "it misbehaves" || e.EndedBy != "prn_admin" {
				t.Errorf("entry %d: %+v", i, e)
			}
		case leaseclient.StateReleased:
			if e.EndedBy != e.Lease.PrincipalID {
				t.Errorf("entry %d ended by %q", i, e.EndedBy)
			}
		case leaseclient.StateExpired:
			if e.EndedAt != e.Lease.ExpiresAt || e.EndedBy != "" {
				t.Errorf("entry %d: %+v", i, e)
			}
		case leaseclient.StateActive:
			t.Errorf("entry %d is active", i)
		}
	}
	for _, cursor := range []string{"0", "-1", "x", "9007199254740992", "01"} {
		if _, err := f.History(t.Context(), leaseclient.HistoryRequest{Identity: id, Cursor: cursor, Deadline: soon()}); leaseclient.CodeOf(err) != leaseclient.CodeInvalid {
			t.Errorf("cursor %q: %v", cursor, err)
		}
	}
	// What is older than the retention is not told any more.
	key := f.key(t, "hist", id)
	last, err := f.raw(t, "LINDEX", key, "-1").ToString()
	if err != nil {
		t.Fatal(err)
	}
	old := strings.ReplaceAll(last, strconv.FormatInt(int64(got[6].EndedAt), 10), strconv.FormatInt(int64(got[6].EndedAt)-31*24*3600*1000, 10))
	if old == last {
		t.Fatal("the entry holds no time")
	}
	f.raw(t, "LSET", key, "-1", old)
	p, err := f.History(t.Context(), leaseclient.HistoryRequest{Identity: id, Deadline: soon()})
	if err != nil || len(p.Entries) != 6 {
		t.Errorf("%d entries, %v", len(p.Entries), err)
	}
}

func TestExpiryIsSeenByExactlyOne(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{}
	f := newFixture(t, func(o *Options) {
		o.OnExpired = func(l leaseclient.Lease) {
			mu.Lock()
			defer mu.Unlock()
			if l.State != leaseclient.StateExpired {
				t.Errorf("told of state %s", l.State)
			}
			seen[l.LeaseID]++
		}
	})
	for name, look := range map[string]func(l leaseclient.Lease){
		"acquire": func(l leaseclient.Lease) { _, _ = f.Acquire(t.Context(), acquireRequest(l.Identity, "two")) },
		"renew":   func(l leaseclient.Lease) { _, _ = f.Renew(t.Context(), renewRequest(l)) },
		"release": func(l leaseclient.Lease) { _, _ = f.Release(t.Context(), releaseRequest(l)) },
		"inspect": func(l leaseclient.Lease) {
			_, _ = f.Inspect(t.Context(), leaseclient.InspectRequest{Identity: l.Identity, Deadline: soon()})
		},
		"inspect-id": func(l leaseclient.Lease) {
			_, _ = f.Inspect(t.Context(), leaseclient.InspectRequest{LeaseID: l.LeaseID, Deadline: soon()})
		},
		"adopt": func(l leaseclient.Lease) { _, _ = f.Adopt(t.Context(), adoptRequest(l)) },
		"list": func(l leaseclient.Lease) {
			f.collect(t, leaseclient.ListRequest{By: leaseclient.ListByProgram, TenantID: l.TenantID, ProgramID: l.ProgramID})
		},
		"history": func(l leaseclient.Lease) {
			_, _ = f.History(t.Context(), leaseclient.HistoryRequest{Identity: l.Identity, Deadline: soon()})
		},
		"revoke": func(l leaseclient.Lease) {
			_, _ = f.Invalidate(t.Context(), invalidateRequest(l, leaseclient.StateRevoked))
		},
		"begin": func(l leaseclient.Lease) { _, _ = f.Begin(t.Context(), beginRequest(l, commit("x"))) },
		"claim": func(l leaseclient.Lease) {
			_, _ = f.Claim(t.Context(), leaseclient.ClaimRequest{LockKey: l.LockKey, Mode: leaseclient.ClaimSweep, Claimer: "c", Deadline: soon()})
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := f.acquire(t, testIdentity(name), "one").Lease
			f.expire(t, l)
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() { look(l) })
			}
			wg.Wait()
			mu.Lock()
			defer mu.Unlock()
			if seen[l.LeaseID] != 1 {
				t.Errorf("its end was told %d times", seen[l.LeaseID])
			}
			if n, _ := f.raw(t, "LLEN", f.key(t, "hist", l.Identity)).AsInt64(); n != 1 {
				t.Errorf("history has %d entries", n)
			}
			if got := f.hash(t, f.key(t, "lease", l.Identity))["lease_id"]; got == l.LeaseID {
				t.Error("the record is still in force")
			}
		})
	}
}
