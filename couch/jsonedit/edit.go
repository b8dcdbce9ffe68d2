package jsonedit

import (
	"encoding/json"
	"fmt"
	"iter"
)

// member says where one member of an object lies in its text: the name with its quotes, and the value. Offsets
// are 32 bits wide because a body of eight megabytes can hold more than a million members.
type member struct {
	key0, key1, val0, val1 uint32
}

// is says whether the member has this name, however the name is escaped.
func (m member) is(src []byte, name string) bool {
	raw := src[m.key0:m.key1]
	if len(raw)-2 == len(name) {
		// Escapes only ever make a spelling longer, so that at equal length the bytes decide.
		return string(raw[1:len(raw)-1]) == name
	}
	if len(raw)-2 < len(name) {
		return false
	}
	return unquote(raw) == name
}

// Object is a validated JSON object together with an index of its own members (not of nested ones). It refers to
// the text it was parsed from and is safe for concurrent readers.
type Object struct {
	src     []byte
	members []member
}

// Member is a name and the JSON text of its value.
type Member struct {
	Name  string
	Value []byte
}

// ParseObject validates a whole text and indexes its outermost object. Valid JSON that is no object is
// [ErrNotObject]; everything else that is wrong is as for [Parse].
func ParseObject(src []byte, limits Limits) (*Object, error) {
	v, err := Parse(src, limits)
	if err != nil {
		return nil, err
	}
	o, ok := v.Object()
	if !ok {
		return nil, ErrNotObject
	}
	return o, nil
}

// Object indexes the members of a value; false when the value is no object.
func (v Value) Object() (*Object, bool) {
	if v.Kind() != Container {
		return nil, false
	}
	o := &Object{src: v.raw}
	s := rescan(v.raw)
	_ = s.object(func(m member) { o.members = append(o.members, m) })
	return o, true
}

// Bytes returns the object as it is written. The caller must not change it.
func (o *Object) Bytes() []byte { return o.src }

// Member returns the value of the last member of this name.
func (o *Object) Member(name string) (Value, bool) {
	for i := len(o.members) - 1; i >= 0; i-- {
		if m := o.members[i]; m.is(o.src, name) {
			return Value{raw: o.src[m.val0:m.val1:m.val1]}, true
		}
	}
	return Value{}, false
}

// Lookup follows a dotted path of member names; see [Value.Lookup].
func (o *Object) Lookup(path string) (Value, bool) {
	return Value{raw: o.src}.Lookup(path)
}

// Names walks the names of all members in the order of the text, duplicates included, escapes resolved.
func (o *Object) Names() iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, m := range o.members {
			if !yield(unquote(o.src[m.key0:m.key1])) {
				return
			}
		}
	}
}

// Without returns a copy of the object in which no member has one of the names. All other bytes are kept: a
// member goes together with the comma and the white space that separate it from its neighbour.
func (o *Object) Without(names ...string) []byte {
	kept, _ := o.strip(names, 0)
	return kept
}

// With returns a copy of the object in which the given members stand at the end, in the order given, and no
// other member has one of their names. All other bytes are kept as by [Object.Without]. A value that is not JSON
// is the caller's error and changes nothing.
func (o *Object) With(set ...Member) ([]byte, error) {
	if len(set) == 0 {
		return append([]byte(nil), o.Bytes()...), nil
	}
	room := 0
	names := make([]string, len(set))
	for i, m := range set {
		if _, err := Parse(m.Value, Limits{}); err != nil {
			return nil, fmt.Errorf("set member %q: %w", m.Name, err)
		}
		names[i] = m.Name
		room += len(m.Name) + len(m.Value) + 8
	}
	kept, end := o.strip(names, room)
	// The new members go right behind the last value that was kept, so that the white space before the closing
	// brace stays where it is and a second call finds what the first one left.
	tail := append([]byte(nil), kept[end:]...)
	out := kept[:end]
	for i, m := range set {
		if i > 0 || end > 1 {
			out = append(out, ',')
		}
		out = append(out, quote(m.Name)...)
		out = append(out, ':')
		out = append(out, m.Value...)
	}
	return append(out, tail...), nil
}

// strip copies the object without the members of these names. end is where the last member that was kept ends in
// the copy, or just behind the opening brace when none was. room is spare capacity for what the caller appends.
//
// White space between the opening brace and the first member stays, and so does what lies between the last member
// and the closing brace. Of two separators around a member that goes, the later one stays.
func (o *Object) strip(names []string, room int) (kept []byte, end int) {
	out := make([]byte, 0, len(o.src)+room)
	if len(o.members) == 0 {
		return append(out, o.src...), 1
	}
	out = append(out, o.src[:o.members[0].key0]...)
	end = 1
	for i, m := range o.members {
		if o.named(m, names) {
			continue
		}
		from := m.key0
		if end > 1 {
			from = o.members[i-1].val1
		}
		out = append(out, o.src[from:m.val1]...)
		end = len(out)
	}
	return append(out, o.src[o.members[len(o.members)-1].val1:]...), end
}

// named says whether the member has one of the names.
func (o *Object) named(m member, names []string) bool {
	for _, name := range names {
		if m.is(o.src, name) {
			return true
		}
	}
	return false
}

// quote writes a name as a JSON string. Names are the proxy's own or ids that were validated as UTF-8, so that
// the encoder cannot fail; it escapes more than is needed, which CouchDB does not mind.
func quote(name string) []byte {
	out, err := json.Marshal(name)
	if err != nil {
		// A string always marshals; kept so that a change of that would not go unseen.
		panic(fmt.Sprintf("quote a member name: %v", err))
	}
	return out
}

// Quote writes a string as a JSON string, for values that go into [Object.With].
func Quote(text string) []byte { return quote(text) }
