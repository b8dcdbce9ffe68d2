package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Bounds of a template.
const (
	maxTemplateBytes = 1024
	maxTemplateParts = 32
	maxPathSegments  = 16
	// maxWordIndex is the last word that a routing key of 255 bytes can have.
	maxWordIndex = 254
)

// side says in which half of the policy file a template stands, and so which
// sources it may name.
type side uint8

const (
	couchSide side = 1 << iota
	rabbitSide
	ackSide
)

// sourceKind tells the sources of a template apart.
type sourceKind uint8

const (
	sourceDatabase sourceKind = iota + 1
	sourceDocID
	sourceDoc
	sourceHeader
	sourceExchange
	sourceRoutingKey
	sourceRoutingWord
	sourceBody
	sourceQueue
)

// source is one place of a write that a template reads.
type source struct {
	// raw is the source as written, for messages.
	raw  string
	kind sourceKind
	// name is the header's name.
	name string
	// path leads to a member of the document or the body.
	path []string
	// index is the word of the routing key, from zero.
	index int
}

// part is literal text or a source, never both.
type part struct {
	literal string
	source  *source
	// hashed replaces the source's text by the SHA-256 of it, in lower-case
	// hexadecimal: the one alphabet that survives the lower-casing of an
	// identity without losing anything.
	hashed bool
}

// Template builds one component of an identity from a write. It is immutable
// and safe for concurrent use.
type Template struct {
	raw   string
	parts []part
}

// String returns the template as it was written.
func (t Template) String() string { return t.raw }

// Literal returns the text of a template that reads nothing, and whether this
// is one.
func (t Template) Literal() (string, bool) {
	if t.uses(func(source) bool { return true }) {
		return "", false
	}
	var b strings.Builder
	for _, p := range t.parts {
		b.WriteString(p.literal)
	}
	return b.String(), true
}

// uses reports whether any source of the template satisfies the question.
func (t Template) uses(q func(source) bool) bool {
	return slices.ContainsFunc(t.parts, func(p part) bool { return p.source != nil && q(*p.source) })
}

// fromBody reports whether the worker's payload decides what this template
// says. The caller then has to hold the write against what is stored.
func (t Template) fromBody() bool {
	return t.uses(func(s source) bool { return s.kind == sourceDoc || s.kind == sourceBody })
}

// literalTemplate wraps a text that is used as it is.
func literalTemplate(text string) Template {
	return Template{
		raw:   strings.NewReplacer("{", "{{", "}", "}}").Replace(text),
		parts: []part{{literal: text}},
	}
}

// parseTemplate compiles a template of one side. A brace that is meant as a
// character is written twice.
func parseTemplate(raw string, where side) (Template, error) {
	switch {
	case raw == "":
		return Template{}, fmt.Errorf("template is empty")
	case len(raw) > maxTemplateBytes:
		return Template{}, fmt.Errorf("template is longer than %d bytes", maxTemplateBytes)
	case !utf8.ValidString(raw):
		return Template{}, fmt.Errorf("template is not valid UTF-8")
	}
	t := Template{raw: raw}
	var literal strings.Builder
	flush := func() {
		if literal.Len() > 0 {
			t.parts = append(t.parts, part{literal: literal.String()})
			literal.Reset()
		}
	}
	for rest := raw; rest != ""; {
		i := strings.IndexAny(rest, "{}")
		if i < 0 {
			literal.WriteString(rest)
			break
		}
		literal.WriteString(rest[:i])
		brace := rest[i]
		rest = rest[i+1:]
		if rest != "" && rest[0] == brace {
			literal.WriteByte(brace)
			rest = rest[1:]
			continue
		}
		if brace == '}' {
			return Template{}, fmt.Errorf("a '}' closes nothing; write '}}' for the character")
		}
		inside, after, ok := cutSource(rest)
		if !ok {
			return Template{}, fmt.Errorf("a '{' is never closed; write '{{' for the character")
		}
		flush()
		p, err := parseSource(inside, where)
		if err != nil {
			return Template{}, err
		}
		t.parts = append(t.parts, p)
		rest = after
	}
	flush()
	if len(t.parts) > maxTemplateParts {
		return Template{}, fmt.Errorf("template has more than %d parts", maxTemplateParts)
	}
	return t, nil
}

// cutSource splits what follows an opening brace at the closing one. A
// backslash hides the character after it, so that a member name may hold braces.
func cutSource(s string) (inside, after string, ok bool) {
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '}':
			return s[:i], s[i+1:], true
		}
	}
	return "", "", false
}

// sourceForms lists the sources of each side for messages.
var sourceForms = map[side]string{
	couchSide:  "{doc.<path>}, {doc._id}, {database}, {header.<name>}",
	rabbitSide: "{header.<name>}, {routing_key}, {routing_key[n]}, {exchange}, {body.<path>}",
	ackSide:    "{queue}, {header.<name>}, {routing_key}, {routing_key[n]}, {exchange}",
}

// parseSource reads what stands between two braces.
func parseSource(inside string, where side) (part, error) {
	text, hashed := strings.CutPrefix(inside, "sha256:")
	s, sides, err := readSource(text)
	if err != nil {
		return part{}, fmt.Errorf("{%s}: %w", inside, err)
	}
	if sides&where == 0 {
		return part{}, fmt.Errorf("{%s}: no such source here; there are %s, each also as {sha256:...}", inside, sourceForms[where])
	}
	s.raw = text
	return part{source: &s, hashed: hashed}, nil
}

// readSource recognizes one source and says on which sides it exists. A name
// that is no source at all exists on none.
func readSource(text string) (source, side, error) {
	head, tail, dotted := strings.Cut(text, ".")
	switch {
	case text == "database":
		return source{kind: sourceDatabase}, couchSide, nil
	case text == "exchange":
		return source{kind: sourceExchange}, rabbitSide | ackSide, nil
	case text == "queue":
		return source{kind: sourceQueue}, ackSide, nil
	case text == "routing_key":
		return source{kind: sourceRoutingKey}, rabbitSide | ackSide, nil
	case strings.HasPrefix(text, "routing_key[") && strings.HasSuffix(text, "]"):
		digits := text[len("routing_key[") : len(text)-1]
		n, err := strconv.ParseUint(digits, 10, 16)
		if err != nil || n > maxWordIndex || strconv.FormatUint(n, 10) != digits {
			return source{}, rabbitSide | ackSide, fmt.Errorf("the word must be a number from 0 to %d", maxWordIndex)
		}
		return source{kind: sourceRoutingWord, index: int(n)}, rabbitSide | ackSide, nil
	case dotted && head == "header":
		if tail == "" {
			return source{}, couchSide | rabbitSide | ackSide, fmt.Errorf("the header has no name")
		}
		return source{kind: sourceHeader, name: tail}, couchSide | rabbitSide | ackSide, nil
	case text == "doc._id":
		return source{kind: sourceDocID}, couchSide, nil
	case dotted && head == "doc":
		path, err := parsePath(tail)
		return source{kind: sourceDoc, path: path}, couchSide, err
	case dotted && head == "body":
		path, err := parsePath(tail)
		return source{kind: sourceBody, path: path}, rabbitSide, err
	}
	return source{}, 0, nil
}

// parsePath splits a path at its dots. A backslash makes the dot, brace or
// backslash after it part of a member's name.
func parsePath(s string) ([]string, error) {
	var path []string
	var segment strings.Builder
	end := func() error {
		if segment.Len() == 0 {
			return fmt.Errorf("the path has an empty segment")
		}
		path = append(path, segment.String())
		segment.Reset()
		return nil
	}
	for i := 0; i < len(s); i++ {
		switch c := s[i]; c {
		case '\\':
			i++
			if i == len(s) || !strings.ContainsRune(`.{}\`, rune(s[i])) {
				return nil, fmt.Errorf(`a backslash must be followed by '.', '{', '}' or '\'`)
			}
			segment.WriteByte(s[i])
		case '.':
			if err := end(); err != nil {
				return nil, err
			}
		default:
			segment.WriteByte(c)
		}
	}
	if err := end(); err != nil {
		return nil, err
	}
	if len(path) > maxPathSegments {
		return nil, fmt.Errorf("the path has more than %d segments", maxPathSegments)
	}
	return path, nil
}

// lookup reads one source of a write. The error is one of the problems below.
type lookup func(source) (string, error)

// sourceProblem is why a source cannot be part of an identity, in words for the
// worker. It never repeats what stood there.
type sourceProblem string

// Error returns the problem.
func (p sourceProblem) Error() string { return string(p) }

// The closed set of problems with a source.
const (
	problemAbsent    sourceProblem = "is absent"
	problemKind      sourceProblem = "is neither a string nor an integer"
	problemRepeated  sourceProblem = "is there more than once"
	problemNotJSON   sourceProblem = "cannot be read because the body is not a JSON object in UTF-8"
	problemNotObject sourceProblem = "is inside something that is not an object"
	problemNotUTF8   sourceProblem = "is not valid UTF-8"
	problemTooLong   sourceProblem = "is longer than a component may be"
)

// maxRawValue bounds a value that is used as it is. Longer ones could only fail
// later; hashed values have no bound but the size of the write.
const maxRawValue = 4096

// render builds the component. The second result names the source at fault.
func (t Template) render(get lookup) (string, string, error) {
	var b strings.Builder
	for _, p := range t.parts {
		if p.source == nil {
			b.WriteString(p.literal)
			continue
		}
		v, err := get(*p.source)
		switch {
		case err != nil:
			return "", p.source.raw, err
		case !utf8.ValidString(v):
			return "", p.source.raw, problemNotUTF8
		case p.hashed:
			sum := sha256.Sum256([]byte(v))
			b.WriteString(hex.EncodeToString(sum[:]))
		case len(v) > maxRawValue:
			return "", p.source.raw, problemTooLong
		default:
			b.WriteString(v)
		}
	}
	return b.String(), "", nil
}
