package couch

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"github.com/starintel/fencerider/couch/jsonedit"
	"github.com/starintel/fencerider/leaseclient"
)

// errAnswered carries an answer in CouchDB's own words through an error return.
type errAnswered struct {
	status       int
	word, reason string
}

func (e *errAnswered) Error() string { return e.word + ": " + e.reason }

// badRequest is CouchDB's answer to a body it cannot use.
func badRequest(reason string) error {
	return &errAnswered{http.StatusBadRequest, "bad_request", reason}
}

// readBody reads a body within its bound, inflated where it is compressed.
func (h *Handler) readBody(r *http.Request) ([]byte, error) {
	var in io.Reader = r.Body
	switch enc := r.Header.Get("Content-Encoding"); enc {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, badRequest("Error decompressing the body")
		}
		in = z
	default:
		return nil, &errAnswered{http.StatusUnsupportedMediaType, "bad_content_encoding", "Content-Encoding must be gzip or nothing"}
	}
	body, err := io.ReadAll(io.LimitReader(in, h.opts.MaxBody+1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, &errAnswered{http.StatusRequestTimeout, "timeout", "the body did not come in time"}
	}
	if err != nil {
		return nil, badRequest("the body could not be read")
	}
	if int64(len(body)) > h.opts.MaxBody {
		return nil, &leaseclient.Error{
			Code: leaseclient.CodeTooLarge, Op: "read body",
			Detail: fmt.Sprintf("the body is longer than the limit of %d bytes", h.opts.MaxBody),
		}
	}
	return body, nil
}

// parseDocument reads one document of a write.
func (h *Handler) parseDocument(body []byte) (*jsonedit.Object, error) {
	o, err := jsonedit.ParseObject(body, jsonedit.Limits{MaxBytes: int(h.opts.MaxBody)})
	switch {
	case errors.Is(err, jsonedit.ErrNotObject):
		return nil, badRequest("Document must be a JSON object")
	case err != nil:
		return nil, badRequest("invalid UTF-8 JSON")
	}
	if _, found := o.Member("_revisions"); found {
		return nil, unsupported("_revisions takes the revision condition away from a write; send _rev")
	}
	if v, found := o.Member("_attachments"); found {
		a, ok := v.Object()
		if !ok {
			return nil, badRequest("_attachments must be an object")
		}
		for name := range a.Names() {
			m, _ := a.Member(name)
			if follows, _ := m.Member("follows"); follows.True() {
				return nil, unsupported("an attachment that follows its document is not fenced yet; send it inline")
			}
		}
	}
	return o, nil
}

// isMultipart recognizes what CouchDB takes for a document with attachments
// behind it.
func isMultipart(r *http.Request) bool {
	return strings.HasPrefix(strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Type"))), "multipart/")
}

// condition is the revision that a single write names, from all the places where
// it may stand. They must agree.
func condition(r *http.Request, req *request, o *jsonedit.Object) (revision, error) {
	var found revision
	take := func(text, clash string) error {
		rev, ok := parseRevision(text)
		if !ok {
			return badRequest("Invalid rev format")
		}
		if !found.none() && found != rev {
			return badRequest(clash)
		}
		found = rev
		return nil
	}
	if o != nil {
		rev, ok := memberRevision(o)
		if !ok {
			return revision{}, badRequest("Invalid rev format")
		}
		found = rev
	}
	if req.judged.class == classCreate {
		// CouchDB reads neither of the others here.
		return found, nil
	}
	if v, ok := req.target.first("rev"); ok {
		if err := take(v, "Document rev from request body and query string have different values"); err != nil {
			return revision{}, err
		}
	}
	if values := r.Header.Values("If-Match"); len(values) > 0 {
		if err := take(strings.Trim(strings.Join(values, ", "), `"`), "Document rev and etag have different values"); err != nil {
			return revision{}, err
		}
	}
	return found, nil
}
