package wire

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"testing"
)

// properties makes a list with a content type, headers and an app id.
func properties(table []byte, messageID string) []byte {
	flags := uint16(flagContentType | 1<<12 | 1<<3)
	var b []byte
	b = AppendShort(b, "text/plain")
	if table != nil {
		flags |= flagHeaders
		b = append(b, 0, 0, byte(len(table)>>8), byte(len(table)))
		b = append(b, table...)
	}
	b = append(b, 2)
	if messageID != "" {
		flags |= flagMessageID
		b = AppendShort(b, messageID)
	}
	b = AppendShort(b, "app")
	return append([]byte{byte(flags >> 8), byte(flags)}, b...)
}

func TestFrames(t *testing.T) {
	in := AppendFrame(nil, FrameBody, 7, []byte("abc"), []byte("de"))
	f, err := ReadFrame(bufio.NewReader(bytes.NewReader(in)), 4096)
	if err != nil || f.Type() != FrameBody || f.Channel() != 7 || string(f.Payload()) != "abcde" || !bytes.Equal(f, in) {
		t.Fatalf("%v %v", f, err)
	}
	for name, tc := range map[string]struct {
		in   []byte
		want error
	}{
		"nothing":   {nil, io.EOF},
		"half":      {in[:9], io.ErrUnexpectedEOF},
		"head only": {in[:3], io.ErrUnexpectedEOF},
		"bad type":  {[]byte("GET / HTTP"), ErrSyntax},
		"bad end":   {append(append([]byte{}, in[:len(in)-1]...), 0), ErrSyntax},
		"too large": {AppendFrame(nil, FrameBody, 1, make([]byte, 4096)), ErrFrameTooLarge},
		"no method": {AppendFrame(nil, FrameMethod, 1, []byte{0, 1}), ErrSyntax},
		"lying":     {[]byte{1, 0, 0, 0xff, 0xff, 0xff, 0xff}, ErrFrameTooLarge},
	} {
		if _, err := ReadFrame(bufio.NewReader(bytes.NewReader(tc.in)), 4096); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
}

func TestMethodsRoundTrip(t *testing.T) {
	p := Publish{Exchange: "ex", RoutingKey: "a.b", Mandatory: true}
	if got, err := ParsePublish(Frame(p.Append(nil, 1)).Payload()); err != nil || got != p {
		t.Errorf("%+v %v", got, err)
	}
	c := Close{Code: 403, Text: "no", Method: BasicPublish}
	if got, err := ParseClose(Frame(c.Append(nil, 1, ChannelClose)).Payload()); err != nil || got != c {
		t.Errorf("%+v %v", got, err)
	}
	tune := Tune{2047, 131072, 60}
	if got, err := ParseTune(Frame(tune.Append(nil, ConnectionTune)).Payload()); err != nil || got != tune {
		t.Errorf("%+v %v", got, err)
	}
	if tag, m, err := ParseAck(Frame(AppendAck(nil, 1, 9)).Payload()); err != nil || tag != 9 || m {
		t.Errorf("%d %v %v", tag, m, err)
	}
	if _, err := ParsePublish([]byte{0, 60, 0, 40, 0, 0, 200, 'x'}); !errors.Is(err, ErrSyntax) {
		t.Errorf("%v", err)
	}
	long := Frame(Close{Code: 1, Text: string(make([]byte, 300))}.Append(nil, 0, ConnectionClose))
	if got, err := ParseClose(long.Payload()); err != nil || len(got.Text) != 255 {
		t.Errorf("%d %v", len(got.Text), err)
	}
}

func TestRewriteKeepsEveryOtherByte(t *testing.T) {
	keep1, keep2 := AppendTextField(nil, "k1", "v"), AppendIntField(nil, "k2", -5)
	table := append(append(append([]byte{}, keep1...), AppendTextField(nil, "x-fence-a", "forged")...), keep2...)
	add := AppendTextField(nil, "x-fence-a", "real")
	drop := func(k string) bool { return k == "x-fence-a" }
	for _, tc := range []struct{ in, want []byte }{
		{properties(table, "id"), properties(append(append(append([]byte{}, keep1...), keep2...), add...), "id")},
		{properties(table, ""), properties(append(append(append([]byte{}, keep1...), keep2...), add...), "new")},
		{properties(nil, "id"), properties(add, "id")},
	} {
		p, err := ParseProperties(tc.in)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Rewrite(drop, add, "new"); !bytes.Equal(got, tc.want) {
			t.Errorf("\n%q\n%q", got, tc.want)
		}
	}
}

func TestPropertiesRefused(t *testing.T) {
	for name, in := range map[string][]byte{
		"empty":        {},
		"reserved":     {0, 1},
		"short":        {0x80, 0},
		"trailing":     {0, 0, 1},
		"bad type":     properties([]byte{1, 'k', 'U', 0, 0}, ""),
		"lying table":  {0x20, 0, 0xff, 0xff, 0xff, 0xff},
		"lying string": properties([]byte{1, 'k', 'S', 0xff, 0xff, 0xff, 0xff}, ""),
	} {
		if _, err := ParseProperties(in); !errors.Is(err, ErrSyntax) {
			t.Errorf("%s: %v", name, err)
		}
	}
	deep := []byte{}
	for range 40 {
		deep = append([]byte{'A', 0, 0, byte(len(deep) >> 8), byte(len(deep))}, deep...)
	}
	if _, err := ParseProperties(properties(append([]byte{1, 'k'}, deep...), "")); !errors.Is(err, ErrSyntax) {
		t.Errorf("deep: %v", err)
	}
}

func TestFieldValues(t *testing.T) {
	arr := []byte{1, 'k', 'A', 0, 0, 0, 12, 'S', 0, 0, 0, 1, 'a', 'S', 0, 0, 0, 1, 'b'}
	var got []Field
	if err := WalkTable(append(arr, AppendIntField(AppendTextField(nil, "t", "true"), "n", 42)...), func(f Field) error { got = append(got, f); return nil }); err != nil {
		t.Fatal(err)
	}
	if s, ok := got[0].Texts(); !ok || len(s) != 2 || s[1] != "b" {
		t.Errorf("%v %v", s, ok)
	}
	if !got[1].True() {
		t.Error("the text true")
	}
	if n, ok := got[2].Integer(); !ok || n != 42 {
		t.Errorf("%d %v", n, ok)
	}
}

func FuzzReadFrame(f *testing.F) {
	f.Add(AppendFrame(nil, FrameMethod, 1, []byte{0, 60, 0, 40}))
	f.Add([]byte("AMQP\x00\x00\x09\x01"))
	f.Fuzz(func(t *testing.T, in []byte) {
		fr, err := ReadFrame(bufio.NewReader(bytes.NewReader(in)), 1<<16)
		if err != nil {
			return
		}
		if !bytes.Equal(fr, in[:len(fr)]) || !bytes.Equal(AppendFrame(nil, fr.Type(), fr.Channel(), fr.Payload()), fr) {
			t.Fatalf("%q is not what was read", fr)
		}
		fr.Method()
	})
}

// FuzzProperties holds that rewriting with nothing to drop or add changes no
// byte, and that stamping twice equals stamping once.
func FuzzProperties(f *testing.F) {
	f.Add(properties(AppendTextField(nil, "k", "v"), "id"))
	f.Add(properties(nil, ""))
	f.Add([]byte{0, 0})
	add := AppendIntField(nil, "x-fence-n", 7)
	drop := func(k string) bool { return k == "x-fence-n" }
	f.Fuzz(func(t *testing.T, in []byte) {
		p, err := ParseProperties(in)
		if err != nil {
			return
		}
		if got := p.Rewrite(func(string) bool { return false }, nil, ""); !bytes.Equal(got, in) {
			t.Fatalf("\n%q\n%q", got, in)
		}
		once := p.Rewrite(drop, add, "m")
		q, err := ParseProperties(once)
		if err != nil {
			t.Fatalf("%q: %v", once, err)
		}
		if twice := q.Rewrite(drop, add, "m"); !bytes.Equal(once, twice) {
			t.Fatalf("\n%q\n%q", once, twice)
		}
	})
}
