// Package deploy holds what is around the binary: settings of the lease store,
// container files, the script that starts real services, and the demo. The Go in
// it checks that these files fit the code; nothing of it is built into anything.
package deploy
