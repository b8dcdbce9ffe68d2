package rabbit

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"go.uber.org/goleak"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/fencetest"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/leaseclient/leasetest"
	"github.com/starintel/fencerider/rabbit/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// brokerURL is the real broker.
func brokerURL(t testing.TB) *url.URL {
	t.Helper()
	raw := os.Getenv("FENCERIDER_TEST_AMQP_URL")
	if raw == "" {
		t.Fatal("FENCERIDER_TEST_AMQP_URL is not set: this test needs a real RabbitMQ, `make test` starts one")
	}
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// setup is a proxy in front of the real broker.
type setup struct {
	t      testing.TB
	gate   *fencetest.Gate
	lost   atomic.Bool
	leases *fencetest.Leases
	policy *policy.Policy
	server *Server
	link   *leasetest.Link
	addr   string
	direct *amqp091.Channel
	queue  string
	stop   func()
}

// newSetup starts a proxy, and makes a queue on the broker.
func newSetup(t testing.TB, mod ...func(*Options)) *setup {
	t.Helper()
	up := brokerURL(t)
	s := &setup{t: t, gate: &fencetest.Gate{}, leases: &fencetest.Leases{Refs: []leaseclient.Ref{fencetest.Ref("x", 5)}}, link: leasetest.NewLink(t, up.Host)}
	s.gate.Refuse = func(leaseclient.Ref, []leaseclient.Commit) error {
		if s.lost.Load() {
			return &leaseclient.Error{Code: leaseclient.CodeLost, Op: "begin"}
		}
		return nil
	}
	via := *up
	via.Host = s.link.Addr()
	o := Options{Upstream: &via, Policy: func() *policy.Policy { return s.policy }, Leases: s.leases, Gate: s.gate}
	for _, m := range mod {
		m(&o)
	}
	srv, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	s.server = srv
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.addr = ln.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := srv.Serve(ctx, ln); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	s.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		end, cancelEnd := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancelEnd()
		if err := srv.Shutdown(end); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	t.Cleanup(s.stop)
	conn, err := amqp091.Dial(up.String())
	if err != nil {
		t.Fatalf("dial broker: %v", err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if s.direct, err = conn.Channel(); err != nil {
		t.Fatal(err)
	}
	s.queue = leaseclient.NewID("q")
	if _, err := s.direct.QueueDeclare(s.queue, false, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = s.direct.QueueDelete(s.queue, false, false, false) })
	return s
}

// worker is a client that talks through the proxy.
func (s *setup) worker() (*amqp091.Connection, *amqp091.Channel) {
	s.t.Helper()
	up := brokerURL(s.t)
	via := *up
	via.Host = s.addr
	conn, err := amqp091.Dial(via.String())
	if err != nil {
		s.t.Fatalf("dial through the proxy: %v", err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		s.t.Fatal(err)
	}
	return conn, ch
}

// send publishes to the test's queue.
func (s *setup) send(ch *amqp091.Channel, body string) error {
	return ch.PublishWithContext(s.t.Context(), "", s.queue, false, false, amqp091.Publishing{
		ContentType: "text/plain", Body: []byte(body), Headers: amqp091.Table{"mine": "kept", "x-fence-lease-id": "forged", "x-fencerider-wish": "gone"},
	})
}

// received empties the queue, directly at the broker.
func (s *setup) received() []amqp091.Delivery {
	s.t.Helper()
	var out []amqp091.Delivery
	for {
		d, ok, err := s.direct.Get(s.queue, true)
		if err != nil {
			s.t.Fatal(err)
		}
		if !ok {
			return out
		}
		out = append(out, d)
	}
}

// await polls the queue until so many messages are there.
func (s *setup) await(n int) []amqp091.Delivery {
	s.t.Helper()
	var out []amqp091.Delivery
	eventually(s.t, fmt.Sprint(n, " messages at the broker"), func() bool {
		out = append(out, s.received()...)
		return len(out) >= n
	})
	return out
}

// eventually polls a condition.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for !f() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("not in time: %s", what)
		}
	}
}

// closed expects that every accepted commit was given back once.
func (s *setup) closed() {
	s.t.Helper()
	eventually(s.t, "every commit is given back", func() bool {
		missing, twice := s.gate.Open()
		return len(missing)+len(twice) == 0
	})
}

// confirm waits for the word on one publish.
func confirm(t testing.TB, ch *amqp091.Channel, publish func() (*amqp091.DeferredConfirmation, error)) bool {
	t.Helper()
	d, err := publish()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ok, err := d.WaitContext(ctx)
	if err != nil {
		t.Fatalf("no confirm: %v", err)
	}
	return ok
}

// deferred publishes in confirm mode.
func (s *setup) deferred(ch *amqp091.Channel, body string) func() (*amqp091.DeferredConfirmation, error) {
	return func() (*amqp091.DeferredConfirmation, error) {
		return ch.PublishWithDeferredConfirmWithContext(s.t.Context(), "", s.queue, false, false, amqp091.Publishing{Body: []byte(body)})
	}
}

func TestPublishIsStamped(t *testing.T) {
	s := newSetup(t)
	_, ch := s.worker()
	if err := s.send(ch, "one"); err != nil {
		t.Fatal(err)
	}
	m := s.await(1)[0]
	h := m.Headers
	if h[fence.HeaderToken] != int64(5) || h[fence.HeaderLeaseID] != "lease_x_5" || h["mine"] != "kept" || h["x-fencerider-wish"] != nil {
		t.Errorf("headers %v", h)
	}
	if m.MessageId != h[fence.HeaderCommitID] || m.MessageId != s.gate.Begun()[0][0].ID || m.ContentType != "text/plain" || string(m.Body) != "one" {
		t.Errorf("message %+v", m)
	}
	s.closed()
	if o, _ := s.gate.Outcome(m.MessageId); o != leaseclient.OutcomeConfirmed {
		t.Errorf("outcome %q", o)
	}
}

func TestOrderAndConfirms(t *testing.T) {
	s := newSetup(t)
	_, ch := s.worker()
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	const n = 500
	var ds []*amqp091.DeferredConfirmation
	for i := range n {
		d, err := s.deferred(ch, fmt.Sprint(i))()
		if err != nil {
			t.Fatal(err)
		}
		ds = append(ds, d)
	}
	for i, d := range ds {
		if ok, err := d.WaitContext(t.Context()); err != nil || !ok || d.DeliveryTag != uint64(i+1) {
			t.Fatalf("confirm %d: %v %v", i, ok, err)
		}
	}
	got := s.await(n)
	for i, m := range got {
		if string(m.Body) != fmt.Sprint(i) {
			t.Fatalf("message %d is %s", i, m.Body)
		}
	}
	s.closed()
	if b := len(s.gate.Begun()); b >= n {
		t.Errorf("%d begins for %d messages: nothing was batched", b, n)
	}
}

func TestRefusalInConfirmModeKeepsTheChannel(t *testing.T) {
	s := newSetup(t)
	_, ch := s.worker()
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	returns := ch.NotifyReturn(make(chan amqp091.Return, 8))
	if !confirm(t, ch, s.deferred(ch, "first")) {
		t.Fatal("first is nacked")
	}
	s.lost.Store(true)
	if confirm(t, ch, s.deferred(ch, "stale")) {
		t.Fatal("a stale publish is acked")
	}
	r := <-returns
	if r.ReplyCode != 403 || !strings.HasPrefix(r.ReplyText, "ACCESS_REFUSED - lease_lost: ") || string(r.Body) != "stale" || len(r.Headers) != 0 {
		t.Errorf("return %+v", r)
	}
	s.lost.Store(false)
	if !confirm(t, ch, s.deferred(ch, "again")) {
		t.Fatal("again is nacked")
	}
	var got []string
	for _, m := range s.await(2) {
		got = append(got, string(m.Body))
	}
	if !slices.Equal(got, []string{"first", "again"}) {
		t.Errorf("at the broker: %v", got)
	}
	s.closed()
}

func TestRefusalWithoutConfirmsClosesTheChannelOnly(t *testing.T) {
	s := newSetup(t)
	conn, ch := s.worker()
	other, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	if err := s.send(ch, "first"); err != nil {
		t.Fatal(err)
	}
	s.await(1)
	s.lost.Store(true)
	if err := s.send(ch, "stale"); err != nil {
		t.Fatal(err)
	}
	e := <-closed
	if e == nil || e.Code != 403 || !strings.HasPrefix(e.Reason, "ACCESS_REFUSED - lease_lost: ") {
		t.Fatalf("closed with %v", e)
	}
	s.lost.Store(false)
	if err := s.send(other, "other"); err != nil {
		t.Fatal(err)
	}
	if got := s.await(1); string(got[0].Body) != "other" {
		t.Errorf("at the broker: %s", got[0].Body)
	}
	// The number of the closed channel is used again.
	for range 3 {
		again, err := conn.Channel()
		if err != nil {
			t.Fatal(err)
		}
		s.lost.Store(true)
		closed := again.NotifyClose(make(chan *amqp091.Error, 1))
		if err := s.send(again, "stale"); err != nil {
			t.Fatal(err)
		}
		if e := <-closed; e == nil || e.Code != 403 {
			t.Fatalf("closed with %v", e)
		}
		s.lost.Store(false)
	}
	last, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.send(last, "last"); err != nil {
		t.Fatal(err)
	}
	if got := s.await(1); string(got[0].Body) != "last" {
		t.Errorf("at the broker: %s", got[0].Body)
	}
	s.closed()
}

func TestConsumersAndReturnsPassThrough(t *testing.T) {
	s := newSetup(t)
	_, ch := s.worker()
	msgs, err := ch.Consume(s.queue, "", false, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	big := strings.Repeat("x", 900_000)
	for _, body := range []string{"small", big, ""} {
		if err := s.send(ch, body); err != nil {
			t.Fatal(err)
		}
		m := <-msgs
		if string(m.Body) != body {
			t.Fatalf("%d bytes came back, want %d", len(m.Body), len(body))
		}
		if err := m.Ack(false); err != nil {
			t.Fatal(err)
		}
	}
	returns := ch.NotifyReturn(make(chan amqp091.Return, 1))
	if err := ch.PublishWithContext(t.Context(), "", "nowhere-"+s.queue, true, false, amqp091.Publishing{Body: []byte("lost")}); err != nil {
		t.Fatal(err)
	}
	if r := <-returns; r.ReplyCode != 312 || string(r.Body) != "lost" {
		t.Errorf("return %+v", r)
	}
	s.closed()
}

func TestCloseRightAfterPublishing(t *testing.T) {
	s := newSetup(t)
	for i := range 20 {
		conn, ch := s.worker()
		if err := s.send(ch, fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
		if err := conn.Close(); err != nil {
			t.Fatalf("close: %v", err)
		}
	}
	if got := s.await(20); len(got) != 20 {
		t.Errorf("%d messages", len(got))
	}
	s.closed()
	if ids := s.gate.Abandoned(); len(ids) != 0 {
		t.Errorf("abandoned %d of them", len(ids))
	}
}

func TestBrokerLostMeansSettlement(t *testing.T) {
	s := newSetup(t)
	e, err := NewEffector(EffectorOptions{Upstream: brokerURL(t)})
	if err != nil {
		t.Fatal(err)
	}
	s.gate.Settle = func(a *fence.Accepted) leaseclient.Outcome {
		o, err := e.Settle(context.Background(), []leaseclient.Entry{fencetest.EntryOf(a)})
		if err != nil || len(o) != 1 {
			t.Errorf("settle: %v %v", o, err)
			return leaseclient.OutcomeUnknown
		}
		return o[0]
	}
	conn, ch := s.worker()
	gone := conn.NotifyClose(make(chan *amqp091.Error, 1))
	s.link.LoseAnswers(true)
	for i := range 5 {
		if err := s.send(ch, fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	err2 := <-gone
	if err2 == nil || err2.Code != 320 || !strings.Contains(err2.Reason, "upstream_unavailable") {
		t.Errorf("worker heard %v", err2)
	}
	s.link.LoseAnswers(false)
	eventually(t, "the connection is given up", func() bool { return s.server.Connections() == 0 })
	s.closed()
	// What was accepted before the connection broke arrives, in order; what was
	// not was never promised.
	var want []string
	for _, batch := range s.gate.Begun() {
		for _, cm := range batch {
			_, m, err := decodeEffect(cm.Effect)
			if err != nil {
				t.Fatal(err)
			}
			want = append(want, string(m.body))
		}
	}
	seen := map[string]bool{}
	var order []string
	for _, m := range s.await(len(want)) {
		if !seen[m.MessageId] {
			order = append(order, string(m.Body))
		}
		seen[m.MessageId] = true
	}
	if len(want) == 0 || !slices.Equal(order, want) {
		t.Errorf("order of first arrivals %v, accepted %v", order, want)
	}
}

func TestTheLogCarriesTheVirtualHost(t *testing.T) {
	s := newSetup(t)
	_, ch := s.worker()
	if err := s.send(ch, "x"); err != nil {
		t.Fatal(err)
	}
	s.await(1)
	vhost, m, err := decodeEffect(s.gate.Begun()[0][0].Effect)
	uri, uriErr := amqp091.ParseURI(brokerURL(t).String())
	if err != nil || uriErr != nil || vhost != uri.Vhost || string(m.body) != "x" {
		t.Errorf("%q %v %v", vhost, err, uriErr)
	}
	e, err := NewEffector(EffectorOptions{Upstream: brokerURL(t)})
	if err != nil {
		t.Fatal(err)
	}
	// A virtual host that is not there is no reason to deliver to another one.
	p := &publish{raw: []byte{0, 0}, body: []byte("astray")}
	p.RoutingKey = s.queue
	entry := leaseclient.Entry{Commit: leaseclient.Commit{ID: "c", Effect: encodeEffect("no-such-vhost", p)}, Token: 5, LeaseID: "l", LockKey: "k"}
	if out, err := e.Settle(t.Context(), []leaseclient.Entry{entry}); err != nil || !slices.Equal(out, []leaseclient.Outcome{leaseclient.OutcomeQuarantined}) {
		t.Errorf("%v %v", out, err)
	}
	if got := s.received(); len(got) != 0 {
		t.Errorf("%d messages went to another virtual host", len(got))
	}
}

func TestExchangeThatIsNotThere(t *testing.T) {
	s := newSetup(t)
	_, ch := s.worker()
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	if err := ch.PublishWithContext(t.Context(), "no-such-exchange", "k", false, false, amqp091.Publishing{Body: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	if e := <-closed; e == nil || e.Code != 404 {
		t.Fatalf("closed with %v", e)
	}
	s.closed()
	if o, _ := s.gate.Outcome(s.gate.Begun()[0][0].ID); o != leaseclient.OutcomeRefused || len(s.gate.Abandoned()) != 0 {
		t.Errorf("outcome %q, %d abandoned", o, len(s.gate.Abandoned()))
	}
}

func TestImmediateIsRefusedAsTheBrokerDoes(t *testing.T) {
	s := newSetup(t)
	conn, ch := s.worker()
	gone := conn.NotifyClose(make(chan *amqp091.Error, 1))
	if err := ch.PublishWithContext(t.Context(), "", s.queue, false, true, amqp091.Publishing{Body: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	if e := <-gone; e == nil || e.Code != 540 {
		t.Fatalf("closed with %v", e)
	}
	s.closed()
	if got := s.received(); len(got) != 0 {
		t.Errorf("%d messages are there", len(got))
	}
}

func TestLateMessagesAreNotSent(t *testing.T) {
	s := newSetup(t)
	s.gate.Bound = -time.Second
	conn, ch := s.worker()
	gone := conn.NotifyClose(make(chan *amqp091.Error, 1))
	if err := s.send(ch, "late"); err != nil {
		t.Fatal(err)
	}
	<-gone
	s.closed()
	if got := s.received(); len(got) != 0 || len(s.gate.Abandoned()) != 1 {
		t.Errorf("%d messages were sent, %d abandoned", len(got), len(s.gate.Abandoned()))
	}
}

func TestUnreachableBroker(t *testing.T) {
	s := newSetup(t)
	s.link.Down(true)
	up := brokerURL(t)
	via := *up
	via.Host = s.addr
	// The link accepts and cuts; nothing listens at the other address.
	if _, err := amqp091.Dial(via.String()); err == nil {
		t.Fatal("connected without a broker")
	}
	dead := *up
	dead.Host = "127.0.0.1:1"
	srv, err := New(Options{Upstream: &dead, Leases: s.leases, Gate: s.gate})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ctx, ln) })
	via.Host = ln.Addr().String()
	_, err = amqp091.Dial(via.String())
	cancel()
	wg.Wait()
	if err := srv.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	e, ok := errors.AsType[*amqp091.Error](err)
	if !ok || !strings.Contains(e.Reason, "upstream_unavailable") {
		t.Fatalf("worker heard %v", err)
	}
	s.link.Down(false)
	_, ch := s.worker()
	if err := s.send(ch, "alive"); err != nil {
		t.Fatal(err)
	}
	s.await(1)
}

func TestGarbage(t *testing.T) {
	s := newSetup(t)
	talk := func(in []byte) []byte {
		c, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.Write(in); err != nil {
			t.Fatal(err)
		}
		_ = c.(*net.TCPConn).CloseWrite()
		out, err := io.ReadAll(c)
		if err != nil {
			t.Fatalf("%q: %v", in, err)
		}
		return out
	}
	for _, in := range []string{"GET / HTTP/1.1\r\n\r\n", "AMQP\x03\x01\x00\x00", "AMQP\x00\x00\x09\x02", "xx"} {
		if got := talk([]byte(in)); string(got) != "AMQP\x00\x00\x09\x01" {
			t.Errorf("%q was answered %q", in, got)
		}
	}
	got := talk([]byte("AMQP\x00\x00\x09\x01\x07garbage"))
	if !bytes.Contains(got, []byte("FRAME_ERROR")) {
		t.Errorf("garbage was answered %q", got)
	}
	_, ch := s.worker()
	if err := s.send(ch, "alive"); err != nil {
		t.Fatal(err)
	}
	s.await(1)
	s.closed()
}

func TestHeartbeatsKeepAQuietConnection(t *testing.T) {
	s := newSetup(t)
	via := *brokerURL(t)
	via.Host = s.addr
	conn, err := amqp091.DialConfig(via.String(), amqp091.Config{Heartbeat: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	gone := conn.NotifyClose(make(chan *amqp091.Error, 1))
	select {
	case e := <-gone:
		t.Fatalf("a quiet connection was closed: %v", e)
	case <-time.After(5 * time.Second):
	}
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.send(ch, "alive"); err != nil {
		t.Fatal(err)
	}
	s.await(1)
	s.closed()
}

// rawClient logs in by hand, so that a test can send what no library would.
func (s *setup) rawClient() (net.Conn, *bufio.Reader) {
	s.t.Helper()
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	p := newPublisher(c)
	uri, _, err := address(brokerURL(s.t))
	if err != nil {
		s.t.Fatal(err)
	}
	if err := p.open(uri); err != nil {
		s.t.Fatal(err)
	}
	return c, p.r
}

// TestPipeliningDoesNotGetRoundTheFence sends in one write what clients send step
// by step.
func TestPipeliningDoesNotGetRoundTheFence(t *testing.T) {
	s := newSetup(t)
	message := func(ch uint16) []byte {
		p := &publish{raw: []byte{0, 0}, body: []byte("sneaked")}
		p.RoutingKey = s.queue
		return p.frames(ch, p.raw, initialFrame)
	}
	open := func(ch uint16) []byte { return wire.AppendMethod(nil, ch, wire.ChannelOpen, []byte{0}) }
	end := func(ch uint16) []byte { return wire.Close{Code: 200}.Append(nil, ch, wire.ChannelClose) }
	closeOK := func(ch uint16) []byte { return wire.AppendMethod(nil, ch, wire.ChannelCloseOK, nil) }
	s.lost.Store(true)
	for name, in := range map[string][][]byte{
		"open and publish":              {open(2), message(2)},
		"publish without a channel":     {message(7)},
		"close, open, publish":          {open(2), end(2), open(2), message(2)},
		"publish, close-ok, open again": {open(2), message(2), closeOK(2), open(2), message(2)},
		"many times over":               {open(2), end(2), open(2), end(2), open(2), message(2), closeOK(2), open(2), message(2), message(3)},
	} {
		c, r := s.rawClient()
		if _, err := c.Write(bytes.Join(in, nil)); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		for {
			f, err := wire.ReadFrame(r, initialFrame+wire.Overhead)
			if err != nil {
				t.Errorf("%s: the connection ended without a word: %v", name, err)
				break
			}
			if m := f.Method(); m == wire.ChannelClose || m == wire.ConnectionClose {
				break
			}
		}
		_ = c.Close()
	}
	s.stop()
	if got := s.received(); len(got) != 0 {
		t.Errorf("%d messages got round the fence", len(got))
	}
	s.closed()
}

func TestPolicyFindsTheLease(t *testing.T) {
	s := newSetup(t)
	p, err := policy.Parse([]byte(`
version: 1
defaults: {tenant_id: t, program_id: p, target_namespace: n, actor_name: a}
rabbit:
  rules:
    - {exchange: "", routing_key: "free.#", fence: off}
    - {exchange: "", routing_key: "`+s.queue+`", identity: {target_id: "{header.target}"}}
`), policy.ParseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.policy = p
	s.leases.Refs = []leaseclient.Ref{fencetest.Ref("x", 5), fencetest.Ref("y", 3)}
	_, ch := s.worker()
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	returns := ch.NotifyReturn(make(chan amqp091.Return, 8))
	send := func(h amqp091.Table) bool {
		return confirm(t, ch, func() (*amqp091.DeferredConfirmation, error) {
			return ch.PublishWithDeferredConfirmWithContext(t.Context(), "", s.queue, false, false, amqp091.Publishing{Headers: h})
		})
	}
	if !send(amqp091.Table{"target": "x"}) || !send(amqp091.Table{"target": "y"}) || !send(amqp091.Table{"target": "x", "x-fencerider-lease": "lease_x_5"}) {
		t.Error("refused")
	}
	for _, tc := range []struct {
		h    amqp091.Table
		want string
	}{
		{amqp091.Table{}, "policy_denied"},
		{amqp091.Table{"target": "z"}, "lease_lost"},
		{amqp091.Table{"target": "x", "x-fencerider-lease": "lease_y_3"}, "lock_mismatch"},
		{amqp091.Table{"target": "x", "CC": []any{"elsewhere"}}, "policy_denied"},
		{amqp091.Table{"target": "x", "BCC": "text"}, "policy_denied"},
	} {
		if send(tc.h) {
			t.Errorf("%v went through", tc.h)
			continue
		}
		if r := <-returns; !strings.Contains(r.ReplyText, tc.want) {
			t.Errorf("%v: %s", tc.h, r.ReplyText)
		}
	}
	tokens := []int64{}
	for _, m := range s.await(3) {
		n, _ := m.Headers[fence.HeaderToken].(int64)
		tokens = append(tokens, n)
	}
	if !slices.Equal(tokens, []int64{5, 3, 5}) {
		t.Errorf("tokens %v", tokens)
	}
	s.closed()
}

func TestTooLargeForTheLog(t *testing.T) {
	s := newSetup(t, func(o *Options) { o.MaxEffect = 1000; o.MaxMessage = 100_000 })
	conn, ch := s.worker()
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	returns := ch.NotifyReturn(make(chan amqp091.Return, 1))
	if confirm(t, ch, s.deferred(ch, strings.Repeat("x", 2000))) {
		t.Error("accepted")
	}
	if r := <-returns; !strings.Contains(r.ReplyText, "too_large") || len(r.Body) != 2000 {
		t.Errorf("%s", r.ReplyText)
	}
	gone := conn.NotifyClose(make(chan *amqp091.Error, 1))
	_, _ = s.deferred(ch, strings.Repeat("x", 200_000))()
	if e := <-gone; e == nil || e.Code != 501 {
		t.Errorf("over the limit of any message: %v", e)
	}
	s.closed()
}

func TestShutdownConfirmsWhatWasAccepted(t *testing.T) {
	s := newSetup(t)
	conn, ch := s.worker()
	gone := conn.NotifyClose(make(chan *amqp091.Error, 1))
	for i := range 50 {
		if err := s.send(ch, fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	s.await(50)
	s.stop()
	if e := <-gone; e == nil || e.Code != 320 || !strings.Contains(e.Reason, "shutting_down") {
		t.Errorf("worker heard %v", e)
	}
	s.closed()
	if len(s.gate.Abandoned()) != 0 {
		t.Error("abandoned at shutdown")
	}
}

func TestWorkerThatNeverReads(t *testing.T) {
	s := newSetup(t)
	_, ch := s.worker()
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	s.lost.Store(true)
	// Refusals carry the message back; nobody reads returns here until the end.
	body := strings.Repeat("x", 10_000)
	var last *amqp091.DeferredConfirmation
	for range 1000 {
		d, err := s.deferred(ch, body)()
		if err != nil {
			t.Fatal(err)
		}
		last = d
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if ok, err := last.WaitContext(ctx); err != nil || ok {
		t.Errorf("%v %v", ok, err)
	}
}

func TestSettleSetsAside(t *testing.T) {
	s := newSetup(t)
	e, err := NewEffector(EffectorOptions{Upstream: brokerURL(t)})
	if err != nil {
		t.Fatal(err)
	}
	entry := func(ex, rk, body string) leaseclient.Entry {
		p := &publish{raw: []byte{0, 0}, body: []byte(body)}
		p.Exchange, p.RoutingKey = ex, rk
		r := fencetest.Ref("x", 5)
		return leaseclient.Entry{
			Commit:  leaseclient.Commit{ID: leaseclient.NewID("commit"), Kind: leaseclient.KindPublish, Effect: encodeEffect("/", p)},
			LockKey: r.LockKey, LeaseID: r.LeaseID, Token: 5, ExecutionID: "e", TraceID: "t", ExpiresAt: 1,
		}
	}
	bad := entry("", s.queue, "x")
	bad.Effect = []byte("?")
	in := []leaseclient.Entry{entry("", s.queue, "a"), entry("no-such-exchange", "k", "b"), entry("", "no-such-"+s.queue, "c"), bad, entry("", s.queue, "d")}
	out, err := e.Settle(t.Context(), in)
	want := []leaseclient.Outcome{leaseclient.OutcomeConfirmed, leaseclient.OutcomeQuarantined, leaseclient.OutcomeQuarantined, leaseclient.OutcomeQuarantined, leaseclient.OutcomeConfirmed}
	if err != nil || !slices.Equal(out, want) {
		t.Fatalf("%v %v", out, err)
	}
	got := s.await(2)
	if string(got[0].Body) != "a" || string(got[1].Body) != "d" || got[0].Headers[fence.HeaderCommitID] != in[0].ID || got[0].MessageId != in[0].ID {
		t.Errorf("%+v", got)
	}
}

func FuzzDecodeEffect(f *testing.F) {
	p := &publish{raw: []byte{0, 0}, body: []byte("b")}
	p.Exchange = "e"
	f.Add(encodeEffect("/", p))
	f.Fuzz(func(t *testing.T, b []byte) {
		vhost, p, err := decodeEffect(b)
		if err == nil && !bytes.Equal(encodeEffect(vhost, p), b) {
			t.Fatalf("%q", b)
		}
	})
}

func BenchmarkPublish(b *testing.B) {
	s := newSetup(b)
	run := func(b *testing.B, ch *amqp091.Channel) {
		if err := ch.Confirm(false); err != nil {
			b.Fatal(err)
		}
		b.ReportAllocs()
		var open []*amqp091.DeferredConfirmation
		for b.Loop() {
			d, err := s.deferred(ch, strings.Repeat("x", 1024))()
			if err != nil {
				b.Fatal(err)
			}
			if open = append(open, d); len(open) == 100 {
				for _, d := range open {
					d.Wait()
				}
				open = open[:0]
			}
		}
	}
	b.Run("direct", func(b *testing.B) { run(b, s.direct) })
	b.Run("proxied", func(b *testing.B) {
		_, ch := s.worker()
		run(b, ch)
	})
	_, _ = s.direct.QueuePurge(s.queue, false)
}
