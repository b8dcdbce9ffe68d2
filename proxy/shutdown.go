package proxy

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"
)

// shutdown ends the sidecar in named phases. Each has a share of the time; one
// that uses it up is logged and the next begins, since what was accepted lies in
// the commit log and is finished by others.
func (s *Sidecar) shutdown(servers []server, stopGate func()) {
	all, cancel := context.WithTimeout(context.Background(), s.opts.Shutdown)
	defer cancel()
	by := func(names ...string) []server {
		var out []server
		for _, v := range servers {
			for _, n := range names {
				if v.name == n {
					out = append(out, v)
				}
			}
		}
		return out
	}
	for _, p := range []struct {
		name  string
		limit time.Duration
		run   func(ctx context.Context) error
	}{
		{"unready", s.opts.Shutdown, func(context.Context) error {
			s.mu.Lock()
			s.end = true
			s.mu.Unlock()
			return nil
		}},
		{"tell workers", s.opts.Shutdown, func(context.Context) error {
			s.hub.publish(newEvent(eventShuttingDown))
			return nil
		}},
		{"stop accepting", s.opts.Drain, func(ctx context.Context) error {
			return stopAll(ctx, by("couch", "amqp"))
		}},
		{"finish accepted commits", s.opts.Drain, s.opts.Gate.Drain},
		{"release leases", s.opts.Deadline, func(ctx context.Context) error {
			s.releaseAll(ctx)
			return nil
		}},
		{"close sockets", time.Second, func(ctx context.Context) error {
			s.cancel()
			stopGate()
			return stopAll(ctx, by("control", "admin", "events"))
		}},
	} {
		ctx, done := context.WithTimeout(all, p.limit)
		start := time.Now()
		err := p.run(ctx)
		done()
		if err != nil {
			s.log.Warn("shutdown phase did not finish", zap.String("phase", p.name), zap.Error(err))
			continue
		}
		s.log.Info("shutdown phase done", zap.String("phase", p.name), zap.Duration("took", time.Since(start)))
	}
}

// stopAll stops servers side by side.
func stopAll(ctx context.Context, servers []server) error {
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, v := range servers {
		wg.Go(func() { errs[i] = v.stop(ctx) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
