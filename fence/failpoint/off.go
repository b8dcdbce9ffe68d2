//go:build !failpoint

package failpoint

// Enabled says whether this build stops at armed points.
const Enabled = false

// Hit does nothing in a production build.
func Hit(string) {}
