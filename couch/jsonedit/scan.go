package jsonedit

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"
)

// Limits bounds what [Parse] accepts. A zero field means the default of that field, never "no limit".
type Limits struct {
	// MaxBytes is the length of the whole text in bytes.
	MaxBytes int
	// MaxDepth is how deep arrays and objects may lie in each other; the outermost value has depth one.
	MaxDepth int
}

const (
	// DefaultMaxBytes is a little above the eight million bytes that CouchDB accepts for one document.
	DefaultMaxBytes = 8 << 20
	// DefaultMaxDepth admits what was seen to pass through CouchDB (2000) with room to spare.
	DefaultMaxDepth = 4096
	// maxNumber bounds one number. Arbitrary integers are legal, but a megabyte of digits costs the server that
	// parses it quadratic time, and nobody means it.
	maxNumber = 4096
)

// withDefaults fills in the fields that were left zero.
func (l Limits) withDefaults() Limits {
	if l.MaxBytes <= 0 || l.MaxBytes > math.MaxUint32 {
		l.MaxBytes = DefaultMaxBytes
	}
	if l.MaxDepth <= 0 {
		l.MaxDepth = DefaultMaxDepth
	}
	return l
}

// Errors that a caller decides on. A text can be wrong in three ways that are answered differently: not JSON,
// JSON that is larger than allowed, and JSON of the wrong kind.
var (
	// ErrTooLarge says that the text is longer than Limits.MaxBytes.
	ErrTooLarge = errors.New("json text is too large")
	// ErrTooDeep says that the nesting is deeper than Limits.MaxDepth.
	ErrTooDeep = errors.New("json text is nested too deeply")
	// ErrNotObject says that the text is valid JSON but its outermost value is not an object.
	ErrNotObject = errors.New("json text is not an object")
)

// SyntaxError says where a text stops being JSON as CouchDB understands it.
type SyntaxError struct {
	// Offset is the byte at which the text is wrong, counted from zero.
	Offset int
	// What names the rule that was broken, in words that hold nothing of the text itself.
	What string
}

// Error implements error.
func (e *SyntaxError) Error() string {
	return fmt.Sprintf("invalid json at byte %d: %s", e.Offset, e.What)
}

// scanner walks one text once. It holds no more state than its place, so that a nested value can be walked again
// later by giving it a slice of the same text.
type scanner struct {
	src   []byte
	pos   int
	depth int
	max   int
}

// fail makes the error for the present place.
func (s *scanner) fail(what string) error {
	return &SyntaxError{Offset: s.pos, What: what}
}

// space skips the four characters that JSON calls white space.
func (s *scanner) space() {
	for s.pos < len(s.src) {
		switch s.src[s.pos] {
		case ' ', '\t', '\n', '\r':
			s.pos++
		default:
			return
		}
	}
}

// peek returns the present byte, or zero at the end (a zero byte is never legal outside a string, so the two
// need not be told apart).
func (s *scanner) peek() byte {
	if s.pos < len(s.src) {
		return s.src[s.pos]
	}
	return 0
}

// value walks one value of any kind. White space before it must be gone already.
func (s *scanner) value() error {
	switch c := s.peek(); {
	case c == '{':
		return s.object(nil)
	case c == '[':
		return s.array(nil)
	case c == '"':
		return s.string()
	case c == '-' || c >= '0' && c <= '9':
		return s.number()
	case c == 't':
		return s.literal("true")
	case c == 'f':
		return s.literal("false")
	case c == 'n':
		return s.literal("null")
	case s.pos >= len(s.src):
		return s.fail("the text ends where a value is due")
	default:
		return s.fail("no value starts with this byte")
	}
}

// enter and leave count nesting, so that a small text cannot use up the stack.
func (s *scanner) enter() error {
	s.depth++
	if s.depth > s.max {
		return fmt.Errorf("at byte %d: %w", s.pos, ErrTooDeep)
	}
	return nil
}

func (s *scanner) leave() { s.depth-- }

// object walks an object and tells found, if there is one, where each member lies.
func (s *scanner) object(found func(member)) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	s.pos++ // the brace
	s.space()
	if s.peek() == '}' {
		s.pos++
		return nil
	}
	for {
		if s.peek() != '"' {
			return s.fail("a member's name must be a string")
		}
		var m member
		m.key0 = uint32(s.pos)
		if err := s.string(); err != nil {
			return err
		}
		m.key1 = uint32(s.pos)
		s.space()
		if s.peek() != ':' {
			return s.fail("a colon is due after a member's name")
		}
		s.pos++
		s.space()
		m.val0 = uint32(s.pos)
		if err := s.value(); err != nil {
			return err
		}
		m.val1 = uint32(s.pos)
		if found != nil {
			found(m)
		}
		s.space()
		switch s.peek() {
		case ',':
			s.pos++
			s.space()
		case '}':
			s.pos++
			return nil
		default:
			return s.fail("a comma or a closing brace is due")
		}
	}
}

// array walks an array and tells found, if there is one, where each element lies. found may stop the walk by
// answering false; the scanner's place is then of no further use.
func (s *scanner) array(found func(from, to int) bool) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	s.pos++ // the bracket
	s.space()
	if s.peek() == ']' {
		s.pos++
		return nil
	}
	for {
		from := s.pos
		if err := s.value(); err != nil {
			return err
		}
		if found != nil && !found(from, s.pos) {
			return nil
		}
		s.space()
		switch s.peek() {
		case ',':
			s.pos++
			s.space()
		case ']':
			s.pos++
			return nil
		default:
			return s.fail("a comma or a closing bracket is due")
		}
	}
}

// literal walks one of the three words.
func (s *scanner) literal(word string) error {
	if len(s.src)-s.pos < len(word) || string(s.src[s.pos:s.pos+len(word)]) != word {
		return s.fail("not one of true, false and null")
	}
	s.pos += len(word)
	return nil
}

// number walks a number and refuses what no double can hold when it is written as a fraction or with an
// exponent, because CouchDB does. Whole numbers have no such bound there.
func (s *scanner) number() error {
	from := s.pos
	if s.peek() == '-' {
		s.pos++
	}
	switch c := s.peek(); {
	case c == '0':
		s.pos++
	case c >= '1' && c <= '9':
		s.digits()
	default:
		return s.fail("a digit is due")
	}
	fraction, exponent := false, false
	if s.peek() == '.' {
		fraction = true
		s.pos++
		if !s.digits() {
			return s.fail("a digit is due after the decimal point")
		}
	}
	if c := s.peek(); c == 'e' || c == 'E' {
		exponent = true
		s.pos++
		if c := s.peek(); c == '+' || c == '-' {
			s.pos++
		}
		if !s.digits() {
			return s.fail("a digit is due in the exponent")
		}
	}
	size := s.pos - from
	if size > maxNumber {
		return s.fail("a number is too long")
	}
	if exponent || fraction && size > 300 {
		f, err := strconv.ParseFloat(string(s.src[from:s.pos]), 64)
		if err != nil || math.IsInf(f, 0) {
			return s.fail("a number is out of range")
		}
	}
	return nil
}

// digits skips digits and says whether there was one.
func (s *scanner) digits() bool {
	from := s.pos
	for s.pos < len(s.src) && s.src[s.pos] >= '0' && s.src[s.pos] <= '9' {
		s.pos++
	}
	return s.pos > from
}

// string walks a string, quotes included. Raw control characters, bad UTF-8, unknown escapes and surrogates
// without their partner are refused: CouchDB refuses each of them.
func (s *scanner) string() error {
	s.pos++ // the opening quote
	for s.pos < len(s.src) {
		switch c := s.src[s.pos]; {
		case c == '"':
			s.pos++
			return nil
		case c == '\\':
			if err := s.escape(); err != nil {
				return err
			}
		case c < 0x20:
			return s.fail("a control character must be escaped")
		case c < utf8.RuneSelf:
			s.pos++
		default:
			r, size := utf8.DecodeRune(s.src[s.pos:])
			if r == utf8.RuneError && size <= 1 {
				return s.fail("a string is not UTF-8")
			}
			s.pos += size
		}
	}
	return s.fail("a string has no end")
}

// escape walks one escape sequence, or two where they make one character.
func (s *scanner) escape() error {
	if s.pos+1 >= len(s.src) {
		return s.fail("a string ends inside an escape")
	}
	switch s.src[s.pos+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.pos += 2
		return nil
	case 'u':
	default:
		return s.fail("an unknown escape")
	}
	first, ok := hex4(s.src[s.pos+2:])
	if !ok {
		return s.fail("four hexadecimal digits are due")
	}
	switch {
	case isHigh(first):
		rest := s.src[s.pos+6:]
		if len(rest) < 6 || rest[0] != '\\' || rest[1] != 'u' {
			return s.fail("a surrogate has no partner")
		}
		second, ok := hex4(rest[2:])
		if !ok || !isLow(second) {
			return s.fail("a surrogate has no partner")
		}
		s.pos += 12
	case isLow(first):
		return s.fail("a surrogate has no partner")
	default:
		s.pos += 6
	}
	return nil
}

// hex4 reads the four digits of a \u escape.
func hex4(b []byte) (rune, bool) {
	if len(b) < 4 {
		return 0, false
	}
	var r rune
	for _, c := range b[:4] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// isHigh and isLow tell the two halves of a surrogate pair apart.
func isHigh(r rune) bool { return r >= 0xD800 && r < 0xDC00 }
func isLow(r rune) bool  { return r >= 0xDC00 && r < 0xE000 }
