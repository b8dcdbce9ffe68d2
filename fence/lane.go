package fence

import (
	"context"
	"sync"

	"github.com/starintel/fencerider/leaseclient"
)

// lane is what the coordinator keeps of one lock while somebody uses it: the
// order of Begins, and what they have to wait for.
type lane struct {
	lockKey string
	// users counts who is on the lane; it is guarded by the coordinator.
	users int

	mu sync.Mutex
	// tail is closed when the last Begin in the queue has been decided.
	tail chan struct{}
	// held counts, by kind, what must be settled before new commits of that
	// kind begin; changed is closed and renewed when a count falls.
	held    map[leaseclient.Kind]int
	changed chan struct{}
	// settling is closed when the last settlement of abandoned commits is through.
	settling chan struct{}
	// job settles a predecessor; all Begins of the lane wait for the same one.
	job *job
}

// lane returns the lane of a lock. Every call is paired with leave.
func (c *Coordinator) lane(lockKey string) *lane {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.lanes[lockKey]
	if l == nil {
		l = &lane{lockKey: lockKey, held: make(map[leaseclient.Kind]int), changed: make(chan struct{})}
		c.lanes[lockKey] = l
	}
	l.users++
	return l
}

// leave forgets a lane that nobody uses.
func (c *Coordinator) leave(l *lane) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.users--
	if l.users == 0 && l.idle() {
		delete(c.lanes, l.lockKey)
	}
}

// idle reports whether nothing hangs on the lane.
func (l *lane) idle() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.held) == 0 && l.job == nil
}

// turn waits until every Begin that came earlier has been decided. The returned
// function lets the next one go.
func (c *Coordinator) turn(ctx context.Context, l *lane) (func(), error) {
	mine := make(chan struct{})
	l.mu.Lock()
	before := l.tail
	l.tail = mine
	l.mu.Unlock()
	if before == nil {
		return func() { close(mine) }, nil
	}
	select {
	case <-before:
		return func() { close(mine) }, nil
	case <-ctx.Done():
		// The place in the queue must be kept until those before are through.
		if !c.goes(func() {
			select {
			case <-before:
			case <-c.work.Done():
			}
			close(mine)
		}) {
			close(mine)
		}
		return nil, ctx.Err()
	}
}

// hold keeps new commits of a kind away until the returned function is called.
func (l *lane) hold(kind leaseclient.Kind) func() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held[kind]++
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.held[kind]--; l.held[kind] == 0 {
			delete(l.held, kind)
		}
		close(l.changed)
		l.changed = make(chan struct{})
	})
}

// next queues a settlement of abandoned commits: it waits for before and closes
// done.
func (l *lane) next() (before <-chan struct{}, done chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	done = make(chan struct{})
	before, l.settling = l.settling, done
	if before == nil {
		through := make(chan struct{})
		close(through)
		before = through
	}
	return before, done
}

// settled waits until nothing of a kind is held.
func (l *lane) settled(ctx context.Context, kind leaseclient.Kind) error {
	for {
		l.mu.Lock()
		n, changed := l.held[kind], l.changed
		l.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
