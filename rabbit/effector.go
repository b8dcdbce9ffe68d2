package rabbit

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"go.uber.org/zap"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// EffectorOptions configure an [Effector].
type EffectorOptions struct {
	// Upstream is the broker's URL; its credentials are those of settlement.
	Upstream *url.URL
	Logger   *zap.Logger
}

// Effector publishes accepted messages that their own sidecar did not see
// confirmed, with exactly the bytes that it would have sent. It speaks the wire
// itself: a client library would decode and encode the headers. It makes a
// connection for each settlement and is safe for concurrent use.
type Effector struct {
	opts EffectorOptions
	uri  amqp091.URI
	tls  *tls.Config
}

var _ fence.Effector = (*Effector)(nil)

// NewEffector returns an effector.
func NewEffector(o EffectorOptions) (*Effector, error) {
	uri, tc, err := address(o.Upstream)
	if err != nil {
		return nil, err
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	return &Effector{opts: o, uri: uri, tls: tc}, nil
}

// settleStep bounds one exchange with the broker.
const settleStep = 10 * time.Second

// publisher is a connection of the effector's own with one channel in confirm
// mode.
type publisher struct {
	conn net.Conn
	r    *bufio.Reader
	// limit is the largest frame that it wishes for, frameMax what was agreed on.
	limit    int
	frameMax int
	tag      uint64
}

// newPublisher speaks over a connection.
func newPublisher(nc net.Conn) *publisher {
	return &publisher{conn: nc, r: bufio.NewReaderSize(nc, 64<<10), limit: initialFrame, frameMax: initialFrame}
}

// refusedError is a broker that closes instead of answering.
type refusedError struct{ close wire.Close }

func (e *refusedError) Error() string { return fmt.Sprintf("the broker refused: %d", e.close.Code) }

// gone reports whether the virtual host of a message is not there any more. The
// code alone does not tell that from a user who may not enter it.
func (e *refusedError) gone() bool {
	return e.close.Code == notAllowed && strings.HasSuffix(e.close.Text, "not found")
}

// Settle implements [fence.Effector]. Messages go one by one: the next is sent
// when the broker has confirmed the one before, so that order is kept and a
// failure belongs to one message.
func (e *Effector) Settle(ctx context.Context, entries []leaseclient.Entry) ([]leaseclient.Outcome, error) {
	var out []leaseclient.Outcome
	var p *publisher
	open := ""
	sound := true
	defer func() {
		switch {
		case p == nil:
		case sound:
			_ = p.conn.Close()
		default:
			// What the broker has not taken yet must not arrive later.
			reset(p.conn)
		}
	}()
	for _, entry := range entries {
		if isAck(entry.Effect) {
			// Only the channel that the message was delivered on can do it. If it
			// did not arrive, the broker gives the message out again.
			out = append(out, leaseclient.OutcomeCancelled)
			continue
		}
		vhost, m, err := decodeEffect(entry.Effect)
		if err != nil {
			e.opts.Logger.Error("a commit in the log cannot be read", zap.String("commit_id", entry.ID), zap.Error(err))
			out = append(out, leaseclient.OutcomeQuarantined)
			continue
		}
		if p != nil && open != vhost {
			_ = p.conn.Close()
			p = nil
		}
		if p == nil {
			p, err = e.connect(ctx, vhost)
			if refused, ok := errors.AsType[*refusedError](err); ok && refused.gone() {
				e.opts.Logger.Warn("set a message aside, its virtual host is gone", zap.String("commit_id", entry.ID))
				out = append(out, leaseclient.OutcomeQuarantined)
				continue
			}
			if err != nil {
				return out, fmt.Errorf("settle messages: %w", err)
			}
			open = vhost
		}
		if fence.SettleLate(ctx) {
			return out, fence.ErrSettleLate
		}
		o, err := p.publish(ctx, m, m.stamped(fence.StampOf(entry)))
		if err != nil {
			sound = false
			return out, fmt.Errorf("settle messages: %w", err)
		}
		if o == leaseclient.OutcomeQuarantined {
			e.opts.Logger.Warn("set a message aside that cannot be delivered", zap.String("commit_id", entry.ID))
		}
		out = append(out, o)
	}
	return out, nil
}

// connect logs in to the virtual host of a message and opens a channel in confirm
// mode.
func (e *Effector) connect(ctx context.Context, vhost string) (*publisher, error) {
	nc, err := dial(ctx, hostPort(e.uri), e.tls)
	if err != nil {
		return nil, err
	}
	p := newPublisher(nc)
	uri := e.uri
	uri.Vhost = vhost
	if err := p.open(uri); err != nil {
		_ = nc.Close()
		return nil, err
	}
	return p, nil
}

// open is the client's side of the handshake.
func (p *publisher) open(uri amqp091.URI) error {
	_ = p.conn.SetDeadline(time.Now().Add(settleStep))
	if _, err := p.conn.Write(wire.ProtocolHeader); err != nil {
		return err
	}
	if _, err := p.expect(wire.ConnectionStart); err != nil {
		return err
	}
	// connection.start-ok: no properties, PLAIN, the credentials, a locale.
	login := []byte{0, 0, 0, 0}
	login = wire.AppendShort(login, "PLAIN")
	secret := "\x00" + uri.Username + "\x00" + uri.Password
	login = append(login, byte(len(secret)>>24), byte(len(secret)>>16), byte(len(secret)>>8), byte(len(secret)))
	login = append(login, secret...)
	login = wire.AppendShort(login, "en_US")
	if _, err := p.conn.Write(wire.AppendMethod(nil, 0, wire.ConnectionStartOK, login)); err != nil {
		return err
	}
	f, err := p.expect(wire.ConnectionTune)
	if err != nil {
		return err
	}
	tune, err := wire.ParseTune(f.Payload())
	if err != nil {
		return err
	}
	tune.Heartbeat = 0
	if tune.FrameMax == 0 || int64(tune.FrameMax) > int64(p.limit) {
		tune.FrameMax = uint32(p.limit)
	}
	p.frameMax = int(tune.FrameMax)
	out := tune.Append(nil, wire.ConnectionTuneOK)
	out = wire.AppendMethod(out, 0, wire.ConnectionOpen, append(wire.AppendShort(nil, uri.Vhost), 0, 0))
	if _, err := p.conn.Write(out); err != nil {
		return err
	}
	if _, err := p.expect(wire.ConnectionOpenOK); err != nil {
		return err
	}
	return p.openChannel()
}

// openChannel opens channel 1 in confirm mode.
func (p *publisher) openChannel() error {
	p.tag = 0
	out := wire.AppendMethod(nil, 1, wire.ChannelOpen, []byte{0})
	out = wire.AppendMethod(out, 1, wire.ConfirmSelect, []byte{0})
	if _, err := p.conn.Write(out); err != nil {
		return err
	}
	if _, err := p.expect(wire.ChannelOpenOK); err != nil {
		return err
	}
	_, err := p.expect(wire.ConfirmSelectOK)
	return err
}

// expect reads the next method, which must be the given one.
func (p *publisher) expect(m wire.Method) (wire.Frame, error) {
	for {
		f, err := wire.ReadFrame(p.r, p.frameMax+wire.Overhead)
		switch {
		case err != nil:
			return nil, err
		case f.Type() == wire.FrameHeartbeat:
			continue
		case f.Method() == m:
			return f, nil
		case f.Method() == wire.ConnectionClose, f.Method() == wire.ChannelClose:
			c, err := wire.ParseClose(f.Payload())
			if err != nil {
				return nil, err
			}
			return nil, &refusedError{c}
		default:
			return nil, errors.New("the broker answered with something unexpected")
		}
	}
}

// publish sends one message and waits for the broker's word on it.
func (p *publisher) publish(ctx context.Context, m *publish, props []byte) (leaseclient.Outcome, error) {
	deadline := time.Now().Add(settleStep)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = p.conn.SetDeadline(deadline)
	msg := *m
	// What cannot be routed is told, so that it is set aside and not dropped.
	msg.Mandatory, msg.Immediate = true, false
	if len(props)+12+wire.Overhead > p.frameMax {
		return leaseclient.OutcomeQuarantined, nil
	}
	if _, err := p.conn.Write(msg.frames(1, props, p.frameMax)); err != nil {
		return "", err
	}
	p.tag++
	returned := false
	for {
		f, err := wire.ReadFrame(p.r, p.frameMax+wire.Overhead)
		if err != nil {
			return "", err
		}
		switch f.Method() {
		case wire.BasicReturn:
			returned = true
		case wire.BasicAck:
			if returned {
				return leaseclient.OutcomeQuarantined, nil
			}
			return leaseclient.OutcomeConfirmed, nil
		case wire.BasicNack:
			return "", errors.New("the broker did not take the message")
		case wire.ChannelClose:
			// The exchange is not there, or the user may not write to it.
			if _, err := p.conn.Write(wire.AppendMethod(nil, 1, wire.ChannelCloseOK, nil)); err != nil {
				return "", err
			}
			return leaseclient.OutcomeQuarantined, p.openChannel()
		case wire.ConnectionClose:
			return "", errors.New("the broker closed the connection")
		}
	}
}
