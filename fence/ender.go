package fence

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// Bounds of the ender. What waits here is in the log too, so the log's own
// limit bounds it: a store that takes no endings takes no new commits either.
const (
	enderWorkers = 4
	enderBatch   = 256
	enderFirst   = 50 * time.Millisecond
	enderMax     = 2 * time.Second
	enderCall    = 5 * time.Second
)

// ending is one entry on its way out of the log, and who wants to hear of it.
type ending struct {
	leaseclient.Ending
	after func()
}

// ender carries endings to the store, off the path of the worker, and repeats
// them until they are through. Endings of one lock keep their order.
type ender struct {
	c *Coordinator

	mu sync.Mutex
	// queues holds what waits, by lock; ready lists locks that no worker has.
	queues map[string][]ending
	busy   map[string]bool
	ready  []string
	// pauses spaces attempts at a lock whose last one failed.
	pauses map[string]time.Duration
	left   int
	wake   chan struct{}
	empty  chan struct{}
}

// newEnder starts the workers.
func newEnder(c *Coordinator) *ender {
	e := &ender{
		c: c, queues: make(map[string][]ending), busy: make(map[string]bool), pauses: make(map[string]time.Duration),
		wake: make(chan struct{}, enderWorkers), empty: make(chan struct{}),
	}
	for range enderWorkers {
		c.goes(e.work)
	}
	return e
}

// add puts endings of one lock into the queue. after, when set, is called when
// the last of them is through.
func (e *ender) add(lockKey string, endings []leaseclient.Ending, after func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, v := range endings {
		item := ending{Ending: v}
		if i == len(endings)-1 {
			item.after = after
		}
		e.queues[lockKey] = append(e.queues[lockKey], item)
	}
	e.left += len(endings)
	if !e.busy[lockKey] {
		e.busy[lockKey] = true
		e.ready = append(e.ready, lockKey)
	}
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// next takes a lock and up to a batch of its endings.
func (e *ender) next() (string, []ending) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.ready) == 0 {
		return "", nil
	}
	key := e.ready[0]
	e.ready = e.ready[1:]
	q := e.queues[key]
	return key, q[:min(len(q), enderBatch)]
}

// done takes the first n endings of a lock out of the queue and gives the lock
// back to the workers when more wait.
func (e *ender) done(key string, n int) {
	e.mu.Lock()
	q := e.queues[key]
	finished := q[:n]
	if rest := q[n:]; len(rest) > 0 {
		e.queues[key] = append([]ending(nil), rest...)
		e.ready = append(e.ready, key)
		select {
		case e.wake <- struct{}{}:
		default:
		}
	} else {
		delete(e.queues, key)
		delete(e.busy, key)
	}
	if n > 0 {
		delete(e.pauses, key)
	}
	e.left -= n
	if e.left == 0 {
		close(e.empty)
		e.empty = make(chan struct{})
	}
	e.mu.Unlock()
	for _, f := range finished {
		if f.after != nil {
			f.after()
		}
	}
}

// work carries endings until the coordinator ends.
func (e *ender) work() {
	for {
		key, batch := e.next()
		if key == "" {
			select {
			case <-e.wake:
				continue
			case <-e.c.work.Done():
				return
			}
		}
		err := e.send(key, batch)
		switch {
		case err == nil:
			e.done(key, len(batch))
		case permanent(err):
			// The request itself is at fault; repeating it would block the
			// lock's queue for good. The entries stay in the log and are
			// settled from there.
			e.c.failed("end commits", err)
			e.done(key, len(batch))
		default:
			e.c.failed("end commits", err)
			e.later(key)
		}
	}
}

// later gives a lock back to the workers after a pause. They go on with others
// meanwhile: one damaged lock must not hold up the rest.
func (e *ender) later(key string) {
	e.mu.Lock()
	pause := min(max(2*e.pauses[key], enderFirst), enderMax)
	e.pauses[key] = pause
	e.mu.Unlock()
	e.c.goes(func() {
		if wait(e.c.work, pause) {
			e.done(key, 0)
		}
	})
}

// permanent reports whether repeating an ending cannot help.
func permanent(err error) bool {
	_, invalid := errors.AsType[*leaseclient.InvalidError](err)
	return invalid
}

// send carries one batch.
func (e *ender) send(key string, batch []ending) error {
	ctx, cancel := context.WithTimeout(e.c.work, enderCall)
	defer cancel()
	endings := make([]leaseclient.Ending, len(batch))
	for i, v := range batch {
		endings[i] = v.Ending
	}
	return e.c.opts.Log.End(ctx, key, "", endings)
}

// drain waits until nothing is left.
func (e *ender) drain(ctx context.Context) error {
	for {
		e.mu.Lock()
		left, empty := e.left, e.empty
		e.mu.Unlock()
		if left == 0 {
			return nil
		}
		select {
		case <-empty:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
