package proxy

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/leaseclient"
)

// Bounds of the event socket.
const (
	maxReaders    = 64
	eventBacklog  = 256
	eventWrite    = 2 * time.Second
	heartbeatTime = 5 * time.Second
	maxAckLine    = 1024
)

// Names of events. The set is closed.
const (
	eventSnapshot     = "snapshot"
	eventAcquired     = "lease_acquired"
	eventLost         = "lease_lost"
	eventReleased     = "lease_released"
	eventShuttingDown = "shutting_down"
	eventHeartbeat    = "heartbeat"
)

// event is one line of the event socket.
type event struct {
	Event string `json:"event"`
	// At is this machine's time, for people; nothing is decided by it.
	At     string                 `json:"at"`
	Reason leaseclient.LossReason `json:"reason,omitempty"`
	Code   leaseclient.Code       `json:"code,omitempty"`
	Lease  *leaseView             `json:"lease,omitempty"`
	Leases []leaseView            `json:"leases,omitempty"`
}

// newEvent dates an event.
func newEvent(name string) event {
	return event{Event: name, At: time.Now().UTC().Format(leaseclient.TimeFormat)}
}

// hub hands events to every reader. A reader that is slow is dropped: nobody
// waits for it, and the end of its stream tells it to stop.
type hub struct {
	log      *zap.Logger
	snapshot func() event

	mu      sync.Mutex
	readers map[chan []byte]bool
	closed  bool
	acked   int
	dropped int
}

// newHub returns a hub without readers.
func newHub(log *zap.Logger, snapshot func() event) *hub {
	return &hub{log: log, snapshot: snapshot, readers: make(map[chan []byte]bool)}
}

// encode writes an event as a line.
func (e event) encode() []byte {
	b, err := json.Marshal(e)
	if err != nil {
		// Strings and numbers always encode.
		b = []byte(`{"event":"error"}`)
	}
	return append(b, '\n')
}

// publish hands an event out.
func (h *hub) publish(e event) {
	line := e.encode()
	h.mu.Lock()
	defer h.mu.Unlock()
	for ch := range h.readers {
		select {
		case ch <- line:
		default:
			delete(h.readers, ch)
			close(ch)
			h.dropped++
			h.log.Warn("dropped a slow reader of events", zap.Int("backlog", eventBacklog))
		}
	}
}

// join adds a reader, whose first line is the snapshot.
func (h *hub) join() (chan []byte, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || len(h.readers) >= maxReaders {
		return nil, false
	}
	ch := make(chan []byte, eventBacklog)
	// Under the lock, so that no event falls between the snapshot and the
	// stream.
	ch <- h.snapshot().encode()
	h.readers[ch] = true
	return ch, true
}

// leave takes a reader out.
func (h *hub) leave(ch chan []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.readers[ch] {
		delete(h.readers, ch)
		close(ch)
	}
}

// close lets readers have what is queued and ends their streams.
func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for ch := range h.readers {
		delete(h.readers, ch)
		close(ch)
	}
}

// serve carries one reader until its stream ends.
func (h *hub) serve(c net.Conn) {
	defer func() { _ = c.Close() }()
	ch, ok := h.join()
	if !ok {
		h.log.Warn("turned a reader of events away", zap.Int("limit", maxReaders))
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() { h.listen(c, ch) })
	for line := range ch {
		_ = c.SetWriteDeadline(time.Now().Add(eventWrite))
		if _, err := c.Write(line); err != nil {
			h.leave(ch)
			break
		}
	}
	_ = c.Close()
	wg.Wait()
}

// listen reads what a worker answers: {"ack":"<lease id>"} says that it has
// stopped. Anything else is counted and forgotten. A worker that closes its
// sending side still reads ("nc -U" does so when its input is empty); whether it
// is gone shows at the next write.
func (h *hub) listen(c net.Conn, ch chan []byte) {
	r := bufio.NewReaderSize(c, maxAckLine)
	for {
		line, err := r.ReadSlice('\n')
		switch {
		case errors.Is(err, io.EOF):
			return
		case errors.Is(err, bufio.ErrBufferFull):
			h.log.Info("a worker sent a line that is too long", zap.Int("limit", maxAckLine))
			h.leave(ch)
			return
		case err != nil:
			h.leave(ch)
			return
		}
		var ack struct {
			Ack string `json:"ack"`
		}
		if json.Unmarshal(line, &ack) != nil || leaseclient.ValidateIdentifier("ack", ack.Ack) != nil {
			h.log.Info("a worker sent a line that is no acknowledgement")
			continue
		}
		h.mu.Lock()
		h.acked++
		h.mu.Unlock()
		h.log.Info("a worker says that it has stopped", zap.String("lease_id", ack.Ack))
	}
}
