package e2e

import (
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// target is the identity that sidecars of a world acquire under a name.
func target(t testing.TB, name string) leaseclient.Identity {
	t.Helper()
	id, err := leaseclient.Identity{TenantID: "tenant", ProgramID: "program", TargetNamespace: "ns", TargetID: name, ActorName: "actor"}.Normalize()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// counter reads the durable counter of an identity, directly at the store.
func (w *world) counter(id leaseclient.Identity) uint64 {
	w.t.Helper()
	digest := id.LockKey()[len(leaseclient.LockKeyPrefix):]
	for shard := range 2 {
		key := fmt.Sprintf("{%s:s%d}:fence:%s", w.ns, shard, digest)
		s, err := w.admin.Do(w.t.Context(), w.admin.B().Hget().Key(key).Field("token").Build()).ToString()
		if err != nil {
			continue
		}
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			w.t.Fatal(err)
		}
		return n
	}
	return 0
}

func TestFiftyAtOnceHaveOneWinner(t *testing.T) {
	const workers, rounds = 50, 200
	w := newWorld(t)
	id := target(t, "raced")
	var last uint64
	for round := range rounds {
		var mu sync.Mutex
		var won []*leaseclient.Acquired
		var wg sync.WaitGroup
		gate := make(chan struct{})
		for i := range workers {
			wg.Go(func() {
				<-gate
				name := fmt.Sprint("worker_", i)
				a, err := w.store.Acquire(t.Context(), leaseclient.AcquireRequest{
					Call: leaseclient.Call{RequestID: leaseclient.NewID("request"), Deadline: time.Now().Add(20 * time.Second)}, Identity: id,
					Owner:       leaseclient.Owner{PrincipalID: name, ClientID: name, CredentialID: name, InstanceID: name},
					ExecutionID: "e", JobID: "j", TraceID: "t",
				})
				mu.Lock()
				defer mu.Unlock()
				switch code := leaseclient.CodeOf(err); {
				case err == nil:
					won = append(won, a)
				case code != leaseclient.CodeConflict:
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		close(gate)
		wg.Wait()
		if len(won) != 1 {
			t.Fatalf("round %d has %d winners", round, len(won))
		}
		l := won[0].Lease
		if l.Token != last+1 {
			t.Fatalf("round %d: token %d after %d", round, l.Token, last)
		}
		last = l.Token
		if n := w.counter(id); n != last {
			t.Fatalf("round %d: counter %d, token %d", round, n, last)
		}
		if _, err := w.store.Release(t.Context(), leaseclient.ReleaseRequest{
			Call: leaseclient.Call{RequestID: leaseclient.NewID("request"), Deadline: time.Now().Add(5 * time.Second)}, Identity: id,
			LeaseID: l.LeaseID, PrincipalID: l.PrincipalID, InstanceID: l.InstanceID, Token: l.Token,
		}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAcquireWhoseAnswerIsCutOff(t *testing.T) {
	w := newWorld(t)
	cut, via := link(t, w.valkey)
	s := w.start("guarded", "FENCERIDER_VALKEY_URL="+via)
	s.ready()
	events := s.events()
	until(t, events, "snapshot")
	const body = `{"target_id":"cut","request_id":"request_cut","ttl_ms":30000}`
	cut.LoseAnswers(true)
	first := s.control("/v1/leases/acquire", body)
	cut.LoseAnswers(false)
	if first.code != http.StatusServiceUnavailable {
		t.Fatalf("%+v", first)
	}
	if c := first.json()["code"]; c != "lease_outcome_unknown" && c != "lease_backend_unavailable" {
		t.Fatalf("%s", first.body)
	}
	var leases []map[string]any
	for range 2 {
		var a answer
		eventually(t, "the store is back", func() bool {
			a = s.control("/v1/leases/acquire", body)
			return a.code == http.StatusOK
		})
		l, _ := a.json()["lease"].(map[string]any)
		leases = append(leases, l)
	}
	if leases[0]["lease_id"] != leases[1]["lease_id"] || leases[0]["fencing_token"] != leases[1]["fencing_token"] || leases[0]["fencing_token"] != 1.0 {
		t.Errorf("%v\n%v", leases[0], leases[1])
	}
	if n := w.counter(target(t, "cut")); n != 1 {
		t.Errorf("the counter moved to %d", n)
	}
	// One lease, one keeper, one event.
	until(t, events, "lease_acquired")
	s.control("/v1/leases/release", fmt.Sprintf(`{"lease_id":%q}`, leases[0]["lease_id"]))
	until(t, events, "lease_released")
	s.stop()
	for e := range events {
		if e["event"] == "lease_acquired" || e["event"] == "lease_lost" {
			t.Errorf("a second event: %v", e)
		}
	}
	cut.Down(true)
}

func TestManyLeasesAtOnceOverTheControlSocket(t *testing.T) {
	w := newWorld(t)
	s := w.start("guarded")
	s.ready()
	events := s.events()
	until(t, events, "snapshot")
	ids := map[string]string{}
	for i := range 20 {
		name := fmt.Sprint("many-", i)
		a := s.control("/v1/leases/acquire", fmt.Sprintf(`{"target_id":%q}`, name))
		if a.code != http.StatusOK || a.json()["code"] != "lease_acquired" {
			t.Fatalf("%+v", a)
		}
		l, _ := a.json()["lease"].(map[string]any)
		ids[name], _ = l["lease_id"].(string)
	}
	if a := s.control("/v1/leases/acquire", `{"target_id":"many-0"}`); a.code != http.StatusConflict || a.json()["retryable"] != true {
		t.Errorf("%+v", a)
	}
	// They outlive their TTL because they are renewed.
	deadline := time.Now().Add(2 * leaseTTL)
	eventually(t, "twice the TTL has passed", func() bool { return time.Now().After(deadline) })
	for name, id := range ids {
		a := s.control("/v1/leases/inspect", fmt.Sprintf(`{"target_id":%q}`, name))
		l, _ := a.json()["lease"].(map[string]any)
		if a.code != http.StatusOK || l["lease_id"] != id || l["state"] != "active" {
			t.Fatalf("%+v", a)
		}
		if a := s.control("/v1/leases/renew", fmt.Sprintf(`{"lease_id":%q}`, id)); a.code != http.StatusOK {
			t.Fatalf("%+v", a)
		}
		if a := s.control("/v1/leases/release", fmt.Sprintf(`{"lease_id":%q,"fencing_token":1}`, id)); a.code != http.StatusOK || a.json()["code"] != "lease_released" {
			t.Fatalf("%+v", a)
		}
		if a := s.control("/v1/leases/renew", fmt.Sprintf(`{"lease_id":%q}`, id)); a.code != http.StatusConflict || a.json()["code"] != "lease_lost" {
			t.Fatalf("%+v", a)
		}
	}
	s.stop()
	if e := until(t, events, "shutting_down"); e == nil {
		t.Error("nobody was told")
	}
}

func TestShutdownReleasesLeases(t *testing.T) {
	w := newWorld(t)
	a := w.holding("guarded", "target", "FENCERIDER_LEASE_TTL=60s")
	a.stop()
	b := w.holding("guarded", "target")
	if n := w.counter(target(t, "target")); n != 2 {
		t.Errorf("counter %d", n)
	}
	b.stop()
}

func TestLeaseThatIsNotToBeHadEndsWithItsOwnCode(t *testing.T) {
	w := newWorld(t)
	a := w.holding("guarded", "target", "FENCERIDER_LEASE_TTL=60s")
	b := w.start("guarded", "FENCERIDER_LEASE_TARGET_ID=target", "FENCERIDER_LEASE_WAIT=500ms")
	<-b.exited
	if code := b.cmd.ProcessState.ExitCode(); code != 4 {
		t.Errorf("exit code %d\n%s", code, b.logs())
	}
	a.stop()
}
