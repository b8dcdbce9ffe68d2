package rabbit

import (
	"bytes"
	"net"
	"strings"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// dialSize connects a worker that wishes for a frame size.
func (s *setup) dialSize(size int) (*amqp091.Connection, *amqp091.Channel) {
	s.t.Helper()
	via := *brokerURL(s.t)
	via.Host = s.addr
	conn, err := amqp091.DialConfig(via.String(), amqp091.Config{FrameSize: size})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		s.t.Fatal(err)
	}
	return conn, ch
}

func TestStampHasRoomInAFullHeader(t *testing.T) {
	for name, size := range map[string]int{"least": 4096, "whatever the broker has": 0} {
		t.Run(name, func(t *testing.T) {
			s := newSetup(t)
			conn, ch := s.dialSize(size)
			if err := ch.Confirm(false); err != nil {
				t.Fatal(err)
			}
			// A header that fills the worker's own frame to the last byte: frame 8,
			// class and size 12, flags 2, table 4, key 2, type and length 5.
			fill := conn.Config.FrameSize - 8 - 12 - 2 - 4 - 2 - 5
			body := strings.Repeat("b", 3*conn.Config.FrameSize)
			ok := confirm(t, ch, func() (*amqp091.DeferredConfirmation, error) {
				return ch.PublishWithDeferredConfirmWithContext(t.Context(), "", s.queue, false, false, amqp091.Publishing{
					Headers: amqp091.Table{"k": strings.Repeat("x", fill)}, Body: []byte(body),
				})
			})
			if !ok {
				t.Fatal("refused")
			}
			if got := s.await(1)[0]; len(got.Headers["k"].(string)) != fill || string(got.Body) != body {
				t.Error("the message did not arrive whole")
			}
			s.closed()
		})
	}
}

func TestBodiesAreCutToTheWorkersFrames(t *testing.T) {
	s := newSetup(t)
	body := bytes.Repeat([]byte("0123456789"), 5_000)
	if err := s.direct.PublishWithContext(t.Context(), "", s.queue, false, false, amqp091.Publishing{Body: body}); err != nil {
		t.Fatal(err)
	}
	// A client by hand, since libraries do not mind frames that are too large.
	nc, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	p := newPublisher(nc)
	p.limit = wire.MinFrameMax
	uri, _, err := address(brokerURL(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.open(uri); err != nil {
		t.Fatal(err)
	}
	get := append(wire.AppendShort([]byte{0, 0}, s.queue), 1)
	if _, err := nc.Write(wire.AppendMethod(nil, 1, wire.BasicGet, get)); err != nil {
		t.Fatal(err)
	}
	var got []byte
	for len(got) < len(body) {
		f, err := wire.ReadFrame(p.r, wire.MinFrameMax)
		if err != nil {
			t.Fatalf("after %d bytes: %v", len(got), err)
		}
		if f.Type() == wire.FrameBody {
			got = append(got, f.Payload()...)
		}
	}
	if !bytes.Equal(got, body) {
		t.Error("the body came out different")
	}
}

func TestStampThatDoesNotFitRefusesTheMessageOnly(t *testing.T) {
	// A broker whose frames are as small as they may be leaves no room.
	s := newScripted(t, script{frameMax: wire.MinFrameMax})
	w, b := s.starts()
	w.put(openFrame(1), selectFrame(1))
	w.until(wire.ConfirmSelectOK)
	p := &publish{body: []byte("m")}
	p.RoutingKey = "q"
	props, err := wire.ParseProperties([]byte{0, 0})
	if err != nil {
		t.Fatal(err)
	}
	p.raw = props.Rewrite(func(string) bool { return false }, wire.AppendTextField(nil, "k", strings.Repeat("x", 4000)), "")
	w.put(p.frames(1, p.raw, wire.MinFrameMax))
	ret := w.until(wire.BasicReturn)
	if !bytes.Contains(ret, []byte(leaseclient.CodeTooLarge)) {
		t.Errorf("returned with %q", ret)
	}
	w.until(wire.BasicNack)
	if o := s.outcome(s.begun(1)); o != leaseclient.OutcomeCancelled {
		t.Errorf("ended as %s", o)
	}
	w.put(publishFrames(1, "", "q", []byte("small")))
	b.until(wire.BasicPublish)
	b.put(wire.AppendAck(nil, 1, 1))
	w.until(wire.BasicAck)
}

func TestWorkersFrameSize(t *testing.T) {
	for _, tc := range []struct {
		name             string
		broker, offer    uint32
		worker, toBroker uint32
		frames, framesUp int
	}{
		{"as offered", 131072, 129024, 129024, 131072, 129024, 131072},
		{"smaller", 131072, 129024, 4096, 6144, 4096, 6144},
		{"larger than offered", 131072, 129024, 131072, 131072, 131072, 131072},
		{"no limit where there is one", 131072, 129024, 0, 0, 131072, 131072},
		{"no limit at all", 0, 0, 0, 0, maxFrame, maxFrame},
		{"beyond every limit", 0, 0, 1<<32 - 1, 1<<32 - 1, maxFrame, maxFrame},
		{"least of the broker", 4096, 4096, 4096, 4096, 4096, 4096},
		{"least of later brokers", 8192, 8192, 8192, 8192, 8192, 8192},
		{"just enough", 10240, 8192, 8192, 10240, 8192, 10240},
	} {
		c := &conn{}
		tune := wire.Frame(wire.Tune{ChannelMax: 7, FrameMax: tc.broker, Heartbeat: 3}.Append(nil, wire.ConnectionTune))
		told, err := offered(tune)
		if err != nil {
			t.Fatal(err)
		}
		if o, err := wire.ParseTune(told.Payload()); err != nil || o != (wire.Tune{ChannelMax: 7, FrameMax: tc.offer, Heartbeat: 3}) {
			t.Errorf("%s: offered %+v %v", tc.name, o, err)
		}
		f, err := c.tuned(tune, wire.Tune{ChannelMax: 7, FrameMax: tc.worker, Heartbeat: 3}.Append(nil, wire.ConnectionTuneOK))
		if err != nil {
			t.Fatal(err)
		}
		if o, err := wire.ParseTune(f.Payload()); err != nil || o.FrameMax != tc.toBroker || c.frameMax != tc.frames || c.upFrameMax != tc.framesUp {
			t.Errorf("%s: told %d, frames of %d and %d", tc.name, o.FrameMax, c.frameMax, c.upFrameMax)
		}
	}
}
