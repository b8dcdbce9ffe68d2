//go:build failpoint

package failpoint

import (
	"os"
	"path/filepath"
	"time"
)

// Enabled says whether this build stops at armed points.
const Enabled = true

// DirVariable names the directory in which points are armed and released.
const DirVariable = "FENCERIDER_TEST_FAILPOINTS"

// poll is how often a waiting point looks for its release.
const poll = 2 * time.Millisecond

// Hit waits while the point is armed. The file "<name>.armed" arms it for one
// hit; the process that takes it renames it to "<name>.hit", which tells the
// test, and goes on when "<name>.release" exists.
func Hit(name string) {
	dir := os.Getenv(DirVariable)
	if dir == "" {
		return
	}
	at := filepath.Join(dir, name)
	// The rename is the arbiter: of several goroutines exactly one stops.
	if err := os.Rename(at+".armed", at+".hit"); err != nil {
		return
	}
	for {
		if _, err := os.Stat(at + ".release"); err == nil {
			return
		}
		<-time.After(poll)
	}
}
