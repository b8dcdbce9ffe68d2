package leasetest

import (
	"sync"
	"time"
)

// Clock is a boot clock that follows the time of a synctest bubble and can leap,
// as a machine's does while it is suspended. The zero value is ready to use.
type Clock struct {
	mu    sync.Mutex
	start time.Time
	leapt time.Duration
}

// Boot implements leaseclient.Clock.
func (c *Clock) Boot() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.start.IsZero() {
		c.start = time.Now()
	}
	return time.Since(c.start) + c.leapt + time.Hour
}

// Leap suspends the machine for d: the boot clock goes on, timers did not.
func (c *Clock) Leap(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leapt += d
}
