package couch

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/leaseclient"
)

// maxAncestors bounds how far back a commit is looked for in the history of a
// document.
const maxAncestors = 20

// settleTimeout bounds one request of a settlement.
const settleTimeout = 10 * time.Second

// EffectorOptions configure an [Effector].
type EffectorOptions struct {
	// Upstream is CouchDB's URL; its credentials are those of settlement.
	Upstream *url.URL
	// StampMember returns the member that carries stamps, for commits whose
	// document was too large for the log; nil means the default.
	StampMember func() string
	Logger      *zap.Logger
}

// Effector finishes accepted document writes. Every write is conditional and
// carries its commit id, so finishing one that is done already changes nothing.
// It is safe for concurrent use.
type Effector struct {
	opts   EffectorOptions
	up     *client
	header http.Header
	close  func()
}

var _ fence.Effector = (*Effector)(nil)

// NewEffector returns an effector.
func NewEffector(o EffectorOptions) (*Effector, error) {
	if o.Upstream == nil || o.Upstream.Host == "" {
		return nil, &leaseclient.InvalidError{Field: "couchdb_url", Reason: "must be http://host[:port][/path] or https://"}
	}
	if o.StampMember == nil {
		o.StampMember = func() string { return "fence" }
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	tr := newTransport()
	e := &Effector{opts: o, up: &client{base: o.Upstream, transport: tr}, header: make(http.Header), close: tr.CloseIdleConnections}
	e.header.Set("Accept", "application/json")
	e.header["User-Agent"] = []string{"fencerider"}
	if u := o.Upstream.User; u != nil {
		password, _ := u.Password()
		e.header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(u.Username()+":"+password)))
	}
	return e, nil
}

// Close gives idle connections up.
func (e *Effector) Close() { e.close() }

// Settle implements [fence.Effector].
func (e *Effector) Settle(ctx context.Context, entries []leaseclient.Entry) ([]leaseclient.Outcome, error) {
	var out []leaseclient.Outcome
	for _, entry := range entries {
		o, err := e.settle(ctx, entry)
		if err != nil {
			return out, fmt.Errorf("settle document write: %w", err)
		}
		if o == leaseclient.OutcomeQuarantined {
			e.opts.Logger.Warn("set a document write aside that cannot be delivered", zap.String("commit_id", entry.ID))
		}
		out = append(out, o)
	}
	return out, nil
}

// settle finishes one entry: it is done already, or it cannot be done any more,
// or it is done now.
func (e *Effector) settle(ctx context.Context, entry leaseclient.Entry) (leaseclient.Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	if len(entry.Effect) == 0 {
		return e.observe(ctx, entry)
	}
	ef, err := decodeEffect(entry.Effect)
	if err != nil {
		e.opts.Logger.Error("a commit in the log cannot be read", zap.String("commit_id", entry.ID), zap.Error(err))
		return leaseclient.OutcomeQuarantined, nil
	}
	for attempt := 0; ; attempt++ {
		found, winner, err := e.find(ctx, ef.Database, ef.ID, ef.Member, entry.ID)
		switch {
		case errors.Is(err, errNoDatabase):
			return leaseclient.OutcomeQuarantined, nil
		case err != nil:
			return "", err
		case found:
			return leaseclient.OutcomeConfirmed, nil
		}
		rev, _ := parseRevision(ef.Rev)
		if check(winner, rev, entry.LockKey, entry.LeaseID, entry.Token, ef.Shared) != nil {
			return leaseclient.OutcomeRefused, nil
		}
		status, err := e.put(ctx, entry, ef)
		switch {
		case err != nil:
			return "", err
		case status < http.StatusMultipleChoices:
			return leaseclient.OutcomeConfirmed, nil
		case status == http.StatusConflict && attempt == 0:
			// Somebody was faster, perhaps the commit's own sidecar.
			continue
		case status == http.StatusUnauthorized, status >= http.StatusInternalServerError:
			return "", fmt.Errorf("CouchDB answered %d", status)
		case status == http.StatusNotFound:
			return leaseclient.OutcomeQuarantined, nil
		default:
			return leaseclient.OutcomeRefused, nil
		}
	}
}

// observe decides about a write that the log does not carry. It is called after
// the time in which its own sidecar may send it, so what is not there by now was
// not written: only a process that was stopped between its last look and the
// system call can still prove that wrong, and its revision will not fit then.
func (e *Effector) observe(ctx context.Context, entry leaseclient.Entry) (leaseclient.Outcome, error) {
	database, id, err := parseTargetOf(entry.Target)
	if err != nil {
		return leaseclient.OutcomeQuarantined, nil
	}
	found, _, err := e.find(ctx, database, id, e.opts.StampMember(), entry.ID)
	switch {
	case errors.Is(err, errNoDatabase):
		return leaseclient.OutcomeQuarantined, nil
	case err != nil:
		return "", err
	case found:
		return leaseclient.OutcomeConfirmed, nil
	}
	return leaseclient.OutcomeRefused, nil
}

// find looks for a commit in the leaves of a document and a bounded way behind
// them. It also returns the winner.
func (e *Effector) find(ctx context.Context, database, id, member, commitID string) (bool, *document, error) {
	winner, err := e.up.look(ctx, newStampCache(), database, id, member, e.header, true)
	if err != nil {
		return false, nil, err
	}
	if carries(winner, commitID) {
		return true, winner, nil
	}
	if !winner.exists {
		return false, winner, nil
	}
	leaves, err := e.up.leaves(ctx, database, id, member, e.header)
	if err != nil {
		return false, nil, err
	}
	left := maxAncestors
	for _, leaf := range leaves {
		if carries(leaf, commitID) {
			return true, winner, nil
		}
		for _, rev := range leaf.ancestors() {
			if left--; left < 0 {
				return false, winner, nil
			}
			d, err := e.up.at(ctx, database, id, member, rev, e.header)
			if err != nil {
				return false, nil, err
			}
			if d == nil {
				// Compacted away, and so is everything behind it.
				break
			}
			if carries(d, commitID) {
				return true, winner, nil
			}
		}
	}
	return false, winner, nil
}

// carries reports whether a revision was written by a commit.
func carries(d *document, commitID string) bool {
	return d.stamp != nil && d.stamp.CommitID == commitID
}

// put repeats the write with exactly the bytes that its own sidecar would send.
func (e *Effector) put(ctx context.Context, entry leaseclient.Entry, ef effect) (int, error) {
	body, err := ef.stamped(fence.StampOf(entry))
	if err != nil {
		return http.StatusBadRequest, nil
	}
	header := e.header.Clone()
	header.Set("Content-Type", "application/json")
	req := e.up.request(ctx, http.MethodPut, docTarget(ef.Database, ef.ID), header, &settleBody{ctx: ctx, r: bytes.NewReader(body)}, int64(len(body)))
	res, err := e.up.transport.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = res.Body.Close() }()
	if _, err := io.Copy(io.Discard, io.LimitReader(res.Body, maxLook)); err != nil {
		return 0, err
	}
	return res.StatusCode, nil
}

// settleBody is the settler's last look, as lateBody is the handler's.
type settleBody struct {
	ctx    context.Context
	r      *bytes.Reader
	looked bool
}

// Read implements [io.Reader].
func (b *settleBody) Read(p []byte) (int, error) {
	if !b.looked && fence.SettleLate(b.ctx) {
		return 0, fence.ErrSettleLate
	}
	b.looked = true
	return b.r.Read(p)
}
