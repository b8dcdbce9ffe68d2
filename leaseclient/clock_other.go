//go:build !linux

package leaseclient

import "time"

// processStart anchors the portable clock.
var processStart = time.Now()

// SystemClock returns the portable clock. Whether it counts suspension depends
// on the platform; only Linux is supported for production use.
func SystemClock() Clock { return portableClock{} }

// portableClock measures against the start of the process.
type portableClock struct{}

// Boot implements [Clock].
func (portableClock) Boot() time.Duration { return time.Since(processStart) }
