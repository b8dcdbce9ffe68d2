package rabbit

import (
	"encoding/binary"
	"slices"
	"strconv"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// Bounds of what is kept for acknowledgements that need a lease.
const (
	// maxUnacked bounds deliveries of such queues on one channel.
	maxUnacked = 65_536
	// maxConsumers bounds consumers, and questions without an answer, on one
	// channel.
	maxConsumers = 4_096
)

// queueName is a queue as a worker means it. The name of one that the broker is to
// name comes later, before the first delivery from it.
type queueName struct{ name string }

// delivery is a message that a worker has and whose acknowledgement needs a lease.
type delivery struct {
	queue    string
	decision policy.Decision
}

// deliveries is what is known of a channel for the sake of its acknowledgements.
// It stays empty unless the policy fences some. The decider and the broker reader
// both use it, under the connection's lock.
type deliveries struct {
	// last is the queue that was declared last: an empty name means that one.
	last *queueName
	// declaring, consuming and getting wait for the broker's answers, in order.
	declaring, consuming, getting []*queueName
	// consumers are queues by consumer tag.
	consumers map[string]*queueName
	// coming is what is known of a delivery whose header is still to come.
	coming    *policy.Delivery
	comingTag uint64
	// unacked are by tag; tags are their keys in order. highest is the last tag of
	// any delivery.
	unacked map[uint64]delivery
	tags    []uint64
	highest uint64
	// overflow: there were too many to remember.
	overflow bool
}

// fencesAcks reports whether anything has to be remembered.
func (c *conn) fencesAcks() bool { return c.s.opts.Policy().FencesAcks() }

// asks notes what a worker asks for: which queue it means by its next question, and
// where deliveries come from. It reports whether the frame may go on.
func (c *conn) asks(u unit, ch *channel, items chan<- item) bool {
	if ch == nil || !c.fencesAcks() {
		return true
	}
	var refusal string
	c.mu.Lock()
	d := &ch.deliveries
	named := func(name string) *queueName {
		if name == "" && d.last != nil {
			return d.last
		}
		return &queueName{name}
	}
	switch p := u.frame.Payload(); u.method {
	case wire.QueueDeclare:
		if q, err := wire.ParseQueueDeclare(p); err == nil {
			d.last = &queueName{q.Queue}
			if !q.NoWait {
				d.declaring = append(d.declaring, d.last)
			}
		}
	case wire.BasicConsume:
		q, err := wire.ParseConsume(p)
		if err != nil {
			break
		}
		queue := named(q.Queue)
		switch {
		case c.unfenceable(queue) && q.NoAck:
			refusal = "the acknowledgements of this queue are fenced, so it cannot be consumed without them"
		case q.NoWait && q.Tag == "" && c.unfenceable(queue):
			refusal = "name the consumer, or wait for the broker's answer"
		case q.NoWait:
			d.consume(q.Tag, queue)
		default:
			d.consuming = append(d.consuming, queue)
		}
	case wire.BasicGet:
		if q, err := wire.ParseGet(p); err == nil {
			queue := named(q.Queue)
			if q.NoAck && c.unfenceable(queue) {
				refusal = "the acknowledgements of this queue are fenced, so it cannot be read without them"
				break
			}
			d.getting = append(d.getting, queue)
		}
	case wire.BasicRecover, wire.BasicRecoverAsync:
		d.forget()
	}
	if refusal == "" && max(len(d.declaring), len(d.consuming), len(d.getting), len(d.consumers)) > maxConsumers {
		refusal = "a channel may have at most " + strconv.Itoa(maxConsumers) + " consumers and open questions while acknowledgements are fenced"
	}
	c.mu.Unlock()
	if refusal != "" {
		c.refuseChannel(u.channel, ch, accessRefused, "ACCESS_REFUSED - "+string(leaseclient.CodeUnsupported)+": "+refusal, u.method, items)
	}
	return refusal == ""
}

// unfenceable reports whether a queue must not be consumed without
// acknowledgements.
func (c *conn) unfenceable(q *queueName) bool {
	name := q.name
	if name == "" {
		// The broker names it so.
		name = "amq.gen-"
	}
	return c.s.opts.Policy().AcksFenced(name)
}

// consume notes where the deliveries of a consumer come from.
func (d *deliveries) consume(tag string, q *queueName) {
	if d.consumers == nil {
		d.consumers = make(map[string]*queueName)
	}
	d.consumers[tag] = q
}

// forget drops what goes back to its queue.
func (d *deliveries) forget() { d.unacked, d.tags = nil, nil }

// answers follows what the broker says, for the queues that deliveries come from.
func (c *conn) answers(id uint16, f wire.Frame) {
	if f.Type() == wire.FrameBody || !c.fencesAcks() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := c.channels[id]
	if ch == nil {
		return
	}
	d := &ch.deliveries
	next := func(list *[]*queueName) *queueName {
		if len(*list) == 0 {
			return &queueName{}
		}
		q := (*list)[0]
		*list = (*list)[1:]
		return q
	}
	p := f.Payload()
	if f.Type() == wire.FrameHeader {
		if d.coming != nil {
			c.delivered(d, p)
		}
		return
	}
	switch f.Method() {
	case wire.QueueDeclareOK:
		if name, err := wire.ParseName(p); err == nil {
			next(&d.declaring).name = name
		}
	case wire.BasicConsumeOK:
		if tag, err := wire.ParseName(p); err == nil {
			d.consume(tag, next(&d.consuming))
		}
	case wire.BasicCancel, wire.BasicCancelOK:
		if tag, err := wire.ParseName(p); err == nil {
			delete(d.consumers, tag)
		}
	case wire.BasicGetEmpty:
		next(&d.getting)
	case wire.BasicGetOK, wire.BasicDeliver:
		v, err := wire.ParseDelivery(f.Method(), p)
		if err != nil {
			return
		}
		var q *queueName
		if f.Method() == wire.BasicGetOK {
			q = next(&d.getting)
		} else {
			q = d.consumers[v.Consumer]
		}
		d.highest = v.Tag
		if q != nil && c.s.opts.Policy().AcksFenced(q.name) {
			d.coming, d.comingTag = &policy.Delivery{Queue: q.name, Exchange: v.Exchange, RoutingKey: v.RoutingKey}, v.Tag
		}
	}
}

// delivered remembers a delivery with the lease that its acknowledgement needs;
// the lock is held.
func (c *conn) delivered(d *deliveries, header []byte) {
	v := *d.coming
	d.coming = nil
	if h, err := wire.ParseHeader(header); err == nil {
		if props, err := wire.ParseProperties(h.Properties); err == nil {
			v.Header = headerSource(props)
		}
	}
	if len(d.unacked) >= maxUnacked {
		d.overflow = true
		return
	}
	decision, err := c.s.opts.Policy().ResolveAck(v)
	if err != nil {
		decision = policy.Decision{Reason: decision.Reason}
	}
	if d.unacked == nil {
		d.unacked = make(map[uint64]delivery)
	}
	d.unacked[d.comingTag] = delivery{v.Queue, decision}
	d.tags = append(d.tags, d.comingTag)
}

// take removes the deliveries that an acknowledgement is about, in order.
func (d *deliveries) take(tag uint64, multiple bool) (tags []uint64, all []delivery) {
	if !multiple {
		if v, ok := d.unacked[tag]; ok {
			delete(d.unacked, tag)
			return []uint64{tag}, []delivery{v}
		}
		return nil, nil
	}
	n := 0
	for _, t := range d.tags {
		if t > tag {
			break
		}
		n++
		if v, ok := d.unacked[t]; ok {
			delete(d.unacked, t)
			tags, all = append(tags, t), append(all, v)
		}
	}
	d.tags = slices.Delete(d.tags, 0, n)
	return tags, all
}

// trim drops what is acknowledged from the front of the tags.
func (d *deliveries) trim() {
	n := 0
	for n < len(d.tags) {
		if _, ok := d.unacked[d.tags[n]]; ok {
			break
		}
		n++
	}
	d.tags = slices.Delete(d.tags, 0, n)
	if len(d.tags) > 2*len(d.unacked)+64 {
		d.tags = slices.DeleteFunc(d.tags, func(t uint64) bool { _, ok := d.unacked[t]; return !ok })
	}
}

// ackUse is the lease that an acknowledgement needs.
type ackUse struct {
	delivery
	tags     []uint64
	overflow bool
}

// removes reports whether a frame takes messages out of their queue, which is what
// needs a lease; giving them back does not.
func removes(m wire.Method, a wire.Ack) bool {
	return m == wire.BasicAck || ((m == wire.BasicNack || m == wire.BasicReject) && !a.Requeue)
}

// splitAcks finds the leases that the acknowledgements among units need. One that
// is about messages of several leases becomes one for each run of them.
func (c *conn) splitAcks(units []unit) []unit {
	if !c.fencesAcks() {
		return units
	}
	out := make([]unit, 0, len(units))
	for _, u := range units {
		switch u.method {
		case wire.BasicAck, wire.BasicNack, wire.BasicReject:
			out = append(out, c.splitAck(u)...)
		default:
			out = append(out, u)
		}
	}
	return out
}

// splitAck is splitAcks for one of them.
func (c *conn) splitAck(u unit) []unit {
	a, err := wire.ParseAcknowledgement(u.method, u.frame.Payload())
	if err != nil {
		return []unit{u}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := c.channels[u.channel]
	if ch == nil {
		return []unit{u}
	}
	d := &ch.deliveries
	if a.Multiple && a.Tag == 0 && len(d.unacked) > 0 {
		// All that the worker has; the broker may have sent more by now.
		a.Tag = d.highest
		u.frame = a.Append(nil, u.channel, u.method)
	}
	tags, all := d.take(a.Tag, a.Multiple)
	d.trim()
	if !removes(u.method, a) {
		return []unit{u}
	}
	if len(all) == 0 {
		if d.overflow {
			u.ack = &ackUse{overflow: true}
		}
		return []unit{u}
	}
	var out []unit
	for i := 0; i < len(all); {
		n := i + 1
		for n < len(all) && all[n].decision == all[i].decision {
			n++
		}
		part := u
		part.ack = &ackUse{delivery: all[i], tags: tags[i:n], overflow: d.overflow}
		if n < len(all) {
			run := a
			run.Tag = tags[n-1]
			part.frame = run.Append(nil, u.channel, u.method)
		}
		out = append(out, part)
		i = n
	}
	return out
}

// resolveAck makes the commit of an acknowledgement. It is accepted by the store
// like a publish, and so comes before everything of a successor, but nobody can
// finish it for somebody else: the broker gives the message out again.
func (c *conn) resolveAck(u *ackUse) verdict {
	if u.overflow {
		return verdict{err: &leaseclient.Error{
			Code: leaseclient.CodeTooLarge, Op: "ack",
			Detail: "a channel may have at most " + strconv.Itoa(maxUnacked) + " unacknowledged messages of queues whose acknowledgements are fenced; set a prefetch",
		}}
	}
	ref, err := fence.Choose(c.s.opts.Leases, u.decision, "")
	if err != nil {
		return verdict{err: err}
	}
	target := "acknowledgement " + u.queue
	return verdict{ref: ref, commit: leaseclient.Commit{
		ID: leaseclient.NewID("commit"), Kind: leaseclient.KindPublish, Target: target[:min(len(target), leaseclient.MaxTargetBytes)],
		Effect: encodeAck(c.vhost, u),
	}}
}

// effectAck is the first octet of what the log carries of an acknowledgement.
const effectAck = 2

// encodeAck writes an acknowledgement for the log: version, virtual host, queue,
// the last tag, how many messages.
func encodeAck(vhost string, u *ackUse) []byte {
	out := wire.AppendShort([]byte{effectAck}, vhost)
	out = wire.AppendShort(out, u.queue)
	out = binary.BigEndian.AppendUint64(out, u.tags[len(u.tags)-1])
	return binary.BigEndian.AppendUint32(out, uint32(len(u.tags)))
}

// isAck reports whether a log entry is an acknowledgement.
func isAck(effect []byte) bool { return len(effect) > 0 && effect[0] == effectAck }

// acknowledge carries the verdict on an acknowledgement out.
func (c *conn) acknowledge(u unit, ch *channel, v verdict, items chan<- item) {
	if ch == nil || c.dropping(ch) {
		if v.a != nil {
			c.s.opts.Gate.End(v.a, leaseclient.OutcomeCancelled)
		}
		return
	}
	if v.err == nil && v.held && ch.tx {
		v.err = ch.open.acknowledges(u, v, c.txHeld)
		if v.err == nil {
			c.txHeld += txAckBytes
		}
	}
	if v.err == nil && v.a == nil && !(v.held && ch.tx) {
		v.err = &leaseclient.Error{Code: leaseclient.CodeUnavailable, Op: "ack", Detail: "the channel was being closed when this acknowledgement came"}
	}
	if v.err != nil {
		if ch.tx {
			c.refuseTx(u.channel, ch, v.err, u.method, items)
			return
		}
		e := leaseclient.AsError(v.err)
		c.s.opts.OnVerdict(e.Code)
		c.log.Info("refused an acknowledgement", zap.String("code", string(e.Code)), zap.NamedError("cause", e))
		// There is no answer to an acknowledgement, so that a client cannot be told
		// otherwise; and the message has to go back to its queue.
		c.refuseChannel(u.channel, ch, accessRefused, refusalText(e), u.method, items)
		return
	}
	it := item{ch: ch, channel: u.channel, bytes: u.frame}
	if v.a != nil {
		c.seq++
		it.p = &pending{a: v.a, seq: c.seq, ack: true}
		c.s.opts.OnVerdict("")
	}
	c.pass(it, items)
}

// txAckBytes is what an acknowledgement counts in a transaction.
const txAckBytes = 256

// acknowledges takes an acknowledgement into a transaction. The broker has it and
// waits for the commit, too.
func (t *transaction) acknowledges(u unit, v verdict, used int) error {
	if len(t.messages)+len(t.acks) >= txMessages || used+txAckBytes > txBytes {
		return errTxFull()
	}
	if err := t.joins(v.ref); err != nil {
		return err
	}
	t.acks = append(t.acks, txAck{u.ack, v})
	t.bytes += txAckBytes
	return nil
}

// txAck is one acknowledgement of a transaction.
type txAck struct {
	use     *ackUse
	verdict verdict
}

// unacknowledge gives back what a rollback leaves with the worker; the lock is held.
func (d *deliveries) unacknowledge(acks []txAck) {
	for _, a := range acks {
		for _, t := range a.use.tags {
			if d.unacked == nil {
				d.unacked = make(map[uint64]delivery)
			}
			d.unacked[t] = a.use.delivery
			d.tags = append(d.tags, t)
		}
	}
	slices.Sort(d.tags)
	d.tags = slices.Compact(d.tags)
}
