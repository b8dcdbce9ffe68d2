package rabbit

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/starintel/fencerider/rabbit/wire"
)

// Bounds of what one read hands on.
const (
	batchUnits = 128
	batchBytes = 1 << 20
	// maxHeld bounds contents that are being read on all channels together.
	maxHeld = 64 << 20
)

// portText writes a port.
func portText(p int) string { return strconv.Itoa(p) }

// protocolError is a violation that ends the connection, with the broker's code.
type protocolError struct {
	code uint16
	text string
}

func (e *protocolError) Error() string { return fmt.Sprintf("%d %s", e.code, e.text) }

// protocolOf turns a reading error into the code that a broker would give; nil
// for an end of the connection.
func protocolOf(err error) *protocolError {
	if pe, ok := errors.AsType[*protocolError](err); ok {
		return pe
	}
	switch {
	case errors.Is(err, wire.ErrFrameTooLarge):
		return &protocolError{501, "FRAME_ERROR - frame_too_large"}
	case errors.Is(err, wire.ErrSyntax):
		return &protocolError{501, "FRAME_ERROR - " + err.Error()}
	}
	return nil
}

// publish is one whole message.
type publish struct {
	wire.Publish
	props *wire.Properties
	// raw are the properties as they came.
	raw  []byte
	body []byte
}

// unit is what moves through the pipeline as one: a frame, or a whole publish.
type unit struct {
	channel uint16
	method  wire.Method
	frame   wire.Frame
	publish *publish
	// ack is set for an acknowledgement that needs a lease.
	ack *ackUse
}

// content is a publish that is being read.
type content struct {
	publish wire.Publish
	header  bool
	raw     []byte
	want    uint64
	body    []byte
}

// assembler puts frames together into units. It is pure and belongs to the
// client reader.
type assembler struct {
	maxMessage int
	open       map[uint16]*content
	held       int
}

// newAssembler returns an empty one.
func newAssembler(maxMessage int) *assembler {
	return &assembler{maxMessage: maxMessage, open: make(map[uint16]*content)}
}

// add takes a frame; ok is false while a content is not complete, and for a
// heartbeat.
func (a *assembler) add(f wire.Frame) (unit, bool, error) {
	ch := f.Channel()
	c := a.open[ch]
	switch f.Type() {
	case wire.FrameHeartbeat:
		if ch != 0 || len(f.Payload()) != 0 {
			return unit{}, false, &protocolError{505, "UNEXPECTED_FRAME - heartbeat with a channel or a payload"}
		}
		return unit{}, false, nil
	case wire.FrameMethod:
		if c != nil {
			return unit{}, false, &protocolError{505, "UNEXPECTED_FRAME - method inside a content"}
		}
		if (ch == 0) != f.Method().OfConnection() {
			return unit{}, false, &protocolError{503, "COMMAND_INVALID - method on a channel where it has no place"}
		}
		if f.Method() != wire.BasicPublish {
			return unit{channel: ch, method: f.Method(), frame: f}, true, nil
		}
		p, err := wire.ParsePublish(f.Payload())
		if err != nil {
			return unit{}, false, err
		}
		a.open[ch] = &content{publish: p}
		return unit{}, false, nil
	case wire.FrameHeader:
		if c == nil || c.header {
			return unit{}, false, &protocolError{505, "UNEXPECTED_FRAME - content header without a publish"}
		}
		h, err := wire.ParseHeader(f.Payload())
		if err != nil {
			return unit{}, false, err
		}
		if h.BodySize > uint64(a.maxMessage) {
			return unit{}, false, &protocolError{501, fmt.Sprintf("FRAME_ERROR - message is larger than the sidecar's limit of %d bytes", a.maxMessage)}
		}
		c.header, c.raw, c.want = true, h.Properties, h.BodySize
		return a.finish(ch, c)
	default:
		if c == nil || !c.header {
			return unit{}, false, &protocolError{505, "UNEXPECTED_FRAME - body without a content header"}
		}
		p := f.Payload()
		if uint64(len(c.body)+len(p)) > c.want {
			return unit{}, false, &protocolError{501, "FRAME_ERROR - body is longer than its header says"}
		}
		if a.held += len(p); a.held > maxHeld {
			return unit{}, false, &protocolError{506, fmt.Sprintf("RESOURCE_ERROR - more than %d bytes of unfinished messages", maxHeld)}
		}
		if c.body == nil && uint64(len(p)) == c.want {
			c.body = p
		} else {
			c.body = append(c.body, p...)
		}
		return a.finish(ch, c)
	}
}

// finish completes a content when everything is there.
func (a *assembler) finish(ch uint16, c *content) (unit, bool, error) {
	if uint64(len(c.body)) < c.want {
		return unit{}, false, nil
	}
	delete(a.open, ch)
	a.held -= len(c.body)
	props, err := wire.ParseProperties(c.raw)
	if err != nil {
		return unit{}, false, err
	}
	return unit{channel: ch, method: wire.BasicPublish, publish: &publish{Publish: c.publish, props: props, raw: c.raw, body: c.body}}, true, nil
}

// readBatch blocks for the first unit and then takes along what is there
// already. It may return units together with an error.
func readBatch(r *bufio.Reader, a *assembler, frameMax int, before func() error) ([]unit, error) {
	var units []unit
	size := 0
	for {
		if len(units) > 0 && !whole(r) {
			return units, nil
		}
		if err := before(); err != nil {
			return units, err
		}
		f, err := wire.ReadFrame(r, frameMax)
		if err != nil {
			return units, err
		}
		u, ok, err := a.add(f)
		if err != nil {
			return units, err
		}
		size += len(f)
		if ok {
			units = append(units, u)
		}
		if len(units) >= batchUnits || (len(units) > 0 && size >= batchBytes) {
			return units, nil
		}
	}
}

// whole reports whether a whole frame lies in the buffer.
func whole(r *bufio.Reader) bool {
	if r.Buffered() < 7 {
		return false
	}
	head, err := r.Peek(7)
	if err != nil {
		return false
	}
	return uint64(r.Buffered()) >= uint64(binary.BigEndian.Uint32(head[3:]))+wire.Overhead
}

// ended reports whether a reading error is just the end of a connection.
func ended(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}
