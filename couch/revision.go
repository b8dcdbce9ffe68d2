package couch

import (
	"strconv"
	"strings"

	"github.com/starintel/fencerider/couch/jsonedit"
)

// revision is a parsed revision. CouchDB takes several spellings for one, so
// they are compared parsed and written in one.
type revision struct {
	gen  uint64
	hash string
}

// parseRevision reads "N-hash". The zero revision stands for "none".
func parseRevision(s string) (revision, bool) {
	n, hash, ok := strings.Cut(s, "-")
	if !ok || hash == "" || len(hash) > 128 {
		return revision{}, false
	}
	gen, err := strconv.ParseUint(strings.TrimPrefix(n, "+"), 10, 53)
	if err != nil || gen == 0 {
		return revision{}, false
	}
	hash = strings.ToLower(hash)
	for i := range len(hash) {
		if unhex(hash[i]) < 0 {
			return revision{}, false
		}
	}
	return revision{gen, hash}, true
}

// String writes the revision, or nothing for none.
func (r revision) String() string {
	if r.gen == 0 {
		return ""
	}
	return strconv.FormatUint(r.gen, 10) + "-" + r.hash
}

// none reports whether there is no revision.
func (r revision) none() bool { return r.gen == 0 }

// less orders revisions the way CouchDB picks a winner among equals.
func (r revision) less(o revision) bool {
	if r.gen != o.gen {
		return r.gen < o.gen
	}
	return r.hash < o.hash
}

// memberRevision reads the _rev of a document. ok is false when there is one
// that is not a revision.
func memberRevision(o *jsonedit.Object) (revision, bool) {
	v, found := o.Member("_rev")
	if !found {
		return revision{}, true
	}
	text, isText := v.Text()
	if !isText {
		return revision{}, false
	}
	return parseRevision(text)
}
