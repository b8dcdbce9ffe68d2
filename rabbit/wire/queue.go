package wire

import "encoding/binary"

// QueueDeclareArgs are the arguments of queue.declare that say which queue it is.
type QueueDeclareArgs struct {
	Queue  string
	NoWait bool
}

// ParseQueueDeclare reads the payload of queue.declare, up to its table.
func ParseQueueDeclare(payload []byte) (QueueDeclareArgs, error) {
	r := &reader{b: payload}
	r.u32()
	r.u16()
	q := QueueDeclareArgs{Queue: r.short()}
	q.NoWait = r.u8()&16 != 0
	return q, r.done("queue.declare")
}

// Consume are the arguments of basic.consume, without its table.
type Consume struct {
	Queue, Tag    string
	NoAck, NoWait bool
}

// ParseConsume reads the payload of basic.consume.
func ParseConsume(payload []byte) (Consume, error) {
	r := &reader{b: payload}
	r.u32()
	r.u16()
	c := Consume{Queue: r.short(), Tag: r.short()}
	bits := r.u8()
	c.NoAck, c.NoWait = bits&2 != 0, bits&8 != 0
	return c, r.done("basic.consume")
}

// Get are the arguments of basic.get.
type Get struct {
	Queue string
	NoAck bool
}

// ParseGet reads the payload of basic.get.
func ParseGet(payload []byte) (Get, error) {
	r := &reader{b: payload}
	r.u32()
	r.u16()
	g := Get{Queue: r.short()}
	g.NoAck = r.u8()&1 != 0
	return g, r.done("basic.get")
}

// ParseName reads the name that a method begins with: the queue of
// queue.declare-ok, the consumer of basic.consume-ok, basic.cancel and
// basic.cancel-ok.
func ParseName(payload []byte) (string, error) {
	r := &reader{b: payload}
	r.u32()
	name := r.short()
	return name, r.done("method")
}

// Delivery is basic.deliver or basic.get-ok; the latter has no consumer.
type Delivery struct {
	Consumer             string
	Tag                  uint64
	Redelivered          bool
	Exchange, RoutingKey string
}

// ParseDelivery reads the payload of either.
func ParseDelivery(m Method, payload []byte) (Delivery, error) {
	r := &reader{b: payload}
	r.u32()
	var d Delivery
	if m == BasicDeliver {
		d.Consumer = r.short()
	}
	d.Tag = r.u64()
	d.Redelivered = r.u8()&1 != 0
	d.Exchange, d.RoutingKey = r.short(), r.short()
	return d, r.done("delivery")
}

// Ack is basic.ack, basic.nack or basic.reject of a worker.
type Ack struct {
	Tag               uint64
	Multiple, Requeue bool
}

// ParseAcknowledgement reads the payload of one of the three.
func ParseAcknowledgement(m Method, payload []byte) (Ack, error) {
	r := &reader{b: payload}
	r.u32()
	a := Ack{Tag: r.u64()}
	bits := r.u8()
	switch m {
	case BasicAck:
		a.Multiple = bits&1 != 0
	case BasicNack:
		a.Multiple, a.Requeue = bits&1 != 0, bits&2 != 0
	default:
		a.Requeue = bits&1 != 0
	}
	return a, r.done("acknowledgement")
}

// Append writes one of the three.
func (a Ack) Append(dst []byte, channel uint16, m Method) []byte {
	var bits byte
	switch {
	case m == BasicReject && a.Requeue, m != BasicReject && a.Multiple:
		bits = 1
	}
	if m == BasicNack && a.Requeue {
		bits |= 2
	}
	return AppendMethod(dst, channel, m, append(binary.BigEndian.AppendUint64(nil, a.Tag), bits))
}
