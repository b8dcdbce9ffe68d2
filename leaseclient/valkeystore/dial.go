package valkeystore

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/valkey-io/valkey-go"
)

// dialError marks a connection that could not be made: nothing was sent.
type dialError struct{ err error }

func (e *dialError) Error() string { return "connect to the lease store: " + e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

// clientOption turns the options into what the client library takes.
//
// A single server is the normal case and is not asked whether it is a cluster,
// so that a least-privilege user needs no right to ask. "cluster=true" or a
// second address in the URL say that it is one, "master_set" that Sentinel
// knows the primary.
func clientOption(o Options) (valkey.ClientOption, error) {
	c, err := valkey.ParseURL(o.URL)
	if err != nil {
		// The library's text may repeat the URL, and with it a password.
		return c, errors.New("lease store URL cannot be read: want valkey://host:port, valkeys:// for TLS, or unix://")
	}
	u, err := url.Parse(o.URL)
	if err != nil {
		return c, errors.New("lease store URL cannot be read")
	}
	if c.SelectDB != 0 {
		return c, errors.New("lease store URL names a database number; the store uses database 0 and names its keys by namespace")
	}
	if o.Username != "" {
		c.Username = o.Username
	}
	if o.Password != "" {
		c.Password = o.Password
	}
	if o.TLS != nil {
		if c.TLSConfig == nil {
			return c, errors.New("a certificate is configured but the lease store URL is not valkeys://")
		}
		t := o.TLS.Clone()
		if t.ServerName == "" {
			t.ServerName = c.TLSConfig.ServerName
		}
		c.TLSConfig = t
	}
	c.ClientName = "fencerider"
	c.ForceSingleClient = c.Sentinel.MasterSet == "" && len(c.InitAddress) == 1 && u.Query().Get("cluster") != "true"
	// A command whose answer was lost may have run; repeating it is never the
	// library's decision.
	c.DisableRetry = true
	c.DisableCache = true
	c.ConnLifetime = 0
	c.ConnWriteTimeout = o.CallTimeout
	c.BlockingPoolSize = maxDedicated
	c.BlockingPoolCleanup = time.Minute
	c.RingScaleEachConn = 9
	c.ReadBufferEachConn = 64 << 10
	c.WriteBufferEachConn = 64 << 10
	c.Dialer = net.Dialer{Timeout: o.DialTimeout, KeepAlive: time.Second}
	unix := strings.HasPrefix(o.URL, "unix:")
	c.DialCtxFn = func(ctx context.Context, addr string, d *net.Dialer, t *tls.Config) (net.Conn, error) {
		network := "tcp"
		if unix {
			network = "unix"
		}
		var conn net.Conn
		var err error
		if t != nil {
			conn, err = (&tls.Dialer{NetDialer: d, Config: t}).DialContext(ctx, network, addr)
		} else {
			conn, err = d.DialContext(ctx, network, addr)
		}
		if err != nil {
			return nil, &dialError{err}
		}
		return conn, nil
	}
	return c, nil
}

// maxDedicated bounds the connections that acquisitions use side by side.
const maxDedicated = 64

// connect returns the client, making it on first use: the sidecar starts while
// the store is still out of reach.
func (s *Store) connect(ctx context.Context) (valkey.Client, error) {
	select {
	case s.dialing <- struct{}{}:
		defer func() { <-s.dialing }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the connection: %w", ctx.Err())
	}
	if s.closed.Load() {
		return nil, errors.New("store is closed")
	}
	if c := s.client.Load(); c != nil {
		return *c, nil
	}
	c, err := valkey.NewClient(s.clientOption)
	if err != nil {
		return nil, err
	}
	s.client.Store(&c)
	return c, nil
}

// Close closes the connections. Calls in flight end as lease_outcome_unknown.
func (s *Store) Close() {
	s.dialing <- struct{}{}
	defer func() { <-s.dialing }()
	if !s.closed.Swap(true) {
		close(s.done)
	}
	if c := s.client.Swap(nil); c != nil {
		(*c).Close()
	}
}
