package rabbit

import (
	"context"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/failpoint"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// Bounds of a transaction. What was published in it waits here for the commit.
const (
	// txMessages is what the store accepts in one step.
	txMessages = 256
	// txBytes bounds all open transactions of a connection together.
	txBytes = 8 << 20
)

// transaction is what a worker has published on a channel since its last commit.
// Nothing of it is accepted and nothing was sent: a stamp says when its message
// was accepted, and that is at the commit. It belongs to the decider.
type transaction struct {
	// ref is the one lease of the transaction; fenced says that there is one.
	ref    leaseclient.Ref
	fenced bool
	// ids are the commit ids, to find one that is there twice.
	ids      map[string]bool
	messages []txMessage
	// acks are the acknowledgements in it that need the lease.
	acks  []txAck
	bytes int
}

// txMessage is one publish of a transaction.
type txMessage struct {
	publish *publish
	verdict verdict
}

// joins holds a lease against the one of the transaction: the store accepts
// commits of one lock in one step, and only one step is all or nothing.
func (t *transaction) joins(ref leaseclient.Ref) error {
	switch {
	case !t.fenced:
		t.ref, t.fenced = ref, true
	case t.ref.LockKey != ref.LockKey:
		return &leaseclient.Error{
			Code: leaseclient.CodeLockMismatch, Op: "transaction",
			Detail: "a transaction publishes under one lock, and this message needs another one than those before it",
		}
	case t.ref != ref:
		return &leaseclient.Error{
			Code: leaseclient.CodeLost, Op: "transaction", Detail: "the lease that this transaction began with is not held any more",
		}
	}
	return nil
}

// add takes a publish in.
func (t *transaction) add(p *publish, v verdict, used int) error {
	size := len(p.raw) + len(p.body) + len(v.commit.Effect)
	if len(t.messages)+len(t.acks) >= txMessages || used+size > txBytes {
		return errTxFull()
	}
	if !v.free {
		if err := t.joins(v.ref); err != nil {
			return err
		}
		if t.ids[v.commit.ID] {
			return &leaseclient.Error{
				Code: leaseclient.CodeOutcomeUnknown, Op: "transaction", Detail: "an earlier message of this transaction has the same id",
			}
		}
		if t.ids == nil {
			t.ids = make(map[string]bool)
		}
		t.ids[v.commit.ID] = true
	}
	t.messages = append(t.messages, txMessage{p, v})
	t.bytes += size
	return nil
}

// errTxFull refuses what goes over the bounds of a transaction.
func errTxFull() error {
	return &leaseclient.Error{
		Code: leaseclient.CodeTooLarge, Op: "transaction",
		Detail: "a transaction may have at most " + strconv.Itoa(txMessages) + " messages, and those of one connection " + strconv.Itoa(txBytes) + " bytes",
	}
}

// cutAtCommit is how many units may be decided together. A commit is decided
// alone: it waits for the store, and what was accepted before it may not wait with
// it.
func cutAtCommit(units []unit) int {
	for i, u := range units {
		if u.method == wire.TxCommit {
			return max(i, 1)
		}
	}
	return len(units)
}

// txSelect handles the worker's tx.select.
func (c *conn) txSelect(u unit, ch *channel, items chan<- item) {
	if ch == nil {
		c.pass(item{channel: u.channel, bytes: u.frame}, items)
		return
	}
	if c.dropping(ch) {
		return
	}
	switch {
	case ch.confirm:
		// The broker refuses it, in its own words.
	case ch.fenced:
		text := "PRECONDITION_FAILED - " + string(leaseclient.CodeUnsupported) + ": select transactions before the first fenced message of a channel"
		c.refuseChannel(u.channel, ch, preconditionFailed, text, u.method, items)
		return
	default:
		c.mu.Lock()
		ch.tx = true
		c.mu.Unlock()
	}
	c.pass(item{ch: ch, channel: u.channel, bytes: u.frame}, items)
}

// hold keeps a publish for the commit.
func (c *conn) hold(u unit, v verdict, ch *channel, items chan<- item) {
	err := v.err
	if err == nil {
		before := ch.open.bytes
		err = ch.open.add(u.publish, v, c.txHeld)
		c.txHeld += ch.open.bytes - before
	}
	if err != nil {
		c.refuseTx(u.channel, ch, err, wire.BasicPublish, items)
	}
}

// forget drops what a transaction holds.
func (c *conn) forget(ch *channel) transaction {
	t := ch.open
	ch.open = transaction{}
	c.txHeld -= t.bytes
	return t
}

// txRollback handles the worker's tx.rollback.
func (c *conn) txRollback(u unit, ch *channel, items chan<- item) {
	if ch != nil {
		if c.dropping(ch) {
			return
		}
		t := c.forget(ch)
		c.mu.Lock()
		ch.deliveries.unacknowledge(t.acks)
		c.mu.Unlock()
	}
	c.pass(item{ch: ch, channel: u.channel, bytes: u.frame}, items)
}

// txCommit decides about everything in a transaction, in one step of the store,
// and sends it together with the commit.
func (c *conn) txCommit(u unit, ch *channel, items chan<- item) {
	if ch == nil {
		c.pass(item{channel: u.channel, bytes: u.frame}, items)
		return
	}
	if c.dropping(ch) {
		return
	}
	t := c.forget(ch)
	as, acks, err := c.beginTx(t)
	if err != nil {
		c.refuseTx(u.channel, ch, err, u.method, items)
		return
	}
	var out []item
	for i, m := range t.messages {
		p := &pending{exchange: m.publish.Exchange, again: m.verdict.again}
		props := m.publish.clean()
		if a := as[i]; a != nil {
			if prior, ok := a.Prior(); ok {
				if prior == leaseclient.OutcomeConfirmed {
					continue
				}
				err = priorError(prior)
				break
			}
			p.a = a
			if props = m.publish.stamped(a.Stamp); c.tooLong(props) {
				err = errStampTooLong()
				break
			}
		}
		c.seq++
		p.seq = c.seq
		out = append(out, item{ch: ch, channel: u.channel, bytes: m.publish.frames(u.channel, props, c.upFrameMax), p: p})
	}
	if err != nil {
		for _, a := range append(as, acks...) {
			if a != nil {
				c.s.opts.Gate.End(a, leaseclient.OutcomeCancelled)
			}
		}
		c.refuseTx(u.channel, ch, err, u.method, items)
		return
	}
	for _, it := range out {
		if it.p.a != nil {
			c.s.opts.OnVerdict("")
		}
		c.pass(it, items)
	}
	for _, a := range acks {
		// The broker has these already; they are in its list for the answer.
		c.seq++
		c.pass(item{ch: ch, channel: u.channel, p: &pending{a: a, seq: c.seq, ack: true}}, items)
	}
	c.pass(item{ch: ch, channel: u.channel, bytes: u.frame, commit: true}, items)
}

// beginTx begins the commits of a transaction. The result has a place for every
// message; nil where it needs no lease. The acknowledgements follow.
func (c *conn) beginTx(t transaction) (messages, acks []*fence.Accepted, err error) {
	out := make([]*fence.Accepted, len(t.messages))
	var at []int
	var commits []leaseclient.Commit
	for i, m := range t.messages {
		if !m.verdict.free {
			at = append(at, i)
			commits = append(commits, m.verdict.commit)
		}
	}
	for _, a := range t.acks {
		commits = append(commits, a.verdict.commit)
	}
	if len(commits) == 0 {
		return out, nil, nil
	}
	failpoint.Hit("rabbit.before-begin")
	ctx, cancel := context.WithTimeout(c.ctx, c.s.opts.Timeout)
	defer cancel()
	as, err := c.s.opts.Gate.Begin(ctx, t.ref, commits)
	failpoint.Hit("rabbit.after-begin")
	if err != nil {
		return nil, nil, err
	}
	for n, i := range at {
		out[i] = as[n]
	}
	return out, as[len(at):], nil
}

// refuseTx tells the worker that a transaction is over. The broker's half of it is
// rolled back by the end of the channel.
func (c *conn) refuseTx(id uint16, ch *channel, err error, m wire.Method, items chan<- item) {
	c.forget(ch)
	e := leaseclient.AsError(err)
	c.s.opts.OnVerdict(e.Code)
	c.log.Info("refused a transaction", zap.String("code", string(e.Code)), zap.NamedError("cause", e))
	c.refuseChannel(id, ch, preconditionFailed, "PRECONDITION_FAILED - "+string(e.Code)+": "+e.Public(), m, items)
}

// committed settles what the broker has committed, and reports whether the worker
// is told.
func (c *conn) committed(id uint16) bool {
	failpoint.Hit("rabbit.after-effect")
	var done []*pending
	c.mu.Lock()
	ch := c.channels[id]
	if ch == nil || len(ch.commits) == 0 {
		c.mu.Unlock()
		return true
	}
	last := ch.commits[0]
	ch.commits = ch.commits[1:]
	for t := ch.low + 1; t <= last; t++ {
		if p := ch.out[t]; p != nil {
			done = append(done, p)
			delete(ch.out, t)
			c.count(p, -1)
		}
	}
	ch.low = max(ch.low, last)
	refused := ch.refused
	c.mu.Unlock()
	c.notify()
	for _, p := range done {
		if p.a != nil {
			c.s.opts.Gate.End(p.a, leaseclient.OutcomeConfirmed)
		}
	}
	return !refused
}

// priorError is the answer for a message that was accepted before and did not end
// as confirmed.
func priorError(o leaseclient.Outcome) error {
	return &leaseclient.Error{
		Code: leaseclient.CodeOutcomeUnknown, Op: "publish", RetryAfter: time.Second,
		Detail: "this message was accepted before and ended as " + string(o),
	}
}

// tooLong reports whether a property list does not fit into one frame to the
// broker.
func (c *conn) tooLong(props []byte) bool { return len(props)+12+wire.Overhead > c.upFrameMax }

// errStampTooLong refuses a message whose stamp does not fit.
func errStampTooLong() error {
	return &leaseclient.Error{
		Code: leaseclient.CodeTooLarge, Op: "stamp",
		Detail: "the properties with the stamp do not fit into one frame of the size that this connection agreed on",
	}
}
