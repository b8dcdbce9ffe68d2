package rabbit

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/failpoint"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// Headers by which a worker says what it wishes.
const (
	headerLease      = "x-fencerider-lease"
	headerIdempotent = "x-fencerider-idempotent"
)

// verdict is what was decided about one publish of a batch.
type verdict struct {
	// free: it needs no lease.
	free   bool
	ref    leaseclient.Ref
	commit leaseclient.Commit
	// held: it is judged at the commit of its transaction.
	held bool
	// again: the commit id follows from the message's own id, so the worker may
	// ask for the same commit once more.
	again bool
	// group is the Begin that a and err come from; nil when there was none.
	group *group
	a     *fence.Accepted
	err   error
}

// group is one Begin of a batch: the publishes of one lease.
type group struct {
	at     []int
	cancel context.CancelFunc
	done   chan struct{}
	// left counts publishes that were not carried out yet.
	left int
}

// batch is what was decided, or is about to be, about one read.
type batch struct {
	verdicts []verdict
	groups   []*group
	// progress has a place for every group and hears of each that is decided.
	progress chan struct{}
}

// decide asks the policy and the gate about every batch, and hands on what may
// go, in the order of the wire.
func (c *conn) decide(batches <-chan []unit, items chan<- item) {
	for units := range batches {
		for len(units) > 0 {
			n := cutAtCommit(units)
			c.carry(c.splitAcks(units[:n]), items)
			units = units[n:]
		}
	}
}

// carry decides about units and carries them out.
func (c *conn) carry(units []unit, items chan<- item) {
	b := c.judge(units)
	for i, u := range units {
		v := &b.verdicts[i]
		if v.group != nil {
			b.await(v.group)
			v.group.left--
		}
		c.apply(u, *v, items)
	}
}

// await waits for a Begin. The batch keeps its order, so messages of another lock
// that were accepted already may stand behind this one; it is given up in time
// for them.
func (b *batch) await(g *group) {
	for {
		select {
		case <-g.done:
			return
		default:
		}
		var limit <-chan time.Time
		var timer *time.Timer
		if left, ok := b.behind(g); ok {
			timer = time.NewTimer(left / 2)
			limit = timer.C
		}
		select {
		case <-b.progress:
		case <-limit:
			g.cancel()
			<-g.done
		}
		if timer != nil {
			timer.Stop()
		}
	}
}

// behind is how long the first message of another group that is accepted and was
// not carried out yet may still be sent.
func (b *batch) behind(g *group) (time.Duration, bool) {
	var least time.Duration
	found := false
	for _, o := range b.groups {
		if o == g || o.left == 0 {
			continue
		}
		select {
		case <-o.done:
		default:
			continue
		}
		for _, i := range o.at {
			a := b.verdicts[i].a
			if a == nil {
				continue
			}
			if _, prior := a.Prior(); prior {
				continue
			}
			if left := a.Remaining(); !found || left < least {
				least, found = left, true
			}
		}
	}
	return least, found
}

// judge finds the lease of every publish and starts to begin their commits, one
// Begin a lease, side by side.
func (c *conn) judge(units []unit) *batch {
	out := make([]verdict, len(units))
	var groups []*group
	byRef := make(map[leaseclient.Ref]*group)
	modes := make(map[uint16]bool)
	for i, u := range units {
		if u.publish == nil && u.ack == nil {
			switch u.method {
			case wire.ChannelOpen:
				modes[u.channel] = false
			case wire.TxSelect:
				modes[u.channel] = true
			}
			continue
		}
		if ch := c.channel(u.channel); ch != nil && c.dropping(ch) {
			// Nobody misses it. Should its channel be open again by the time of
			// its turn, it is refused: whether a message needs a lease is never
			// a matter of the state of a channel.
			out[i].err = &leaseclient.Error{
				Code: leaseclient.CodeUnavailable, Op: "begin", Detail: "the channel was being closed when this message came",
			}
			continue
		}
		v := c.resolveUnit(u)
		v.held = c.inTx(u.channel, modes)
		out[i] = v
		if v.err != nil || v.free || v.held {
			continue
		}
		g := byRef[v.ref]
		if g == nil {
			g = &group{done: make(chan struct{})}
			byRef[v.ref] = g
			groups = append(groups, g)
		}
		g.at = append(g.at, i)
		g.left++
		out[i].group = g
	}
	if len(groups) > 0 {
		failpoint.Hit("rabbit.before-begin")
	}
	b := &batch{verdicts: out, groups: groups, progress: make(chan struct{}, len(groups))}
	for _, g := range groups {
		ctx, cancel := context.WithTimeout(c.ctx, c.s.opts.Timeout)
		g.cancel = cancel
		start := func() {
			defer func() {
				cancel()
				close(g.done)
				b.progress <- struct{}{}
			}()
			c.begin(ctx, out[g.at[0]].ref, g.at, out)
			failpoint.Hit("rabbit.after-begin")
		}
		if len(groups) == 1 {
			start()
			continue
		}
		// The decider waits for every one of them.
		go start()
	}
	return b
}

// inTx reports whether a publish is part of a transaction: by what the channel is,
// or becomes by what stands before it in the batch.
func (c *conn) inTx(id uint16, modes map[uint16]bool) bool {
	if tx, ok := modes[id]; ok {
		return tx
	}
	ch := c.channel(id)
	return ch != nil && ch.tx
}

// begin asks the gate about the publishes of one lease.
func (c *conn) begin(ctx context.Context, ref leaseclient.Ref, at []int, out []verdict) {
	first := make(map[string]bool)
	var fresh []int
	var commits []leaseclient.Commit
	for _, i := range at {
		id := out[i].commit.ID
		if first[id] {
			// The same id twice in one batch: the second is a repetition.
			out[i].err = &leaseclient.Error{
				Code: leaseclient.CodeOutcomeUnknown, Op: "begin", RetryAfter: time.Second,
				Detail: "an earlier message with this id is still on its way",
			}
			continue
		}
		first[id] = true
		fresh = append(fresh, i)
		commits = append(commits, out[i].commit)
	}
	as, err := c.s.opts.Gate.Begin(ctx, ref, commits)
	if err != nil && len(fresh) > 1 && repeats(err) {
		// One id that was used before must not cost its neighbours.
		for _, i := range fresh {
			c.begin(ctx, ref, []int{i}, out)
		}
		return
	}
	for n, i := range fresh {
		if err != nil {
			out[i].err = err
		} else {
			out[i].a = as[n]
		}
	}
}

// repeats reports whether a Begin was refused for an id that was used before.
func repeats(err error) bool {
	_, inFlight := errors.AsType[*leaseclient.InFlightError](err)
	return inFlight || leaseclient.CodeOf(err) == leaseclient.CodeIdempotencyConflict
}

// resolveUnit finds the lease of a publish or of an acknowledgement.
func (c *conn) resolveUnit(u unit) verdict {
	if u.ack != nil {
		return c.resolveAck(u.ack)
	}
	return c.resolve(u.publish)
}

// resolve asks the policy which lease a publish needs, and makes its commit.
func (c *conn) resolve(p *publish) verdict {
	w := wishesOf(p)
	keys, ok := moreKeys(p)
	if !ok {
		return verdict{err: &leaseclient.Error{Code: leaseclient.CodePolicyDenied, Op: "resolve identity", Detail: "CC and BCC must be lists of texts"}}
	}
	d, err := c.s.opts.Policy().ResolvePublish(policy.Publish{
		Exchange: p.Exchange, RoutingKey: p.RoutingKey, MoreKeys: keys, Header: headerSource(p.props), Body: p.body,
	})
	switch {
	case err != nil:
		return verdict{err: &leaseclient.Error{Code: leaseclient.CodePolicyDenied, Op: "resolve identity", Detail: d.Reason, Err: err}}
	case d.Verdict == policy.Off || d.Verdict == policy.Pass:
		return verdict{free: true}
	}
	ref, err := fence.Choose(c.s.opts.Leases, d, w.lease)
	if err != nil {
		return verdict{err: err}
	}
	effect := encodeEffect(c.vhost, p)
	if len(effect) > c.s.opts.MaxEffect {
		return verdict{err: &leaseclient.Error{
			Code: leaseclient.CodeTooLarge, Op: "seal",
			Detail: "a fenced message may have at most " + strconv.Itoa(c.s.opts.MaxEffect) + " bytes with its properties",
		}}
	}
	target := p.Exchange + " " + p.RoutingKey
	id := leaseclient.NewID("commit")
	again := false
	if mid, has := p.props.MessageID(); w.idempotent && has && mid != "" {
		sum := sha256.Sum256([]byte(ref.LockKey + "\x00" + mid))
		id, again = "commit_"+hex.EncodeToString(sum[:16]), true
	}
	return verdict{ref: ref, again: again, commit: leaseclient.Commit{ID: id, Kind: leaseclient.KindPublish, Target: target, Effect: effect}}
}

// wishes are what a worker asks for by headers.
type wishes struct {
	lease      string
	idempotent bool
}

// wishesOf reads them.
func wishesOf(p *publish) wishes {
	var w wishes
	p.props.Headers(func(f wire.Field) {
		switch f.Key {
		case headerLease:
			w.lease, _ = f.Text()
		case headerIdempotent:
			w.idempotent = f.True()
		}
	})
	return w
}

// moreKeys returns the routing keys of CC and BCC, which route as well.
func moreKeys(p *publish) ([]string, bool) {
	var keys []string
	good := true
	p.props.Headers(func(f wire.Field) {
		if f.Key == "CC" || f.Key == "BCC" {
			k, ok := f.Texts()
			good = good && ok
			keys = append(keys, k...)
		}
	})
	return keys, good
}

// headerSource answers {header.<name>} of a policy.
func headerSource(props *wire.Properties) func(string) policy.Value {
	return func(name string) policy.Value {
		var v policy.Value
		n := 0
		props.Headers(func(f wire.Field) {
			if f.Key != name {
				return
			}
			n++
			v = policy.Value{Kind: policy.Unusable}
			if s, ok := f.Text(); ok {
				v = policy.Value{Kind: policy.Text, Text: s}
			} else if i, ok := f.Integer(); ok {
				v = policy.Value{Kind: policy.Integer, Text: strconv.FormatInt(i, 10)}
			}
		})
		if n > 1 {
			return policy.Value{Kind: policy.Repeated}
		}
		return v
	}
}

// dropping reports whether nothing of a channel goes anywhere any more.
func (c *conn) dropping(ch *channel) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return ch.refused || ch.closing || ch.brokerClosed
}

// pass puts an item into the queue to the broker and waits for its room there.
func (c *conn) pass(it item, items chan<- item) {
	it.room = min(int64(len(it.bytes)), queueBytes)
	// It cannot fail: the forwarder takes every item, whatever has become of the
	// connection.
	_ = c.room.Acquire(context.Background(), it.room)
	if it.p != nil && it.p.a != nil {
		c.mu.Lock()
		c.waiting = append(c.waiting, it.p)
		c.mu.Unlock()
	}
	items <- it
}

// apply carries one unit out, in its turn.
func (c *conn) apply(u unit, v verdict, items chan<- item) {
	if u.channel == 0 {
		it := item{bytes: u.frame}
		switch u.method {
		case wire.ConnectionClose:
			it.drain, it.leaving = true, true
		case wire.ConnectionCloseOK:
			it.leaving = true
		}
		c.pass(it, items)
		return
	}
	ch := c.channel(u.channel)
	if u.ack != nil {
		c.acknowledge(u, ch, v, items)
		return
	}
	switch u.method {
	case wire.ChannelOpen:
		c.opened(u, items)
	case wire.ChannelClose:
		c.workerCloses(u, items)
	case wire.ChannelCloseOK:
		c.workerClosedOK(u, items)
	case wire.BasicPublish:
		c.publish(u, v, items)
	case wire.ConfirmSelect:
		if ch != nil {
			if c.dropping(ch) {
				return
			}
			ch.confirm = true
		}
		c.pass(item{ch: ch, channel: u.channel, bytes: u.frame, confirm: true}, items)
	case wire.TxSelect:
		c.txSelect(u, ch, items)
	case wire.TxCommit:
		c.txCommit(u, ch, items)
	case wire.TxRollback:
		c.txRollback(u, ch, items)
	default:
		if ch != nil && c.dropping(ch) {
			return
		}
		if c.asks(u, ch, items) {
			c.pass(item{ch: ch, channel: u.channel, bytes: u.frame}, items)
		}
	}
}

// opened starts a channel. A number is used again only when the broker has closed
// the channel that had it before: a client need not wait for that, and what is
// known of the old one must not be mixed with the new.
func (c *conn) opened(u unit, items chan<- item) {
	if ch := c.channel(u.channel); ch != nil {
		c.forget(ch)
		c.mu.Lock()
		open := !ch.refused && !ch.closing
		c.mu.Unlock()
		if open {
			c.violated(&protocolError{504, "CHANNEL_ERROR - second 'channel.open' seen"})
			return
		}
		gone := func() bool { return ch.brokerDone || c.channels[u.channel] != ch }
		if !c.await(closeWait, nil, gone) {
			c.cut(errChannelOpen)
			return
		}
	}
	ch := &channel{out: make(map[uint64]*pending)}
	c.mu.Lock()
	c.channels[u.channel] = ch
	c.mu.Unlock()
	c.pass(item{ch: ch, channel: u.channel, bytes: u.frame}, items)
}

// workerCloses handles the worker's channel.close.
func (c *conn) workerCloses(u unit, items chan<- item) {
	ch := c.channel(u.channel)
	if ch != nil && ch.refused {
		// Both closed at once. The worker gets its answer; the broker has had a
		// close already.
		_ = c.down.inject(u.channel, wire.AppendMethod(nil, u.channel, wire.ChannelCloseOK, nil))
		return
	}
	if ch != nil {
		c.forget(ch)
		c.mu.Lock()
		ch.closing = true
		c.mu.Unlock()
	}
	c.pass(item{ch: ch, channel: u.channel, bytes: u.frame, drainChannel: ch != nil}, items)
}

// workerClosedOK handles the worker's answer to a close.
func (c *conn) workerClosedOK(u unit, items chan<- item) {
	c.mu.Lock()
	ch := c.channels[u.channel]
	answer := ch != nil && ch.brokerClosed
	if answer {
		delete(c.channels, u.channel)
	}
	c.mu.Unlock()
	if answer {
		c.forget(ch)
		c.pass(item{ch: ch, channel: u.channel, bytes: u.frame}, items)
	}
}

// publish carries a verdict out.
func (c *conn) publish(u unit, v verdict, items chan<- item) {
	ch := c.channel(u.channel)
	if ch == nil || c.dropping(ch) {
		if v.a != nil {
			c.s.opts.Gate.End(v.a, leaseclient.OutcomeCancelled)
		}
		if ch == nil {
			c.violated(&protocolError{504, "CHANNEL_ERROR - expected 'channel.open'"})
		}
		return
	}
	if u.publish.Immediate {
		// The broker closes the connection over it; accepting it first would
		// have it delivered by settlement all the same.
		if v.a != nil {
			c.s.opts.Gate.End(v.a, leaseclient.OutcomeCancelled)
		}
		c.violated(&protocolError{540, "NOT_IMPLEMENTED - immediate=true"})
		return
	}
	if ch.tx {
		if v.a != nil {
			// It was judged as if it stood alone.
			c.s.opts.Gate.End(v.a, leaseclient.OutcomeCancelled)
		}
		c.hold(u, v, ch, items)
		return
	}
	if v.held && !v.free && v.err == nil {
		v.err = &leaseclient.Error{Code: leaseclient.CodeUnavailable, Op: "begin", Detail: "the transaction that this message came for is not there"}
	}
	p := &pending{a: v.a, exchange: u.publish.Exchange, again: v.again}
	c.seq++
	p.seq = c.seq
	if ch.confirm {
		ch.tag++
		p.tag = ch.tag
	}
	if v.free {
		c.pass(item{ch: ch, channel: u.channel, bytes: u.publish.frames(u.channel, u.publish.clean(), c.upFrameMax), p: p}, items)
		return
	}
	if v.err != nil {
		c.refuse(u, ch, p, v.err, items)
		return
	}
	if prior, ok := v.a.Prior(); ok {
		c.answerPrior(u, ch, p, prior, items)
		return
	}
	props := u.publish.stamped(v.a.Stamp)
	if c.tooLong(props) {
		c.s.opts.Gate.End(v.a, leaseclient.OutcomeCancelled)
		c.refuse(u, ch, p, errStampTooLong(), items)
		return
	}
	c.s.opts.OnVerdict("")
	ch.fenced = true
	c.pass(item{ch: ch, channel: u.channel, bytes: u.publish.frames(u.channel, props, c.upFrameMax), p: p}, items)
}

// refuse tells the worker that a publish was not accepted, in the form that its
// client surfaces.
func (c *conn) refuse(u unit, ch *channel, p *pending, err error, items chan<- item) {
	e := leaseclient.AsError(err)
	c.s.opts.OnVerdict(e.Code)
	c.log.Info("refused a publish", zap.String("code", string(e.Code)), zap.NamedError("cause", e))
	text := refusalText(e)
	if p.tag != 0 {
		if err := c.down.inject(u.channel, rejectConfirm(u.channel, u.publish, p.tag, text, c.frameMax)); err != nil {
			c.cut(err)
		}
		return
	}
	c.refuseChannel(u.channel, ch, accessRefused, text, wire.BasicPublish, items)
}

// refuseChannel closes a channel on both sides.
func (c *conn) refuseChannel(id uint16, ch *channel, code uint16, text string, m wire.Method, items chan<- item) {
	c.mu.Lock()
	ch.refused = true
	c.mu.Unlock()
	if err := c.down.inject(id, rejectChannel(id, code, text, m)); err != nil {
		c.cut(err)
	}
	// What was accepted before it is confirmed first, or it would have to be
	// settled, which is a second publish.
	c.pass(item{ch: ch, channel: id, bytes: wire.Close{Code: 200, Text: "fenced"}.Append(nil, id, wire.ChannelClose), drainChannel: true}, items)
}

// answerPrior answers for a message that an earlier request has dealt with.
func (c *conn) answerPrior(u unit, ch *channel, p *pending, o leaseclient.Outcome, items chan<- item) {
	if o == leaseclient.OutcomeConfirmed {
		if p.tag != 0 {
			_ = c.down.inject(u.channel, wire.AppendAck(nil, u.channel, p.tag))
		}
		return
	}
	c.refuse(u, ch, p, priorError(o), items)
}
