package valkeystore

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/starintel/fencerider/leaseclient"
)

// The pause before a broken subscription is tried again.
const (
	watchFirst = 50 * time.Millisecond
	watchMax   = 2 * time.Second
)

// Watch implements [leaseclient.Watcher].
func (s *Store) Watch(ctx context.Context, f func(leaseclient.Notice)) error {
	pause := watchFirst
	for {
		stood := s.watchOnce(ctx, f)
		if s.closed.Load() {
			return errors.New("watch leases: store is closed")
		}
		if stood {
			pause = watchFirst
		}
		t := time.NewTimer(pause + rand.N(pause))
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		}
		pause = min(2*pause, watchMax)
	}
}

// watchOnce subscribes and passes notices on until the subscription breaks or
// ctx ends. It reports whether the subscription ever stood.
func (s *Store) watchOnce(ctx context.Context, f func(leaseclient.Notice)) (stood bool) {
	client, err := s.connect(ctx)
	if err != nil {
		return false
	}
	select {
	case s.dedicated <- struct{}{}:
		defer func() { <-s.dedicated }()
	case <-ctx.Done():
		return false
	}
	dedicated, release := client.Dedicate()
	defer release()
	// The library calls from the goroutine that reads the connection; after
	// this function has returned, nothing is passed on any more.
	var mu sync.Mutex
	over := false
	pass := func(n leaseclient.Notice) {
		mu.Lock()
		defer mu.Unlock()
		if !over {
			f(n)
		}
	}
	broken := dedicated.SetPubSubHooks(valkey.PubSubHooks{
		OnMessage: func(m valkey.PubSubMessage) {
			if n, ok := parseNotice(m.Message); ok {
				pass(n)
			}
		},
	})
	defer func() {
		mu.Lock()
		defer mu.Unlock()
		over = true
	}()
	subscribe, cancel := context.WithTimeout(ctx, s.opts.CallTimeout)
	err = dedicated.Do(subscribe, dedicated.B().Subscribe().Channel(s.keys.notices()).Build()).Error()
	cancel()
	if err != nil {
		return false
	}
	// What was sent before it stood was missed.
	pass(leaseclient.Notice{Gap: true})
	select {
	case _ = <-broken: // why does not matter: it is tried again
	case <-ctx.Done():
	case <-s.done:
	}
	return true
}

// parseNotice reads what notify() in the prelude sends.
func parseNotice(text string) (leaseclient.Notice, bool) {
	p := strings.Split(text, " ")
	if len(p) != 5 || p[0] != "1" {
		return leaseclient.Notice{}, false
	}
	n := leaseclient.Notice{LockKey: p[2], LeaseID: p[3], State: leaseclient.StateReleased}
	switch p[1] {
	case "released":
	case "force_release":
		n.Forced = true
	case "revoke":
		n.Forced, n.State = true, leaseclient.StateRevoked
	default:
		return leaseclient.Notice{}, false
	}
	token, err := strconv.ParseUint(p[4], 10, 64)
	if err != nil {
		return leaseclient.Notice{}, false
	}
	if _, err := leaseclient.ParseLockKey(n.LockKey); err != nil {
		return leaseclient.Notice{}, false
	}
	n.Token = token
	return n, true
}
