package wire

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Frame types.
const (
	FrameMethod    = 1
	FrameHeader    = 2
	FrameBody      = 3
	FrameHeartbeat = 8
	frameEnd       = 0xCE
)

// Sizes of a frame.
const (
	// Overhead is what a frame adds to its payload.
	Overhead = 8
	// MinFrameMax is the least frame size that every peer must accept.
	MinFrameMax = 4096
)

// ProtocolHeader is what a client of this protocol sends first, and what a
// server answers to every other.
var ProtocolHeader = []byte{'A', 'M', 'Q', 'P', 0, 0, 9, 1}

// protocolHeader09 is the older spelling that some clients still send.
var protocolHeader09 = []byte{'A', 'M', 'Q', 'P', 1, 1, 0, 9}

// IsProtocolHeader reports whether eight bytes open this protocol.
func IsProtocolHeader(b []byte) bool {
	return string(b) == string(ProtocolHeader) || string(b) == string(protocolHeader09)
}

// ErrSyntax is wrapped by every error about bytes that are not what they should
// be.
var ErrSyntax = errors.New("malformed AMQP")

// ErrFrameTooLarge says that a frame announces more than was agreed on.
var ErrFrameTooLarge = errors.New("frame is larger than frame_max")

// syntax makes an error about malformed bytes.
func syntax(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrSyntax, fmt.Sprintf(format, args...))
}

// Frame is one whole frame as it was read, its end octet included.
type Frame []byte

// Type returns the frame's type.
func (f Frame) Type() byte { return f[0] }

// Channel returns the frame's channel.
func (f Frame) Channel() uint16 { return binary.BigEndian.Uint16(f[1:3]) }

// Payload returns what stands between the frame's head and its end octet.
func (f Frame) Payload() []byte { return f[7 : len(f)-1] }

// Method returns the class and method of a method frame, and zero for any other
// frame or one that is too short.
func (f Frame) Method() Method {
	if p := f.Payload(); f.Type() == FrameMethod && len(p) >= 4 {
		return Method(binary.BigEndian.Uint32(p))
	}
	return 0
}

// ReadFrame reads one frame into memory of its own. max bounds the whole frame.
// The error is [io.EOF] at a clean end, [io.ErrUnexpectedEOF] inside a frame, and
// wraps [ErrSyntax] or [ErrFrameTooLarge] for bytes that are no frame.
func ReadFrame(r *bufio.Reader, max int) (Frame, error) {
	var head [7]byte
	if _, err := io.ReadFull(r, head[:1]); err != nil {
		return nil, err
	}
	switch head[0] {
	case FrameMethod, FrameHeader, FrameBody, FrameHeartbeat:
	default:
		return nil, syntax("unknown frame type %d", head[0])
	}
	if _, err := io.ReadFull(r, head[1:]); err != nil {
		return nil, unexpected(err)
	}
	size := binary.BigEndian.Uint32(head[3:])
	if int64(size)+Overhead > int64(max) {
		return nil, ErrFrameTooLarge
	}
	f := make(Frame, int(size)+Overhead)
	copy(f, head[:])
	if _, err := io.ReadFull(r, f[7:]); err != nil {
		return nil, unexpected(err)
	}
	if f[len(f)-1] != frameEnd {
		return nil, syntax("frame does not end with its end octet")
	}
	if f[0] == FrameMethod && size < 4 {
		return nil, syntax("method frame is too short")
	}
	return f, nil
}

// unexpected says that an end came inside a frame.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// AppendFrame writes a frame.
func AppendFrame(dst []byte, typ byte, channel uint16, payload ...[]byte) []byte {
	size := 0
	for _, p := range payload {
		size += len(p)
	}
	dst = append(dst, typ)
	dst = binary.BigEndian.AppendUint16(dst, channel)
	dst = binary.BigEndian.AppendUint32(dst, uint32(size))
	for _, p := range payload {
		dst = append(dst, p...)
	}
	return append(dst, frameEnd)
}

// Heartbeat is a heartbeat frame.
var Heartbeat = Frame(AppendFrame(nil, FrameHeartbeat, 0))
