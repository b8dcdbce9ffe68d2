package couch

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"

	"github.com/starintel/fencerider/leaseclient"
)

// HeaderCode carries the stable code of every answer that is the sidecar's own.
const HeaderCode = "Fencerider-Code"

// refusal is the body of an answer that is the sidecar's own. The first two
// members are CouchDB's, so that every client finds what it looks for.
type refusal struct {
	Error       string `json:"error"`
	Reason      string `json:"reason"`
	Code        string `json:"code,omitempty"`
	Correlation string `json:"correlation_id,omitempty"`
	Retryable   *bool  `json:"retryable,omitempty"`
}

// status maps a code to what a CouchDB client can make sense of. A lost lease is
// never 409, 408, 429 or 5xx: those are taken for "already there", or repeated
// without an end.
func status(code leaseclient.Code) (int, string) {
	switch code {
	case leaseclient.CodeUnavailable, leaseclient.CodeOutcomeUnknown, leaseclient.CodeDeadlineExceeded:
		return http.StatusServiceUnavailable, "service_unavailable"
	case leaseclient.CodeUpstreamUnavailable:
		return http.StatusServiceUnavailable, "upstream_unavailable"
	case leaseclient.CodeRateLimited:
		return http.StatusTooManyRequests, "too_many_requests"
	case leaseclient.CodeTooLarge:
		return http.StatusRequestEntityTooLarge, "document_too_large"
	case leaseclient.CodeInvalid:
		return http.StatusBadRequest, "bad_request"
	case leaseclient.CodeInternal:
		return http.StatusInternalServerError, "internal_server_error"
	default:
		return http.StatusForbidden, "forbidden"
	}
}

// refusalOf is the body for an error.
func refusalOf(e *leaseclient.Error) refusal {
	_, word := status(e.Code)
	retryable := e.Code.Info().Retryable
	return refusal{
		Error: word, Reason: string(e.Code) + ": " + e.Public(), Code: string(e.Code),
		Correlation: leaseclient.NewID("corr"), Retryable: &retryable,
	}
}

// refuse answers with an error of the sidecar's own and logs it once.
func (h *Handler) refuse(w http.ResponseWriter, r *http.Request, err error) {
	e := leaseclient.AsError(err)
	code, _ := status(e.Code)
	body := refusalOf(e)
	h.opts.Logger.Info("refused a request", fields(r, e, body.Correlation)...)
	w.Header().Set(HeaderCode, string(e.Code))
	if e.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(max(1, int(math.Ceil(e.RetryAfter.Seconds())))))
	}
	writeJSON(w, code, body)
}

// couchError answers as CouchDB itself would.
func couchError(w http.ResponseWriter, code int, word, reason string) {
	writeJSON(w, code, refusal{Error: word, Reason: reason})
}

// conflict is CouchDB's own answer to a revision that does not fit.
func conflict(w http.ResponseWriter) {
	couchError(w, http.StatusConflict, "conflict", "Document update conflict.")
}

// writeJSON writes a body the way CouchDB does, with a line end.
func writeJSON(w http.ResponseWriter, code int, body any) {
	b, err := json.Marshal(body)
	if err != nil {
		// Strings, numbers and raw JSON that was validated always encode.
		code, b = http.StatusInternalServerError, []byte(`{"error":"internal_server_error","reason":"answer cannot be encoded"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "must-revalidate")
	w.WriteHeader(code)
	_, _ = w.Write(append(b, '\n'))
}
