package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/leaseclient"
)

// Bounds of the sidecar's HTTP servers.
const (
	headerTime = 10 * time.Second
	idleTime   = 2 * time.Minute
	maxHeaders = 64 << 10
)

// ErrLease says that the configured lease was not to be had.
var ErrLease = errors.New("the configured lease could not be acquired")

// Sidecar is one running sidecar.
type Sidecar struct {
	opts Options
	log  *zap.Logger
	hub  *hub

	// work is the context of keepers and of everything that ends last; group
	// waits for it.
	work   context.Context
	cancel context.CancelFunc
	group  sync.WaitGroup

	keeping sync.Mutex
	mu      sync.Mutex
	end     bool
	bound   map[string]string
	started chan struct{}
}

// New checks the options and returns a sidecar that does nothing yet.
func New(o Options) (*Sidecar, error) {
	switch {
	case o.Store == nil || o.Gate == nil || o.Table == nil || o.Metrics == nil || o.Logger == nil:
		return nil, errors.New("proxy: a collaborator is missing")
	case o.SocketDir == "":
		return nil, &leaseclient.InvalidError{Field: "socket_dir", Reason: "missing"}
	case o.Couch == nil && o.Rabbit == nil:
		return nil, &leaseclient.InvalidError{Field: "couchdb_url, amqp_url", Reason: "neither is set, there is nothing to stand in front of"}
	}
	if o.Clock == nil {
		o.Clock = leaseclient.SystemClock()
	}
	if o.SocketMode == 0 {
		o.SocketMode = 0o600
	}
	for d, v := range map[*time.Duration]time.Duration{
		&o.Deadline: 5 * time.Second, &o.DeadlineCeiling: time.Minute, &o.Drain: 10 * time.Second, &o.Shutdown: 20 * time.Second,
	} {
		if *d <= 0 {
			*d = v
		}
	}
	s := &Sidecar{opts: o, log: o.Logger, bound: make(map[string]string), started: make(chan struct{})}
	s.work, s.cancel = context.WithCancel(context.Background())
	s.hub = newHub(o.Logger, s.snapshot)
	open := func() int { return 0 }
	if g, ok := o.Gate.(interface{ Open() int }); ok {
		open = g.Open
	}
	o.Metrics.watchTable(o.Table, open)
	return s, nil
}

// snapshot is the first line of every reader of events.
func (s *Sidecar) snapshot() event {
	e := newEvent(eventSnapshot)
	e.Leases = s.views()
	return e
}

// ending reports whether the sidecar is shutting down.
func (s *Sidecar) ending() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.end
}

// Started is closed when every listener accepts.
func (s *Sidecar) Started() <-chan struct{} { return s.started }

// Addr returns where a listener accepts: "couch", "amqp", "admin".
func (s *Sidecar) Addr(name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bound[name]
}

// server is one listener and what serves it.
type server struct {
	name string
	ln   net.Listener
	// serve returns nil when stop ended it.
	serve func() error
	// stop takes no new work and waits for what is there.
	stop func(ctx context.Context) error
}

// Run serves until ctx ends or something cannot go on, and shuts down in order.
// It is called once. The error wraps [ErrLease] when the configured lease was not
// to be had in its time.
func (s *Sidecar) Run(ctx context.Context) error {
	servers, err := s.listen()
	if err != nil {
		s.cancel()
		return err
	}
	failed := make(chan error, len(servers)+2)
	gateCtx, stopGate := context.WithCancel(context.Background())
	defer stopGate()
	s.group.Go(func() {
		if err := s.opts.Gate.Run(gateCtx); err != nil {
			failed <- fmt.Errorf("run the fence: %w", err)
		}
	})
	var serving sync.WaitGroup
	for _, v := range servers {
		serving.Go(func() {
			if err := v.serve(); err != nil {
				failed <- fmt.Errorf("serve %s: %w", v.name, err)
			}
		})
	}
	envCtx, stopEnv := context.WithCancel(ctx)
	defer stopEnv()
	if s.opts.EnvLease != nil {
		s.group.Go(func() {
			if err := s.environment(envCtx); err != nil {
				failed <- fmt.Errorf("%w: %w", ErrLease, err)
			}
		})
	}
	s.group.Go(func() { s.heartbeat(envCtx) })
	for _, u := range s.opts.Unprotected {
		s.log.Warn("the policy leaves something unprotected", zap.String("what", u))
	}
	s.log.Info("sidecar runs", zap.String("version", s.opts.Version), zap.Any("listeners", s.bound))
	close(s.started)

	var cause error
	select {
	case <-ctx.Done():
		s.log.Info("asked to end")
	case cause = <-failed:
		s.log.Error("cannot go on", zap.Error(cause))
	}
	stopEnv()
	s.shutdown(servers, stopGate)
	serving.Wait()
	s.group.Wait()
	s.log.Info("sidecar ended")
	return cause
}

// heartbeat tells readers of events that the sidecar is there.
func (s *Sidecar) heartbeat(ctx context.Context) {
	tick := time.NewTicker(heartbeatTime)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.hub.publish(newEvent(eventHeartbeat))
		case <-ctx.Done():
			return
		}
	}
}

// listen opens every listener, or none.
func (s *Sidecar) listen() (servers []server, err error) {
	defer func() {
		if err != nil {
			for _, v := range servers {
				_ = v.ln.Close()
			}
		}
	}()
	tcp := func(name, addr string) (net.Listener, error) {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			return nil, fmt.Errorf("listen for %s: %w", name, err)
		}
		s.mu.Lock()
		s.bound[name] = ln.Addr().String()
		s.mu.Unlock()
		return ln, nil
	}
	unix := func(name string) (net.Listener, error) {
		path := filepath.Join(s.opts.SocketDir, name+".sock")
		ln, err := listenUnix(path, s.opts.SocketMode)
		if err != nil {
			return nil, fmt.Errorf("listen for %s: %w", name, err)
		}
		s.mu.Lock()
		s.bound[name] = path
		s.mu.Unlock()
		return guarded{ln, s.log}, nil
	}
	ln, err := unix("control")
	if err != nil {
		return servers, err
	}
	servers = append(servers, s.httpServer("control", ln, s.controlHandler()))
	if ln, err = unix("events"); err != nil {
		return servers, err
	}
	servers = append(servers, s.eventServer(ln))
	if s.opts.AdminListen != "" {
		if ln, err = tcp("admin", s.opts.AdminListen); err != nil {
			return servers, err
		}
		servers = append(servers, s.httpServer("admin", ln, s.adminHandler()))
	}
	if s.opts.Couch != nil {
		if ln, err = tcp("couch", s.opts.CouchListen); err != nil {
			return servers, err
		}
		servers = append(servers, s.httpServer("couch", ln, s.opts.Couch))
	}
	if s.opts.Rabbit != nil {
		if ln, err = tcp("amqp", s.opts.AMQPListen); err != nil {
			return servers, err
		}
		servers = append(servers, s.rabbitServer(ln))
	}
	return servers, nil
}

// httpServer serves HTTP on a listener.
func (s *Sidecar) httpServer(name string, ln net.Listener, h http.Handler) server {
	srv := &http.Server{
		Handler: h, ReadHeaderTimeout: headerTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHeaders,
		ErrorLog: zap.NewStdLog(s.log.With(zap.String("listener", name))),
	}
	return server{
		name: name, ln: ln,
		serve: func() error {
			if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return nil
		},
		stop: func(ctx context.Context) error {
			if err := srv.Shutdown(ctx); err != nil {
				return errors.Join(err, srv.Close())
			}
			return nil
		},
	}
}

// rabbitServer serves AMQP.
func (s *Sidecar) rabbitServer(ln net.Listener) server {
	ctx, cancel := context.WithCancel(context.Background())
	return server{
		name: "amqp", ln: ln,
		serve: func() error { return s.opts.Rabbit.Serve(ctx, ln) },
		stop: func(end context.Context) error {
			cancel()
			return s.opts.Rabbit.Shutdown(end)
		},
	}
}

// eventServer serves readers of events. It is stopped by closing the hub.
func (s *Sidecar) eventServer(ln net.Listener) server {
	var readers sync.WaitGroup
	return server{
		name: "events", ln: ln,
		serve: func() error {
			defer readers.Wait()
			for {
				c, err := ln.Accept()
				if err != nil {
					if errors.Is(err, net.ErrClosed) {
						return nil
					}
					return err
				}
				readers.Go(func() { s.hub.serve(c) })
			}
		},
		stop: func(context.Context) error {
			s.hub.close()
			return ln.Close()
		},
	}
}
