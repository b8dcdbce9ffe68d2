package wire

import "encoding/binary"

// Method is a class and a method, as on the wire.
type Method uint32

// The methods that the sidecar acts on. All others are passed on as they are.
const (
	ConnectionStart    Method = 10<<16 | 10
	ConnectionStartOK  Method = 10<<16 | 11
	ConnectionSecure   Method = 10<<16 | 20
	ConnectionSecureOK Method = 10<<16 | 21
	ConnectionTune     Method = 10<<16 | 30
	ConnectionTuneOK   Method = 10<<16 | 31
	ConnectionOpen     Method = 10<<16 | 40
	ConnectionOpenOK   Method = 10<<16 | 41
	ConnectionClose    Method = 10<<16 | 50
	ConnectionCloseOK  Method = 10<<16 | 51
	ChannelOpen        Method = 20<<16 | 10
	ChannelOpenOK      Method = 20<<16 | 11
	ChannelClose       Method = 20<<16 | 40
	ChannelCloseOK     Method = 20<<16 | 41
	QueueDeclare       Method = 50<<16 | 10
	QueueDeclareOK     Method = 50<<16 | 11
	BasicConsume       Method = 60<<16 | 20
	BasicConsumeOK     Method = 60<<16 | 21
	BasicCancel        Method = 60<<16 | 30
	BasicCancelOK      Method = 60<<16 | 31
	BasicPublish       Method = 60<<16 | 40
	BasicReturn        Method = 60<<16 | 50
	BasicDeliver       Method = 60<<16 | 60
	BasicGetOK         Method = 60<<16 | 71
	BasicGet           Method = 60<<16 | 70
	BasicGetEmpty      Method = 60<<16 | 72
	BasicAck           Method = 60<<16 | 80
	BasicReject        Method = 60<<16 | 90
	BasicRecoverAsync  Method = 60<<16 | 100
	BasicRecover       Method = 60<<16 | 110
	BasicNack          Method = 60<<16 | 120
	ConfirmSelect      Method = 85<<16 | 10
	ConfirmSelectOK    Method = 85<<16 | 11
	TxSelect           Method = 90<<16 | 10
	TxSelectOK         Method = 90<<16 | 11
	TxCommit           Method = 90<<16 | 20
	TxCommitOK         Method = 90<<16 | 21
	TxRollback         Method = 90<<16 | 30
	TxRollbackOK       Method = 90<<16 | 31
)

// OfConnection reports whether a method belongs to the connection, and with that
// to channel 0.
func (m Method) OfConnection() bool { return m>>16 == 10 }

// HasContent reports whether a header and a body follow a method.
func (m Method) HasContent() bool {
	return m == BasicPublish || m == BasicReturn || m == BasicDeliver || m == BasicGetOK
}

// reader takes arguments apart. The first failure sticks.
type reader struct {
	b   []byte
	bad bool
}

// take returns the next n bytes.
func (r *reader) take(n int) []byte {
	if r.bad || n < 0 || len(r.b) < n {
		r.bad = true
		return make([]byte, max(0, min(n, 8)))
	}
	v := r.b[:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) u8() byte    { return r.take(1)[0] }
func (r *reader) u16() uint16 { return binary.BigEndian.Uint16(r.take(2)) }
func (r *reader) u32() uint32 { return binary.BigEndian.Uint32(r.take(4)) }
func (r *reader) u64() uint64 { return binary.BigEndian.Uint64(r.take(8)) }

// short reads a short string.
func (r *reader) short() string {
	n := int(r.u8())
	if r.bad {
		return ""
	}
	b := r.take(n)
	if r.bad {
		return ""
	}
	return string(b)
}

// long reads a long string.
func (r *reader) long() []byte {
	n := r.u32()
	if r.bad || uint64(n) > uint64(len(r.b)) {
		r.bad = true
		return nil
	}
	return r.take(int(n))
}

// done returns the error that stuck.
func (r *reader) done(what string) error {
	if r.bad {
		return syntax("%s is too short", what)
	}
	return nil
}

// AppendShort writes a short string, cut to what fits.
func AppendShort(dst []byte, s string) []byte {
	s = s[:min(len(s), 255)]
	dst = append(dst, byte(len(s)))
	return append(dst, s...)
}

// method starts the payload of a method frame.
func method(m Method) []byte { return binary.BigEndian.AppendUint32(nil, uint32(m)) }

// AppendMethod writes a method frame with its arguments.
func AppendMethod(dst []byte, channel uint16, m Method, args []byte) []byte {
	return AppendFrame(dst, FrameMethod, channel, method(m), args)
}

// Publish is basic.publish.
type Publish struct {
	Exchange, RoutingKey string
	Mandatory, Immediate bool
}

// ParsePublish reads the payload of basic.publish.
func ParsePublish(payload []byte) (Publish, error) {
	r := &reader{b: payload}
	r.u32()
	r.u16()
	p := Publish{Exchange: r.short(), RoutingKey: r.short()}
	bits := r.u8()
	p.Mandatory, p.Immediate = bits&1 != 0, bits&2 != 0
	if err := r.done("basic.publish"); err != nil {
		return Publish{}, err
	}
	if len(r.b) != 0 {
		return Publish{}, syntax("basic.publish is too long")
	}
	return p, nil
}

// Append writes basic.publish.
func (p Publish) Append(dst []byte, channel uint16) []byte {
	args := AppendShort([]byte{0, 0}, p.Exchange)
	args = AppendShort(args, p.RoutingKey)
	return AppendMethod(dst, channel, BasicPublish, append(args, p.flags()))
}

// flags packs the two bits.
func (p Publish) flags() byte {
	var b byte
	if p.Mandatory {
		b |= 1
	}
	if p.Immediate {
		b |= 2
	}
	return b
}

// Close is connection.close or channel.close.
type Close struct {
	Code   uint16
	Text   string
	Method Method
}

// ParseClose reads the payload of either.
func ParseClose(payload []byte) (Close, error) {
	r := &reader{b: payload}
	r.u32()
	c := Close{Code: r.u16(), Text: r.short(), Method: Method(r.u32())}
	return c, r.done("close")
}

// Append writes one of the two.
func (c Close) Append(dst []byte, channel uint16, m Method) []byte {
	args := binary.BigEndian.AppendUint16(nil, c.Code)
	args = AppendShort(args, c.Text)
	args = binary.BigEndian.AppendUint32(args, uint32(c.Method))
	return AppendMethod(dst, channel, m, args)
}

// Return is basic.return.
type Return struct {
	Code                 uint16
	Text                 string
	Exchange, RoutingKey string
}

// Append writes basic.return; its content follows.
func (t Return) Append(dst []byte, channel uint16) []byte {
	args := binary.BigEndian.AppendUint16(nil, t.Code)
	args = AppendShort(args, t.Text)
	args = AppendShort(args, t.Exchange)
	args = AppendShort(args, t.RoutingKey)
	return AppendMethod(dst, channel, BasicReturn, args)
}

// ParseAck reads basic.ack or basic.nack: a tag and whether it means all up to
// it.
func ParseAck(payload []byte) (tag uint64, multiple bool, err error) {
	r := &reader{b: payload}
	r.u32()
	tag = r.u64()
	multiple = r.u8()&1 != 0
	return tag, multiple, r.done("basic.ack")
}

// AppendAck writes a single basic.ack.
func AppendAck(dst []byte, channel uint16, tag uint64) []byte {
	return AppendMethod(dst, channel, BasicAck, append(binary.BigEndian.AppendUint64(nil, tag), 0))
}

// AppendNack writes a single basic.nack of a publish.
func AppendNack(dst []byte, channel uint16, tag uint64) []byte {
	return AppendMethod(dst, channel, BasicNack, append(binary.BigEndian.AppendUint64(nil, tag), 0))
}

// NoWait reads the single bit of confirm.select.
func NoWait(payload []byte) bool { return len(payload) >= 5 && payload[4]&1 != 0 }

// ParseOpen reads the virtual host out of connection.open.
func ParseOpen(payload []byte) (string, error) {
	r := &reader{b: payload}
	r.u32()
	vhost := r.short()
	return vhost, r.done("connection.open")
}

// Tune is connection.tune or connection.tune-ok.
type Tune struct {
	ChannelMax uint16
	FrameMax   uint32
	Heartbeat  uint16
}

// ParseTune reads the payload of either.
func ParseTune(payload []byte) (Tune, error) {
	r := &reader{b: payload}
	r.u32()
	t := Tune{ChannelMax: r.u16(), FrameMax: r.u32(), Heartbeat: r.u16()}
	return t, r.done("connection.tune")
}

// Append writes one of the two.
func (t Tune) Append(dst []byte, m Method) []byte {
	args := binary.BigEndian.AppendUint16(nil, t.ChannelMax)
	args = binary.BigEndian.AppendUint32(args, t.FrameMax)
	args = binary.BigEndian.AppendUint16(args, t.Heartbeat)
	return AppendMethod(dst, 0, m, args)
}
