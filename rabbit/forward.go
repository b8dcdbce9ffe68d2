package rabbit

import (
	"time"

	"github.com/starintel/fencerider/fence/failpoint"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

const (
	// flushBytes is how much is gathered for one write.
	flushBytes = 256 << 10
	// queueBytes bounds what waits for the broker. One message may be larger and
	// then waits alone.
	queueBytes = 8 << 20
)

// item is something for the broker, in its place. It belongs to a channel, not to
// a number: by the time of its turn the number may be another channel's.
type item struct {
	ch      *channel
	channel uint16
	bytes   []byte
	// room is what the item takes of the queue.
	room int64
	// p is set for a publish.
	p *pending
	// confirm: it is the worker's confirm.select; commit: its tx.commit.
	confirm, commit bool
	// drainChannel and drain wait until everything sent before is settled, on
	// the channel or on all.
	drainChannel, drain bool
	// leaving: the connection ends with it.
	leaving bool
}

// forward sends items in order until there are no more, and then waits for the
// confirms of what it has sent.
func (c *conn) forward(items <-chan item) {
	var buf []byte
	var held []*pending
	flush := func() {
		buf, held = c.flush(buf, held), nil
	}
	for {
		var it item
		var ok bool
		select {
		case b := <-c.urgent:
			buf = append(buf, b...)
			continue
		default:
		}
		select {
		case it, ok = <-items:
		default:
			flush()
			select {
			case it, ok = <-items:
			case b := <-c.urgent:
				buf = append(buf, b...)
				continue
			}
		}
		if !ok {
			break
		}
		if it.drain || it.drainChannel {
			flush()
			c.drainFor(it)
		}
		if it.leaving {
			c.mu.Lock()
			c.leaving = true
			c.mu.Unlock()
		}
		buf, held = c.place(it, buf, held)
		c.handOver()
		if len(buf) >= flushBytes || it.leaving {
			flush()
		}
		c.room.Release(it.room)
	}
	flush()
	c.drainFor(item{drain: true})
}

// place puts an item into the next write. A publish is entered into its channel's
// list before it can be confirmed.
func (c *conn) place(it item, buf []byte, held []*pending) ([]byte, []*pending) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := it.ch
	if it.confirm && ch != nil {
		ch.upConfirm = true
	}
	if it.commit && ch != nil {
		ch.commits = append(ch.commits, ch.upTag)
	}
	if it.p == nil {
		return append(buf, it.bytes...), held
	}
	if it.p.a != nil {
		c.waiting = c.waiting[1:]
	}
	if c.err != nil || ch.brokerClosed {
		// It goes nowhere from here; settlement takes it.
		it.p.discarded = ch.discarded
		c.orphan([]*pending{it.p})
		return buf, held
	}
	if it.p.a != nil && !it.p.ack && !ch.upConfirm && !ch.tx {
		ch.upConfirm = true
		buf = wire.AppendMethod(buf, it.channel, wire.ConfirmSelect, []byte{1})
	}
	if it.p.ack && !ch.tx {
		// There is no answer to wait for; what is written counts.
		return append(buf, it.bytes...), append(held, it.p)
	}
	if ch.upConfirm || ch.tx {
		ch.upTag++
		ch.out[ch.upTag] = it.p
		it.p.listed = true
		c.count(it.p, 1)
	}
	return append(buf, it.bytes...), append(held, it.p)
}

// flush writes what was gathered. Directly before it looks once more whether
// everything in it may still be sent.
func (c *conn) flush(buf []byte, held []*pending) []byte {
	if len(buf) == 0 || c.failure() != nil {
		c.unsent(held)
		return buf[:0]
	}
	deadline := time.Time{}
	fenced := false
	for _, p := range held {
		if p.a == nil {
			continue
		}
		fenced = true
		left := p.a.Remaining()
		if left <= 0 {
			c.cut(errLate)
			c.unsent(held)
			return buf[:0]
		}
		if d := time.Now().Add(left); deadline.IsZero() || d.Before(deadline) {
			deadline = d
		}
	}
	if fenced {
		failpoint.Hit("rabbit.before-send")
	}
	_ = c.up.SetWriteDeadline(deadline)
	if _, err := c.up.Write(buf); err != nil {
		c.cut(err)
		c.unsent(held)
	} else {
		c.acked(held)
	}
	c.mu.Lock()
	c.upWrote = time.Now()
	c.mu.Unlock()
	if cap(buf) > 4*flushBytes {
		return nil
	}
	return buf[:0]
}

// unsent hands over acknowledgements that may not have been written. Publishes are
// in their channels' lists.
func (c *conn) unsent(held []*pending) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range held {
		if p.ack && !p.listed {
			c.orphan([]*pending{p})
		}
	}
}

// acked ends acknowledgements that were written.
func (c *conn) acked(held []*pending) {
	for _, p := range held {
		if p.ack && !p.listed {
			failpoint.Hit("rabbit.after-effect")
			c.s.opts.Gate.End(p.a, leaseclient.OutcomeConfirmed)
		}
	}
}

// drainFor waits until no fenced message that was sent is open, on one channel or
// on all. Their arrival bound ends it at the latest. The broker hears heartbeats
// meanwhile.
func (c *conn) drainFor(it item) {
	open := func(ch *channel) bool {
		for _, p := range ch.out {
			if p.a != nil {
				return true
			}
		}
		return false
	}
	c.await(0, c.urgent, func() bool {
		if !it.drain {
			return !open(it.ch)
		}
		for _, ch := range c.channels {
			if open(ch) {
				return false
			}
		}
		return true
	})
}

// await waits until a condition on the channels holds, the connection is cut, or
// the time is up (zero: no limit), and reports whether it held. It is used by the
// decider and the forwarder; each looks again at every change and every tick. The
// forwarder goes on writing what is urgent.
func (c *conn) await(limit time.Duration, urgent <-chan []byte, ok func() bool) bool {
	tick := time.NewTicker(watchEvery / 10)
	defer tick.Stop()
	start := time.Now()
	for {
		c.mu.Lock()
		done, failed := ok(), c.err != nil
		c.mu.Unlock()
		if done || failed || (limit > 0 && time.Since(start) > limit) {
			return done
		}
		select {
		case <-c.changed:
		case <-tick.C:
		case b := <-urgent:
			c.flush(b, nil)
		}
	}
}
