package rabbit

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// errProtocol is a client that speaks something else.
var errProtocol = errors.New("client does not speak AMQP 0-9-1")

// handshake answers the protocol header itself, so that no other protocol ever
// reaches the broker through this port, and relays the rest: the login is the
// worker's own.
func (c *conn) handshake() error {
	_ = c.client.SetDeadline(time.Now().Add(handshakeTime))
	header := make([]byte, 8)
	if n, err := io.ReadFull(c.cr, header); err != nil && (n == 0 || !ended(err)) {
		return fmt.Errorf("read protocol header: %w", err)
	}
	if !wire.IsProtocolHeader(header) {
		_, _ = c.client.Write(wire.ProtocolHeader)
		c.lastWords()
		return errProtocol
	}
	ctx, cancel := context.WithTimeout(c.ctx, handshakeTime)
	defer cancel()
	up, err := dial(ctx, c.s.addr, c.s.tls)
	if err != nil {
		c.unreachable()
		return fmt.Errorf("reach the broker: %w", err)
	}
	c.mu.Lock()
	c.up = up
	c.mu.Unlock()
	if t, ok := up.(*net.TCPConn); ok {
		_ = t.SetNoDelay(true)
	}
	c.ur = bufio.NewReaderSize(up, 64<<10)
	_ = up.SetDeadline(time.Now().Add(handshakeTime))
	if _, err := up.Write(wire.ProtocolHeader); err != nil {
		c.unreachable()
		return fmt.Errorf("greet the broker: %w", err)
	}
	return c.relayHandshake()
}

// answers are what a worker may say to each of the broker's questions, in order.
// Nothing else of the worker's goes to the broker before the connection is open:
// no message may pass unseen.
var answers = map[wire.Method][]wire.Method{
	wire.ConnectionStart:  {wire.ConnectionStartOK},
	wire.ConnectionSecure: {wire.ConnectionSecureOK},
	wire.ConnectionTune:   {wire.ConnectionTuneOK, wire.ConnectionOpen},
}

// errLeft is a worker that ended its connection while it was being opened.
var errLeft = errors.New("worker closed the connection during the handshake")

// relayHandshake passes the broker's questions and the worker's answers on until
// the connection is open.
func (c *conn) relayHandshake() error {
	for {
		f, err := wire.ReadFrame(c.ur, initialFrame)
		if err != nil {
			return fmt.Errorf("read the broker's handshake: %w", err)
		}
		if f.Type() == wire.FrameHeartbeat {
			continue
		}
		told := f
		if f.Method() == wire.ConnectionTune {
			if told, err = offered(f); err != nil {
				return fmt.Errorf("read the broker's handshake: %w", err)
			}
		}
		if _, err := c.client.Write(told); err != nil {
			return fmt.Errorf("answer the worker's handshake: %w", err)
		}
		switch f.Method() {
		case wire.ConnectionOpenOK:
			return nil
		case wire.ConnectionClose:
			return c.relayRefusal()
		}
		want, ok := answers[f.Method()]
		if !ok {
			return errors.New("the broker said something unexpected during the handshake")
		}
		for _, m := range want {
			g, err := c.answer(m)
			if err != nil {
				return err
			}
			if g, err = c.note(f, g); err != nil {
				return err
			}
			if _, err := c.up.Write(g); err != nil {
				return fmt.Errorf("pass the handshake on: %w", err)
			}
		}
	}
}

// note keeps what the worker chose in its handshake, and returns what the broker
// hears of it.
func (c *conn) note(question, answer wire.Frame) (wire.Frame, error) {
	var err error
	switch answer.Method() {
	case wire.ConnectionTuneOK:
		return c.tuned(question, answer)
	case wire.ConnectionOpen:
		c.vhost, err = wire.ParseOpen(answer.Payload())
	}
	return answer, err
}

// answer reads the next frame of the worker's handshake, which must be the given
// one or the end; everything else is told to be wrong.
func (c *conn) answer(want wire.Method) (wire.Frame, error) {
	for {
		g, err := wire.ReadFrame(c.cr, initialFrame)
		switch {
		case err != nil:
			if pe := protocolOf(err); pe != nil {
				c.turnAway(pe)
			}
			return nil, fmt.Errorf("read the worker's handshake: %w", err)
		case g.Type() == wire.FrameHeartbeat:
			continue
		case g.Channel() == 0 && g.Method() == want:
			return g, nil
		case g.Channel() == 0 && g.Method() == wire.ConnectionClose:
			_, _ = c.client.Write(wire.AppendMethod(nil, 0, wire.ConnectionCloseOK, nil))
			c.lastWords()
			return nil, errLeft
		}
		pe := &protocolError{503, "COMMAND_INVALID - the connection is not open yet"}
		c.turnAway(pe)
		return nil, fmt.Errorf("read the worker's handshake: %w", pe)
	}
}

// turnAway ends a handshake with a reason.
func (c *conn) turnAway(pe *protocolError) {
	_, _ = c.client.Write(wire.Close{Code: pe.code, Text: pe.text}.Append(nil, 0, wire.ConnectionClose))
	c.lastWords()
}

// stampRoom is how much larger frames towards the broker may be than the
// worker's: a stamp with identifiers of full length and a message id fit into it.
const stampRoom = 2 << 10

// offered is the broker's tune with room for the stamp kept back.
func offered(tune wire.Frame) (wire.Frame, error) {
	t, err := wire.ParseTune(tune.Payload())
	if err != nil {
		return nil, err
	}
	if t.FrameMax >= minOffer+stampRoom {
		t.FrameMax -= stampRoom
	}
	return t.Append(nil, wire.ConnectionTune), nil
}

// minOffer is the least that a worker is offered: brokers and clients of later
// versions do not go below it. A broker that has less to offer leaves no room for
// the stamp.
const minOffer = 8192

// maxFrame bounds frames where neither side has a limit.
const maxFrame = 16 << 20

// tuned notes what the worker chose and gives the broker's frames the room back.
func (c *conn) tuned(tune, tuneOK wire.Frame) (wire.Frame, error) {
	limit, err := wire.ParseTune(tune.Payload())
	if err != nil {
		return nil, err
	}
	chosen, err := wire.ParseTune(tuneOK.Payload())
	if err != nil {
		return nil, err
	}
	size, up := chosen.FrameMax, chosen.FrameMax
	switch {
	case size == 0 && limit.FrameMax == 0:
		size, up = maxFrame, maxFrame
	case size == 0:
		// Not an answer to an offer with a limit; the broker says so.
		size = limit.FrameMax
	case size <= maxFrame && (limit.FrameMax == 0 || size+stampRoom <= limit.FrameMax):
		chosen.FrameMax += stampRoom
		up = chosen.FrameMax
	}
	c.frameMax = max(min(int(size), maxFrame), wire.MinFrameMax)
	c.upFrameMax = max(min(int(up), maxFrame), c.frameMax)
	c.heartbeat = time.Duration(chosen.Heartbeat) * time.Second
	return chosen.Append(nil, wire.ConnectionTuneOK), nil
}

// relayRefusal passes a worker's answer to a broker that turned it away.
func (c *conn) relayRefusal() error {
	if g, err := wire.ReadFrame(c.cr, initialFrame); err == nil && g.Method() == wire.ConnectionCloseOK {
		_, _ = c.up.Write(g)
	}
	c.lastWords()
	return errors.New("the broker refused the login")
}

// unreachable tells a worker that there is no broker, in the only way that
// clients understand before they have logged in: the first steps of the
// handshake, and then a close with a reason.
func (c *conn) unreachable() {
	start := []byte{0, 9, 0, 0, 0, 0}
	for _, s := range []string{"PLAIN AMQPLAIN", "en_US"} {
		start = append(start, 0, 0, 0, byte(len(s)))
		start = append(start, s...)
	}
	if _, err := c.client.Write(wire.AppendMethod(nil, 0, wire.ConnectionStart, start)); err != nil {
		return
	}
	if _, err := wire.ReadFrame(c.cr, initialFrame); err != nil {
		return
	}
	text := "CONNECTION_FORCED - " + string(leaseclient.CodeUpstreamUnavailable) + ": the broker cannot be reached; nothing was sent"
	_, _ = c.client.Write(wire.Close{Code: connectionForced, Text: text}.Append(nil, 0, wire.ConnectionClose))
	c.lastWords()
}
