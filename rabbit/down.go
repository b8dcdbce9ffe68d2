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
	left    map[uint16]int64
	pending map[uint16][]byte
	closed  bool
	err     error
	wrote   time.Time
	done    chan struct{}
}

// newDown starts the writer.
func newDown(c net.Conn) *down {
	d := &down{conn: c, left: make(map[uint16]int64), pending: make(map[uint16][]byte), done: make(chan struct{}), wrote: time.Now()}
	d.cond = sync.NewCond(&d.mu)
	go d.write()
	return d
}

// push adds a frame of the broker, waiting for room.
func (d *down) push(f wire.Frame) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.size > downSoft && !d.closed && d.err == nil {
		d.cond.Wait()
	}
	if d.err != nil || d.closed {
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
			d.add(p)
		}
	}
	return nil
}

// inject adds frames of the sidecar without waiting, all in one write.
func (d *down) inject(channel uint16, frames []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil || d.closed {
		return net.ErrClosed
	}
	if d.size > downHard {
		return errSlowWorker
	}
	if _, open := d.left[channel]; open {
		d.pending[channel] = append(d.pending[channel], frames...)
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
