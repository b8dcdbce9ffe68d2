// Command fencerider is the sidecar: `fencerider run` beside a worker, and the
// few commands that set it up and look at it.
//
// The package turns flags and variables into plain options and builds the rooms
// in the one order that their arrows allow. It owns no logic of its own and must
// never be imported.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		stop()
		// A second signal does not wait for anything.
		<-signals
		fmt.Fprintln(os.Stderr, "fencerider: second signal, ending at once")
		os.Exit(exitInterrupted)
	}()
	os.Exit(execute(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}
