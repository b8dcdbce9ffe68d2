package rabbit

import (
	"errors"
	"net"
	"sync"
	"time"

	"encoding/binary"

	"github.com/starintel/fencerider/rabbit/wire"
)

// Bounds of the way back to the worker.
const (
	// downSoft is where the broker reader waits for a slow worker.
	downSoft = 8 << 20
	// downHard is where a worker that does not read loses its connection:
	// refusals may be added past downSoft, since waiting for room could wait
	// for the worker itself.
	downHard = 64 << 20
)

// errSlowWorker ends a connection whose worker does not read.
var errSlowWorker = errors.New("worker does not read what the sidecar has for it")

// down is the queue of what goes to the worker. Frames of the broker keep their
// order; what the sidecar adds on a channel waits until no content of that
// channel is half written.
type down struct {
	conn net.Conn

	mu    sync.Mutex
	cond  *sync.Cond
	queue net.Buffers
	size  int
	// left counts, by channel, what is missing of a content: -1 while its
	// header is.
	left map[uint16]int64
	// pending waits for the end of a content; held is how much it is together.
	pending map[uint16][]byte
	held    int
	// eager says that the broker must be read past the soft bound: a confirm may
	// stand behind what a slow worker does not take.
	eager func() bool
	// loose: the broker is gone, and nobody waits for room any more.
	loose  bool
	closed bool
	err    error
	wrote  time.Time
	done   chan struct{}
}

// newDown returns an empty queue; write, which close ends, carries it out. eager is asked while the queue is past its soft
// bound, under the queue's lock.
func newDown(c net.Conn, eager func() bool) *down {
	d := &down{
		conn: c, left: make(map[uint16]int64), pending: make(map[uint16][]byte), eager: eager,
		done: make(chan struct{}), wrote: time.Now(),
	}
	d.cond = sync.NewCond(&d.mu)
	return d
}

// push adds a frame of the broker, waiting for room.
func (d *down) push(f wire.Frame) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.crowded() && !d.loose && !d.closed && d.err == nil {
		d.cond.Wait()
	}
	if d.err != nil || d.closed || d.loose {
		return net.ErrClosed
	}
	d.add(f)
	ch := f.Channel()
	switch f.Type() {
	case wire.FrameMethod:
		if f.Method().HasContent() {
			d.left[ch] = -1
		}
	case wire.FrameHeader:
		if p := f.Payload(); len(p) >= 12 {
			d.left[ch] = int64(binary.BigEndian.Uint64(p[4:12]))
		}
	case wire.FrameBody:
		d.left[ch] -= int64(len(f.Payload()))
	}
	if n, open := d.left[ch]; open && n == 0 {
		delete(d.left, ch)
		if p := d.pending[ch]; p != nil {
			delete(d.pending, ch)
			d.held -= len(p)
			d.add(p)
		}
	}
	return nil
}

// crowded reports whether a frame of the broker has to wait; the lock is held.
func (d *down) crowded() bool {
	return d.size > downSoft && (d.size+d.held > downHard || !d.eager())
}

// inContent reports whether a content of the broker is half written on a channel.
// It must go on whatever becomes of the channel, or nothing could follow it.
func (d *down) inContent(channel uint16) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, open := d.left[channel]
	return open
}

// wake lets a waiting push look again.
func (d *down) wake() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cond.Broadcast()
}

// loosen ends all waiting for room. What is queued still goes out.
func (d *down) loosen() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.loose = true
	d.cond.Broadcast()
}

// inject adds frames of the sidecar without waiting, all in one write.
func (d *down) inject(channel uint16, frames []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil || d.closed {
		return net.ErrClosed
	}
	if d.size+d.held > downHard {
		return errSlowWorker
	}
	if _, open := d.left[channel]; open {
		d.pending[channel] = append(d.pending[channel], frames...)
		d.held += len(frames)
		return nil
	}
	d.add(frames)
	return nil
}

// add appends to the queue; the lock is held.
func (d *down) add(b []byte) {
	d.queue = append(d.queue, b)
	d.size += len(b)
	d.cond.Broadcast()
}

// write carries the queue to the worker until it is closed and empty.
func (d *down) write() {
	defer close(d.done)
	for {
		d.mu.Lock()
		for len(d.queue) == 0 && !d.closed {
			d.cond.Wait()
		}
		q, n := d.queue, d.size
		d.queue, d.size = nil, 0
		d.cond.Broadcast()
		d.mu.Unlock()
		if n == 0 {
			return
		}
		_, err := q.WriteTo(d.conn)
		d.mu.Lock()
		d.wrote = time.Now()
		if err != nil {
			d.err = err
			d.cond.Broadcast()
			d.mu.Unlock()
			return
		}
		d.mu.Unlock()
	}
}

// idle is how long nothing was written.
func (d *down) idle() time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return time.Since(d.wrote)
}

// close lets what is queued out, for a while, and ends the writer.
func (d *down) close(linger time.Duration) {
	_ = d.conn.SetWriteDeadline(time.Now().Add(linger))
	d.mu.Lock()
	d.closed = true
	d.cond.Broadcast()
	d.mu.Unlock()
	<-d.done
}
