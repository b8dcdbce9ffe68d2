package policy

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode/utf8"
)

// Kind says what was found where a source points.
type Kind uint8

// The kinds of a value. The zero Kind is an absent value, so that a lookup that
// knows nothing denies.
const (
	// Absent: nothing is there.
	Absent Kind = iota
	// Text: a string; Text holds it.
	Text
	// Integer: an integer; Text holds its decimal form, without a plus sign or
	// leading zeros.
	Integer
	// Unusable: something that is neither, or null.
	Unusable
	// Repeated: more than one value, so that readers may disagree.
	Repeated
)

// Value is what a header lookup returns.
type Value struct {
	Kind Kind
	// Text is set for [Text] and [Integer] only.
	Text string
}

// text returns the value as the text of a component, or why it is none.
func (v Value) text() (string, error) {
	switch v.Kind {
	case Text, Integer:
		return v.Text, nil
	case Absent:
		return "", problemAbsent
	case Repeated:
		return "", problemRepeated
	case Unusable:
	}
	return "", problemKind
}

// payload is the JSON body of one write. It is checked once, however many
// sources read it. It belongs to one resolution and is not for concurrent use.
type payload struct {
	raw     []byte
	checked bool
	valid   bool
}

// member finds the value at a path. It reads the text once per level, keeps no
// tree, and looks at every member of the objects on the path, because a
// repeated name may come last. Names are compared after their escapes are
// resolved: "\u005fid" is "_id" to CouchDB, too.
func (p *payload) member(path []string) (string, error) {
	if !p.checked {
		p.checked, p.valid = true, utf8.Valid(p.raw) && json.Valid(p.raw)
	}
	if !p.valid {
		return "", problemNotJSON
	}
	value := json.RawMessage(p.raw)
	for depth, name := range path {
		trimmed := bytes.TrimLeft(value, " \t\r\n")
		if len(trimmed) == 0 || trimmed[0] != '{' {
			if depth == 0 {
				return "", problemNotJSON
			}
			return "", problemNotObject
		}
		found, err := field(trimmed, name)
		if err != nil {
			return "", err
		}
		value = found
	}
	return scalar(value)
}

// field returns the raw value of one member of an object that is known to be
// well-formed.
func field(object json.RawMessage, name string) (json.RawMessage, error) {
	dec := json.NewDecoder(bytes.NewReader(object))
	if _, err := dec.Token(); err != nil {
		return nil, problemNotJSON
	}
	var found json.RawMessage
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, problemNotJSON
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return nil, problemNotJSON
		}
		if key != name {
			continue
		}
		if found != nil {
			return nil, problemRepeated
		}
		found = raw
	}
	if found == nil {
		return nil, problemAbsent
	}
	return found, nil
}

// scalar returns the text of a string or an integer.
func scalar(value json.RawMessage) (string, error) {
	value = bytes.TrimSpace(value)
	if len(value) > 0 && value[0] == '"' {
		var s string
		if err := json.Unmarshal(value, &s); err != nil {
			return "", problemNotJSON
		}
		// Go replaces half of a surrogate pair by U+FFFD, so that different
		// texts would become one. The character itself means "could not be
		// read" and names nothing either.
		if strings.ContainsRune(s, utf8.RuneError) {
			return "", problemNotUTF8
		}
		return s, nil
	}
	if isInteger(value) {
		return string(value), nil
	}
	return "", problemKind
}

// isInteger reports whether a JSON number is an integer in its only spelling.
// The length bound keeps it within what every client library keeps exactly.
func isInteger(v []byte) bool {
	digits := bytes.TrimPrefix(v, []byte("-"))
	if len(digits) == 0 || len(digits) > 15 {
		return false
	}
	if digits[0] == '0' && len(v) > 1 {
		return false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}
