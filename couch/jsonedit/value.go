package jsonedit

import (
	"iter"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Kind is what a JSON value is.
type Kind uint8

// The kinds. The zero Kind is that of the zero Value, which is no value at all.
const (
	None Kind = iota
	Null
	Bool
	Number
	String
	Array
	Container // an object; the name Object belongs to the parsed form
)

// Value is one JSON value of a validated text, without white space around it. It keeps a reference to the text,
// which must not be changed while the value is in use. The zero Value stands for "not there".
type Value struct {
	raw []byte
}

// Parse validates a whole text and returns its outermost value. The value refers to src.
func Parse(src []byte, limits Limits) (Value, error) {
	limits = limits.withDefaults()
	if len(src) > limits.MaxBytes {
		return Value{}, ErrTooLarge
	}
	s := scanner{src: src, max: limits.MaxDepth}
	s.space()
	from := s.pos
	if err := s.value(); err != nil {
		return Value{}, err
	}
	to := s.pos
	s.space()
	if s.pos != len(src) {
		return Value{}, s.fail("something follows the value")
	}
	return Value{raw: src[from:to:to]}, nil
}

// Bytes returns the value as it is written. The caller must not change it.
func (v Value) Bytes() []byte { return v.raw }

// Kind says what the value is.
func (v Value) Kind() Kind {
	if len(v.raw) == 0 {
		return None
	}
	switch v.raw[0] {
	case '{':
		return Container
	case '[':
		return Array
	case '"':
		return String
	case 't', 'f':
		return Bool
	case 'n':
		return Null
	default:
		return Number
	}
}

// Text returns the string that the value stands for, with escapes resolved; false when it is not a string.
func (v Value) Text() (string, bool) {
	if v.Kind() != String {
		return "", false
	}
	return unquote(v.raw), true
}

// True says whether the value is the word true. Anything else, a missing value too, is not.
func (v Value) True() bool { return string(v.raw) == "true" }

// Elements walks the elements of an array; of any other value there are none.
func (v Value) Elements() iter.Seq[Value] {
	return func(yield func(Value) bool) {
		if v.Kind() != Array {
			return
		}
		s := rescan(v.raw)
		// The text was validated by Parse, so that the only way to end early is the caller's wish.
		_ = s.array(func(from, to int) bool {
			return yield(Value{raw: v.raw[from:to:to]})
		})
	}
}

// Member returns the value of a member of an object, the last of its name; false when the value is no object or
// has no such member. Use [Object] where more than one member is asked for: this walks the object every time.
func (v Value) Member(name string) (Value, bool) {
	if v.Kind() != Container {
		return Value{}, false
	}
	var last Value
	found := false
	s := rescan(v.raw)
	_ = s.object(func(m member) {
		if m.is(v.raw, name) {
			last, found = Value{raw: v.raw[m.val0:m.val1:m.val1]}, true
		}
	})
	return last, found
}

// Lookup follows a dotted path of member names from the value; false when a step is missing. A name that itself
// holds a dot cannot be reached, nor can the elements of an array.
func (v Value) Lookup(path string) (Value, bool) {
	for name := range strings.SplitSeq(path, ".") {
		next, ok := v.Member(name)
		if !ok {
			return Value{}, false
		}
		v = next
	}
	return v, true
}

// rescan makes a scanner for a value that was validated before: its depth was judged then.
func rescan(raw []byte) *scanner {
	return &scanner{src: raw, max: len(raw) + 1}
}

// unquote resolves the escapes of a validated string, quotes included in raw.
func unquote(raw []byte) string {
	in := raw[1 : len(raw)-1]
	plain := true
	for _, c := range in {
		if c == '\\' {
			plain = false
			break
		}
	}
	if plain {
		return string(in)
	}
	out := make([]byte, 0, len(in))
	for i := 0; i < len(in); {
		if in[i] != '\\' {
			out = append(out, in[i])
			i++
			continue
		}
		switch c := in[i+1]; c {
		case 'b':
			out = append(out, '\b')
		case 'f':
			out = append(out, '\f')
		case 'n':
			out = append(out, '\n')
		case 'r':
			out = append(out, '\r')
		case 't':
			out = append(out, '\t')
		case 'u':
			r, _ := hex4(in[i+2:])
			if isHigh(r) {
				low, _ := hex4(in[i+8:])
				r = utf16.DecodeRune(r, low)
				i += 6
			}
			out = utf8.AppendRune(out, r)
			i += 4
		default: // the quote, the backslash and the slash stand for themselves
			out = append(out, c)
		}
		i += 2
	}
	return string(out)
}
