package rabbit

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/fencetest"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// transacted is a worker's channel in transaction mode.
func (s *setup) transacted() (*amqp091.Connection, *amqp091.Channel) {
	s.t.Helper()
	conn, ch := s.worker()
	if err := ch.Tx(); err != nil {
		s.t.Fatal(err)
	}
	return conn, ch
}

// mustSend publishes to the test's queue.
func (s *setup) mustSend(ch *amqp091.Channel, bodies ...string) {
	s.t.Helper()
	for _, b := range bodies {
		if err := s.send(ch, b); err != nil {
			s.t.Fatal(err)
		}
	}
}

// refusedWith expects the error of a channel that was closed.
func refusedWith(t testing.TB, err error, code int, text string) {
	t.Helper()
	e, ok := errors.AsType[*amqp091.Error](err)
	if !ok || e.Code != code || !strings.Contains(e.Reason, text) {
		t.Errorf("heard %v, want %d %s", err, code, text)
	}
}

func TestTransactionIsDecidedAtItsCommit(t *testing.T) {
	s := newSetup(t)
	_, ch := s.transacted()
	s.mustSend(ch, "one", "two")
	// The answer to a rollback comes after everything before it was looked at.
	if err := ch.TxRollback(); err != nil {
		t.Fatal(err)
	}
	s.mustSend(ch, "three", "four")
	other, err := s.direct.QueueDeclarePassive(s.queue, false, false, false, false, nil)
	if err != nil || other.Messages != 0 || len(s.gate.Begun()) != 0 {
		t.Fatalf("%d messages and %d begins before the commit (%v)", other.Messages, len(s.gate.Begun()), err)
	}
	if err := ch.TxCommit(); err != nil {
		t.Fatal(err)
	}
	got := s.received()
	if len(got) != 2 || string(got[0].Body) != "three" || string(got[1].Body) != "four" || got[0].Headers[fence.HeaderToken] != int64(5) {
		t.Errorf("at the broker: %+v", got)
	}
	b := s.gate.Begun()
	if len(b) != 1 || len(b[0]) != 2 {
		t.Fatalf("begun %v", b)
	}
	for _, c := range b[0] {
		if o, ok := s.gate.Outcome(c.ID); !ok || o != leaseclient.OutcomeConfirmed {
			t.Errorf("ended as %s", o)
		}
	}
	// The channel goes on, with a transaction of its own each time.
	s.mustSend(ch, "five")
	if err := ch.TxCommit(); err != nil {
		t.Fatal(err)
	}
	if err := ch.TxCommit(); err != nil {
		t.Fatal(err)
	}
	if got := s.received(); len(got) != 1 || string(got[0].Body) != "five" {
		t.Errorf("at the broker: %+v", got)
	}
	s.closed()
}

func TestTransactionOfAStaleHolderIsRolledBack(t *testing.T) {
	s := newSetup(t)
	if err := s.direct.PublishWithContext(t.Context(), "", s.queue, false, false, amqp091.Publishing{Body: []byte("job")}); err != nil {
		t.Fatal(err)
	}
	conn, ch := s.transacted()
	jobs, err := ch.Consume(s.queue, "", false, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	job := <-jobs
	results := leaseclient.NewID("results")
	if _, err := s.direct.QueueDeclare(results, false, true, false, false, nil); err != nil {
		t.Fatal(err)
	}
	if err := ch.PublishWithContext(t.Context(), "", results, false, false, amqp091.Publishing{Body: []byte("result")}); err != nil {
		t.Fatal(err)
	}
	if err := job.Ack(false); err != nil {
		t.Fatal(err)
	}
	s.lost.Store(true)
	refusedWith(t, ch.TxCommit(), 406, "PRECONDITION_FAILED - lease_lost: ")
	// The job is there again and the result is not.
	again := s.await(1)
	if string(again[0].Body) != "job" || !again[0].Redelivered {
		t.Errorf("the job came back as %+v", again)
	}
	if _, ok, err := s.direct.Get(results, true); err != nil || ok {
		t.Errorf("a result of a refused transaction is there: %v %v", ok, err)
	}
	s.lost.Store(false)
	next, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	s.mustSend(next, "alive")
	if got := s.await(1); string(got[0].Body) != "alive" {
		t.Errorf("at the broker: %s", got[0].Body)
	}
	s.closed()
}

func TestTransactionHasOneLock(t *testing.T) {
	s := newSetup(t)
	s.policy, s.leases = twoLocks(t, s.queue, "other")
	srv := s.server
	srv.opts.Leases = s.leases
	conn, ch := s.transacted()
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	publish := func(ch *amqp091.Channel, key string) {
		t.Helper()
		if err := ch.PublishWithContext(t.Context(), "", key, false, false, amqp091.Publishing{Body: []byte(key)}); err != nil {
			t.Fatal(err)
		}
	}
	publish(ch, s.queue)
	publish(ch, "free")
	publish(ch, "other")
	refusedWith(t, <-closed, 406, "PRECONDITION_FAILED - lock_mismatch: ")
	if got := s.received(); len(got) != 0 || len(s.gate.Begun()) != 0 {
		t.Errorf("%d messages, %d begins", len(got), len(s.gate.Begun()))
	}
	again, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Tx(); err != nil {
		t.Fatal(err)
	}
	publish(again, "free")
	publish(again, s.queue)
	if err := again.TxCommit(); err != nil {
		t.Fatal(err)
	}
	if got := s.received(); len(got) != 1 || len(s.gate.Begun()) != 1 || len(s.gate.Begun()[0]) != 1 {
		t.Errorf("%d messages, begun %v", len(got), s.gate.Begun())
	}
	s.closed()
}

func TestTransactionThatTheBrokerRefuses(t *testing.T) {
	s := newSetup(t)
	_, ch := s.transacted()
	s.mustSend(ch, "before")
	if err := ch.PublishWithContext(t.Context(), "no-such-exchange", "k", false, false, amqp091.Publishing{}); err != nil {
		t.Fatal(err)
	}
	s.mustSend(ch, "after")
	refusedWith(t, ch.TxCommit(), 404, "no-such-exchange")
	s.closed()
	for _, c := range s.gate.Begun()[0] {
		if o, _ := s.gate.Outcome(c.ID); o != leaseclient.OutcomeRefused {
			t.Errorf("ended as %s", o)
		}
	}
	if got := s.received(); len(got) != 0 || len(s.gate.Abandoned()) != 0 {
		t.Errorf("%d messages of it are there, %v abandoned", len(got), s.gate.Abandoned())
	}
}

func TestTransactionReturnsWhatCannotBeRouted(t *testing.T) {
	s := newSetup(t)
	_, ch := s.transacted()
	returns := ch.NotifyReturn(make(chan amqp091.Return, 1))
	if err := ch.PublishWithContext(t.Context(), "", "nowhere-"+s.queue, true, false, amqp091.Publishing{Body: []byte("lost")}); err != nil {
		t.Fatal(err)
	}
	if err := ch.TxCommit(); err != nil {
		t.Fatal(err)
	}
	select {
	case r := <-returns:
		if r.ReplyCode != 312 || string(r.Body) != "lost" {
			t.Errorf("return %+v", r)
		}
	default:
		t.Error("the return did not come before the answer to the commit")
	}
	s.closed()
}

func TestTransactionLimits(t *testing.T) {
	for name, publish := range map[string]func(s *setup, ch *amqp091.Channel){
		"messages": func(s *setup, ch *amqp091.Channel) {
			for i := range txMessages + 1 {
				s.mustSend(ch, fmt.Sprint(i))
			}
		},
		"bytes": func(s *setup, ch *amqp091.Channel) {
			// Each counts twice: as it goes to the broker and as it goes to the log.
			for range txBytes/2/900_000 + 1 {
				s.mustSend(ch, strings.Repeat("x", 900_000))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSetup(t)
			_, ch := s.transacted()
			closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
			publish(s, ch)
			refusedWith(t, <-closed, 406, "too_large")
			_, again := s.transacted()
			s.mustSend(again, "small")
			if err := again.TxCommit(); err != nil {
				t.Fatal(err)
			}
			if got := s.received(); len(got) != 1 {
				t.Errorf("%d messages", len(got))
			}
			s.closed()
		})
	}
}

func TestTransactionsAndConfirmsOfOneChannel(t *testing.T) {
	s := newSetup(t)
	conn, ch := s.worker()
	s.mustSend(ch, "fenced")
	refusedWith(t, ch.Tx(), 406, "operation_not_fenced")
	confirms, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := confirms.Confirm(false); err != nil {
		t.Fatal(err)
	}
	refusedWith(t, confirms.Tx(), 406, "PRECONDITION_FAILED")
	tx, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Tx(); err != nil {
		t.Fatal(err)
	}
	refusedWith(t, tx.Confirm(false), 406, "PRECONDITION_FAILED")
	s.closed()
}

func TestTransactionWithoutAnAnswerIsSettled(t *testing.T) {
	s := newScripted(t, script{})
	w, b := s.starts()
	w.put(openFrame(1), wire.AppendMethod(nil, 1, wire.TxSelect, nil), publishFrames(1, "", "q", []byte("one")), publishFrames(1, "", "q", []byte("two")),
		wire.AppendMethod(nil, 1, wire.TxCommit, nil))
	b.until(wire.TxCommit)
	_ = b.Close()
	var want []string
	s.begun(1)
	for _, c := range s.gate.Begun()[0] {
		want = append(want, c.ID)
		s.outcome(c.ID)
	}
	if len(want) != 2 || !slices.Equal(s.gate.Abandoned(), want) {
		t.Errorf("abandoned %v, want %v", s.gate.Abandoned(), want)
	}
}

func TestPipelinedTransactionDoesNotGetRoundTheFence(t *testing.T) {
	s := newScripted(t, script{gate: lostGate()})
	w, b := s.starts()
	sel, commit := wire.AppendMethod(nil, 1, wire.TxSelect, nil), wire.AppendMethod(nil, 1, wire.TxCommit, nil)
	w.put(slices.Concat(openFrame(1), sel, publishFrames(1, "", "q", []byte("stale")), commit, publishFrames(1, "", "q", []byte("stale")), commit,
		closeOKFrame(1), openFrame(1), publishFrames(1, "", "q", []byte("stale"))))
	refusal(t, w.until(wire.ChannelClose), 406, "PRECONDITION_FAILED - lease_lost")
	for f := b.next(); f.Method() != wire.ChannelClose; f = b.next() {
		if m := f.Method(); m == wire.BasicPublish || m == wire.TxCommit {
			t.Errorf("method %d of a refused transaction reached the broker", m)
		}
	}
	b.put(closeOKFrame(1))
	// It was judged while its channel was being closed.
	refusal(t, w.until(wire.ChannelClose), 403, "ACCESS_REFUSED - lease_")
}

func TestCommitsOfATransactionKeepTheirOrder(t *testing.T) {
	s := newScripted(t, script{gate: &fencetest.Gate{}})
	w, b := s.starts()
	sel, commit := wire.AppendMethod(nil, 1, wire.TxSelect, nil), wire.AppendMethod(nil, 1, wire.TxCommit, nil)
	ok := wire.AppendMethod(nil, 1, wire.TxCommitOK, nil)
	w.put(openFrame(1), sel, publishFrames(1, "", "q", []byte("one")), commit, publishFrames(1, "", "q", []byte("two")), commit)
	b.until(wire.TxCommit)
	b.until(wire.TxCommit)
	b.put(ok)
	w.until(wire.TxCommitOK)
	second := s.begun(2)
	first := s.gate.Begun()[0][0].ID
	if o := s.outcome(first); o != leaseclient.OutcomeConfirmed {
		t.Errorf("the first ended as %s", o)
	}
	if _, ended := s.gate.Outcome(second); ended {
		t.Error("the second ended with the answer to the first")
	}
	b.put(ok)
	s.outcome(second)
}
