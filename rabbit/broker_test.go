package rabbit

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/fencetest"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// A scripted broker and a scripted worker, for moments that a real broker cannot be
// brought to.

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// peer is one end of a connection, frame by frame.
type peer struct {
	net.Conn
	t      testing.TB
	r      *bufio.Reader
	frames chan wire.Frame
}

// put writes frames.
func (p *peer) put(b ...[]byte) {
	p.t.Helper()
	if _, err := p.Write(bytes.Join(b, nil)); err != nil {
		p.t.Errorf("write: %v", err)
	}
}

// reply writes frames unless the test has ended meanwhile: what a broker answers
// by itself races with the end of the connection.
func (p *peer) reply(b ...[]byte) {
	if _, err := p.Write(bytes.Join(b, nil)); err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		p.t.Errorf("answer: %v", err)
	}
}

// reads starts to collect frames; heartbeats do not count.
func (p *peer) reads(group *sync.WaitGroup, see func(wire.Frame)) *peer {
	group.Go(func() {
		defer close(p.frames)
		for {
			f, err := wire.ReadFrame(p.r, 1<<24)
			if err != nil {
				return
			}
			if f.Type() == wire.FrameHeartbeat {
				continue
			}
			if see != nil {
				see(f)
			}
			p.frames <- f
		}
	})
	return p
}

// next waits for a frame.
func (p *peer) next() wire.Frame {
	p.t.Helper()
	select {
	case f, ok := <-p.frames:
		if !ok {
			p.t.Fatal("the connection ended")
		}
		return f
	case <-time.After(patience):
		p.t.Fatal("no frame came")
	}
	return nil
}

// until reads up to the first frame of a method.
func (p *peer) until(m wire.Method) wire.Frame {
	p.t.Helper()
	for {
		if f := p.next(); f.Method() == m {
			return f
		}
	}
}

// scripted is a proxy between a scripted broker and scripted workers.
type scripted struct {
	t      testing.TB
	gate   *fencetest.Gate
	server *Server
	addr   string
	broker chan *peer
	group  sync.WaitGroup
}

// script says how.
type script struct {
	gate      *fencetest.Gate
	leases    *fencetest.Leases
	policy    *policy.Policy
	beforeOK  func(c net.Conn)
	deaf      bool
	heartbeat uint16
	// frameMax is the broker's; zero is the usual one.
	frameMax uint32
}

// newScripted starts everything but the worker.
func newScripted(t testing.TB, o script) *scripted {
	t.Helper()
	s := &scripted{t: t, gate: o.gate, broker: make(chan *peer, 1)}
	if s.gate == nil {
		s.gate = &fencetest.Gate{}
	}
	if o.leases == nil {
		o.leases = &fencetest.Leases{Refs: []leaseclient.Ref{fencetest.Ref("x", 5)}}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.group.Go(func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		s.greet(&peer{Conn: c, t: t, r: bufio.NewReader(c), frames: make(chan wire.Frame, 10_000)}, o)
	})
	srv, err := New(Options{
		Upstream: &url.URL{Scheme: "amqp", Host: ln.Addr().String(), Path: "/"},
		Policy:   func() *policy.Policy { return o.policy }, Leases: o.leases, Gate: s.gate,
	})
	if err != nil {
		t.Fatal(err)
	}
	s.server = srv
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.addr = front.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	s.group.Go(func() {
		if err := srv.Serve(ctx, front); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		now, cancelNow := context.WithCancel(context.Background())
		cancelNow()
		_ = srv.Shutdown(now)
		_ = ln.Close()
		select {
		case b := <-s.broker:
			_ = b.Close()
		default:
		}
		s.group.Wait()
	})
	return s
}

// greet is the broker's side of the handshake.
func (s *scripted) greet(b *peer, o script) {
	s.t.Cleanup(func() { _ = b.Close() })
	if _, err := io.ReadFull(b.r, make([]byte, 8)); err != nil {
		return
	}
	start := []byte{0, 9, 0, 0, 0, 0}
	for _, text := range []string{"PLAIN", "en_US"} {
		start = append(start, 0, 0, 0, byte(len(text)))
		start = append(start, text...)
	}
	b.put(wire.AppendMethod(nil, 0, wire.ConnectionStart, start))
	if _, err := wire.ReadFrame(b.r, 1<<20); err != nil {
		return
	}
	if o.frameMax == 0 {
		o.frameMax = 131072
	}
	b.put(wire.Tune{ChannelMax: 2047, FrameMax: o.frameMax, Heartbeat: o.heartbeat}.Append(nil, wire.ConnectionTune))
	for range 2 {
		if _, err := wire.ReadFrame(b.r, 1<<20); err != nil {
			return
		}
	}
	if o.beforeOK != nil {
		o.beforeOK(b)
	}
	b.put(wire.AppendMethod(nil, 0, wire.ConnectionOpenOK, []byte{0}))
	if !o.deaf {
		b.reads(&s.group, func(f wire.Frame) {
			switch {
			case f.Method() == wire.ChannelOpen:
				b.reply(wire.AppendMethod(nil, f.Channel(), wire.ChannelOpenOK, []byte{0, 0, 0, 0}))
			case f.Method() == wire.ConfirmSelect && !wire.NoWait(f.Payload()):
				b.reply(wire.AppendMethod(nil, f.Channel(), wire.ConfirmSelectOK, nil))
			}
		})
	}
	s.broker <- b
}

// dial connects a worker and sends the first steps of its handshake, with more
// behind them.
func (s *scripted) dial(more ...[]byte) *peer {
	s.t.Helper()
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	w := &peer{Conn: c, t: s.t, r: bufio.NewReader(c), frames: make(chan wire.Frame, 10_000)}
	expect := func(m wire.Method) wire.Frame {
		s.t.Helper()
		f, err := wire.ReadFrame(w.r, 1<<20)
		if err != nil || f.Method() != m {
			s.t.Fatalf("handshake: %v, want method %d", err, m)
		}
		return f
	}
	w.put(wire.ProtocolHeader)
	expect(wire.ConnectionStart)
	login := wire.AppendShort([]byte{0, 0, 0, 0}, "PLAIN")
	login = append(login, 0, 0, 0, 4, 0, 'a', 0, 'b')
	w.put(wire.AppendMethod(nil, 0, wire.ConnectionStartOK, wire.AppendShort(login, "en_US")))
	tune, err := wire.ParseTune(expect(wire.ConnectionTune).Payload())
	if err != nil {
		s.t.Fatal(err)
	}
	w.put(tune.Append(nil, wire.ConnectionTuneOK), wire.AppendMethod(nil, 0, wire.ConnectionOpen, []byte{1, '/', 0, 0}), bytes.Join(more, nil))
	return w
}

// start returns a worker and the broker behind it, both past the handshake.
func (s *scripted) start() (worker, broker *peer) {
	s.t.Helper()
	w := s.dial()
	if f, err := wire.ReadFrame(w.r, 1<<20); err != nil || f.Method() != wire.ConnectionOpenOK {
		s.t.Fatalf("handshake: %v", err)
	}
	b := <-s.broker
	s.t.Cleanup(func() { _ = b.Close() })
	return w, b
}

// starts is start with a worker that reads.
func (s *scripted) starts() (worker, broker *peer) {
	s.t.Helper()
	w, b := s.start()
	return w.reads(&s.group, nil), b
}

func openFrame(ch uint16) []byte { return wire.AppendMethod(nil, ch, wire.ChannelOpen, []byte{0}) }
func closeFrame(ch uint16) []byte {
	return wire.Close{Code: 200}.Append(nil, ch, wire.ChannelClose)
}
func closeOKFrame(ch uint16) []byte { return wire.AppendMethod(nil, ch, wire.ChannelCloseOK, nil) }
func selectFrame(ch uint16) []byte {
	return wire.AppendMethod(nil, ch, wire.ConfirmSelect, []byte{0})
}
func publishFrames(ch uint16, exchange, key string, body []byte) []byte {
	p := &publish{raw: []byte{0, 0}, body: body}
	p.Exchange, p.RoutingKey = exchange, key
	return p.frames(ch, p.raw, 131072)
}

// deliverFrame is the method of a delivery; header and body follow.
func deliverFrame(ch uint16) []byte {
	return wire.AppendMethod(nil, ch, wire.BasicDeliver, []byte{1, 'c', 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 'q'})
}
func headerFrame(ch uint16, size int) []byte {
	return wire.Header{BodySize: uint64(size), Properties: []byte{0, 0}}.Append(nil, ch)
}
func bodyFrame(ch uint16, size int) []byte {
	return wire.AppendFrame(nil, wire.FrameBody, ch, make([]byte, size))
}

// refusal reads a close and checks its code and how its text begins.
func refusal(t testing.TB, f wire.Frame, code uint16, text string) {
	t.Helper()
	c, err := wire.ParseClose(f.Payload())
	if err != nil || c.Code != code || !strings.HasPrefix(c.Text, text) {
		t.Errorf("closed with %d %q (%v), want %d %q", c.Code, c.Text, err, code, text)
	}
}

// lostGate refuses everything.
func lostGate() *fencetest.Gate {
	return &fencetest.Gate{Refuse: func(leaseclient.Ref, []leaseclient.Commit) error {
		return &leaseclient.Error{Code: leaseclient.CodeLost, Op: "begin"}
	}}
}

// twoLocks is a policy of one lock a routing key, and "free" without any.
func twoLocks(t testing.TB, names ...string) (*policy.Policy, *fencetest.Leases) {
	t.Helper()
	p, err := policy.Parse([]byte(`
version: 1
defaults: {tenant_id: tenant, program_id: program, actor_name: actor}
rabbit:
  unmatched: deny
  rules:
    - {exchange: "", routing_key: "free", fence: off}
    - exchange: ""
      identity: {target_namespace: ns, target_id: "{routing_key}"}
`), policy.ParseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l := &fencetest.Leases{}
	for i, n := range names {
		d, err := p.ResolvePublish(policy.Publish{RoutingKey: n})
		if err != nil {
			t.Fatal(err)
		}
		r := fencetest.Ref(n, uint64(i+1))
		r.Identity, r.LockKey = d.Identity, d.Identity.LockKey()
		l.Refs = append(l.Refs, r)
	}
	return p, l
}

// channel is what the proxy knows of a channel of its only connection.
func (s *scripted) channel(id uint16) *channel {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	for c := range s.server.conns {
		return c.channel(id)
	}
	return nil
}

// outcome waits until a commit was given back.
func (s *scripted) outcome(id string) leaseclient.Outcome {
	s.t.Helper()
	var o leaseclient.Outcome
	eventually(s.t, "the commit is given back", func() bool {
		var ok bool
		o, ok = s.gate.Outcome(id)
		return ok
	})
	return o
}

// begun waits for so many batches and returns the last one's first commit id.
func (s *scripted) begun(n int) string {
	s.t.Helper()
	eventually(s.t, "the commits are begun", func() bool { return len(s.gate.Begun()) >= n })
	return s.gate.Begun()[n-1][0].ID
}

func TestNothingPassesBeforeTheConnectionIsOpen(t *testing.T) {
	s := newScripted(t, script{beforeOK: func(c net.Conn) {
		// A broker may send heartbeats while it opens the virtual host.
		for range 4 {
			_, _ = c.Write(wire.Heartbeat)
		}
	}})
	w := s.dial(openFrame(1), publishFrames(1, "", "q", []byte("early"))).reads(&s.group, nil)
	w.until(wire.ConnectionOpenOK)
	b := <-s.broker
	b.until(wire.BasicPublish)
	if f := b.next(); !bytes.Contains(f.Payload(), []byte(fence.HeaderToken)) {
		t.Errorf("a message without a stamp reached the broker: %q", f.Payload())
	}
	if n := len(s.gate.Begun()); n != 1 {
		t.Errorf("%d begins", n)
	}
}

func TestHandshakeTakesOnlyItsOwnMethods(t *testing.T) {
	s := newScripted(t, script{})
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	w := &peer{Conn: c, t: t, r: bufio.NewReader(c), frames: make(chan wire.Frame, 16)}
	w.reads(&s.group, nil)
	w.put(wire.ProtocolHeader)
	w.until(wire.ConnectionStart)
	w.put(publishFrames(1, "", "q", []byte("first")))
	refusal(t, w.until(wire.ConnectionClose), 503, "COMMAND_INVALID")
}

func TestMethodsStayOnTheirChannels(t *testing.T) {
	for name, frames := range map[string][]byte{
		"publish on channel 0":            publishFrames(0, "", "q", []byte("zero")),
		"connection method on channel 1":  wire.AppendMethod(nil, 1, wire.ConnectionClose, []byte{0, 200, 0, 0, 0, 0, 0}),
		"queue method on channel 0":       wire.AppendMethod(nil, 0, 50<<16|10, []byte{0, 0, 1, 'q', 0, 0, 0, 0, 0}),
		"open of a channel that is open":  append(openFrame(1), openFrame(1)...),
		"publish on a channel not opened": publishFrames(9, "", "q", []byte("nine")),
	} {
		t.Run(name, func(t *testing.T) {
			s := newScripted(t, script{})
			w, _ := s.starts()
			w.put(frames)
			code := uint16(503)
			if strings.HasPrefix(name, "open") || strings.HasSuffix(name, "opened") {
				code = 504
			}
			refusal(t, w.until(wire.ConnectionClose), code, "")
			eventually(t, "every commit is given back", func() bool {
				missing, twice := s.gate.Open()
				return len(missing)+len(twice) == 0
			})
		})
	}
}

func TestRefusalInsideADelivery(t *testing.T) {
	s := newScripted(t, script{gate: lostGate()})
	w, b := s.starts()
	w.put(openFrame(1))
	w.until(wire.ChannelOpenOK)
	b.put(deliverFrame(1), headerFrame(1, 20), bodyFrame(1, 10))
	w.until(wire.BasicDeliver)
	w.next()
	w.next()
	w.put(publishFrames(1, "", "q", []byte("stale")))
	b.until(wire.ChannelClose)
	// The delivery goes on to its end, and what begins afterwards is dropped.
	b.put(bodyFrame(1, 10), deliverFrame(1), headerFrame(1, 5), bodyFrame(1, 5), closeOKFrame(1))
	if f := w.next(); f.Type() != wire.FrameBody {
		t.Errorf("frame of type %d, want the rest of the delivery", f.Type())
	}
	f := w.next()
	if f.Method() != wire.ChannelClose {
		t.Fatalf("method %d, want the refusal", f.Method())
	}
	refusal(t, f, 403, "ACCESS_REFUSED - lease_lost")
	w.put(closeOKFrame(1), openFrame(1))
	w.until(wire.ChannelOpenOK)
}

// staged brings the proxy to where channel 2 waits to be closed, so that a message
// of channel 1, accepted already, stands behind it; then the broker closes channel
// 1.
func staged(t *testing.T) (s *scripted, w, b *peer, behind string) {
	s = newScripted(t, script{})
	w, b = s.starts()
	w.put(openFrame(1), openFrame(2), selectFrame(1))
	w.until(wire.ConfirmSelectOK)
	w.put(publishFrames(1, "missing", "q", []byte("first")))
	b.until(wire.BasicPublish)
	w.put(publishFrames(2, "", "q", []byte("second")), closeFrame(2))
	b.until(wire.BasicPublish)
	w.put(publishFrames(1, "", "q", []byte("behind")))
	behind = s.begun(3)
	b.put(wire.Close{Code: 404, Text: "NOT_FOUND - no exchange 'missing' in vhost '/'", Method: wire.BasicPublish}.Append(nil, 1, wire.ChannelClose))
	w.until(wire.ChannelClose)
	return s, w, b, behind
}

func TestMessageOfAClosedChannelIsNotTakenForAnotherOne(t *testing.T) {
	s, w, b, behind := staged(t)
	before := s.channel(1)
	w.put(closeOKFrame(1), openFrame(1))
	eventually(t, "channel 1 is used again", func() bool {
		now := s.channel(1)
		return now != nil && now != before
	})
	b.put(wire.AppendAck(nil, 2, 1)) // channel 2 may be closed
	for f := b.next(); f.Method() != wire.ChannelOpen; f = b.next() {
		if f.Method() == wire.BasicPublish {
			t.Error("the message of the closed channel was sent")
		}
	}
	w.put(selectFrame(1))
	b.until(wire.ConfirmSelect)
	w.put(publishFrames(1, "", "q", []byte("new")))
	b.until(wire.BasicPublish)
	next := s.begun(4)
	b.put(wire.AppendAck(nil, 1, 1))
	if o := s.outcome(next); o != leaseclient.OutcomeConfirmed {
		t.Errorf("the message of the new channel ended as %s", o)
	}
	s.outcome(behind)
	if !slices.Equal(s.gate.Abandoned(), []string{behind}) {
		t.Errorf("abandoned %v, want the message of the closed channel", s.gate.Abandoned())
	}
}

func TestMessageOfAClosedChannelIsSettledAtOnce(t *testing.T) {
	s, _, b, behind := staged(t)
	b.put(wire.AppendAck(nil, 2, 1))
	s.outcome(behind)
	if !slices.Equal(s.gate.Abandoned(), []string{behind}) || s.server.Connections() != 1 {
		t.Errorf("abandoned %v, %d connections", s.gate.Abandoned(), s.server.Connections())
	}
}

func TestDrainDoesNotWaitForUnfencedMessages(t *testing.T) {
	p, l := twoLocks(t, "a")
	s := newScripted(t, script{policy: p, leases: l})
	w, b := s.starts()
	w.put(openFrame(1), openFrame(2), selectFrame(1))
	w.until(wire.ConfirmSelectOK)
	w.put(publishFrames(1, "", "free", []byte("never confirmed")), closeFrame(1), publishFrames(2, "", "a", []byte("fenced")))
	b.until(wire.BasicPublish)
	b.until(wire.ChannelClose)
	b.until(wire.BasicPublish)
	b.put(wire.AppendAck(nil, 2, 1))
	if o := s.outcome(s.begun(1)); o != leaseclient.OutcomeConfirmed {
		t.Errorf("ended as %s", o)
	}
}

func TestSlowLockDoesNotMakeAnotherLate(t *testing.T) {
	p, l := twoLocks(t, "a", "b")
	var free atomic.Bool
	gate := &fencetest.Gate{Bound: 2 * time.Second, Delay: func(ctx context.Context, ref leaseclient.Ref) {
		if ref.LockKey == l.Refs[1].LockKey && !free.Load() {
			<-ctx.Done() // a predecessor that takes its time
		}
	}}
	s := newScripted(t, script{policy: p, leases: l, gate: gate})
	w, b := s.starts()
	w.put(openFrame(1), selectFrame(1))
	w.until(wire.ConfirmSelectOK)
	w.put(slices.Concat(publishFrames(1, "", "b", []byte("slow")), publishFrames(1, "", "a", []byte("quick"))))
	b.until(wire.BasicPublish)
	b.put(wire.AppendAck(nil, 1, 1))
	first, second := w.until(wire.BasicNack), w.until(wire.BasicAck)
	for i, f := range []wire.Frame{first, second} {
		if tag, _, err := wire.ParseAck(f.Payload()); err != nil || tag != uint64(i+1) {
			t.Errorf("word %d is about %d (%v)", i+1, tag, err)
		}
	}
	free.Store(true)
	w.put(publishFrames(1, "", "b", []byte("again")))
	b.until(wire.BasicPublish)
	b.put(wire.AppendAck(nil, 1, 2))
	w.until(wire.BasicAck)
}

func TestConfirmIsReadPastASlowConsumer(t *testing.T) {
	s := newScripted(t, script{})
	w, b := s.start() // this worker reads nothing
	w.put(openFrame(1))
	b.until(wire.ChannelOpen)
	w.put(publishFrames(1, "", "q", []byte("one")))
	b.until(wire.BasicPublish)
	const each = 100 << 10
	for range 3 * downSoft / each {
		b.put(deliverFrame(1), headerFrame(1, each), bodyFrame(1, each))
	}
	b.put(wire.AppendAck(nil, 1, 1))
	id := s.begun(1)
	if o := s.outcome(id); o != leaseclient.OutcomeConfirmed || len(s.gate.Abandoned()) > 0 {
		t.Errorf("ended as %s, abandoned %v", o, s.gate.Abandoned())
	}
}

func TestWorkerThatNeverReadsIsGivenUp(t *testing.T) {
	t.Parallel()
	s := newScripted(t, script{gate: &fencetest.Gate{Bound: 2 * time.Second}})
	w, b := s.start()
	w.put(openFrame(1))
	b.until(wire.ChannelOpen)
	w.put(publishFrames(1, "", "q", []byte("one")))
	b.until(wire.BasicPublish)
	s.group.Go(func() {
		// More than is kept for a worker; it ends when the connection is cut.
		msg := slices.Concat(deliverFrame(1), headerFrame(1, 100<<10), bodyFrame(1, 100<<10))
		for {
			if _, err := b.Write(msg); err != nil {
				return
			}
		}
	})
	id := s.begun(1)
	s.outcome(id)
	if !slices.Equal(s.gate.Abandoned(), []string{id}) {
		t.Errorf("abandoned %v", s.gate.Abandoned())
	}
	eventually(t, "the connection is gone", func() bool { return s.server.Connections() == 0 })
}

func TestRefusalsForAWorkerThatNeverReadsAreBounded(t *testing.T) {
	t.Parallel()
	s := newScripted(t, script{gate: lostGate()})
	w, b := s.start()
	w.put(openFrame(1), selectFrame(1))
	b.until(wire.ConfirmSelect)
	b.put(deliverFrame(1)) // its content is still to come, so the refusals wait
	msg := publishFrames(1, "", "q", make([]byte, 900<<10))
	sent := 0
	for sent < 4*downHard {
		if _, err := w.Write(msg); err != nil {
			break
		}
		sent += len(msg)
	}
	if sent >= 4*downHard {
		t.Errorf("%d bytes of refusals were kept", sent)
	}
}

func TestQueueToTheBrokerIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	p, l := twoLocks(t)
	s := newScripted(t, script{policy: p, leases: l, deaf: true})
	w, _ := s.start()
	w.put(openFrame(1))
	msg := publishFrames(1, "", "free", make([]byte, 8<<20))
	sent := 0
	for ; sent < 20; sent++ {
		_ = w.SetWriteDeadline(time.Now().Add(3 * time.Second))
		if _, err := w.Write(msg); err != nil {
			break
		}
	}
	if sent > 8 {
		t.Errorf("%d messages of 8 MiB were taken while the broker read nothing", sent)
	}
}

func TestNackedMessageMayBeSentAgain(t *testing.T) {
	for name, again := range map[string]bool{"repeatable": true, "once": false} {
		t.Run(name, func(t *testing.T) {
			s := newScripted(t, script{})
			w, b := s.starts()
			w.put(openFrame(1), selectFrame(1))
			w.until(wire.ConfirmSelectOK)
			p := &publish{raw: []byte{0, 0}, body: []byte("m")}
			if again {
				table := wire.AppendTextField(nil, "other", "x")
				table = append(table, byte(len(headerIdempotent)))
				table = append(table, headerIdempotent...)
				table = append(table, 't', 1)
				props, err := wire.ParseProperties(p.raw)
				if err != nil {
					t.Fatal(err)
				}
				p.raw = props.Rewrite(func(string) bool { return false }, table, "message-1")
			}
			p.RoutingKey = "q"
			w.put(p.frames(1, p.raw, 131072))
			b.until(wire.BasicPublish)
			b.put(wire.AppendNack(nil, 1, 1))
			w.until(wire.BasicNack)
			want := leaseclient.OutcomeRefused
			if again {
				want = leaseclient.OutcomeCancelled
			}
			if o := s.outcome(s.begun(1)); o != want {
				t.Errorf("ended as %s, want %s", o, want)
			}
		})
	}
}

func TestSilentBrokerIsGivenUp(t *testing.T) {
	t.Parallel()
	s := newScripted(t, script{heartbeat: 1})
	w, b := s.starts()
	w.put(openFrame(1))
	b.until(wire.ChannelOpen)
	w.put(publishFrames(1, "", "q", []byte("one")))
	b.until(wire.BasicPublish)
	w.keepsAlive(&s.group)
	id := s.begun(1)
	s.outcome(id)
	if !slices.Equal(s.gate.Abandoned(), []string{id}) {
		t.Errorf("abandoned %v", s.gate.Abandoned())
	}
}

// keepsAlive sends heartbeats until the connection ends.
func (p *peer) keepsAlive(group *sync.WaitGroup) {
	group.Go(func() {
		tick := time.NewTicker(300 * time.Millisecond)
		defer tick.Stop()
		for range tick.C {
			if _, err := p.Write(wire.Heartbeat); err != nil {
				return
			}
		}
	})
}
