package valkeystore

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
	"testing"

	"github.com/starintel/fencerider/leaseclient"
)

// invalidateRequest takes a lease away as an administrator.
func invalidateRequest(l leaseclient.Lease, to leaseclient.State) leaseclient.InvalidateRequest {
	return leaseclient.InvalidateRequest{
		Call: leaseclient.Call{RequestID: leaseclient.NewID("request"), Deadline: soon()}, To: to, Identity: l.Identity,
		LeaseID: l.LeaseID, Token: l.Token, Admin: owner("admin"), Reason: "it misbehaves",
		CorrelationID: "corr_1", DecisionID: "decision_1",
	}
}

// audited reads the events that scripts wrote for an identity's shard.
func (f *fixture) audited(t *testing.T, id leaseclient.Identity) []map[string]string {
	t.Helper()
	entries, err := f.raw(t, "XRANGE", f.shardKey(t, "audit", id), "-", "+").AsXRange()
	if err != nil {
		t.Fatal(err)
	}
	var out []map[string]string
	for _, e := range entries {
		out = append(out, e.FieldValues)
	}
	return out
}

func TestInvalidationEndsExactlyTheObservedLease(t *testing.T) {
	for to, event := range map[leaseclient.State][2]string{
		leaseclient.StateReleased: {"target_lease_force_release", "lease_released"},
		leaseclient.StateRevoked:  {"target_lease_revoke", "lease_revoked"},
	} {
		t.Run(string(to), func(t *testing.T) {
			f := newFixture(t)
			id := testIdentity("a")
			a := f.acquire(t, id, "one")
			if _, err := f.Begin(t.Context(), beginRequest(a.Lease, commit("x"), commit("y"))); err != nil {
				t.Fatal(err)
			}
			for name, change := range map[string]func(*leaseclient.InvalidateRequest){
				"token":    func(r *leaseclient.InvalidateRequest) { r.Token++ },
				"lease id": func(r *leaseclient.InvalidateRequest) { r.LeaseID = "lease_000_other" },
				"identity": func(r *leaseclient.InvalidateRequest) { r.Identity = testIdentity("b") },
			} {
				r := invalidateRequest(a.Lease, to)
				change(&r)
				if _, err := f.Invalidate(t.Context(), r); leaseclient.CodeOf(err) != leaseclient.CodeLost {
					t.Errorf("with another %s: %v", name, err)
				}
			}
			if n := len(f.audited(t, id)); n != 0 {
				t.Fatalf("%d events of refused requests", n)
			}
			r := invalidateRequest(a.Lease, to)
			got, err := f.Invalidate(t.Context(), r)
			if err != nil || got.Lease.State != to || got.InFlight != 2 || got.Replayed || got.Lease.LeaseID != a.Lease.LeaseID {
				t.Fatalf("%+v %v", got, err)
			}
			if f.exists(t, f.key(t, "lease", id)) {
				t.Error("the record is still there")
			}
			// The boundary rejects the lease before success was reported.
			_, err = f.Begin(t.Context(), beginRequest(a.Lease, commit("z")))
			wantCode(t, err, leaseclient.CodeLost)
			_, err = f.Renew(t.Context(), renewRequest(a.Lease))
			wantCode(t, err, leaseclient.CodeLost)
			if n, err := f.InFlight(t.Context(), id, soon()); err != nil || n != 2 {
				t.Errorf("in flight %d, %v", n, err)
			}
			events := f.audited(t, id)
			if len(events) != 1 {
				t.Fatalf("%d events", len(events))
			}
			for k, v := range map[string]string{
				"event_type": event[0], "code": event[1], "lease_id": a.Lease.LeaseID, "fencing_token": "1",
				"reason": "it misbehaves", "principal_id": "prn_admin", "credential_id": "key_admin", "request_id": r.RequestID,
				"correlation_id": "corr_1", "previous_state": "active", "resulting_state": string(to), "in_flight": "2",
				"target_id": id.TargetID,
			} {
				if events[0][k] != v {
					t.Errorf("event's %s is %q, want %q", k, events[0][k], v)
				}
			}
			// A repetition changes nothing, not even beside a successor.
			b := f.acquire(t, id, "two")
			again, err := f.Invalidate(t.Context(), r)
			if err != nil || !again.Replayed || again.InFlight != 2 || again.Lease.State != to || again.Lease.LeaseID != a.Lease.LeaseID {
				t.Fatalf("replay: %+v %v", again, err)
			}
			other := r
			other.Reason = "another"
			_, err = f.Invalidate(t.Context(), other)
			wantCode(t, err, leaseclient.CodeIdempotencyConflict)
			if got := f.hash(t, f.key(t, "lease", id))["lease_id"]; got != b.Lease.LeaseID {
				t.Errorf("the successor is gone: %q", got)
			}
			if n := len(f.audited(t, id)); n != 1 {
				t.Errorf("%d events after a replay", n)
			}
			if f.counter(t, id) != 2 {
				t.Errorf("counter %d", f.counter(t, id))
			}
		})
	}
}

func TestInvalidationNeedsAReason(t *testing.T) {
	f := newFixture(t)
	l := f.acquire(t, testIdentity("a"), "one").Lease
	long := make([]byte, leaseclient.MaxReasonBytes+1)
	for i := range long {
		long[i] = 'x'
	}
	for name, change := range map[string]func(*leaseclient.InvalidateRequest){
		"none":               func(r *leaseclient.InvalidateRequest) { r.Reason = "" },
		"blank":              func(r *leaseclient.InvalidateRequest) { r.Reason = "  " },
		"too long":           func(r *leaseclient.InvalidateRequest) { r.Reason = string(long) },
		"control characters": func(r *leaseclient.InvalidateRequest) { r.Reason = "a\nb" },
		"incident":           func(r *leaseclient.InvalidateRequest) { r.Incident = "a b" },
		"state":              func(r *leaseclient.InvalidateRequest) { r.To = leaseclient.StateExpired },
		"no administrator":   func(r *leaseclient.InvalidateRequest) { r.Admin.PrincipalID = "" },
		"no lease":           func(r *leaseclient.InvalidateRequest) { r.LeaseID = "" },
		"no token":           func(r *leaseclient.InvalidateRequest) { r.Token = 0 },
	} {
		r := invalidateRequest(l, leaseclient.StateRevoked)
		change(&r)
		if _, err := f.Invalidate(t.Context(), r); leaseclient.CodeOf(err) != leaseclient.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := invalidateRequest(l, leaseclient.StateRevoked)
	r.Reason, r.Incident = "", "INC-1234"
	if _, err := f.Invalidate(t.Context(), r); err != nil {
		t.Errorf("with an incident alone: %v", err)
	}
}

func TestInvalidationIsDurableOrUnknown(t *testing.T) {
	f := ownServer(t)
	id := testIdentity("a")
	a := f.acquire(t, id, "one")
	f.raw(t, "CONFIG", "SET", "appendfsync", "no")
	f.opts.CallTimeout = 500 * 1e6
	r := invalidateRequest(a.Lease, leaseclient.StateRevoked)
	for range 2 {
		_, err := f.Invalidate(t.Context(), r)
		wantCode(t, err, leaseclient.CodeOutcomeUnknown)
	}
	f.opts.CallTimeout = 5 * 1e9
	f.raw(t, "CONFIG", "SET", "appendfsync", "always")
	got, err := f.Invalidate(t.Context(), r)
	if err != nil || !got.Replayed || got.Lease.State != leaseclient.StateRevoked {
		t.Fatalf("%+v %v", got, err)
	}
	if n := len(f.audited(t, id)); n != 1 {
		t.Errorf("%d events", n)
	}
}

func TestInvalidationOverDamageDoesNothing(t *testing.T) {
	f := newFixture(t)
	for name, damage := range map[string]func(l leaseclient.Lease){
		"audit": func(l leaseclient.Lease) { f.raw(t, "SET", f.shardKey(t, "audit", l.Identity), "x") },
		"log":   func(l leaseclient.Lease) { f.raw(t, "SET", f.key(t, "logq", l.Identity), "x") },
		"hist":  func(l leaseclient.Lease) { f.raw(t, "SET", f.key(t, "hist", l.Identity), "x") },
		"lease": func(l leaseclient.Lease) { f.raw(t, "HDEL", f.key(t, "lease", l.Identity), "trace_id") },
	} {
		t.Run(name, func(t *testing.T) {
			l := f.acquire(t, testIdentity(name), "one").Lease
			damage(l)
			before := f.hash(t, f.key(t, "lease", l.Identity))
			_, err := f.Invalidate(t.Context(), invalidateRequest(l, leaseclient.StateRevoked))
			wantCode(t, err, leaseclient.CodeUnavailable)
			if got := f.hash(t, f.key(t, "lease", l.Identity)); !reflect.DeepEqual(got, before) {
				t.Errorf("the record was changed: %v", got)
			}
			f.raw(t, "DEL", f.shardKey(t, "audit", l.Identity))
		})
	}
}

func TestRevokeRacesRenewAndRelease(t *testing.T) {
	f := newFixture(t)
	const rounds = 200
	for i := range rounds {
		id := testIdentity(fmt.Sprint("r", i))
		l := f.acquire(t, id, "one").Lease
		var wg sync.WaitGroup
		var renewed, released, revoked error
		wg.Go(func() { _, renewed = f.Renew(t.Context(), renewRequest(l)) })
		wg.Go(func() { _, released = f.Release(t.Context(), releaseRequest(l)) })
		wg.Go(func() { _, revoked = f.Invalidate(t.Context(), invalidateRequest(l, leaseclient.StateRevoked)) })
		wg.Wait()
		for _, err := range []error{renewed, released, revoked} {
			if err != nil && leaseclient.CodeOf(err) != leaseclient.CodeLost {
				t.Fatalf("round %d: %v", i, err)
			}
		}
		if (released == nil) == (revoked == nil) {
			t.Fatalf("round %d: released %v, revoked %v", i, released, revoked)
		}
		state := f.hash(t, f.shardKey(t, "lid:"+l.LeaseID, id))["state"]
		if want := map[bool]string{true: "revoked", false: "released"}[revoked == nil]; state != want || f.exists(t, f.key(t, "lease", id)) {
			t.Fatalf("round %d: the store holds %s, want %s", i, state, want)
		}
	}
}

func TestAlertsTellWhatDoesNotMendItself(t *testing.T) {
	var mu sync.Mutex
	var alerts []Alert
	f := newFixture(t, func(o *Options) {
		o.OnAlert = func(a Alert) {
			mu.Lock()
			defer mu.Unlock()
			alerts = append(alerts, a)
		}
	})
	id := testIdentity("a")
	l := f.acquire(t, id, "one").Lease
	f.raw(t, "HDEL", f.key(t, "lease", id), "trace_id")
	_, _ = f.Renew(t.Context(), renewRequest(l))
	full := testIdentity("b")
	f.release(t, f.acquire(t, full, "one").Lease)
	f.raw(t, "HSET", f.key(t, "fence", full), "token", fmt.Sprint(leaseclient.MaxToken))
	_, _ = f.Acquire(t.Context(), acquireRequest(full, "one"))
	if len(alerts) != 2 || alerts[0].Kind != AlertCorrupt || alerts[0].Identity != id || !errors.Is(alerts[0].Err, ErrCorrupt) ||
		alerts[1].Kind != AlertExhausted || alerts[1].Identity != full {
		t.Errorf("alerts %+v", alerts)
	}
}
