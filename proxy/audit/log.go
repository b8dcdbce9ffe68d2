package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/leaseclient"
)

// Sink keeps events. One goroutine uses it.
type Sink interface {
	// Name is a word for logs and metrics.
	Name() string
	// Write keeps events, each encoded as a JSON object without a line end. When
	// it returns nil they are where they survive this process. No events only
	// ask whether the sink would keep some.
	Write(lines [][]byte) error
	// Close ends the sink.
	Close() error
}

// Bounds of what waits for a sink.
const (
	maxBacklog = 4096
	maxBatch   = 128
)

// Options configure a [Log].
type Options struct {
	Logger *zap.Logger
	// Sinks get every event.
	Sinks []Sink
	// FloodAfter is how many events of one kind the process log shows a minute;
	// the rest is counted. Zero means 10.
	FloodAfter int
	// OnFailed, when set, is told of every event that a sink did not keep.
	OnFailed func(sink string, err error)
	// OnEvent, when set, is told of every event.
	OnEvent func(e Event)
	// Now is the time; time.Now.
	Now func() time.Time
}

// Log records events. It is safe for concurrent use; Close it when done.
type Log struct {
	opts    Options
	writers []*writer
	group   sync.WaitGroup

	mu     sync.Mutex
	window time.Time
	shown  map[floodKey]int
}

// floodKey tells kinds of events apart.
type floodKey struct {
	t Type
	c leaseclient.Code
}

// writer feeds one sink.
type writer struct {
	sink Sink

	mu     sync.Mutex
	queue  chan entry
	closed bool
	err    error
}

// entry is one event for one sink, and who waits for it. Without a line it asks
// whether the sink works.
type entry struct {
	line []byte
	kept chan error
}

// New returns a log and starts what feeds its sinks.
func New(o Options) *Log {
	if o.FloodAfter <= 0 {
		o.FloodAfter = 10
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	l := &Log{opts: o, shown: make(map[floodKey]int)}
	for _, s := range o.Sinks {
		w := &writer{sink: s, queue: make(chan entry, maxBacklog)}
		l.writers = append(l.writers, w)
		l.group.Go(func() { l.feed(w) })
	}
	return l
}

// Record keeps an event. It does not wait: a sink that fails, or that has too
// much to do, is told to OnFailed and to the log.
func (l *Log) Record(e Event) {
	line, err := l.make(e)
	if err != nil {
		return
	}
	for _, w := range l.writers {
		if err := w.put(entry{line: line}); err != nil {
			l.failed(w, err)
		}
	}
}

// RecordDurably keeps an event in every sink and waits for it. An error says that
// at least one of them did not keep it in time.
func (l *Log) RecordDurably(ctx context.Context, e Event) error {
	line, err := l.make(e)
	if err != nil {
		return err
	}
	return l.await(ctx, line)
}

// Healthy reports an error while a sink is broken. Operations that must be
// audited durably are not begun then.
func (l *Log) Healthy(ctx context.Context) error { return l.await(ctx, nil) }

// await gives every sink a line, or the question whether it works where it did
// not before, and waits for all of them.
func (l *Log) await(ctx context.Context, line []byte) error {
	var errs []error
	var waits []entry
	var asked []*writer
	for _, w := range l.writers {
		if line == nil && w.works() {
			continue
		}
		e := entry{line: line, kept: make(chan error, 1)}
		if err := w.put(e); err != nil {
			l.failed(w, err)
			errs = append(errs, fmt.Errorf("audit sink %s: %w", w.sink.Name(), err))
			continue
		}
		waits, asked = append(waits, e), append(asked, w)
	}
	for i, e := range waits {
		var err error
		select {
		case err = <-e.kept:
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("audit sink %s: %w", asked[i].sink.Name(), err))
		}
	}
	return errors.Join(errs...)
}

// works reports whether the last write went well.
func (w *writer) works() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err == nil && !w.closed
}

// put queues an entry.
func (w *writer) put(e entry) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return errors.New("closed")
	}
	select {
	case w.queue <- e:
		return nil
	default:
		return fmt.Errorf("%d events wait already", maxBacklog)
	}
}

// feed writes what is queued until the log is closed.
func (l *Log) feed(w *writer) {
	for e := range w.queue {
		batch := []entry{e}
	more:
		for len(batch) < maxBatch {
			select {
			case e, ok := <-w.queue:
				if !ok {
					break more
				}
				batch = append(batch, e)
			default:
				break more
			}
		}
		var lines [][]byte
		for _, e := range batch {
			if e.line != nil {
				lines = append(lines, e.line)
			}
		}
		err := w.sink.Write(lines)
		w.mu.Lock()
		w.err = err
		w.mu.Unlock()
		for _, e := range batch {
			if e.kept != nil {
				e.kept <- err
			}
			if err != nil && e.line != nil {
				l.failed(w, err)
			}
		}
	}
}

// failed tells that a sink did not keep an event.
func (l *Log) failed(w *writer, err error) {
	l.opts.Logger.Error("an audit event was not kept", zap.String("sink", w.sink.Name()), zap.Error(err))
	if l.opts.OnFailed != nil {
		l.opts.OnFailed(w.sink.Name(), err)
	}
}

// make is the one function that makes events.
func (l *Log) make(e Event) ([]byte, error) {
	e.complete(l.opts.Now())
	if err := e.check(); err != nil {
		l.opts.Logger.DPanic("audit", zap.Error(err))
		return nil, err
	}
	line, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encode audit event: %w", err)
	}
	l.show(e, line)
	if l.opts.OnEvent != nil {
		l.opts.OnEvent(e)
	}
	return line, nil
}

// show writes an event to the process log, or counts it.
func (l *Log) show(e Event, line []byte) {
	k := floodKey{e.EventType, e.Code}
	now := l.opts.Now()
	l.mu.Lock()
	if now.Sub(l.window) >= time.Minute {
		l.summarize()
		l.window = now
	}
	l.shown[k]++
	n := l.shown[k]
	l.mu.Unlock()
	if n > l.opts.FloodAfter && !e.EventType.Privileged() {
		return
	}
	l.opts.Logger.Info("audit", zap.Any("event", json.RawMessage(line)))
}

// summarize says how many events were counted instead of shown; the lock is
// held.
func (l *Log) summarize() {
	for k, n := range l.shown {
		if more := n - l.opts.FloodAfter; more > 0 && !k.t.Privileged() {
			l.opts.Logger.Info("audit events of one kind were counted, not shown",
				zap.String("event_type", string(k.t)), zap.String("code", string(k.c)), zap.Int("count", more))
		}
	}
	clear(l.shown)
}

// Close writes what waits, says what was counted and closes the sinks.
func (l *Log) Close() error {
	for _, w := range l.writers {
		w.mu.Lock()
		if !w.closed {
			w.closed = true
			close(w.queue)
		}
		w.mu.Unlock()
	}
	l.group.Wait()
	l.mu.Lock()
	l.summarize()
	l.mu.Unlock()
	var errs []error
	for _, w := range l.writers {
		errs = append(errs, w.sink.Close())
	}
	return errors.Join(errs...)
}
