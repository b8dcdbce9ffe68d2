package rabbit

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"github.com/starintel/fencerider/fence/fencetest"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// fencedAcks is a policy by which acknowledgements of the test's queue need the
// lease that the message names; publishing needs none.
func fencedAcks(t testing.TB, queue string, targets ...string) (*policy.Policy, *fencetest.Leases) {
	t.Helper()
	p, err := policy.Parse([]byte(`
version: 1
defaults: {tenant_id: t, program_id: p, target_namespace: n, actor_name: a}
rabbit:
  unmatched: pass
  acks:
    - {queue: "`+queue+`", identity: {target_id: "{header.target}"}}
`), policy.ParseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l := &fencetest.Leases{}
	for i, n := range targets {
		l.Refs = append(l.Refs, fencetest.Ref(n, uint64(i+1)))
	}
	return p, l
}

// jobs fills the test's queue with a message for each target.
func (s *setup) jobs(targets ...string) {
	s.t.Helper()
	for i, n := range targets {
		h := amqp091.Table{"target": n}
		if n == "" {
			h = nil
		}
		if err := s.direct.PublishWithContext(s.t.Context(), "", s.queue, false, false, amqp091.Publishing{Body: []byte(fmt.Sprint(i)), Headers: h}); err != nil {
			s.t.Fatal(err)
		}
	}
}

// take consumes n messages.
func take(t testing.TB, ch *amqp091.Channel, queue string, n int) []amqp091.Delivery {
	t.Helper()
	msgs, err := ch.Consume(queue, "", false, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	var out []amqp091.Delivery
	for range n {
		out = append(out, <-msgs)
	}
	return out
}

// left closes a worker's connection and returns what is in the queue then.
func (s *setup) left(conn *amqp091.Connection) []string {
	s.t.Helper()
	if err := conn.Close(); err != nil {
		s.t.Fatal(err)
	}
	var out []string
	for _, m := range s.received() {
		out = append(out, string(m.Body))
	}
	return out
}

// newAckSetup is a setup whose queue has fenced acknowledgements.
func newAckSetup(t testing.TB, targets ...string) *setup {
	s := newSetup(t)
	s.policy, s.leases = fencedAcks(t, s.queue, targets...)
	s.server.opts.Leases = s.leases
	return s
}

// TestStaleHolderCannotAcknowledge: the job of a worker that has lost its lease
// goes back to the queue, for its successor.
func TestStaleHolderCannotAcknowledge(t *testing.T) {
	for name, ack := range map[string]func(d amqp091.Delivery) error{
		"ack":             func(d amqp091.Delivery) error { return d.Ack(false) },
		"ack up to":       func(d amqp091.Delivery) error { return d.Ack(true) },
		"reject":          func(d amqp091.Delivery) error { return d.Reject(false) },
		"nack":            func(d amqp091.Delivery) error { return d.Nack(false, false) },
		"nack everything": func(d amqp091.Delivery) error { return d.Acknowledger.Nack(0, true, false) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newAckSetup(t, "x")
			s.jobs("x")
			_, ch := s.worker()
			closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
			d := take(t, ch, s.queue, 1)[0]
			s.lost.Store(true)
			if err := ack(d); err != nil {
				t.Fatal(err)
			}
			refusedWith(t, <-closed, 403, "ACCESS_REFUSED - lease_lost: ")
			s.lost.Store(false)
			_, successor := s.worker()
			again := take(t, successor, s.queue, 1)[0]
			if string(again.Body) != "0" || !again.Redelivered {
				t.Errorf("the successor gets %+v", again)
			}
			if err := again.Ack(false); err != nil {
				t.Fatal(err)
			}
			s.closed()
			eventually(t, "the successor's acknowledgement is accepted", func() bool { return len(s.gate.Begun()) == 1 })
		})
	}
}

func TestAcknowledgementsWithTheirLease(t *testing.T) {
	s := newAckSetup(t, "x", "y")
	s.jobs("x", "x", "y", "y", "x", "x")
	conn, ch := s.worker()
	d := take(t, ch, s.queue, 6)
	if err := d[0].Ack(false); err != nil {
		t.Fatal(err)
	}
	// Of two leases, in three runs: x, y y, x.
	if err := d[4].Ack(true); err != nil {
		t.Fatal(err)
	}
	accepted := func() (n int) {
		for _, b := range s.gate.Begun() {
			n += len(b)
		}
		return n
	}
	eventually(t, "the acknowledgements are accepted", func() bool { return accepted() == 4 })
	s.closed()
	// Giving a message back needs no lease.
	s.lost.Store(true)
	if err := d[5].Nack(false, true); err != nil {
		t.Fatal(err)
	}
	if got := s.left(conn); !slices.Equal(got, []string{"5"}) {
		t.Errorf("left in the queue: %v", got)
	}
	s.closed()
	for _, b := range s.gate.Begun() {
		for _, c := range b {
			if o, _ := s.gate.Outcome(c.ID); o != leaseclient.OutcomeConfirmed || !isAck(c.Effect) {
				t.Errorf("%s ended as %s", c.Target, o)
			}
		}
	}
	if n := accepted(); n != 4 {
		t.Errorf("%d acknowledgements were accepted, want 4", n)
	}
}

func TestAcknowledgementOfSeveralLeasesStopsAtTheLostOne(t *testing.T) {
	s := newAckSetup(t, "x") // and none of y
	s.jobs("x", "x", "y", "x")
	conn, ch := s.worker()
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	d := take(t, ch, s.queue, 4)
	if err := d[3].Ack(true); err != nil {
		t.Fatal(err)
	}
	refusedWith(t, <-closed, 403, "lease_lost")
	if got := s.left(conn); !slices.Equal(got, []string{"2", "3"}) {
		t.Errorf("left in the queue: %v", got)
	}
	s.closed()
}

func TestWhatCannotBeAcknowledgedUnderALease(t *testing.T) {
	for name, do := range map[string]func(s *setup, ch *amqp091.Channel) error{
		"consume without acknowledgements": func(s *setup, ch *amqp091.Channel) error {
			_, err := ch.Consume(s.queue, "", true, false, false, false, nil)
			return err
		},
		"get without acknowledgements": func(s *setup, ch *amqp091.Channel) error {
			_, _, err := ch.Get(s.queue, true)
			return err
		},
		"get of the queue that was declared last": func(s *setup, ch *amqp091.Channel) error {
			if _, err := ch.QueueDeclare(s.queue, false, false, false, false, nil); err != nil {
				return err
			}
			_, _, err := ch.Get("", true)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newAckSetup(t, "x")
			s.jobs("x")
			conn, ch := s.worker()
			refusedWith(t, do(s, ch), 403, "operation_not_fenced")
			if got := s.left(conn); len(got) != 1 {
				t.Errorf("left in the queue: %v", got)
			}
		})
	}
	s := newAckSetup(t, "x")
	s.jobs("") // names no target
	_, ch := s.worker()
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	if err := take(t, ch, s.queue, 1)[0].Ack(false); err != nil {
		t.Fatal(err)
	}
	refusedWith(t, <-closed, 403, "policy_denied")
}

func TestGetAndOtherQueues(t *testing.T) {
	s := newAckSetup(t, "x")
	free := s.queueWith(nil)
	s.jobs("x")
	if err := s.direct.PublishWithContext(t.Context(), "", free, false, false, amqp091.Publishing{Body: []byte("free")}); err != nil {
		t.Fatal(err)
	}
	conn, ch := s.worker()
	s.lost.Store(true)
	get := func(q string) amqp091.Delivery {
		t.Helper()
		for {
			d, ok, err := ch.Get(q, false)
			if err != nil {
				t.Fatal(err)
			}
			if ok {
				return d
			}
		}
	}
	if err := get(free).Ack(false); err != nil {
		t.Fatal(err)
	}
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	if err := get(s.queue).Ack(false); err != nil {
		t.Fatal(err)
	}
	refusedWith(t, <-closed, 403, "lease_lost")
	if got := s.left(conn); len(got) != 1 {
		t.Errorf("left in the fenced queue: %v", got)
	}
	if _, ok, err := s.direct.Get(free, true); ok || err != nil {
		t.Errorf("the other queue's message was not acknowledged: %v %v", ok, err)
	}
}

func TestAcknowledgementsInATransaction(t *testing.T) {
	s := newAckSetup(t, "x")
	s.jobs("x", "x")
	conn, ch := s.transacted()
	d := take(t, ch, s.queue, 2)
	if err := d[0].Ack(false); err != nil {
		t.Fatal(err)
	}
	if err := ch.TxRollback(); err != nil {
		t.Fatal(err)
	}
	if len(s.gate.Begun()) != 0 {
		t.Error("begun before the commit")
	}
	// After a rollback the message is unacknowledged again.
	if err := d[0].Ack(false); err != nil {
		t.Fatal(err)
	}
	if err := ch.TxCommit(); err != nil {
		t.Fatal(err)
	}
	if b := s.gate.Begun(); len(b) != 1 || len(b[0]) != 1 {
		t.Fatalf("begun %v", b)
	}
	s.closed()
	if err := d[1].Ack(false); err != nil {
		t.Fatal(err)
	}
	s.lost.Store(true)
	refusedWith(t, ch.TxCommit(), 406, "lease_lost")
	if got := s.left(conn); !slices.Equal(got, []string{"1"}) {
		t.Errorf("left in the queue: %v", got)
	}
}

func TestAcknowledgementThatIsNotSentIsNotFinishedByOthers(t *testing.T) {
	s := newAckSetup(t, "x")
	e, err := NewEffector(EffectorOptions{Upstream: brokerURL(t)})
	if err != nil {
		t.Fatal(err)
	}
	entry := leaseclient.Entry{Commit: leaseclient.Commit{ID: "c", Kind: leaseclient.KindPublish, Effect: encodeAck("/", &ackUse{delivery: delivery{queue: s.queue}, tags: []uint64{1}})}}
	out, err := e.Settle(t.Context(), []leaseclient.Entry{entry})
	if err != nil || !slices.Equal(out, []leaseclient.Outcome{leaseclient.OutcomeCancelled}) {
		t.Errorf("%v %v", out, err)
	}
	if got := s.received(); len(got) != 0 {
		t.Errorf("%d messages were published for it", len(got))
	}
}

func TestTooManyUnacknowledged(t *testing.T) {
	p, l := fencedAcks(t, "q", "x")
	s := newScripted(t, script{policy: p, leases: l})
	w, b := s.starts()
	consume := wire.AppendMethod(nil, 1, wire.BasicConsume, append(wire.AppendShort(wire.AppendShort([]byte{0, 0}, "q"), "c"), 0, 0, 0, 0, 0))
	w.put(openFrame(1), consume)
	b.until(wire.BasicConsume)
	b.put(wire.AppendMethod(nil, 1, wire.BasicConsumeOK, wire.AppendShort(nil, "c")))
	w.until(wire.BasicConsumeOK)
	s.group.Go(func() {
		for i := range maxUnacked/64 + 1 {
			var out []byte
			for n := range 64 {
				args := binary.BigEndian.AppendUint64([]byte{1, 'c'}, uint64(64*i+n+1))
				out = wire.AppendMethod(out, 1, wire.BasicDeliver, append(args, 0, 0, 1, 'q'))
				out = append(out, headerFrame(1, 0)...)
			}
			b.reply(out)
		}
	})
	for range 2 * 64 * (maxUnacked/64 + 1) {
		w.next()
	}
	w.put(wire.Ack{Tag: 1}.Append(nil, 1, wire.BasicAck))
	refusal(t, w.until(wire.ChannelClose), 403, "ACCESS_REFUSED - too_large")
}
