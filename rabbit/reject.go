package rabbit

import (
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/rabbit/wire"
)

// Reply codes of the protocol.
const (
	accessRefused      = 403
	notFound           = 404
	preconditionFailed = 406
	connectionForced   = 320
	notAllowed         = 530
)

// refusalText starts with the class that the broker itself would name and then
// the stable code, so that a program can read it.
func refusalText(e *leaseclient.Error) string {
	return "ACCESS_REFUSED - " + string(e.Code) + ": " + e.Public()
}

// rejectConfirm is the refusal of one publish in confirm mode: the message comes
// back with the reason, and its tag is nacked, in one write. Clients charge a
// nack that comes later to another message.
func rejectConfirm(channel uint16, p *publish, tag uint64, text string, frameMax int) []byte {
	out := wire.Return{Code: accessRefused, Text: text, Exchange: p.Exchange, RoutingKey: p.RoutingKey}.Append(nil, channel)
	out = wire.Header{BodySize: uint64(len(p.body)), Properties: p.raw}.Append(out, channel)
	out = wire.AppendBody(out, channel, p.body, frameMax)
	return wire.AppendNack(out, channel, tag)
}

// rejectChannel is the refusal where nothing else would be noticed.
func rejectChannel(channel uint16, code uint16, text string, m wire.Method) []byte {
	return wire.Close{Code: code, Text: text, Method: m}.Append(nil, channel, wire.ChannelClose)
}
