package rabbit

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"github.com/starintel/fencerider/leaseclient"
)

// queueWith makes a queue of its own for a test.
func (s *setup) queueWith(args amqp091.Table) string {
	s.t.Helper()
	q := leaseclient.NewID("q")
	if _, err := s.direct.QueueDeclare(q, false, false, false, false, args); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _, _ = s.direct.QueueDelete(q, false, false, false) })
	return q
}

// TestCopiesNeedTheLeaseToo: CC and BCC route a message as its routing key does.
func TestCopiesNeedTheLeaseToo(t *testing.T) {
	s := newSetup(t)
	other := s.queueWith(nil)
	s.policy, s.leases = twoLocks(t, s.queue)
	s.server.opts.Leases = s.leases
	_, ch := s.worker()
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	returns := ch.NotifyReturn(make(chan amqp091.Return, 8))
	send := func(key string, h amqp091.Table) bool {
		return confirm(t, ch, func() (*amqp091.DeferredConfirmation, error) {
			return ch.PublishWithDeferredConfirmWithContext(t.Context(), "", key, false, false, amqp091.Publishing{Headers: h})
		})
	}
	for _, header := range []string{"CC", "BCC"} {
		for _, key := range []string{s.queue, "free"} {
			// The copy would go to a queue whose lease is not held.
			if send(key, amqp091.Table{header: []any{other}}) {
				t.Errorf("%s from %s went to a queue of another lock", header, key)
			}
			r := <-returns
			if !strings.Contains(r.ReplyText, "policy_denied") && !strings.Contains(r.ReplyText, "lease_lost") {
				t.Errorf("refused with %s", r.ReplyText)
			}
		}
		// Copies under the same lease are fine.
		if !send(s.queue, amqp091.Table{header: []any{s.queue, s.queue}}) {
			t.Errorf("%s to the message's own queue is refused", header)
		}
		// A list of something else would close the channel at the broker.
		if send(s.queue, amqp091.Table{header: []any{int32(1)}}) {
			t.Errorf("%s with a number went through", header)
		}
		<-returns
	}
	s.lost.Store(true)
	if send(s.queue, amqp091.Table{"BCC": []any{s.queue}}) {
		t.Error("a stale copy is acked")
	}
	if _, ok, err := s.direct.Get(other, true); err != nil || ok {
		t.Errorf("a copy arrived without its lease: %v %v", ok, err)
	}
	if got := s.received(); len(got) != 2 {
		t.Errorf("%d messages in the queue, want the two that were accepted", len(got))
	}
	s.closed()
}

func TestMandatoryReturnsComeBeforeTheirAcks(t *testing.T) {
	s := newSetup(t)
	_, ch := s.worker()
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	var order []string
	returns, confirms := make(chan amqp091.Return), make(chan amqp091.Confirmation)
	ch.NotifyReturn(returns)
	ch.NotifyPublish(confirms)
	for i, key := range []string{s.queue, "nowhere-" + s.queue, s.queue} {
		if err := ch.PublishWithContext(t.Context(), "", key, true, false, amqp091.Publishing{Body: []byte(fmt.Sprint(i))}); err != nil {
			t.Fatal(err)
		}
		for done := false; !done; {
			select {
			case r := <-returns:
				order = append(order, "return "+string(r.Body))
			case c := <-confirms:
				order = append(order, fmt.Sprint("confirm ", c.DeliveryTag, c.Ack))
				done = true
			}
		}
	}
	if want := []string{"confirm 1 true", "return 1", "confirm 2 true", "confirm 3 true"}; !slices.Equal(order, want) {
		t.Errorf("%v, want %v", order, want)
	}
	s.closed()
}

func TestNackOfTheBrokerIsPassedOn(t *testing.T) {
	s := newSetup(t)
	full := s.queueWith(amqp091.Table{"x-max-length": int32(1), "x-overflow": "reject-publish"})
	_, ch := s.worker()
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	var words []bool
	for i := range 3 {
		words = append(words, confirm(t, ch, func() (*amqp091.DeferredConfirmation, error) {
			return ch.PublishWithDeferredConfirmWithContext(t.Context(), "", full, false, false, amqp091.Publishing{Body: []byte(fmt.Sprint(i))})
		}))
	}
	if !words[0] || words[2] {
		t.Fatalf("confirmed %v: the broker refuses what a full queue cannot take", words)
	}
	s.closed()
	for i, b := range s.gate.Begun() {
		want := leaseclient.OutcomeConfirmed
		if !words[i] {
			want = leaseclient.OutcomeRefused
		}
		if o, _ := s.gate.Outcome(b[0].ID); o != want {
			t.Errorf("message %d ended as %s, want %s", i, o, want)
		}
	}
}
