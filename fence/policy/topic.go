package policy

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Topic matches routing keys the way a topic exchange does: words are separated
// by dots, "*" stands for exactly one word and "#" for any number of words, also
// none. A Topic is immutable and safe for concurrent use.
type Topic struct {
	raw   string
	words []string
}

// ParseTopic compiles a pattern. A star or a hash inside a word would be an
// ordinary character to the broker; it is refused here, because whoever writes
// "new*" means something else than what the broker does.
func ParseTopic(pattern string) (Topic, error) {
	if len(pattern) > maxPatternBytes {
		return Topic{}, fmt.Errorf("pattern is longer than %d bytes", maxPatternBytes)
	}
	if !utf8.ValidString(pattern) {
		return Topic{}, fmt.Errorf("pattern is not valid UTF-8")
	}
	t := Topic{raw: pattern}
	for _, w := range routingWords(pattern) {
		if w != "*" && w != "#" && strings.ContainsAny(w, "*#") {
			return Topic{}, fmt.Errorf("'*' and '#' stand alone between dots")
		}
		// Two hashes in a row mean what one means.
		if n := len(t.words); w == "#" && n > 0 && t.words[n-1] == "#" {
			continue
		}
		t.words = append(t.words, w)
	}
	return t, nil
}

// routingWords splits a routing key into its words. An empty key has no words,
// as at the broker; an empty text between two dots is a word.
func routingWords(key string) []string {
	if key == "" {
		return nil
	}
	return strings.Split(key, ".")
}

// String returns the pattern as it was written.
func (t Topic) String() string { return t.raw }

// Match reports whether the whole key fits the pattern. As in [Glob.Match] only
// the last hash is revisited, so a hostile key costs no more than the product
// of both lengths.
func (t Topic) Match(key string) bool {
	words := routingWords(key)
	p, w := 0, 0
	hash, from := -1, 0
	for w < len(words) {
		if p < len(t.words) {
			switch t.words[p] {
			case "#":
				hash, from = p, w
				p++
				continue
			case "*", words[w]:
				p++
				w++
				continue
			}
		}
		if hash < 0 {
			return false
		}
		from++
		p, w = hash+1, from
	}
	for p < len(t.words) && t.words[p] == "#" {
		p++
	}
	return p == len(t.words)
}

// covers reports whether this pattern surely matches everything the other one
// does; as [Glob.covers] it knows only the plain cases.
func (t Topic) covers(other Topic) bool {
	return slices.Equal(t.words, []string{"#"}) || slices.Equal(t.words, other.words)
}
