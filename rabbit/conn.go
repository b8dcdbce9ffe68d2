package rabbit

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/semaphore"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/failpoint"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// Times of a connection.
const (
	handshakeTime = 10 * time.Second
	// linger is how long a worker has to take the last words.
	linger = 2 * time.Second
	// closeWait is how long the broker has to close a channel.
	closeWait = 5 * time.Second
	// watchEvery is how often arrival bounds and heartbeats are looked at.
	watchEvery = 100 * time.Millisecond
	// initialFrame bounds frames before a size is agreed on; tokens of a login
	// can be long.
	initialFrame = 128 << 10
)

// Reasons why a connection to the broker ends.
var (
	errBrokerLost  = errors.New("connection to the broker was lost")
	errUnconfirmed = errors.New("the broker did not confirm a message within its arrival bound")
	errLate        = errors.New("the time to send a message has run out")
	errChannelOpen = errors.New("the broker did not close a channel in time")
)

// pending is one publish that was forwarded or is going to be.
type pending struct {
	seq uint64
	// tag is the worker's number; zero when it did not ask for confirms.
	tag uint64
	// a is nil for a message that needs no lease.
	a        *fence.Accepted
	exchange string
	// again: the worker may send this message once more under the same id.
	again bool
	// discarded: the broker dropped it with its transaction.
	discarded bool
	// ack: it is an acknowledgement, which the broker does not answer.
	ack bool
	// listed: it is in its channel's list, and what becomes of that becomes of it.
	listed bool
}

// channel is what the sidecar knows of a worker's channel.
type channel struct {
	// confirm and tag are the worker's own mode and numbering.
	confirm bool
	tag     uint64
	// upConfirm, upTag and low are the broker's; out holds what is not settled.
	upConfirm bool
	upTag     uint64
	low       uint64
	out       map[uint64]*pending
	// fenced: a message that needs a lease went out on it, and so it is in confirm
	// mode at the broker. tx: the worker selected transactions, and open is the one
	// that it has not committed. The decider writes these.
	fenced bool
	tx     bool
	open   transaction
	// commits are, for every tx.commit that the broker has not answered, the last
	// message of it. discarded: it dropped them with the channel.
	commits   []uint64
	discarded bool
	// deliveries are for acknowledgements that need a lease.
	deliveries deliveries
	// refused: the sidecar closed the channel on both sides. brokerDone says that
	// the broker's answer has come.
	refused, brokerDone bool
	// closing: the worker closed it and waits for the broker's answer.
	closing bool
	// brokerClosed: the broker closed it and waits for the worker's answer.
	brokerClosed bool
}

// conn is one worker's connection and its own connection to the broker.
type conn struct {
	s      *Server
	log    *zap.Logger
	client net.Conn
	cr     *bufio.Reader
	up     net.Conn
	ur     *bufio.Reader
	down   *down

	// frameMax is the worker's frame size, upFrameMax the one towards the broker.
	frameMax   int
	upFrameMax int
	heartbeat  time.Duration
	// vhost is the virtual host that the worker opened.
	vhost string

	ctx    context.Context
	cancel context.CancelFunc
	// urgent are small frames for the broker that do not stand in the queue.
	urgent chan []byte
	// changed wakes whoever waits for channels to change.
	changed chan struct{}

	// room bounds the bytes between the decider and the forwarder.
	room *semaphore.Weighted
	// unconfirmed counts fenced messages that the broker has not confirmed.
	unconfirmed atomic.Int64
	// settling keeps what is handed over in the order in which it was accepted.
	settling sync.Mutex

	mu       sync.Mutex
	channels map[uint16]*channel
	// orphans are accepted and will not be sent; they are about to be settled.
	orphans []*pending
	// waiting are fenced messages before the forwarder, the oldest first.
	waiting  []*pending
	err      error
	stopping bool
	// leaving: connection.close is on its way in one of the directions.
	leaving bool
	// ended: the worker broke the protocol, nothing more is read.
	ended   bool
	upWrote time.Time
	// seq numbers publishes, and txHeld is what open transactions hold; both belong
	// to the decider.
	seq    uint64
	txHeld int
}

// newConn prepares a connection; run does the work.
func newConn(s *Server, client net.Conn) *conn {
	c := &conn{
		s: s, log: s.opts.Logger.With(zap.String("adapter", "rabbit")), client: client, cr: bufio.NewReaderSize(client, 64<<10),
		urgent: make(chan []byte, 64), changed: make(chan struct{}, 1), channels: make(map[uint16]*channel),
		room: semaphore.NewWeighted(queueBytes),
	}
	c.down = newDown(client, func() bool { return c.unconfirmed.Load() > 0 })
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if t, ok := client.(*net.TCPConn); ok {
		_ = t.SetNoDelay(true)
	}
	return c
}

// notify wakes one waiter; it looks again at what it waits for.
func (c *conn) notify() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// stop ends the connection in an orderly way.
func (c *conn) stop() {
	c.mu.Lock()
	c.stopping = true
	c.mu.Unlock()
	_ = c.client.SetReadDeadline(time.Unix(1, 0))
}

// cut drops the connection to the broker with everything that the kernel still
// holds of it, so that nothing of it arrives late. The first reason counts.
func (c *conn) cut(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	up := c.up
	c.mu.Unlock()
	if up != nil {
		reset(up)
	}
	c.cancel()
	c.down.loosen()
	_ = c.client.SetReadDeadline(time.Unix(1, 0))
	c.notify()
}

// reset drops a connection together with what the kernel still holds of it.
func reset(nc net.Conn) {
	raw := nc
	if t, ok := nc.(*tls.Conn); ok {
		// Not the TLS layer's own close, which would write once more.
		raw = t.NetConn()
	}
	if t, ok := raw.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = raw.Close()
}

// failure returns why the connection was cut.
func (c *conn) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// run carries one worker from its first byte to its last.
func (c *conn) run() {
	defer c.cancel()
	defer func() { _ = c.client.Close() }()
	if err := c.handshake(); err != nil {
		c.log.Info("a connection did not get through its handshake", zap.Error(err))
		if c.up != nil {
			_ = c.up.Close()
		}
		return
	}
	_ = c.client.SetDeadline(time.Time{})
	_ = c.up.SetDeadline(time.Time{})
	go c.down.write() // ended by farewell
	if c.stopped() {
		c.stop()
	}

	batches := make(chan []unit, 1)
	items := make(chan item, 2*batchUnits) // its bytes are bounded by room
	var pipeline, broker, watch sync.WaitGroup
	watching, stopWatching := context.WithCancel(context.Background())
	watch.Go(func() { c.watch(watching) })
	broker.Go(c.readBroker)
	pipeline.Go(func() { defer close(batches); c.readClient(batches) })
	pipeline.Go(func() { defer close(items); c.decide(batches, items) })
	pipeline.Go(func() { c.forward(items) })
	pipeline.Wait()
	if c.isLeaving() {
		// The broker's close-ok is still to come.
		_ = c.up.SetReadDeadline(time.Now().Add(linger))
	} else {
		c.mu.Lock()
		c.leaving = c.leaving || c.err == nil
		c.mu.Unlock()
		_ = c.up.Close()
	}
	broker.Wait()
	_ = c.up.Close()
	stopWatching()
	watch.Wait()
	c.abandon()
	c.farewell()
}

// stopped reports whether the server is shutting down.
func (c *conn) stopped() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stopping
}

// finished reports whether nothing more is to be read from the worker.
func (c *conn) finished() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stopping || c.ended || c.err != nil
}

// isLeaving reports whether a connection.close is on its way.
func (c *conn) isLeaving() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leaving && c.err == nil
}

// abandon hands over everything that was accepted and not confirmed, in order.
func (c *conn) abandon() {
	c.mu.Lock()
	for _, ch := range c.channels {
		c.orphan(c.take(ch))
	}
	c.channels = make(map[uint16]*channel)
	all := c.orphans
	c.orphans = nil
	c.mu.Unlock()
	c.settle(all)
}

// orphan notes publishes that will not be sent; the lock is held. Whoever calls
// it calls handOver when the lock is free.
func (c *conn) orphan(all []*pending) { c.orphans = append(c.orphans, all...) }

// handOver abandons what was noted. What is noted later was accepted later: the
// lock stands around the note and the reason for it, and settling around the look
// and the handing over. When the connection is cut, earlier messages may still be
// open on other channels, and all of them are handed over together at its end.
func (c *conn) handOver() {
	c.settling.Lock()
	defer c.settling.Unlock()
	c.mu.Lock()
	var all []*pending
	if c.err == nil {
		all, c.orphans = c.orphans, nil
	}
	c.mu.Unlock()
	c.settle(all)
}

// settle abandons publishes in the order in which they were accepted.
func (c *conn) settle(all []*pending) {
	slices.SortFunc(all, func(a, b *pending) int { return cmp.Compare(a.seq, b.seq) })
	var as []*fence.Accepted
	for _, p := range all {
		switch {
		case p.a == nil:
		case p.discarded:
			c.s.opts.Gate.End(p.a, leaseclient.OutcomeRefused)
		default:
			as = append(as, p.a)
		}
	}
	if len(as) > 0 {
		c.log.Warn("accepted messages were not confirmed, they are being settled", zap.Int("messages", len(as)))
		c.s.opts.Gate.Abandon(as...)
	}
}

// farewell tells the worker why the connection ends, where nobody has yet.
func (c *conn) farewell() {
	c.mu.Lock()
	err, stopping, leaving := c.err, c.stopping, c.leaving
	c.mu.Unlock()
	text := ""
	switch {
	case stopping:
		text = "CONNECTION_FORCED - shutting_down: the sidecar ends"
	case err != nil && !leaving:
		c.log.Warn("connection to the broker ended", zap.Error(err))
		text = "CONNECTION_FORCED - " + string(leaseclient.CodeUpstreamUnavailable) + ": the connection to the broker was lost; accepted messages are delivered"
	}
	if text != "" {
		_ = c.down.inject(0, wire.Close{Code: connectionForced, Text: text}.Append(nil, 0, wire.ConnectionClose))
	}
	c.down.close(linger)
	c.lastWords()
}

// lastWords lets a worker read what was written before its socket is closed: a
// close with unread bytes would take the words back.
func (c *conn) lastWords() {
	if t, ok := c.client.(*net.TCPConn); ok {
		_ = t.CloseWrite()
	}
	_ = c.client.SetReadDeadline(time.Now().Add(linger))
	_, _ = io.Copy(io.Discard, io.LimitReader(c.client, downHard))
}

// readClient turns what the worker sends into batches.
func (c *conn) readClient(batches chan<- []unit) {
	a := newAssembler(c.s.opts.MaxMessage)
	before := func() error {
		deadline := time.Time{}
		if c.heartbeat > 0 {
			deadline = time.Now().Add(c.heartbeat*5/2 + time.Second)
		}
		_ = c.client.SetReadDeadline(deadline)
		// Checked after the deadline was set, so that a stop which came in
		// between is not undone.
		if c.finished() {
			return net.ErrClosed
		}
		return nil
	}
	for {
		units, err := readBatch(c.cr, a, c.frameMax+wire.Overhead, before)
		if len(units) > 0 {
			batches <- units
		}
		if err == nil {
			continue
		}
		if pe := protocolOf(err); pe != nil {
			c.violated(pe)
		}
		return
	}
}

// violated ends a connection whose worker broke the protocol. What was accepted
// before is still confirmed.
func (c *conn) violated(pe *protocolError) {
	c.log.Info("a worker broke the protocol", zap.Error(pe))
	_ = c.down.inject(0, wire.Close{Code: pe.code, Text: pe.text}.Append(nil, 0, wire.ConnectionClose))
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	_ = c.client.SetReadDeadline(time.Unix(1, 0))
}

// channel returns a channel's state; nil when it is not open.
func (c *conn) channel(id uint16) *channel {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.channels[id]
}

// readBroker passes on what the broker sends, and settles what it confirms. It
// goes on reading when the worker is gone, for the confirms.
func (c *conn) readBroker() {
	var set time.Time
	for {
		// A broker that is silent for longer than the heartbeat allows is gone.
		// While the connection ends, its end is bounded otherwise.
		if now := time.Now(); c.heartbeat > 0 && now.Sub(set) > c.heartbeat/4 && !c.isLeaving() {
			set = now
			_ = c.up.SetReadDeadline(now.Add(c.heartbeat*5/2 + time.Second))
		}
		f, err := wire.ReadFrame(c.ur, c.upFrameMax+wire.Overhead)
		if err != nil {
			if !c.isLeaving() {
				c.cut(errors.Join(errBrokerLost, err))
			} else {
				_ = c.client.SetReadDeadline(time.Now().Add(linger))
			}
			c.notify()
			return
		}
		if f.Type() == wire.FrameHeartbeat {
			continue
		}
		if !c.fromBroker(f) {
			continue
		}
		for _, g := range c.cutToSize(f) {
			if err := c.down.push(g); err != nil {
				_ = c.client.SetReadDeadline(time.Unix(1, 0))
			}
		}
		if f.Method() == wire.ConnectionCloseOK {
			// The broker's last word; it waits for the other side to hang up.
			return
		}
	}
}

// cutToSize makes a body that was made for the broker's frame size fit into the
// worker's. Nothing else can be cut, and nothing else is that large unless it was
// published with larger frames than this worker reads.
func (c *conn) cutToSize(f wire.Frame) []wire.Frame {
	most := c.frameMax - wire.Overhead
	if f.Type() != wire.FrameBody || len(f.Payload()) <= most {
		return []wire.Frame{f}
	}
	var out []wire.Frame
	for rest := f.Payload(); len(rest) > 0; {
		n := min(len(rest), most)
		out = append(out, wire.AppendFrame(nil, wire.FrameBody, f.Channel(), rest[:n]))
		rest = rest[n:]
	}
	return out
}

// fromBroker acts on a frame and reports whether the worker gets it.
func (c *conn) fromBroker(f wire.Frame) bool {
	id, m := f.Channel(), f.Method()
	if id == 0 {
		if m == wire.ConnectionClose || m == wire.ConnectionCloseOK {
			c.brokerLeaves()
		}
		return true
	}
	switch m {
	case wire.BasicAck, wire.BasicNack:
		c.confirmed(id, f, m == wire.BasicAck)
		return false
	case wire.TxCommitOK:
		return c.committed(id)
	case wire.ChannelClose:
		return c.brokerCloses(id, f)
	case wire.ChannelCloseOK:
		return c.brokerClosedOK(id)
	}
	c.answers(id, f)
	c.mu.Lock()
	ch := c.channels[id]
	pass := ch == nil || !ch.refused
	c.mu.Unlock()
	// A content that the worker has the beginning of goes on to its end.
	return pass || (f.Type() != wire.FrameMethod && c.down.inContent(id))
}

// brokerLeaves handles the end of the connection as the broker announces it:
// nothing will be confirmed any more.
func (c *conn) brokerLeaves() {
	c.mu.Lock()
	c.leaving = true
	for _, ch := range c.channels {
		c.orphan(c.take(ch))
		ch.brokerClosed = true
	}
	c.mu.Unlock()
	c.handOver()
	c.notify()
}

// confirmed settles one publish or a range, and passes the word on in the
// worker's own numbering, one at a time: a range could span tags that the
// sidecar has nacked itself.
func (c *conn) confirmed(id uint16, f wire.Frame, ack bool) {
	tag, multiple, err := wire.ParseAck(f.Payload())
	if err != nil {
		c.cut(err)
		return
	}
	failpoint.Hit("rabbit.after-effect")
	var done []*pending
	c.mu.Lock()
	ch := c.channels[id]
	if ch == nil {
		c.mu.Unlock()
		return
	}
	last := tag
	first := tag
	if multiple {
		if tag == 0 {
			last = ch.upTag
		}
		first = ch.low + 1
	}
	for t := first; t <= last && t <= ch.upTag; t++ {
		if p := ch.out[t]; p != nil {
			done = append(done, p)
			delete(ch.out, t)
			c.count(p, -1)
		}
	}
	for ch.low < ch.upTag && ch.out[ch.low+1] == nil {
		ch.low++
	}
	refused := ch.refused
	c.mu.Unlock()
	c.notify()
	var words []byte
	for _, p := range done {
		switch {
		case p.a == nil:
		case ack:
			c.s.opts.Gate.End(p.a, leaseclient.OutcomeConfirmed)
		case p.again:
			// The broker could not take it this time. A final refusal would be
			// the answer to every further try.
			c.s.opts.Gate.End(p.a, leaseclient.OutcomeCancelled)
		default:
			c.s.opts.Gate.End(p.a, leaseclient.OutcomeRefused)
		}
		if p.tag == 0 || refused {
			continue
		}
		if ack {
			words = wire.AppendAck(words, id, p.tag)
		} else {
			words = wire.AppendNack(words, id, p.tag)
		}
	}
	if len(words) > 0 {
		if err := c.down.inject(id, words); errors.Is(err, errSlowWorker) {
			c.cut(err)
		}
	}
}

// brokerCloses handles the broker's channel.close. What was not confirmed by then
// may or may not have arrived, save for messages to an exchange that the broker
// says it does not have, and for those of a transaction whose commit it has not
// come to: those were refused, and the worker is being told.
func (c *conn) brokerCloses(id uint16, f wire.Frame) bool {
	missing := func(*pending) bool { return false }
	cl, err := wire.ParseClose(f.Payload())
	overPublish := err == nil && cl.Method == wire.BasicPublish
	if overPublish && cl.Code == notFound {
		missing = func(p *pending) bool { return strings.Contains(cl.Text, "no exchange '"+p.exchange+"'") }
	}
	c.mu.Lock()
	ch := c.channels[id]
	if ch == nil {
		c.mu.Unlock()
		return true
	}
	refused := ch.refused
	if !refused {
		ch.brokerClosed = true
	}
	if ch.tx && overPublish && len(ch.commits) <= 1 {
		// It closed over a message before the only commit, so there is none. What
		// is still in the queue belongs to the same transaction.
		ch.discarded = true
		missing = func(*pending) bool { return true }
	}
	var gone []*pending
	c.orphan(slices.DeleteFunc(c.take(ch), func(p *pending) bool {
		if missing(p) {
			gone = append(gone, p)
			return true
		}
		return false
	}))
	c.mu.Unlock()
	for _, p := range gone {
		if p.a != nil {
			c.s.opts.Gate.End(p.a, leaseclient.OutcomeRefused)
		}
	}
	c.handOver()
	if refused {
		// Both closed at once. The broker wants an answer to its own, too.
		c.send(wire.AppendMethod(nil, id, wire.ChannelCloseOK, nil))
	}
	c.notify()
	return !refused
}

// brokerClosedOK handles the broker's answer to a close.
func (c *conn) brokerClosedOK(id uint16) bool {
	c.mu.Lock()
	ch := c.channels[id]
	if ch == nil {
		c.mu.Unlock()
		return true
	}
	c.orphan(c.take(ch))
	refused := ch.refused
	if refused {
		ch.brokerDone = true
	} else {
		ch.brokerClosed = true
		delete(c.channels, id)
	}
	c.mu.Unlock()
	c.handOver()
	c.notify()
	return !refused
}

// take empties a channel's list of what is not settled; the lock is held.
func (c *conn) take(ch *channel) []*pending {
	all := make([]*pending, 0, len(ch.out))
	for _, p := range ch.out {
		all = append(all, p)
		c.count(p, -1)
	}
	ch.out = make(map[uint64]*pending)
	ch.low = ch.upTag
	return all
}

// count keeps the number of fenced messages that wait for their confirm.
func (c *conn) count(p *pending, n int64) {
	if p.a == nil {
		return
	}
	if c.unconfirmed.Add(n) == n && n > 0 {
		c.down.wake()
	}
}

// send puts a small frame for the broker past the queue. When even that is full
// the broker has not read for long, and the connection is given up.
func (c *conn) send(b []byte) {
	select {
	case c.urgent <- b:
	default:
		c.cut(errBrokerLost)
	}
}

// watch looks after arrival bounds and heartbeats until ctx ends.
func (c *conn) watch(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if c.overdue() {
			c.cut(errUnconfirmed)
		}
		if c.heartbeat <= 0 {
			continue
		}
		if c.down.idle() >= c.heartbeat/2 {
			_ = c.down.inject(0, wire.Heartbeat)
		}
		c.mu.Lock()
		quiet := time.Since(c.upWrote) >= c.heartbeat/2
		c.mu.Unlock()
		if quiet {
			select {
			case c.urgent <- wire.Heartbeat:
			default:
			}
		}
	}
}

// overdue reports whether an accepted message has been waiting for its turn or
// its confirm for longer than it may.
func (c *conn) overdue() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waiting) > 0 && c.waiting[0].a.Late() {
		return true
	}
	for _, ch := range c.channels {
		for t := ch.low + 1; t <= ch.upTag; t++ {
			if p := ch.out[t]; p != nil && p.a != nil {
				// Later ones on this channel were accepted later.
				if p.a.Late() {
					return true
				}
				break
			}
		}
	}
	return false
}
