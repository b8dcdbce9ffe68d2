package policy

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// maxPatternBytes bounds every pattern of a policy file. Document ids and
// routing keys are shorter than this in practice, so a longer pattern is a
// mistake; the bound also keeps matching cheap.
const maxPatternBytes = 512

// globKind tells the three things a pattern is made of apart.
type globKind uint8

const (
	globRune globKind = iota // one given character
	globOne                  // "?": any one character
	globRun                  // "*": any run of characters, also none
)

// globToken is one element of a compiled pattern.
type globToken struct {
	kind globKind
	r    rune
}

// Glob matches names as a whole. "*" stands for any run of characters, the
// slash included, "?" for exactly one; a backslash takes the meaning away from
// the character after it. A Glob is immutable and safe for concurrent use.
type Glob struct {
	raw    string
	tokens []globToken
}

// ParseGlob compiles a pattern. An empty pattern matches the empty name only,
// which is how the default exchange is written.
func ParseGlob(pattern string) (Glob, error) {
	if len(pattern) > maxPatternBytes {
		return Glob{}, fmt.Errorf("pattern is longer than %d bytes", maxPatternBytes)
	}
	if !utf8.ValidString(pattern) {
		return Glob{}, fmt.Errorf("pattern is not valid UTF-8")
	}
	g := Glob{raw: pattern}
	escaped := false
	for _, r := range pattern {
		switch {
		case escaped:
			if !strings.ContainsRune(`*?\`, r) {
				return Glob{}, fmt.Errorf(`a backslash must be followed by '*', '?' or '\'`)
			}
			escaped = false
			g.tokens = append(g.tokens, globToken{kind: globRune, r: r})
		case r == '\\':
			escaped = true
		case r == '*':
			// Two stars in a row mean what one means; one is cheaper.
			if n := len(g.tokens); n == 0 || g.tokens[n-1].kind != globRun {
				g.tokens = append(g.tokens, globToken{kind: globRun})
			}
		case r == '?':
			g.tokens = append(g.tokens, globToken{kind: globOne})
		default:
			g.tokens = append(g.tokens, globToken{kind: globRune, r: r})
		}
	}
	if escaped {
		return Glob{}, fmt.Errorf("pattern ends with a backslash")
	}
	return g, nil
}

// String returns the pattern as it was written.
func (g Glob) String() string { return g.raw }

// Match reports whether the whole name fits the pattern. Its cost is at most
// the product of both lengths: only the last star is ever revisited, because
// what an earlier star took too little of, a later one can take.
func (g Glob) Match(name string) bool {
	t := 0
	i := 0
	starToken, starName := -1, 0
	for i < len(name) {
		r, w := utf8.DecodeRuneInString(name[i:])
		if t < len(g.tokens) {
			switch tok := g.tokens[t]; {
			case tok.kind == globRun:
				starToken, starName = t, i
				t++
				continue
			case tok.kind == globOne, tok.r == r:
				t++
				i += w
				continue
			}
		}
		if starToken < 0 {
			return false
		}
		_, w = utf8.DecodeRuneInString(name[starName:])
		starName += w
		t, i = starToken+1, starName
	}
	for t < len(g.tokens) && g.tokens[t].kind == globRun {
		t++
	}
	return t == len(g.tokens)
}

// everything reports whether the pattern matches every name.
func (g Glob) everything() bool {
	return len(g.tokens) == 1 && g.tokens[0].kind == globRun
}

// reserved reports whether the pattern begins with a literal underscore, which
// is what it takes to speak about design and local documents.
func (g Glob) reserved() bool {
	return len(g.tokens) > 0 && g.tokens[0] == globToken{kind: globRune, r: '_'}
}

// covers reports whether this pattern surely matches everything the other one
// does. It knows only the plain cases (the same pattern, or "*"): it is used to
// find rules that can never be reached, where missing one is harmless.
func (g Glob) covers(other Glob) bool {
	return g.everything() || g.raw == other.raw
}
