package rabbit

import (
	"encoding/binary"
	"errors"
	"strings"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/rabbit/wire"
)

// effectVersion is the first octet of what the commit log carries of a message.
const effectVersion = 1

// encodeEffect writes a message as the log carries it, without its stamp:
// version, mandatory, virtual host, exchange, routing key, length of the
// properties, the properties, the body.
func encodeEffect(vhost string, p *publish) []byte {
	out := make([]byte, 0, len(p.raw)+len(p.body)+len(vhost)+len(p.Exchange)+len(p.RoutingKey)+16)
	out = append(out, effectVersion, flag(p.Mandatory))
	out = wire.AppendShort(out, vhost)
	out = wire.AppendShort(out, p.Exchange)
	out = wire.AppendShort(out, p.RoutingKey)
	out = binary.BigEndian.AppendUint32(out, uint32(len(p.raw)))
	out = append(out, p.raw...)
	return append(out, p.body...)
}

// flag writes a boolean.
func flag(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// errEffect is an effect that cannot be read.
var errEffect = errors.New("commit log carries a message that cannot be read")

// decodeEffect reads what encodeEffect wrote.
func decodeEffect(b []byte) (vhost string, p *publish, err error) {
	if len(b) < 2 || b[0] != effectVersion || b[1] > 1 {
		return "", nil, errEffect
	}
	p = &publish{}
	p.Mandatory = b[1] == 1
	b = b[2:]
	for _, s := range []*string{&vhost, &p.Exchange, &p.RoutingKey} {
		if len(b) < 1 || len(b) < 1+int(b[0]) {
			return "", nil, errEffect
		}
		*s = string(b[1 : 1+int(b[0])])
		b = b[1+int(b[0]):]
	}
	if len(b) < 4 {
		return "", nil, errEffect
	}
	n := binary.BigEndian.Uint32(b)
	b = b[4:]
	if uint64(n) > uint64(len(b)) {
		return "", nil, errEffect
	}
	p.raw, p.body = b[:n], b[n:]
	props, err := wire.ParseProperties(p.raw)
	if err != nil {
		return "", nil, errEffect
	}
	p.props = props
	return vhost, p, nil
}

// ours reports whether a header belongs to the sidecar: its word, or a wish of
// the worker that ends here. Readers of headers may fold case, so this does too.
func ours(key string) bool {
	k := strings.ToLower(key)
	return strings.HasPrefix(k, fence.HeaderPrefix) || strings.HasPrefix(k, "x-fencerider-")
}

// stamped returns the properties with the stamp, and a message id where the
// worker gave none.
func (p *publish) stamped(s fence.Stamp) []byte {
	var table []byte
	for _, h := range s.Message() {
		if h.Text != "" {
			table = wire.AppendTextField(table, h.Key, h.Text)
		} else {
			table = wire.AppendIntField(table, h.Key, h.Int)
		}
	}
	return p.props.Rewrite(ours, table, s.CommitID)
}

// clean returns the properties of a message that needs no lease: nothing in it
// may look like the sidecar's word.
func (p *publish) clean() []byte { return p.props.Rewrite(ours, nil, "") }

// frames writes the message with the given properties.
func (p *publish) frames(channel uint16, props []byte, frameMax int) []byte {
	dst := p.Append(nil, channel)
	dst = wire.Header{BodySize: uint64(len(p.body)), Properties: props}.Append(dst, channel)
	return wire.AppendBody(dst, channel, p.body, frameMax)
}
