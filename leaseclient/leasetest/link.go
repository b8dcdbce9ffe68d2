// Package leasetest has what tests of leases need: a link to a server that can
// be cut at a chosen moment, and a clock that is set by hand. It owns nothing
// that runs in production and must never be imported there.
package leasetest

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Link is a TCP relay in front of a real server. It can lose the answers to
// what it has passed on, or cut everything. It is safe for concurrent use.
type Link struct {
	target string
	ln     net.Listener
	wg     sync.WaitGroup

	mu      sync.Mutex
	conns   map[net.Conn]bool
	deaf    bool
	down    bool
	closed  bool
	dropped chan struct{}
}

// NewLink relays to an address until the test ends.
func NewLink(t testing.TB, target string) *Link {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listen for link: %v", err)
	}
	l := &Link{target: target, ln: ln, conns: make(map[net.Conn]bool), dropped: make(chan struct{}, 1024)}
	l.wg.Go(l.accept)
	t.Cleanup(l.close)
	return l
}

// Addr is where clients connect.
func (l *Link) Addr() string { return l.ln.Addr().String() }

// LoseAnswers lets requests through and, at the first byte of an answer, cuts
// the connection instead of passing it on. False ends it.
func (l *Link) LoseAnswers(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deaf = on
}

// Dropped receives one value for every answer that was lost.
func (l *Link) Dropped() <-chan struct{} { return l.dropped }

// Down cuts all connections and refuses new ones; false ends it.
func (l *Link) Down(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = on
	if on {
		l.cut()
	}
}

// Cut cuts all connections once.
func (l *Link) Cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut()
}

// cut closes every connection; the lock is held.
func (l *Link) cut() {
	for c := range l.conns {
		_ = c.Close()
	}
}

// close ends the relay and waits for it.
func (l *Link) close() {
	l.mu.Lock()
	l.closed = true
	_ = l.ln.Close()
	l.cut()
	l.mu.Unlock()
	l.wg.Wait()
}

// accept relays connections.
func (l *Link) accept() {
	for {
		c, err := l.ln.Accept()
		if err != nil {
			return
		}
		l.wg.Go(func() { l.relay(c) })
	}
}

// hold remembers a connection so that it can be cut.
func (l *Link) hold(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down || l.closed {
		_ = c.Close()
		return false
	}
	l.conns[c] = true
	return true
}

// drop forgets and closes a connection.
func (l *Link) drop(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c)
	_ = c.Close()
}

// relay carries one connection both ways.
func (l *Link) relay(client net.Conn) {
	if !l.hold(client) {
		return
	}
	defer l.drop(client)
	server, err := net.DialTimeout("tcp", l.target, 5*time.Second)
	if err != nil {
		return
	}
	if !l.hold(server) {
		return
	}
	defer l.drop(server)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(server, client)
		_ = server.Close()
	}()
	buf := make([]byte, 32<<10)
	for {
		n, err := server.Read(buf)
		if n > 0 {
			l.mu.Lock()
			deaf := l.deaf
			l.mu.Unlock()
			if deaf {
				select {
				case l.dropped <- struct{}{}:
				default:
				}
				break
			}
			if _, err := client.Write(buf[:n]); err != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	_ = client.Close()
	_ = server.Close()
	<-done
}
