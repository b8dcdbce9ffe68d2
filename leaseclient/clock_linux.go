package leaseclient

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// SystemClock returns the boot clock of this machine.
func SystemClock() Clock { return bootClock{} }

// bootClock reads CLOCK_BOOTTIME. Go's own monotonic clock is CLOCK_MONOTONIC,
// which stands still while the machine is suspended.
type bootClock struct{}

// Boot implements [Clock].
func (bootClock) Boot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// The clock exists since Linux 2.6.39; without it no lease can be
		// judged, and going on would be the one wrong answer.
		panic(fmt.Sprintf("read CLOCK_BOOTTIME: %v", err))
	}
	return time.Duration(ts.Nano())
}
