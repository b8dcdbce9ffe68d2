package couch

import (
	"errors"
	"strings"
	"unicode/utf8"
)

// Bounds of a request's target.
const (
	maxTargetBytes = 16 << 10
	maxSegments    = 64
	maxParams      = 256
)

// errTarget is a target that CouchDB would not read the way it is meant.
var errTarget = errors.New("request target is malformed")

// param is one decoded key and value of a query.
type param struct{ key, value string }

// target is a request's target as CouchDB reads it: empty segments vanish, a
// plus sign is a space, everything may be percent-encoded, and a query is
// separated by ampersands and semicolons.
type target struct {
	segments []string
	query    []param
	// slash keeps a slash at the end. CouchDB ignores it, but redirects of its
	// web interface come and go with it.
	slash bool
}

// parseTarget reads a raw request target, in origin form or absolute form.
func parseTarget(raw string) (target, error) {
	if len(raw) > maxTargetBytes {
		return target{}, errTarget
	}
	if !strings.HasPrefix(raw, "/") {
		_, rest, ok := strings.Cut(raw, "://")
		if !ok {
			return target{}, errTarget
		}
		i := strings.IndexByte(rest, '/')
		if i < 0 {
			rest, i = "/", 0
		}
		raw = rest[i:]
	}
	raw, _, _ = strings.Cut(raw, "#")
	path, query, _ := strings.Cut(raw, "?")
	t := target{slash: len(path) > 1 && strings.HasSuffix(path, "/")}
	for s := range strings.SplitSeq(path, "/") {
		if s == "" {
			continue
		}
		d, err := decode(s)
		if err != nil {
			return target{}, err
		}
		if len(t.segments) == maxSegments {
			return target{}, errTarget
		}
		t.segments = append(t.segments, d)
	}
	for _, p := range strings.FieldsFunc(query, func(r rune) bool { return r == '&' || r == ';' }) {
		k, v, _ := strings.Cut(p, "=")
		key, err := decode(k)
		if err != nil {
			return target{}, err
		}
		value, err := decode(v)
		if err != nil {
			return target{}, err
		}
		if len(t.query) == maxParams {
			return target{}, errTarget
		}
		t.query = append(t.query, param{key, value})
	}
	return t, nil
}

// decode resolves percent-encoding and plus signs.
func decode(s string) (string, error) {
	if !strings.ContainsAny(s, "%+") {
		if !utf8.ValidString(s) {
			return "", errTarget
		}
		return s, nil
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '+':
			b.WriteByte(' ')
		case '%':
			if i+2 >= len(s) {
				return "", errTarget
			}
			hi, lo := unhex(s[i+1]), unhex(s[i+2])
			if hi < 0 || lo < 0 {
				return "", errTarget
			}
			b.WriteByte(byte(hi<<4 | lo))
			i += 2
		default:
			b.WriteByte(s[i])
		}
	}
	if !utf8.ValidString(b.String()) {
		return "", errTarget
	}
	return b.String(), nil
}

// unhex returns the value of a hexadecimal digit, or -1.
func unhex(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// encode writes a segment or a part of a query so that every reader decodes it
// alike: only letters, digits and four marks stand for themselves.
func encode(s string) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.' || c == '~' {
			b.WriteByte(c)
			continue
		}
		b.WriteByte('%')
		b.WriteByte(hex[c>>4])
		b.WriteByte(hex[c&15])
	}
	return b.String()
}

// path returns the canonical path.
func (t target) path() string {
	var b strings.Builder
	for _, s := range t.segments {
		b.WriteByte('/')
		b.WriteString(encode(s))
	}
	if b.Len() == 0 || t.slash {
		b.WriteByte('/')
	}
	return b.String()
}

// rawQuery returns the canonical query.
func (t target) rawQuery() string {
	parts := make([]string, len(t.query))
	for i, p := range t.query {
		parts[i] = encode(p.key) + "=" + encode(p.value)
	}
	return strings.Join(parts, "&")
}

// first returns the first value of a key, which is the one that counts for rev,
// w and batch.
func (t target) first(key string) (string, bool) {
	for _, p := range t.query {
		if p.key == key {
			return p.value, true
		}
	}
	return "", false
}

// last returns the last value of a key, which is the one that counts for
// new_edits.
func (t target) last(key string) (string, bool) {
	for i := len(t.query) - 1; i >= 0; i-- {
		if t.query[i].key == key {
			return t.query[i].value, true
		}
	}
	return "", false
}

// without returns the target less some keys of its query.
func (t target) without(keys ...string) target {
	out := target{segments: t.segments, slash: t.slash}
next:
	for _, p := range t.query {
		for _, k := range keys {
			if p.key == k {
				continue next
			}
		}
		out.query = append(out.query, p)
	}
	return out
}
