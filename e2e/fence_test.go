package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// point is a place where a sidecar is stopped.
type point struct {
	name string
	// accepted: the store had accepted the write by then.
	accepted bool
	// syscall: the sidecar is past its last look, so a message may come late
	// and twice, under the same commit id.
	syscall bool
}

// points of one adapter, in the order of a write.
func points(adapter string) []point {
	return []point{
		{adapter + ".before-begin", false, false},
		{adapter + ".after-begin", true, false},
		{adapter + ".before-send", true, true},
		{adapter + ".after-effect", true, false},
	}
}

// violations judges what the broker holds: messages in the order of arrival, by
// the rules of the fence. first is the body of the successor's first message.
func violations(messages []amqp091.Delivery, first string, lateDuplicates bool) []string {
	var out []string
	seen := map[string]bool{}
	high := int64(0)
	after := false
	for i, m := range messages {
		n, id := token(m), commitOf(m)
		if n == 0 || id == "" {
			out = append(out, fmt.Sprintf("message %d (%s) has no stamp", i, m.Body))
		}
		if string(m.Body) == first {
			after = true
		}
		if n < high && !(lateDuplicates && seen[id]) {
			out = append(out, fmt.Sprintf("message %d (%s) of token %d came after token %d", i, m.Body, n, high))
		}
		seen[id] = true
		high = max(high, n)
	}
	if !after {
		out = append(out, "the successor's first message is not there")
	}
	return out
}

// bodies lists messages for a failure's text.
func bodies(ms []amqp091.Delivery) string {
	var out []string
	for _, m := range ms {
		out = append(out, fmt.Sprintf("%s/%d", m.Body, token(m)))
	}
	return strings.Join(out, " ")
}

// stopPublishing stops or kills a sidecar in the middle of a publish, lets a
// successor take over, and wakes it again. It returns what the broker holds.
func stopPublishing(t *testing.T, w *world, build string, p point, sig syscall.Signal) []amqp091.Delivery {
	a := w.holding(build, "target")
	events := a.events()
	k := a.worker()
	k.confirmed("a0")
	a.arm(p.name)
	if _, err := k.publish("a1"); err != nil {
		t.Fatal(err)
	}
	a.hit(p.name)
	a.signal(sig)

	b := w.holding(build, "target")
	kb := b.worker()
	kb.confirmed("b1")
	if sig == syscall.SIGSTOP {
		a.let(p.name)
		a.signal(syscall.SIGCONT)
		e := until(t, events, "lease_lost")
		if e["reason"] == "" || e["code"] != "lease_lost" {
			t.Errorf("worker heard %v", e)
		}
		// What the woken sidecar has left to do comes before this.
		if !k.refused("a2") && build == "guarded" {
			t.Error("a stale publish was confirmed")
		}
		a.stop()
	}
	kb.confirmed("b2")
	b.stop()
	return w.received()
}

func TestStoppedPublisherNeverLandsAfterItsSuccessor(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
		for _, p := range points("rabbit") {
			t.Run(fmt.Sprintf("%v/%s", sig, p.name), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				ms := stopPublishing(t, w, "guarded", p, sig)
				if v := violations(ms, "b1", p.syscall); len(v) > 0 {
					t.Errorf("%s\n%s", strings.Join(v, "\n"), bodies(ms))
				}
				count, ids := 0, map[string]bool{}
				for _, m := range ms {
					switch string(m.Body) {
					case "a1":
						count++
						ids[commitOf(m)] = true
					case "a2":
						t.Error("a publish after the loss is at the broker")
					}
				}
				if p.accepted && (count == 0 || len(ids) != 1) {
					t.Errorf("accepted message is there %d times under %d commit ids: %s", count, len(ids), bodies(ms))
				}
				if !p.accepted && count != 0 {
					t.Errorf("a message that was not accepted is there: %s", bodies(ms))
				}
			})
		}
	}
}

func TestWithoutTheGateTheSamePublishCheckFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := points("rabbit")[1]
	ms := stopPublishing(t, w, "open", p, syscall.SIGSTOP)
	if v := violations(ms, "b1", false); len(v) == 0 {
		t.Fatalf("the check finds nothing wrong with a sidecar that guards nothing: %s", bodies(ms))
	}
}

func TestSweeperFinishesWhatAKilledPublisherLeft(t *testing.T) {
	for _, p := range points("rabbit")[1:] {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a := w.holding("guarded", "target")
			k := a.worker()
			a.arm(p.name)
			if _, err := k.publish("a1"); err != nil {
				t.Fatal(err)
			}
			a.hit(p.name)
			a.signal(syscall.SIGKILL)
			// Somebody else's sidecar, with another target.
			c := w.holding("guarded", "other")
			var ms []amqp091.Delivery
			eventually(t, "the message is delivered", func() bool {
				ms = append(ms, w.received()...)
				return len(ms) > 0
			})
			if token(ms[0]) != 1 || string(ms[0].Body) != "a1" {
				t.Errorf("%s", bodies(ms))
			}
			// Nothing is left that a successor would have to wait for.
			eventually(t, "the commit log is empty", func() bool { return !w.unsettled() })
			c.stop()
		})
	}
}

// unsettled reports whether any lock of the namespace has open commits.
func (w *world) unsettled() bool {
	w.t.Helper()
	for shard := range 2 {
		key := fmt.Sprintf("{%s:s%d}:unsettled", w.ns, shard)
		n, err := w.admin.Do(w.t.Context(), w.admin.B().Zcard().Key(key).Build()).AsInt64()
		if err != nil {
			w.t.Fatal(err)
		}
		if n > 0 {
			return true
		}
	}
	return false
}

// change is one line of a database's history: which document changed last, under
// which token.
type change struct {
	id    string
	token int64
	by    string
}

// changes lists documents in the order of their last change.
func (w *world) changes() []change {
	w.t.Helper()
	var feed struct {
		Results []struct {
			ID  string `json:"id"`
			Doc struct {
				By    string `json:"by"`
				Fence struct {
					Token int64 `json:"fencing_token"`
				} `json:"fence"`
			} `json:"doc"`
		} `json:"results"`
	}
	a := w.direct(http.MethodGet, "/_changes?include_docs=true", "", http.StatusOK)
	if err := json.Unmarshal([]byte(a.body), &feed); err != nil {
		w.t.Fatal(err)
	}
	var out []change
	for _, r := range feed.Results {
		out = append(out, change{r.ID, r.Doc.Fence.Token, r.Doc.By})
	}
	return out
}

// stopWriting does with document writes what stopPublishing does with messages.
// The predecessor creates "x"; the successor's first write is "y", and it also
// overwrites "shared", which the predecessor had written.
func stopWriting(t *testing.T, w *world, build string, p point, sig syscall.Signal) {
	a := w.holding(build, "target")
	events := a.events()
	first, err := a.put("shared", `{"by":"a0"}`)
	if err != nil || first.code != http.StatusCreated {
		t.Fatalf("%v %+v", err, first)
	}
	a.arm(p.name)
	done := make(chan answer, 1)
	go func() {
		r, err := a.put("x", `{"by":"a1"}`)
		if err != nil {
			r = answer{code: -1, body: err.Error()}
		}
		done <- r
	}()
	a.hit(p.name)
	a.signal(sig)

	b := w.holding(build, "target")
	if r, err := b.put("y", `{"by":"b1"}`); err != nil || r.code != http.StatusCreated {
		t.Fatalf("%v %+v", err, r)
	}
	rev, _ := first.json()["rev"].(string)
	if r, err := b.put("shared", `{"by":"b2","_rev":"`+rev+`"}`); err != nil || r.code != http.StatusCreated {
		t.Fatalf("%v %+v", err, r)
	}
	if sig == syscall.SIGSTOP {
		a.let(p.name)
		a.signal(syscall.SIGCONT)
		until(t, events, "lease_lost")
		r := <-done
		if r.code == http.StatusConflict && !p.accepted {
			t.Errorf("a lost lease was answered as a conflict: %s", r.body)
		}
		stale, err := a.put("shared", `{"by":"stale","_rev":"`+rev+`"}`)
		if err != nil || stale.code == http.StatusCreated {
			t.Errorf("a stale write went through: %v %+v", err, stale)
		}
		if build == "guarded" && stale.header.Get("Fencerider-Code") != "lease_lost" {
			t.Errorf("a stale write was answered %+v", stale)
		}
		a.stop()
	}
	b.stop()
}

// disorder finds a change of a lower token behind one of a higher.
func disorder(cs []change) []string {
	var out []string
	high := int64(0)
	for _, c := range cs {
		if c.token < high {
			out = append(out, fmt.Sprintf("%s of token %d changed after token %d", c.id, c.token, high))
		}
		high = max(high, c.token)
	}
	return out
}

func TestStoppedWriterNeverLandsAfterItsSuccessor(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
		for _, p := range points("couch") {
			t.Run(fmt.Sprintf("%v/%s", sig, p.name), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				stopWriting(t, w, "guarded", p, sig)
				cs := w.changes()
				if v := disorder(cs); len(v) > 0 {
					t.Errorf("%s\n%v", strings.Join(v, "\n"), cs)
				}
				by := map[string]string{}
				for _, c := range cs {
					by[c.id] = c.by
				}
				if by["shared"] != "b2" || by["y"] != "b1" {
					t.Errorf("a successor's write was overwritten: %v", cs)
				}
				if got, want := by["x"] == "a1", p.accepted; got != want {
					t.Errorf("accepted %v, and the document is there: %v", want, got)
				}
			})
		}
	}
}

func TestWithoutTheGateTheSameWriteCheckFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stopWriting(t, w, "open", points("couch")[1], syscall.SIGSTOP)
	if v := disorder(w.changes()); len(v) == 0 {
		t.Fatalf("the check finds nothing wrong with a sidecar that guards nothing: %v", w.changes())
	}
}

func TestSweeperFinishesWhatAKilledWriterLeft(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.holding("guarded", "target")
	a.arm("couch.after-begin")
	go func() { _, _ = a.put("x", `{"by":"a1"}`) }()
	a.hit("couch.after-begin")
	a.signal(syscall.SIGKILL)
	c := w.holding("guarded", "other")
	eventually(t, "the document is written", func() bool {
		for _, ch := range w.changes() {
			if ch.id == "x" && ch.by == "a1" && ch.token == 1 {
				return true
			}
		}
		return false
	})
	c.stop()
}

func TestPausedSidecarTellsItsWorkerAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.holding("guarded", "target", "FENCERIDER_LEASE_AGAIN=false")
	events := a.events()
	until(t, events, "snapshot")
	a.signal(syscall.SIGSTOP)
	b := w.holding("guarded", "target")
	a.signal(syscall.SIGCONT)
	woke := time.Now()
	e := until(t, events, "lease_lost")
	t.Logf("heard %v after waking: %v", time.Since(woke), e["reason"])
	if ok, body := a.readiness(); ok {
		t.Errorf("ready without its lease: %s", body)
	}
	b.stop()
}
