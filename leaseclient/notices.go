package leaseclient

import (
	"context"
	"sync"
)

// maxQueued bounds the notices that wait for one subscriber. A lock that changes
// hands faster than its subscriber reads costs it the detail, not the knowledge
// that there was something: the rest becomes one [Notice] with Gap.
const maxQueued = 16

// Notices hands the notices of a [Watcher] to whoever waits for a lock. One
// subscription at the store serves any number of leases. The zero value is
// ready; without a Run nothing ever comes. It is safe for concurrent use.
type Notices struct {
	mu   sync.Mutex
	subs map[string]map[*subscription]bool
}

// subscription is one waiter. Its channel is never closed and holds a value
// while there is something to take.
type subscription struct {
	lockKey string
	ready   chan struct{}

	mu     sync.Mutex
	queued []Notice
}

// Run watches until ctx ends and returns then.
func (h *Notices) Run(ctx context.Context, w Watcher) error { return w.Watch(ctx, h.publish) }

// publish hands a notice out. A gap goes to everybody.
func (h *Notices) publish(n Notice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n.Gap {
		for _, subs := range h.subs {
			for s := range subs {
				s.put(n)
			}
		}
		return
	}
	for s := range h.subs[n.LockKey] {
		s.put(n)
	}
}

// put queues a notice and wakes the waiter.
func (s *subscription) put(n Notice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n.Gap || len(s.queued) >= maxQueued {
		s.queued = append(s.queued[:0], Notice{Gap: true})
	} else {
		s.queued = append(s.queued, n)
	}
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

// take returns what came.
func (s *subscription) take() []Notice {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.queued
	s.queued = nil
	return out
}

// subscribe begins to wait for a lock. A nil receiver gives a subscription to
// which nothing ever comes.
func (h *Notices) subscribe(lockKey string) *subscription {
	s := &subscription{lockKey: lockKey, ready: make(chan struct{}, 1)}
	if h == nil {
		return s
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.subs == nil {
		h.subs = make(map[string]map[*subscription]bool)
	}
	if h.subs[lockKey] == nil {
		h.subs[lockKey] = make(map[*subscription]bool)
	}
	h.subs[lockKey][s] = true
	return s
}

// unsubscribe ends it.
func (h *Notices) unsubscribe(s *subscription) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.subs[s.lockKey], s)
	if len(h.subs[s.lockKey]) == 0 {
		delete(h.subs, s.lockKey)
	}
}
