// Package failpoint marks the places where a stopped process would hurt most,
// so that a test can stop one exactly there.
//
// It owns nothing in a production build: without the build tag "failpoint"
// every function is empty and disappears. With the tag, a test arms a point by
// making a file, and the process that reaches the point waits there until it is
// released. What happens to it meanwhile (SIGSTOP, SIGKILL, a cut link) is the
// test's business.
//
// It must never be built into anything that is shipped; the binary says so in
// its version when it is.
package failpoint
