package couch

import (
	"context"
	"errors"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
)

// Defaults of [Options].
const (
	DefaultMaxBody     = 8 << 20
	DefaultMaxBulkDocs = 1000
	DefaultMaxEffect   = 1 << 20
	DefaultMaxWrites   = 64
	DefaultTimeout     = 15 * time.Second
)

// Options configure a [Handler]. Zero values mean the defaults named here.
type Options struct {
	// Upstream is CouchDB's URL; its path is put in front of every target. Its
	// credentials are not used by the handler.
	Upstream *url.URL
	// Policy returns the policy in force; nil means that there is none.
	Policy func() *policy.Policy
	// Leases and Gate decide about writes.
	Leases fence.Leases
	Gate   fence.Gate
	Logger *zap.Logger
	// MaxBody bounds the body of a fenced write, in bytes, after
	// decompression; 8 MiB.
	MaxBody int64
	// MaxBulkDocs bounds the documents of one _bulk_docs; 1,000.
	MaxBulkDocs int
	// MaxEffect bounds the document that the commit log carries; a larger one
	// is settled by looking for its commit id. 1 MiB.
	MaxEffect int
	// MaxWrites bounds fenced writes that are held in memory at once; 64.
	MaxWrites int
	// Timeout bounds how long a fenced write may wait for its turn; 15 s.
	Timeout time.Duration
	// OnVerdict, when set, is told the code of every fenced write that the
	// sidecar decided; an empty code is an accepted one.
	OnVerdict func(code leaseclient.Code)
}

// Handler is the fencing reverse proxy. It is safe for concurrent use.
type Handler struct {
	opts   Options
	up     *client
	proxy  *httputil.ReverseProxy
	cache  *stampCache
	writes chan struct{}
	close  func()
}

// New returns a handler. [Handler.Close] gives its connections up.
func New(o Options) (*Handler, error) {
	switch {
	case o.Upstream == nil || o.Upstream.Host == "" || (o.Upstream.Scheme != "http" && o.Upstream.Scheme != "https"):
		return nil, &leaseclient.InvalidError{Field: "couchdb_url", Reason: "must be http://host[:port][/path] or https://"}
	case o.Leases == nil || o.Gate == nil:
		return nil, errors.New("couch: options name no leases or no gate")
	}
	if o.Policy == nil {
		o.Policy = func() *policy.Policy { return nil }
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.MaxBody <= 0 {
		o.MaxBody = DefaultMaxBody
	}
	if o.MaxBulkDocs <= 0 {
		o.MaxBulkDocs = DefaultMaxBulkDocs
	}
	if o.MaxEffect <= 0 {
		o.MaxEffect = DefaultMaxEffect
	}
	if o.MaxWrites <= 0 {
		o.MaxWrites = DefaultMaxWrites
	}
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.OnVerdict == nil {
		o.OnVerdict = func(leaseclient.Code) {}
	}
	tr := newTransport()
	h := &Handler{
		opts: o, up: &client{base: o.Upstream, transport: tr}, cache: newStampCache(),
		writes: make(chan struct{}, o.MaxWrites), close: tr.CloseIdleConnections,
	}
	h.proxy = &httputil.ReverseProxy{
		Transport:     tr,
		FlushInterval: -1,
		Rewrite: func(p *httputil.ProxyRequest) {
			req, _ := p.In.Context().Value(requestKey{}).(*request)
			p.Out.Method = req.method
			p.Out.URL = h.up.url(req.target)
			p.Out.Host = o.Upstream.Host
			p.Out.Header = forwardHeaders(p.In.Header)
		},
		ModifyResponse: func(res *http.Response) error {
			req, _ := res.Request.Context().Value(requestKey{}).(*request)
			h.relocate(res.Header, req.host)
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() != nil {
				return
			}
			h.refuse(w, r, upstreamError(err))
		},
		ErrorLog: zap.NewStdLog(o.Logger),
	}
	return h, nil
}

// Close gives idle connections up.
func (h *Handler) Close() { h.close() }

// requestKey carries a judged request through a context.
type requestKey struct{}

// request is one request as it was judged.
type request struct {
	method string
	target target
	host   string
	judged judgement
	policy *policy.Policy
}

// upstreamError is the answer when CouchDB could not be reached at all.
func upstreamError(err error) error {
	return &leaseclient.Error{
		Code: leaseclient.CodeUpstreamUnavailable, Op: "reach CouchDB", RetryAfter: time.Second,
		Detail: "CouchDB cannot be reached; nothing was written", Err: err,
	}
}

// relocate turns the upstream's own address in a Location into the one that the
// worker knows.
func (h *Handler) relocate(header http.Header, host string) {
	loc := header.Get("Location")
	u, err := url.Parse(loc)
	if loc == "" || err != nil || u.Host != h.opts.Upstream.Host {
		return
	}
	u.Scheme, u.Host = "http", host
	path := u.EscapedPath()
	u.RawPath = strings.TrimPrefix(path, strings.TrimSuffix(h.opts.Upstream.EscapedPath(), "/"))
	u.Path, _ = url.PathUnescape(u.RawPath)
	header.Set("Location", u.String())
}

// fields are what a log line about a request says. It never shows the target:
// ids can hold another owner's data.
func fields(r *http.Request, e *leaseclient.Error, correlation string) []zap.Field {
	return []zap.Field{
		zap.String("adapter", "couch"), zap.String("method", r.Method), zap.String("code", string(e.Code)),
		zap.String("correlation_id", correlation), zap.NamedError("cause", e),
	}
}

// ServeHTTP judges a request by the table and the policy, and sends it one of
// three ways: through, to the fence, or back with a reason.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	t, err := parseTarget(r.RequestURI)
	if err != nil {
		couchError(w, http.StatusBadRequest, "bad_request", "invalid_url_encoding")
		return
	}
	req := &request{method: effectiveMethod(r), target: t, host: r.Host, policy: h.opts.Policy()}
	req.judged = classify(req.method, t)
	j, p := req.judged, req.policy
	switch {
	case j.class == classRead:
		h.pass(w, r, req)
	case j.class == classEndpoint:
		if p.Opened(j.database, j.endpoint) || (j.database != "" && p.Free(j.database) && harmless(j.endpoint)) {
			h.pass(w, r, req)
			return
		}
		h.refuse(w, r, unsupported(string(j.endpoint)+" is not fenced and not opened by the policy"))
	case j.database != "" && p.Free(j.database):
		h.pass(w, r, req)
	case j.class == classUnfenceable:
		h.refuse(w, r, unsupported(j.what+" is not fenced yet; write the whole document instead"))
	case j.class == classUnknown:
		h.refuse(w, r, unsupported("this request is not known to be harmless"))
	default:
		h.write(w, r, req)
	}
}

// harmless reports whether an endpoint stays inside its own database, so that a
// database without a fence may use it freely.
func harmless(e policy.Endpoint) bool {
	switch e {
	case policy.EndpointRewrite, policy.EndpointReplicate, policy.EndpointNode:
		return false
	default:
		return true
	}
}

// unsupported is the refusal of what cannot be fenced.
func unsupported(detail string) error {
	return &leaseclient.Error{Code: leaseclient.CodeUnsupported, Op: "classify", Detail: detail}
}

// pass sends a request through.
func (h *Handler) pass(w http.ResponseWriter, r *http.Request, req *request) {
	h.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, req)))
}

// write takes a place among the fenced writes and hands the request to the one
// that knows its kind.
func (h *Handler) write(w http.ResponseWriter, r *http.Request, req *request) {
	if err := refusedOptions(req); err != nil {
		h.refuse(w, r, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), h.opts.Timeout)
	defer cancel()
	select {
	case h.writes <- struct{}{}:
		defer func() { <-h.writes }()
	case <-ctx.Done():
		h.refuse(w, r, &leaseclient.Error{
			Code: leaseclient.CodeRateLimited, Op: "write", RetryAfter: time.Second,
			Detail: "too many writes are waiting in this sidecar",
		})
		return
	}
	r = r.WithContext(ctx)
	// A body that never comes must not hold the place for ever. The server lifts
	// the deadline before the next request.
	if err := http.NewResponseController(w).SetReadDeadline(time.Now().Add(h.opts.Timeout)); err != nil {
		h.opts.Logger.Debug("reads have no deadline here", zap.Error(err))
	}
	if req.judged.class == classBulk {
		h.bulk(w, r, req)
		return
	}
	h.single(w, r, req)
}

// refusedOptions finds what takes the condition away from a write.
func refusedOptions(req *request) error {
	no := func(e policy.Endpoint, name string) error {
		if req.policy.Opened(req.judged.database, e) {
			return nil
		}
		return unsupported(name + " takes the revision condition away from a write; leave it out")
	}
	if v, ok := req.target.last("new_edits"); ok && v != "true" {
		if err := no(policy.EndpointNewEdits, "new_edits=false"); err != nil {
			return err
		}
	}
	if v, ok := req.target.first("batch"); ok && v != "" {
		if err := no(policy.EndpointBatch, "batch"); err != nil {
			return err
		}
	}
	if _, ok := req.target.first("w"); ok {
		return no(policy.EndpointQuorum, "w")
	}
	return nil
}
