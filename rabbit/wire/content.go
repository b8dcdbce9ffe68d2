package wire

import "encoding/binary"

// Header is the header frame of a content.
type Header struct {
	BodySize uint64
	// Properties are the flags and the values, as on the wire.
	Properties []byte
}

// ParseHeader reads the payload of a header frame.
func ParseHeader(payload []byte) (Header, error) {
	r := &reader{b: payload}
	class, weight := r.u16(), r.u16()
	h := Header{BodySize: r.u64()}
	if r.bad || len(r.b) < 2 {
		return Header{}, syntax("content header is too short")
	}
	if class != 60 || weight != 0 {
		return Header{}, syntax("content header is of class %d, weight %d", class, weight)
	}
	h.Properties = r.b
	return h, nil
}

// Append writes a header frame.
func (h Header) Append(dst []byte, channel uint16) []byte {
	head := make([]byte, 0, 12)
	head = binary.BigEndian.AppendUint16(head, 60)
	head = binary.BigEndian.AppendUint16(head, 0)
	head = binary.BigEndian.AppendUint64(head, h.BodySize)
	return AppendFrame(dst, FrameHeader, channel, head, h.Properties)
}

// AppendBody writes a body in frames of at most frameMax.
func AppendBody(dst []byte, channel uint16, body []byte, frameMax int) []byte {
	for len(body) > 0 {
		n := min(len(body), frameMax-Overhead)
		dst = AppendFrame(dst, FrameBody, channel, body[:n])
		body = body[n:]
	}
	return dst
}

// Flags of the properties, in the order of their values.
const (
	flagContentType     = 1 << 15
	flagContentEncoding = 1 << 14
	flagHeaders         = 1 << 13
	flagMessageID       = 1 << 7
)

// Properties knows where the parts of a property list lie.
type Properties struct {
	raw   []byte
	flags uint16
	// headers0 and headers1 enclose the headers table with its length; equal
	// where there is none, and then the place for one.
	headers0, headers1 int
	// id0 and id1 enclose the message id in the same way.
	id0, id1 int
}

// ParseProperties finds the parts of a property list and checks that it is whole:
// RabbitMQ closes the connection over one that is not.
func ParseProperties(raw []byte) (*Properties, error) {
	if len(raw) < 2 {
		return nil, syntax("property list is too short")
	}
	p := &Properties{raw: raw, flags: binary.BigEndian.Uint16(raw)}
	if p.flags&3 != 0 {
		return nil, syntax("property list uses reserved flags")
	}
	r := &reader{b: raw[2:]}
	at := func() int { return len(raw) - len(r.b) }
	for bit := 15; bit >= 2; bit-- {
		start := at()
		set := p.flags&(1<<bit) != 0
		if set {
			switch bit {
			case 13:
				table := r.long()
				if !r.bad {
					if err := WalkTable(table, func(Field) error { return nil }); err != nil {
						return nil, err
					}
				}
			case 12, 11:
				r.u8()
			case 6:
				r.u64()
			default:
				r.short()
			}
		}
		switch 1 << bit {
		case flagHeaders:
			p.headers0, p.headers1 = start, at()
		case flagMessageID:
			p.id0, p.id1 = start, at()
		}
	}
	if err := r.done("property list"); err != nil {
		return nil, err
	}
	if len(r.b) != 0 {
		return nil, syntax("something follows the properties")
	}
	return p, nil
}

// MessageID returns the message id, and whether there is one.
func (p *Properties) MessageID() (string, bool) {
	if p.flags&flagMessageID == 0 {
		return "", false
	}
	return string(p.raw[p.id0+1 : p.id1]), true
}

// table returns the fields of the headers, without the length.
func (p *Properties) table() []byte {
	if p.flags&flagHeaders == 0 {
		return nil
	}
	return p.raw[p.headers0+4 : p.headers1]
}

// Headers walks the headers in the order of the wire, duplicates included.
func (p *Properties) Headers(f func(Field)) {
	// The table was walked when it was parsed, so it is whole.
	_ = WalkTable(p.table(), func(fl Field) error { f(fl); return nil })
}

// Rewrite returns the property list without the headers that drop names, with
// more of them at the end, and with a message id where there is none. Every
// other byte is kept.
func (p *Properties) Rewrite(drop func(key string) bool, add []byte, messageID string) []byte {
	var table []byte
	p.Headers(func(f Field) {
		if !drop(f.Key) {
			table = append(table, f.Raw...)
		}
	})
	table = append(table, add...)
	flags := p.flags
	out := make([]byte, 2, len(p.raw)+len(add)+len(messageID)+8)
	out = append(out, p.raw[2:p.headers0]...)
	if p.flags&flagHeaders != 0 || len(table) > 0 {
		flags |= flagHeaders
		out = binary.BigEndian.AppendUint32(out, uint32(len(table)))
		out = append(out, table...)
	}
	out = append(out, p.raw[p.headers1:p.id0]...)
	if p.flags&flagMessageID == 0 && messageID != "" {
		flags |= flagMessageID
		out = AppendShort(out, messageID)
	}
	out = append(out, p.raw[p.id0:]...)
	binary.BigEndian.PutUint16(out, flags)
	return out
}

// Field is one entry of a field table.
type Field struct {
	Key  string
	Type byte
	// Value is what follows the type; Raw is the whole entry.
	Value, Raw []byte
}

// maxTableDepth bounds tables and arrays inside each other.
const maxTableDepth = 32

// WalkTable walks the entries of a table, without its length. The error wraps
// [ErrSyntax] or is the callback's.
func WalkTable(table []byte, f func(Field) error) error {
	return walkTable(table, f, 0)
}

// walkTable walks at a depth.
func walkTable(table []byte, f func(Field) error, depth int) error {
	for len(table) > 0 {
		r := &reader{b: table}
		key := r.short()
		typ := r.u8()
		if r.bad {
			return syntax("table is too short")
		}
		n, err := valueSize(typ, r.b, depth)
		if err != nil {
			return err
		}
		size := len(table) - len(r.b) + n
		if err := f(Field{Key: key, Type: typ, Value: r.b[:n], Raw: table[:size]}); err != nil {
			return err
		}
		table = table[size:]
	}
	return nil
}

// valueSize is how many bytes a value of a type takes. Types that RabbitMQ does
// not read are refused: it would close the connection over them.
func valueSize(typ byte, b []byte, depth int) (int, error) {
	if depth > maxTableDepth {
		return 0, syntax("tables are nested too deeply")
	}
	n := 0
	switch typ {
	case 't', 'b', 'B':
		n = 1
	case 's', 'u':
		n = 2
	case 'I', 'i', 'f':
		n = 4
	case 'l', 'L', 'd', 'T':
		n = 8
	case 'D':
		n = 5
	case 'V':
	case 'S', 'x', 'F', 'A':
		r := &reader{b: b}
		inner := r.long()
		if r.bad {
			return 0, syntax("table value is too short")
		}
		if typ == 'F' {
			if err := walkTable(inner, func(Field) error { return nil }, depth+1); err != nil {
				return 0, err
			}
		}
		if typ == 'A' {
			if err := walkArray(inner, func(byte, []byte) {}, depth+1); err != nil {
				return 0, err
			}
		}
		return 4 + len(inner), nil
	default:
		return 0, syntax("table value has the unknown type %q", typ)
	}
	if len(b) < n {
		return 0, syntax("table value is too short")
	}
	return n, nil
}

// walkArray walks the values of an array, without its length.
func walkArray(b []byte, f func(typ byte, value []byte), depth int) error {
	for len(b) > 0 {
		n, err := valueSize(b[0], b[1:], depth)
		if err != nil {
			return err
		}
		f(b[0], b[1:1+n])
		b = b[1+n:]
	}
	return nil
}

// Text returns a long string's text; false for any other type.
func (f Field) Text() (string, bool) {
	if f.Type != 'S' {
		return "", false
	}
	return string(f.Value[4:]), true
}

// Integer returns an integer of any width; false for any other type.
func (f Field) Integer() (int64, bool) {
	v := f.Value
	switch f.Type {
	case 'b':
		return int64(int8(v[0])), true
	case 'B':
		return int64(v[0]), true
	case 's':
		return int64(int16(binary.BigEndian.Uint16(v))), true
	case 'u':
		return int64(binary.BigEndian.Uint16(v)), true
	case 'I':
		return int64(int32(binary.BigEndian.Uint32(v))), true
	case 'i':
		return int64(binary.BigEndian.Uint32(v)), true
	case 'l', 'L':
		return int64(binary.BigEndian.Uint64(v)), true
	}
	return 0, false
}

// True reports whether the value is the boolean true or the text "true".
func (f Field) True() bool {
	if f.Type == 't' {
		return f.Value[0] != 0
	}
	s, _ := f.Text()
	return s == "true"
}

// Texts returns the long strings of an array; false when it is no array of only
// those.
func (f Field) Texts() ([]string, bool) {
	if f.Type != 'A' {
		return nil, false
	}
	var out []string
	all := true
	err := walkArray(f.Value[4:], func(typ byte, v []byte) {
		if typ != 'S' {
			all = false
			return
		}
		out = append(out, string(v[4:]))
	}, 1)
	return out, all && err == nil
}

// AppendTextField writes a table entry with a long string.
func AppendTextField(dst []byte, key, value string) []byte {
	dst = AppendShort(dst, key)
	dst = append(dst, 'S')
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}

// AppendIntField writes a table entry with a 64-bit integer, the one width that
// every client library reads alike.
func AppendIntField(dst []byte, key string, value int64) []byte {
	dst = AppendShort(dst, key)
	dst = append(dst, 'l')
	return binary.BigEndian.AppendUint64(dst, uint64(value))
}
