package couch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/starintel/fencerider/couch/jsonedit"
	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/failpoint"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
)

// lookAhead bounds how many documents of one _bulk_docs are looked at side by
// side.
const lookAhead = 8

// bulkRow is one document of a _bulk_docs and what became of it.
type bulkRow struct {
	id string
	j  *judged
	a  *fence.Accepted
	// doc is what goes upstream.
	doc []byte
	// answer is the row of the answer, once it is known.
	answer json.RawMessage
	// err is why the sidecar refused it.
	err error
}

// refusedRow is a row of the answer that is the sidecar's own.
type refusedRow struct {
	ID string `json:"id"`
	refusal
}

// bulk handles _bulk_docs: every document is judged by itself, and those that
// pass are written by one request.
func (h *Handler) bulk(w http.ResponseWriter, r *http.Request, req *request) {
	body, rows, err := h.readBulk(r, req)
	if err != nil {
		h.verdict(err)
		h.fail(w, r, err)
		return
	}
	if err := h.prepareRows(r, req, rows); err != nil {
		h.fail(w, r, err)
		return
	}
	failpoint.Hit("couch.before-begin")
	h.beginRows(r, rows)
	h.checkRows(r, req, rows)
	failpoint.Hit("couch.after-begin")
	h.stampRows(rows)
	res, err := h.sendRows(r, req, body, rows)
	if err != nil {
		h.fail(w, r, err)
		return
	}
	if res != nil {
		h.relay(w, r, res.status, res.header, res.body)
		return
	}
	out := make([]json.RawMessage, len(rows))
	for i, row := range rows {
		out[i] = row.answer
		if row.answer == nil {
			out[i] = rowOf(row.id, row.err)
		}
		h.verdict(row.err)
	}
	writeJSON(w, http.StatusCreated, out)
}

// rowOf is the row of a document that was not written.
func rowOf(id string, err error) json.RawMessage {
	row := refusedRow{ID: id}
	if a, ok := errors.AsType[*errAnswered](err); ok {
		row.Error, row.Reason = a.word, a.reason
	} else {
		row.refusal = refusalOf(leaseclient.AsError(err))
	}
	b, merr := json.Marshal(row)
	if merr != nil {
		// Strings and a boolean always encode.
		return json.RawMessage(`{"error":"internal_server_error","reason":"row cannot be encoded"}`)
	}
	return b
}

// readBulk reads the request and takes it apart.
func (h *Handler) readBulk(r *http.Request, req *request) (*jsonedit.Object, []*bulkRow, error) {
	if ct, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); ct != "application/json" {
		return nil, nil, &errAnswered{http.StatusUnsupportedMediaType, "bad_content_type", "Content-Type must be application/json"}
	}
	raw, err := h.readBody(r)
	if err != nil {
		return nil, nil, err
	}
	body, err := jsonedit.ParseObject(raw, jsonedit.Limits{MaxBytes: int(h.opts.MaxBody)})
	switch {
	case errors.Is(err, jsonedit.ErrNotObject):
		return nil, nil, badRequest("Request body must be a JSON object")
	case err != nil:
		return nil, nil, badRequest("invalid UTF-8 JSON")
	}
	if v, found := body.Member("new_edits"); found && !v.True() && !req.policy.Opened(req.judged.database, policy.EndpointNewEdits) {
		return nil, nil, unsupported("new_edits=false takes the revision condition away from a write; leave it out")
	}
	if _, found := body.Member("w"); found && !req.policy.Opened(req.judged.database, policy.EndpointQuorum) {
		return nil, nil, unsupported("w takes the revision condition away from a write; leave it out")
	}
	docs, found := body.Member("docs")
	if !found || docs.Kind() != jsonedit.Array {
		return nil, nil, badRequest("POST body must include `docs` parameter.")
	}
	var rows []*bulkRow
	seen := make(map[string]bool)
	for v := range docs.Elements() {
		if len(rows) == h.opts.MaxBulkDocs {
			return nil, nil, &leaseclient.Error{
				Code: leaseclient.CodeTooLarge, Op: "read bulk",
				Detail: fmt.Sprintf("more than %d documents in one request", h.opts.MaxBulkDocs),
			}
		}
		row, err := h.readRow(r, req, v)
		if err != nil {
			return nil, nil, err
		}
		if row.err == nil && seen[row.id] {
			// CouchDB takes the first of two, too.
			row.err = errConflict
		}
		seen[row.id] = true
		rows = append(rows, row)
	}
	return body, rows, nil
}

// readRow reads one document. An error of the whole request is returned, one of
// the row alone goes into the row.
func (h *Handler) readRow(_ *http.Request, req *request, v jsonedit.Value) (*bulkRow, error) {
	row := &bulkRow{doc: v.Bytes()}
	o, err := h.parseDocument(v.Bytes())
	if _, ok := errors.AsType[*errAnswered](err); ok {
		return nil, err
	}
	if err != nil {
		row.err = err
		if o, ok := v.Object(); ok {
			if m, found := o.Member("_id"); found {
				row.id, _ = m.Text()
			}
		}
		return row, nil
	}
	m, found := o.Member("_id")
	if !found {
		row.id = newDocumentID()
	} else {
		text, ok := m.Text()
		if !ok || text == "" {
			return nil, &errAnswered{http.StatusBadRequest, "illegal_docid", "Document id must be a string that is not empty"}
		}
		row.id = text
	}
	if err := reservedID(req.policy, row.id); err != nil {
		if _, ok := errors.AsType[*errAnswered](err); ok {
			return nil, err
		}
		row.err = err
		return row, nil
	}
	rev, ok := memberRevision(o)
	if !ok {
		return nil, badRequest("Invalid rev format")
	}
	row.j = &judged{rev: rev}
	return row, nil
}

// prepareRows resolves the lease of every document.
func (h *Handler) prepareRows(r *http.Request, req *request, rows []*bulkRow) error {
	return eachRow(rows, func(row *bulkRow) error {
		doc := row.doc
		if o, err := jsonedit.ParseObject(row.doc, jsonedit.Limits{MaxBytes: int(h.opts.MaxBody)}); err == nil {
			if v, found := o.Member("_deleted"); found && v.True() {
				// A tombstone has nothing to read an identity from; what it
				// deletes has.
				d, err := h.look(r, req, row.id, true)
				if err != nil {
					return err
				}
				row.j.seen = d
				if d.exists && !d.deleted {
					doc = d.body
				}
			}
		}
		if err := h.decide(r, req, row.j, req.judged.database, row.id, doc); err != nil {
			row.err = err
			return nil
		}
		if v := row.j.decision.Verdict; v == policy.Off || v == policy.Pass {
			row.j = nil
			return nil
		}
		row.err = h.seal(r, req, row.j, row.id, row.doc)
		return nil
	})
}

// eachRow does something for every row that is still in, a few at a time. An
// error is one of the whole request.
func eachRow(rows []*bulkRow, f func(*bulkRow) error) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var first error
	places := make(chan struct{}, lookAhead)
	for _, row := range rows {
		if row.err != nil || row.j == nil {
			continue
		}
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			if err := f(row); err != nil {
				mu.Lock()
				defer mu.Unlock()
				if first == nil {
					first = err
				}
			}
		})
	}
	wg.Wait()
	return first
}

// maxBatch is the most commits that one Begin takes.
const maxBatch = 128

// beginRows asks the gate, one Begin a lock, in the order of the request.
func (h *Handler) beginRows(r *http.Request, rows []*bulkRow) {
	var order []leaseclient.Ref
	byRef := make(map[leaseclient.Ref][]*bulkRow)
	for _, row := range rows {
		if row.err != nil || row.j == nil {
			continue
		}
		if _, ok := byRef[row.j.ref]; !ok {
			order = append(order, row.j.ref)
		}
		byRef[row.j.ref] = append(byRef[row.j.ref], row)
	}
	for _, ref := range order {
		for group := byRef[ref]; len(group) > 0; {
			n := min(len(group), maxBatch)
			commits := make([]leaseclient.Commit, n)
			for i, row := range group[:n] {
				commits[i] = row.j.commit
			}
			as, err := h.opts.Gate.Begin(r.Context(), ref, commits)
			for i, row := range group[:n] {
				if err != nil {
					row.err = err
				} else {
					row.a = as[i]
				}
			}
			group = group[n:]
		}
	}
}

// checkRows looks at the winners and ends what does not fit.
func (h *Handler) checkRows(r *http.Request, req *request, rows []*bulkRow) {
	_ = eachRow(rows, func(row *bulkRow) error {
		if prior, ok := row.a.Prior(); ok {
			row.err = errConflict
			if prior == leaseclient.OutcomeUnknown {
				row.err = outcomeUnknown()
			}
			return nil
		}
		d, err := row.j.seen, error(nil)
		if d == nil {
			d, err = h.look(r, req, row.id, false)
		}
		if err == nil {
			err = h.checkWinner(r, req, row.j, d)
		}
		if err != nil {
			h.opts.Gate.End(row.a, checkOutcome(err))
			if u, ok := errors.AsType[*errUpstream](err); ok {
				err = &errAnswered{u.status, "forbidden", "CouchDB does not show this document"}
			} else if _, ok := errors.AsType[*errAnswered](err); !ok {
				if _, ok := errors.AsType[*leaseclient.Error](err); !ok {
					err = upstreamError(err)
				}
			}
			row.err = err
		}
		return nil
	})
}

// stampRows writes the documents as they go upstream.
func (h *Handler) stampRows(rows []*bulkRow) {
	for _, row := range rows {
		if row.err != nil || row.j == nil {
			continue
		}
		doc, err := row.j.effect.stamped(row.a.Stamp)
		if err != nil {
			h.opts.Gate.End(row.a, leaseclient.OutcomeRefused)
			row.err = badRequest("invalid UTF-8 JSON")
			continue
		}
		row.doc = doc
	}
}

// sendRows writes what passed. An answer of CouchDB that is about the whole
// request is returned.
func (h *Handler) sendRows(r *http.Request, req *request, body *jsonedit.Object, rows []*bulkRow) (*answered, error) {
	var sent []*bulkRow
	var accepted []*fence.Accepted
	docs := bytes.NewBufferString("[")
	for _, row := range rows {
		if row.err != nil {
			continue
		}
		if len(sent) > 0 {
			docs.WriteByte(',')
		}
		docs.Write(row.doc)
		sent = append(sent, row)
		if row.a != nil {
			accepted = append(accepted, row.a)
		}
	}
	docs.WriteByte(']')
	if len(sent) == 0 {
		return nil, nil
	}
	out, err := body.With(jsonedit.Member{Name: "docs", Value: docs.Bytes()})
	if err != nil {
		for _, a := range accepted {
			h.opts.Gate.End(a, leaseclient.OutcomeCancelled)
		}
		return nil, badRequest("invalid UTF-8 JSON")
	}
	t := target{segments: []string{req.judged.database, "_bulk_docs"}}
	res, err := h.roundTrip(r, http.MethodPost, t, out, accepted)
	failpoint.Hit("couch.after-effect")
	switch {
	case err != nil, res.status >= http.StatusInternalServerError:
		h.settleRows(r, sent)
		return nil, nil
	case res.status >= http.StatusMultipleChoices:
		for _, a := range accepted {
			h.opts.Gate.End(a, leaseclient.OutcomeRefused)
		}
		return res, nil
	}
	h.takeAnswer(r, res, sent)
	return nil, nil
}

// takeAnswer reads CouchDB's row for each document.
func (h *Handler) takeAnswer(r *http.Request, res *answered, sent []*bulkRow) {
	byID := make(map[string]*bulkRow, len(sent))
	for _, row := range sent {
		byID[row.id] = row
	}
	v, err := jsonedit.Parse(res.body, jsonedit.Limits{MaxBytes: maxLook})
	if err == nil {
		for e := range v.Elements() {
			m, _ := e.Member("id")
			id, _ := m.Text()
			row := byID[id]
			if row == nil || row.answer != nil {
				continue
			}
			if h.takeRow(row, e) {
				row.answer = append(json.RawMessage(nil), e.Bytes()...)
			}
		}
	}
	var open []*bulkRow
	for _, row := range sent {
		if row.answer == nil {
			open = append(open, row)
		}
	}
	h.settleRows(r, open)
}

// takeRow ends the commit of one row by CouchDB's word, and reports whether that
// word is final.
func (h *Handler) takeRow(row *bulkRow, e jsonedit.Value) bool {
	okay, _ := e.Member("ok")
	if word, failed := e.Member("error"); failed {
		text, _ := word.Text()
		switch text {
		case "conflict", "forbidden", "unauthorized", "not_found", "bad_request", "doc_validation", "illegal_docid":
			if row.a != nil {
				h.opts.Gate.End(row.a, leaseclient.OutcomeRefused)
			}
			return true
		}
		// Anything else says that something went wrong, not that nothing was
		// written.
		return row.a == nil
	}
	if !okay.True() {
		return row.a == nil
	}
	if row.a != nil {
		h.opts.Gate.End(row.a, leaseclient.OutcomeConfirmed)
		m, _ := e.Member("rev")
		text, _ := m.Text()
		if rev, ok := parseRevision(text); ok {
			h.cache.put(row.j.effect.Database, row.id, rev, &row.a.Stamp)
		}
	}
	return true
}

// settleRows finds out what became of rows whose answer never came.
func (h *Handler) settleRows(r *http.Request, open []*bulkRow) {
	var as []*fence.Accepted
	var rows []*bulkRow
	for _, row := range open {
		if row.a == nil {
			row.err = upstreamUnknown()
			continue
		}
		as = append(as, row.a)
		rows = append(rows, row)
	}
	if len(as) == 0 {
		return
	}
	for i, o := range h.opts.Gate.Abandon(as...).Wait(r.Context()) {
		row := rows[i]
		switch o {
		case leaseclient.OutcomeConfirmed:
			d, err := h.up.look(r.Context(), h.cache, row.j.effect.Database, row.id, row.j.effect.Member, credentials(r), true)
			if err == nil && d.stamp != nil && d.stamp.CommitID == row.a.Commit.ID {
				b, merr := json.Marshal(savedRow{OK: true, ID: row.id, Rev: d.rev.String()})
				if merr == nil {
					row.answer = b
					continue
				}
			}
			row.err = errConflict
		case leaseclient.OutcomeRefused:
			row.err = errConflict
		case leaseclient.OutcomeUnknown, leaseclient.OutcomeCancelled, leaseclient.OutcomeQuarantined:
			row.err = outcomeUnknown()
		}
	}
}

// upstreamUnknown is the answer for an unfenced document whose answer never came.
func upstreamUnknown() error {
	return &leaseclient.Error{
		Code: leaseclient.CodeOutcomeUnknown, Op: "write",
		Detail: "CouchDB did not answer for this document; it is not fenced, so nobody follows it up",
	}
}
