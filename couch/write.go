package couch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/starintel/fencerider/couch/jsonedit"
	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/failpoint"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
)

// errLate is what a body answers when its acceptance has run out.
var errLate = errors.New("the time to send this write has run out")

// lateBody is the last look: it hands out nothing when an acceptance has run
// out. CouchDB commits nothing before it has the whole body.
type lateBody struct {
	accepted []*fence.Accepted
	r        *bytes.Reader
	looked   bool
}

// Read implements [io.Reader].
func (b *lateBody) Read(p []byte) (int, error) {
	if !b.looked {
		for _, a := range b.accepted {
			if a.Late() {
				return 0, errLate
			}
		}
		b.looked = true
		failpoint.Hit("couch.before-send")
	}
	return b.r.Read(p)
}

// named returns the lease that a request names.
func named(r *http.Request) string { return strings.TrimSpace(r.Header.Get("Fencerider-Lease")) }

// commitID is the worker's own where it made the write repeatable, else random.
func commitID(r *http.Request, lockKey, part string) string {
	key := r.Header.Get("Idempotency-Key")
	if key == "" {
		return leaseclient.NewID("commit")
	}
	sum := sha256.Sum256([]byte(lockKey + "\x00" + key + "\x00" + part))
	return "commit_" + hex.EncodeToString(sum[:16])
}

// newDocumentID is what the sidecar calls a document that came without an id.
func newDocumentID() string {
	sum := sha256.Sum256([]byte(leaseclient.NewID("doc")))
	return hex.EncodeToString(sum[:16])
}

// headerSource answers {header.<name>} of a policy.
func headerSource(header http.Header) func(string) policy.Value {
	return func(name string) policy.Value {
		switch v := header.Values(name); len(v) {
		case 0:
			return policy.Value{}
		case 1:
			return policy.Value{Kind: policy.Text, Text: v[0]}
		default:
			return policy.Value{Kind: policy.Repeated}
		}
	}
}

// judged is one document write, ready for the gate.
type judged struct {
	effect   effect
	rev      revision
	decision policy.Decision
	ref      leaseclient.Ref
	commit   leaseclient.Commit
	// seen is the winner, when a look was needed for the policy.
	seen *document
}

// fail answers with an error of whatever kind.
func (h *Handler) fail(w http.ResponseWriter, r *http.Request, err error) {
	if a, ok := errors.AsType[*errAnswered](err); ok {
		couchError(w, a.status, a.word, a.reason)
		return
	}
	if u, ok := errors.AsType[*errUpstream](err); ok {
		h.relay(w, r, u.status, u.header, u.body)
		return
	}
	if errors.Is(err, errNoDatabase) {
		couchError(w, http.StatusNotFound, "not_found", "Database does not exist.")
		return
	}
	if _, ok := errors.AsType[*leaseclient.Error](err); !ok {
		err = upstreamError(err)
	}
	h.refuse(w, r, err)
}

// relay passes an answer of CouchDB on.
func (h *Handler) relay(w http.ResponseWriter, r *http.Request, code int, header http.Header, body []byte) {
	h.relocate(header, r.Host)
	for name, values := range header {
		switch name {
		case "Connection", "Transfer-Encoding", "Content-Length", "Keep-Alive":
			continue
		}
		w.Header()[name] = values
	}
	w.WriteHeader(code)
	_, _ = w.Write(body)
}

// single handles PUT, DELETE and POST /db.
func (h *Handler) single(w http.ResponseWriter, r *http.Request, req *request) {
	j, err := h.prepare(r, req)
	if err != nil {
		h.verdict(err)
		h.fail(w, r, err)
		return
	}
	if j == nil {
		// The policy lets it through as it is.
		h.pass(w, r, req)
		return
	}
	a, err := h.accept(r, req, j)
	if err != nil {
		h.verdict(err)
		h.fail(w, r, err)
		return
	}
	h.verdict(nil)
	if prior, ok := a.Prior(); ok {
		h.answerPrior(w, r, req, j, a, prior)
		return
	}
	h.send(w, r, req, j, a)
}

// verdict tells the metrics.
func (h *Handler) verdict(err error) {
	if _, ok := errors.AsType[*errAnswered](err); ok {
		return
	}
	h.opts.OnVerdict(leaseclient.CodeOf(err))
}

// prepare reads the write and finds the lease it needs. It returns nil when the
// policy asks for none; the body can be read again then.
func (h *Handler) prepare(r *http.Request, req *request) (*judged, error) {
	if isMultipart(r) {
		return nil, unsupported("multipart documents are not fenced yet; send attachments inline")
	}
	var doc []byte
	var o *jsonedit.Object
	if req.judged.class != classDelete {
		raw, err := h.readBody(r)
		if err != nil {
			return nil, err
		}
		if o, err = h.parseDocument(raw); err != nil {
			return nil, err
		}
		doc = o.Bytes()
		r.Body = io.NopCloser(bytes.NewReader(raw))
		r.ContentLength = int64(len(raw))
		r.Header.Del("Content-Encoding")
	}
	rev, err := condition(r, req, o)
	if err != nil {
		return nil, err
	}
	id, err := h.documentID(r, req, o)
	if err != nil {
		return nil, err
	}
	j := &judged{rev: rev}
	if req.judged.class == classDelete {
		if j.seen, err = h.look(r, req, id, true); err != nil {
			return nil, err
		}
		doc = j.seen.body
	}
	if err := h.decide(r, req, j, req.judged.database, id, doc); err != nil {
		return nil, err
	}
	if j.decision.Verdict == policy.Off || j.decision.Verdict == policy.Pass {
		return nil, nil
	}
	if req.judged.class == classDelete {
		switch {
		case !j.seen.exists:
			return nil, &errAnswered{http.StatusNotFound, "not_found", "missing"}
		case j.seen.deleted:
			return nil, &errAnswered{http.StatusNotFound, "not_found", "deleted"}
		case rev.none():
			return nil, errConflict
		}
		doc = []byte(`{"_deleted":true}`)
	}
	return j, h.seal(r, req, j, id, doc)
}

// documentID is the id under which the document will be stored.
func (h *Handler) documentID(r *http.Request, req *request, o *jsonedit.Object) (string, error) {
	id := req.judged.id
	if req.judged.class == classCreate {
		if ct, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); ct != "application/json" {
			return "", &errAnswered{http.StatusUnsupportedMediaType, "bad_content_type", "Content-Type must be application/json"}
		}
		v, found := o.Member("_id")
		if !found {
			return newDocumentID(), nil
		}
		text, ok := v.Text()
		if !ok || text == "" {
			return "", &errAnswered{http.StatusBadRequest, "illegal_docid", "Document id must be a string that is not empty"}
		}
		id = text
	}
	return id, reservedID(req.policy, id)
}

// reservedID refuses ids that CouchDB does not treat as documents of the worker.
func reservedID(p *policy.Policy, id string) error {
	switch {
	case strings.HasPrefix(id, "_local/"):
		return unsupported("local documents have no revisions that a write could be conditioned on")
	case strings.HasPrefix(id, "_design/"):
		if p == nil {
			return unsupported("design documents hold code that runs in the database; a policy rule must name them")
		}
	case strings.HasPrefix(id, "_"):
		return &errAnswered{http.StatusBadRequest, "illegal_docid", "Only reserved document ids may start with underscore."}
	}
	return nil
}

// decide asks the policy which lease the write needs, and finds it.
func (h *Handler) decide(r *http.Request, req *request, j *judged, database, id string, doc []byte) error {
	var err error
	j.decision, err = req.policy.ResolveDocument(policy.DocumentWrite{Database: database, ID: id, Doc: doc, Header: headerSource(r.Header)})
	if err != nil {
		return &leaseclient.Error{Code: leaseclient.CodePolicyDenied, Op: "resolve identity", Detail: j.decision.Reason, Err: err}
	}
	if j.decision.Verdict == policy.Off || j.decision.Verdict == policy.Pass {
		return nil
	}
	j.ref, err = fence.Choose(h.opts.Leases, j.decision, named(r))
	return err
}

// seal makes the commit.
func (h *Handler) seal(r *http.Request, req *request, j *judged, id string, doc []byte) error {
	j.effect = effect{
		Version: effectVersion, Database: req.judged.database, ID: id, Rev: j.rev.String(),
		Member: req.policy.StampMember(), Shared: j.decision.Shared, doc: doc,
	}
	j.commit = leaseclient.Commit{
		ID:   commitID(r, j.ref.LockKey, targetOf(j.effect.Database, id)),
		Kind: leaseclient.KindDocument, Target: targetOf(j.effect.Database, id),
	}
	if len(j.commit.Target) > leaseclient.MaxTargetBytes {
		return &leaseclient.Error{Code: leaseclient.CodeTooLarge, Op: "seal", Detail: "the document's id is too long"}
	}
	b, err := j.effect.encode()
	if err != nil {
		return err
	}
	if len(b) <= h.opts.MaxEffect {
		j.commit.Effect = b
	}
	return nil
}

// credentials are the headers of a look on behalf of the worker.
func credentials(r *http.Request) http.Header {
	out := make(http.Header)
	for _, name := range credentialHeaders {
		if v := r.Header.Values(name); len(v) > 0 {
			out[http.CanonicalHeaderKey(name)] = v
		}
	}
	return out
}

// look reads the winner with the worker's credentials.
func (h *Handler) look(r *http.Request, req *request, id string, withBody bool) (*document, error) {
	return h.up.look(r.Context(), h.cache, req.judged.database, id, req.policy.StampMember(), credentials(r), withBody)
}

// accept runs Begin and the look at the winner side by side, and then judges.
// An accepted commit whose check fails is ended here.
func (h *Handler) accept(r *http.Request, req *request, j *judged) (*fence.Accepted, error) {
	failpoint.Hit("couch.before-begin")
	type looked struct {
		d   *document
		err error
	}
	look := make(chan looked, 1)
	go func() {
		if j.seen != nil {
			look <- looked{d: j.seen}
			return
		}
		d, err := h.look(r, req, j.effect.ID, false)
		look <- looked{d, err}
	}()
	as, err := h.opts.Gate.Begin(r.Context(), j.ref, []leaseclient.Commit{j.commit})
	l := <-look
	if err != nil {
		return nil, err
	}
	a := as[0]
	if _, ok := a.Prior(); ok {
		return a, nil
	}
	if l.err == nil {
		l.err = h.checkWinner(r, req, j, l.d)
	}
	if l.err != nil {
		h.opts.Gate.End(a, checkOutcome(l.err))
		return nil, l.err
	}
	failpoint.Hit("couch.after-begin")
	return a, nil
}

// checkWinner judges a write against the winner it is going to replace. Where the
// identity comes from the worker's own document and the stored one carries no
// stamp that could disagree, its content is asked: a worker must not take a
// document of another target over by writing its own target into it.
func (h *Handler) checkWinner(r *http.Request, req *request, j *judged, d *document) error {
	if err := check(d, j.rev, j.ref.LockKey, j.ref.LeaseID, j.ref.Token, j.decision.Shared); err != nil {
		return err
	}
	if !j.decision.FromBody || !d.exists || d.deleted || d.stamp != nil || j.decision.Shared {
		return nil
	}
	if d.body == nil {
		var err error
		if d, err = h.look(r, req, j.effect.ID, true); err != nil {
			return err
		}
	}
	stored, err := req.policy.ResolveDocument(policy.DocumentWrite{
		Database: j.effect.Database, ID: j.effect.ID, Doc: d.body, Header: headerSource(r.Header),
	})
	if err == nil && stored.Verdict == policy.Fenced && stored.Identity != j.decision.Identity {
		return &leaseclient.Error{
			Code: leaseclient.CodeLockMismatch, Op: "check winner", Detail: "the stored document belongs to another target",
		}
	}
	return nil
}

// checkOutcome tells a write that the winner stands against from one whose look
// failed. The first is final; the second was never judged and never sent, so the
// same commit id may be asked for again.
func checkOutcome(err error) leaseclient.Outcome {
	if _, ok := errors.AsType[*errAnswered](err); ok {
		return leaseclient.OutcomeRefused
	}
	if _, ok := errors.AsType[*leaseclient.Error](err); ok {
		return leaseclient.OutcomeRefused
	}
	return leaseclient.OutcomeCancelled
}

// answered is an answer of CouchDB to a write.
type answered struct {
	status int
	header http.Header
	body   []byte
}

// roundTrip sends a write within the time its acceptance leaves. It is not bound
// to the worker's connection: the write is accepted, and somebody will finish it.
func (h *Handler) roundTrip(r *http.Request, method string, t target, body []byte, accepted []*fence.Accepted) (*answered, error) {
	remaining := h.opts.Timeout
	for _, a := range accepted {
		remaining = min(remaining, a.Remaining())
	}
	if remaining <= 0 {
		return nil, errLate
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), remaining)
	defer cancel()
	header := forwardHeaders(r.Header)
	for _, name := range []string{"If-Match", "Content-Encoding", "Content-Length", "Expect", "Accept-Encoding"} {
		header.Del(name)
	}
	header.Set("Content-Type", "application/json")
	out := h.up.request(ctx, method, t, header, &lateBody{accepted: accepted, r: bytes.NewReader(body)}, int64(len(body)))
	res, err := h.up.transport.RoundTrip(out)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxLook))
	if err != nil {
		return nil, err
	}
	return &answered{res.StatusCode, res.Header, b}, nil
}

// send makes the effect and answers by it.
func (h *Handler) send(w http.ResponseWriter, r *http.Request, req *request, j *judged, a *fence.Accepted) {
	body, err := j.effect.stamped(a.Stamp)
	if err != nil {
		h.opts.Gate.End(a, leaseclient.OutcomeRefused)
		h.fail(w, r, badRequest("invalid UTF-8 JSON"))
		return
	}
	t := docTarget(j.effect.Database, j.effect.ID)
	t.query = req.target.without("rev", "new_edits", "batch", "w").query
	res, err := h.roundTrip(r, http.MethodPut, t, body, []*fence.Accepted{a})
	failpoint.Hit("couch.after-effect")
	if err != nil || res.status >= http.StatusInternalServerError {
		h.settle(w, r, req, j, a)
		return
	}
	if res.status >= http.StatusMultipleChoices {
		h.opts.Gate.End(a, leaseclient.OutcomeRefused)
		h.relay(w, r, res.status, res.header, res.body)
		return
	}
	h.opts.Gate.End(a, leaseclient.OutcomeConfirmed)
	if rev, ok := answeredRevision(res.body); ok {
		h.cache.put(j.effect.Database, j.effect.ID, rev, &a.Stamp)
	}
	if req.judged.class == classDelete {
		res.header.Del("Location")
		if res.status == http.StatusCreated {
			res.status = http.StatusOK
		}
	}
	if req.judged.class == classCreate {
		res.header.Del("Etag")
		if res.status == http.StatusOK {
			res.status = http.StatusCreated
		}
	}
	h.relay(w, r, res.status, res.header, res.body)
}

// answeredRevision reads the revision out of an answer.
func answeredRevision(body []byte) (revision, bool) {
	o, err := jsonedit.ParseObject(body, jsonedit.Limits{})
	if err != nil {
		return revision{}, false
	}
	v, _ := o.Member("rev")
	text, _ := v.Text()
	return parseRevision(text)
}

// settle hands a write over whose answer never came, waits for its fate as long
// as the worker's time allows, and answers by it.
func (h *Handler) settle(w http.ResponseWriter, r *http.Request, req *request, j *judged, a *fence.Accepted) {
	outcome := h.opts.Gate.Abandon(a).Wait(r.Context())[0]
	h.answerPrior(w, r, req, j, a, outcome)
}

// answerPrior answers for a commit whose effect was not made by this request.
func (h *Handler) answerPrior(w http.ResponseWriter, r *http.Request, req *request, j *judged, a *fence.Accepted, o leaseclient.Outcome) {
	switch o {
	case leaseclient.OutcomeConfirmed:
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), h.opts.Timeout)
		defer cancel()
		d, err := h.up.look(ctx, h.cache, j.effect.Database, j.effect.ID, j.effect.Member, credentials(r), true)
		if err == nil && d.stamp != nil && d.stamp.CommitID == a.Commit.ID {
			code := http.StatusCreated
			if req.judged.class == classDelete {
				code = http.StatusOK
			}
			w.Header().Set("Etag", `"`+d.rev.String()+`"`)
			writeJSON(w, code, savedRow{OK: true, ID: j.effect.ID, Rev: d.rev.String()})
			return
		}
		// It was written and has been replaced since. There is no revision to
		// name that a next write could use.
		conflict(w)
	case leaseclient.OutcomeRefused:
		conflict(w)
	case leaseclient.OutcomeUnknown, leaseclient.OutcomeCancelled, leaseclient.OutcomeQuarantined:
		h.refuse(w, r, outcomeUnknown())
	}
}

// outcomeUnknown is the answer for an accepted write whose fate is open.
func outcomeUnknown() *leaseclient.Error {
	return &leaseclient.Error{
		Code: leaseclient.CodeOutcomeUnknown, Op: "write", RetryAfter: time.Second,
		Detail: "the write was accepted and its answer never came; it is being settled",
	}
}

// savedRow is CouchDB's word for a document that was written.
type savedRow struct {
	OK  bool   `json:"ok"`
	ID  string `json:"id"`
	Rev string `json:"rev"`
}
