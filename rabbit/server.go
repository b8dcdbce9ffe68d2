package rabbit

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/url"
	"sync"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"go.uber.org/zap"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
)

// Defaults of [Options].
const (
	DefaultMaxConnections = 1000
	DefaultMaxMessage     = 16 << 20
	DefaultMaxEffect      = 1 << 20
	DefaultTimeout        = 15 * time.Second
)

// Options configure a [Server]. Zero values mean the defaults named here.
type Options struct {
	// Upstream is the broker's URL, amqp:// or amqps://. Its credentials are not
	// used by the server: workers bring their own.
	Upstream *url.URL
	// Policy returns the policy in force; nil means that there is none.
	Policy func() *policy.Policy
	// Leases and Gate decide about publishes.
	Leases fence.Leases
	Gate   fence.Gate
	Logger *zap.Logger
	// MaxConnections bounds workers' connections; 1,000.
	MaxConnections int
	// MaxMessage bounds any message, in bytes; 16 MiB.
	MaxMessage int
	// MaxEffect bounds a fenced message with its properties: the commit log
	// carries it whole. 1 MiB.
	MaxEffect int
	// Timeout bounds how long a publish may wait for its turn; 15 s.
	Timeout time.Duration
	// OnVerdict, when set, is told the code of every publish that the sidecar
	// decided; an empty code is an accepted one.
	OnVerdict func(code leaseclient.Code)
}

// Server is the fencing proxy. It is safe for concurrent use.
type Server struct {
	opts Options
	addr string
	tls  *tls.Config

	mu    sync.Mutex
	conns map[*conn]bool
	group sync.WaitGroup
	down  bool
}

// address takes a broker's URL apart.
func address(u *url.URL) (amqp091.URI, *tls.Config, error) {
	if u == nil {
		return amqp091.URI{}, nil, &leaseclient.InvalidError{Field: "amqp_url", Reason: "missing"}
	}
	uri, err := amqp091.ParseURI(u.String())
	if err != nil {
		// The library's text may repeat the URL, and with it a password.
		return amqp091.URI{}, nil, &leaseclient.InvalidError{Field: "amqp_url", Reason: "must be amqp://[user:password@]host[:port][/vhost] or amqps://"}
	}
	if uri.Scheme == "amqps" {
		return uri, &tls.Config{ServerName: uri.Host, MinVersion: tls.VersionTLS12}, nil
	}
	return uri, nil, nil
}

// New returns a server.
func New(o Options) (*Server, error) {
	uri, tc, err := address(o.Upstream)
	if err != nil {
		return nil, err
	}
	if o.Leases == nil || o.Gate == nil {
		return nil, errors.New("rabbit: options name no leases or no gate")
	}
	if o.Policy == nil {
		o.Policy = func() *policy.Policy { return nil }
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.MaxConnections <= 0 {
		o.MaxConnections = DefaultMaxConnections
	}
	if o.MaxMessage <= 0 {
		o.MaxMessage = DefaultMaxMessage
	}
	if o.MaxEffect <= 0 {
		o.MaxEffect = DefaultMaxEffect
	}
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.OnVerdict == nil {
		o.OnVerdict = func(leaseclient.Code) {}
	}
	return &Server{opts: o, addr: hostPort(uri), tls: tc, conns: make(map[*conn]bool)}, nil
}

// hostPort is the address to dial.
func hostPort(uri amqp091.URI) string {
	return net.JoinHostPort(uri.Host, portText(uri.Port))
}

// dial connects to the broker.
func dial(ctx context.Context, addr string, tc *tls.Config) (net.Conn, error) {
	d := &net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}
	if tc != nil {
		return (&tls.Dialer{NetDialer: d, Config: tc}).DialContext(ctx, "tcp", addr)
	}
	return d.DialContext(ctx, "tcp", addr)
}

// Serve accepts workers until ctx ends or the listener fails; it closes the
// listener. Connections go on until [Server.Shutdown].
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	defer func() { _ = ln.Close() }()
	for {
		c, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
				continue
			}
			return err
		}
		s.start(c)
	}
}

// start serves one worker, unless there are too many already.
func (s *Server) start(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down || len(s.conns) >= s.opts.MaxConnections {
		s.opts.Logger.Warn("closed a connection, there are too many", zap.String("adapter", "rabbit"), zap.Int("limit", s.opts.MaxConnections))
		_ = nc.Close()
		return
	}
	c := newConn(s, nc)
	s.conns[c] = true
	s.group.Go(func() {
		c.run()
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.conns, c)
	})
}

// Shutdown takes no new publishes, lets accepted ones be confirmed, tells the
// workers, and waits. When ctx ends first, connections are cut; what is left is
// in the commit log.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.down = true
	for c := range s.conns {
		c.stop()
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		s.group.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	for c := range s.conns {
		c.cut(errors.New("shutdown took too long"))
	}
	s.mu.Unlock()
	<-done
	return ctx.Err()
}

// Connections returns how many workers are connected.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}
