package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/couch/jsonedit"
	"github.com/starintel/fencerider/leaseclient"
)

// maxRequest bounds a request's body on the control socket.
const maxRequest = 64 << 10

// headerCorrelation carries a request's correlation id, in and out.
const headerCorrelation = "X-Correlation-Id"

// success is the envelope of an operation that was completed.
type success struct {
	Status      string           `json:"status"`
	Code        leaseclient.Code `json:"code"`
	Correlation string           `json:"correlation_id"`
	RequestID   string           `json:"request_id,omitempty"`
	Replayed    bool             `json:"replayed,omitempty"`
	Lease       *leaseView       `json:"lease,omitempty"`
}

// failure is the envelope of every other answer.
type failure struct {
	Status      string           `json:"status"`
	Code        leaseclient.Code `json:"code"`
	Msg         string           `json:"msg"`
	Correlation string           `json:"correlation_id"`
	RequestID   string           `json:"request_id,omitempty"`
	Retryable   bool             `json:"retryable"`
	RetryAfter  int64            `json:"retry_after_ms,omitempty"`
}

// operation handles one request whose body has been read.
type operation func(ctx context.Context, body []byte) (*success, error)

// requestError says to which request id a failure belongs, so that the caller
// can repeat it under that id.
type requestError struct {
	id  string
	err error
}

func (e *requestError) Error() string { return e.err.Error() }
func (e *requestError) Unwrap() error { return e.err }

// controlHandler is the API of the control socket.
func (s *Sidecar) controlHandler() http.Handler {
	mux := http.NewServeMux()
	post := func(path, name string, op operation) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) { s.operate(w, r, name, op) })
	}
	post("/v1/leases/acquire", "acquire", s.apiAcquire)
	post("/v1/leases/renew", "renew", s.onLease(func(ctx context.Context, k *leaseclient.Keeper, c leaseclient.Call) (*success, error) {
		r, err := k.Renew(ctx, c)
		if err != nil {
			return nil, err
		}
		return onLeaseDone(leaseclient.CodeRenewed, r.Lease, r.Replayed), nil
	}))
	post("/v1/leases/release", "release", s.onLease(func(ctx context.Context, k *leaseclient.Keeper, c leaseclient.Call) (*success, error) {
		r, err := k.Release(ctx, c)
		if err != nil {
			return nil, err
		}
		return onLeaseDone(leaseclient.CodeReleased, r.Lease, r.Replayed), nil
	}))
	post("/v1/leases/inspect", "inspect", s.apiInspect)
	mux.HandleFunc("/v1/status", s.apiStatus)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.fail(w, correlation(r), "", &leaseclient.Error{Code: leaseclient.CodeRouteNotFound, Op: "route"})
	})
	return mux
}

// correlation is the caller's id where it is usable, else a new one.
func correlation(r *http.Request) string {
	if id := r.Header.Get(headerCorrelation); id != "" && leaseclient.ValidateIdentifier("correlation_id", id) == nil {
		return id
	}
	return leaseclient.NewID("corr")
}

// operate reads a request, runs its operation and writes the envelope.
func (s *Sidecar) operate(w http.ResponseWriter, r *http.Request, name string, op operation) {
	id := correlation(r)
	w.Header().Set(headerCorrelation, id)
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		s.fail(w, id, name, &leaseclient.Error{Code: leaseclient.CodeMethodNotAllowed, Op: name})
		return
	}
	// curl sends a form type unless told otherwise; what counts is that nobody
	// meant another format.
	if ct, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); ct != "" && ct != "application/json" && ct != "application/x-www-form-urlencoded" {
		s.fail(w, id, name, &leaseclient.Error{Code: leaseclient.CodeUnsupportedMedia, Op: name})
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		s.fail(w, id, name, &leaseclient.Error{Code: leaseclient.CodeTooLarge, Op: name, Detail: fmt.Sprintf("request is longer than %d bytes or was cut off", maxRequest)})
		return
	}
	out, err := op(r.Context(), body)
	if err != nil {
		s.fail(w, id, name, err)
		return
	}
	out.Status, out.Correlation = "success", id
	s.opts.Metrics.operations.WithLabelValues(name, string(out.Code)).Inc()
	s.answer(w, out.Code.Info().HTTP, out)
}

// fail writes the envelope of a failure.
func (s *Sidecar) fail(w http.ResponseWriter, id, name string, err error) {
	e := leaseclient.AsError(err)
	if name == "" {
		name = "none"
	}
	s.opts.Metrics.operations.WithLabelValues(name, string(e.Code)).Inc()
	s.log.Info("an operation was not completed", zap.String("operation", name), zap.String("code", string(e.Code)), zap.String("correlation_id", id), zap.NamedError("cause", err))
	f := failure{
		Status: "error", Code: e.Code, Msg: e.Public(), Correlation: id,
		Retryable: e.Code.Info().Retryable, RetryAfter: e.RetryAfter.Milliseconds(),
	}
	if re, ok := errors.AsType[*requestError](err); ok {
		f.RequestID = re.id
	}
	w.Header().Set(headerCorrelation, id)
	s.answer(w, e.Code.Info().HTTP, f)
}

// answer writes JSON.
func (s *Sidecar) answer(w http.ResponseWriter, code int, body any) {
	b, err := json.Marshal(body)
	if err != nil {
		code, b = http.StatusInternalServerError, []byte(`{"status":"error","code":"internal_error","msg":"Internal error"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(append(b, '\n'))
}

// decode reads a request strictly: members that nobody knows and members that
// are there twice are refused by name.
func decode(body []byte, into any, known ...string) error {
	if len(strings.TrimSpace(string(body))) == 0 {
		body = []byte("{}")
	}
	o, err := jsonedit.ParseObject(body, jsonedit.Limits{MaxBytes: maxRequest, MaxDepth: 32})
	if err != nil {
		return &leaseclient.InvalidError{Field: "body", Reason: "must be a JSON object"}
	}
	seen := make(map[string]bool)
	for name := range o.Names() {
		switch {
		case !slices.Contains(known, name):
			return &leaseclient.InvalidError{Field: "body", Reason: fmt.Sprintf("has the unknown member %.64q; known are %s", name, strings.Join(known, ", "))}
		case seen[name]:
			return &leaseclient.InvalidError{Field: name, Reason: "is there twice"}
		}
		seen[name] = true
	}
	if err := json.Unmarshal(body, into); err != nil {
		if te, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return &leaseclient.InvalidError{Field: te.Field, Reason: "is of the wrong type"}
		}
		return &leaseclient.InvalidError{Field: "body", Reason: "cannot be read"}
	}
	return nil
}

// identityMembers are the components that a request may name.
var identityMembers = []string{"tenant_id", "program_id", "target_namespace", "target_id", "actor_name", "workflow_name", "operation_class"}

// callMembers are what every operation may carry.
type callMembers struct {
	RequestID string `json:"request_id"`
	Deadline  string `json:"deadline_at"`
}

// call makes the call, with defaults where the worker said nothing.
func (s *Sidecar) call(m callMembers) (leaseclient.Call, error) {
	c := leaseclient.Call{RequestID: m.RequestID, Deadline: time.Now().Add(s.opts.Deadline)}
	if c.RequestID == "" {
		c.RequestID = leaseclient.NewID("request")
	}
	if m.Deadline != "" {
		d, err := time.Parse(time.RFC3339Nano, m.Deadline)
		if err != nil {
			return c, &leaseclient.InvalidError{Field: "deadline_at", Reason: "must be a time such as 2026-08-05T12:00:00.000Z"}
		}
		// The server's ceiling holds, whatever the client asks for.
		c.Deadline = d
		if ceiling := time.Now().Add(s.opts.DeadlineCeiling); d.After(ceiling) {
			c.Deadline = ceiling
		}
	}
	return c, nil
}

// identity completes and canonicalizes the identity of a request.
func (s *Sidecar) identity(id leaseclient.Identity) (leaseclient.Identity, error) {
	d := s.opts.Identity
	for _, f := range [...]struct {
		have *string
		def  string
	}{
		{&id.TenantID, d.TenantID}, {&id.ProgramID, d.ProgramID}, {&id.TargetNamespace, d.TargetNamespace}, {&id.TargetID, d.TargetID},
		{&id.ActorName, d.ActorName}, {&id.WorkflowName, d.WorkflowName}, {&id.OperationClass, d.OperationClass},
	} {
		if *f.have == "" {
			*f.have = f.def
		}
	}
	n, err := id.Normalize()
	if err != nil {
		return n, err
	}
	if len(s.opts.Classes) > 0 && !slices.Contains(s.opts.Classes, n.OperationClass) {
		return n, &leaseclient.InvalidError{Field: "operation_class", Reason: "is not one of this deployment's"}
	}
	return n, nil
}

// apiAcquire grants a lease and keeps it.
func (s *Sidecar) apiAcquire(ctx context.Context, body []byte) (*success, error) {
	var in struct {
		leaseclient.Identity
		callMembers
		TTL         int64          `json:"ttl_ms"`
		Lifetime    int64          `json:"maximum_lifetime_ms"`
		ExecutionID string         `json:"execution_id"`
		JobID       string         `json:"job_id"`
		TraceID     string         `json:"trace_id"`
		Metadata    map[string]any `json:"metadata"`
	}
	known := append([]string{"request_id", "deadline_at", "ttl_ms", "maximum_lifetime_ms", "execution_id", "job_id", "trace_id", "metadata"}, identityMembers...)
	if err := decode(body, &in, known...); err != nil {
		return nil, err
	}
	call, err := s.call(in.callMembers)
	if err != nil {
		return nil, err
	}
	id, err := s.identity(in.Identity)
	if err != nil {
		return nil, err
	}
	const most = int64(1<<62) / int64(time.Millisecond)
	if in.TTL < 0 || in.TTL > most || in.Lifetime < 0 || in.Lifetime > most {
		return nil, &leaseclient.InvalidError{Field: "ttl_ms", Reason: "out of range"}
	}
	if s.ending() {
		return nil, &leaseclient.Error{Code: leaseclient.CodeUnavailable, Op: "acquire", Detail: "the sidecar is shutting down"}
	}
	// What the worker leaves out is derived from the request id, so that a
	// repeated request is the same request.
	or := func(v, prefix string) string {
		if v == "" {
			return prefix + "_" + strings.TrimPrefix(call.RequestID, "request_")
		}
		return v
	}
	a, err := s.opts.Store.Acquire(ctx, leaseclient.AcquireRequest{
		Call: call, Identity: id, Owner: s.opts.Owner,
		TTL: time.Duration(in.TTL) * time.Millisecond, MaxLifetime: time.Duration(in.Lifetime) * time.Millisecond,
		ExecutionID: or(in.ExecutionID, "execution"), JobID: or(in.JobID, "job"), TraceID: or(in.TraceID, "trace"), Metadata: in.Metadata,
	})
	if err != nil {
		return nil, &requestError{call.RequestID, err}
	}
	if a.Current == leaseclient.StateActive {
		s.keep(a)
	}
	v := viewOf(a.Lease)
	v.State = a.Current
	return &success{Code: leaseclient.CodeAcquired, RequestID: call.RequestID, Replayed: a.Replayed, Lease: &v}, nil
}

// leaseMembers name a lease of this sidecar.
type leaseMembers struct {
	LeaseID string `json:"lease_id"`
	Token   uint64 `json:"fencing_token"`
}

// find returns the keeper of a lease that a request names.
func (s *Sidecar) find(m leaseMembers) (*leaseclient.Keeper, error) {
	if err := leaseclient.ValidateIdentifier("lease_id", m.LeaseID); err != nil {
		return nil, err
	}
	k := s.opts.Table.keeper(m.LeaseID)
	if k == nil || (m.Token != 0 && m.Token != k.Lease().Token) {
		return nil, &leaseclient.Error{Code: leaseclient.CodeLost, Op: "find lease", Detail: "this sidecar does not hold that lease"}
	}
	return k, nil
}

// onLease makes an operation on a lease that this sidecar holds.
func (s *Sidecar) onLease(do func(context.Context, *leaseclient.Keeper, leaseclient.Call) (*success, error)) operation {
	return func(ctx context.Context, body []byte) (*success, error) {
		var in struct {
			callMembers
			leaseMembers
		}
		if err := decode(body, &in, "request_id", "deadline_at", "lease_id", "fencing_token"); err != nil {
			return nil, err
		}
		call, err := s.call(in.callMembers)
		if err != nil {
			return nil, err
		}
		k, err := s.find(in.leaseMembers)
		if err != nil {
			return nil, err
		}
		out, err := do(ctx, k, call)
		if err != nil {
			return nil, &requestError{call.RequestID, err}
		}
		out.RequestID = call.RequestID
		return out, nil
	}
}

// onLeaseDone is the envelope of an operation on a lease.
func onLeaseDone(code leaseclient.Code, l leaseclient.Lease, replayed bool) *success {
	v := viewOf(l)
	return &success{Code: code, Replayed: replayed, Lease: &v}
}

// apiInspect reads the current lease of an identity, or of a lease that this
// sidecar holds.
func (s *Sidecar) apiInspect(ctx context.Context, body []byte) (*success, error) {
	var in struct {
		leaseclient.Identity
		Deadline string `json:"deadline_at"`
		LeaseID  string `json:"lease_id"`
	}
	if err := decode(body, &in, append([]string{"deadline_at", "lease_id"}, identityMembers...)...); err != nil {
		return nil, err
	}
	call, err := s.call(callMembers{Deadline: in.Deadline})
	if err != nil {
		return nil, err
	}
	var id leaseclient.Identity
	if in.LeaseID != "" {
		if in.Identity != (leaseclient.Identity{}) {
			return nil, &leaseclient.InvalidError{Field: "lease_id", Reason: "and an identity are both given; name one"}
		}
		k, err := s.find(leaseMembers{LeaseID: in.LeaseID})
		if err != nil {
			return nil, &leaseclient.Error{Code: leaseclient.CodeNotFound, Op: "inspect"}
		}
		id = k.Lease().Identity
	} else if id, err = s.identity(in.Identity); err != nil {
		return nil, err
	}
	r, err := s.opts.Store.Inspect(ctx, leaseclient.InspectRequest{Identity: id, Deadline: call.Deadline})
	if err != nil {
		return nil, err
	}
	if in.LeaseID != "" && r.Lease.LeaseID != in.LeaseID {
		return nil, &leaseclient.Error{Code: leaseclient.CodeNotFound, Op: "inspect"}
	}
	v := viewOfOther(r.Lease)
	if s.opts.Table.keeper(r.Lease.LeaseID) != nil {
		v = viewOf(r.Lease)
	}
	return &success{Code: leaseclient.CodeInspected, Lease: &v}, nil
}

// status is what /v1/status shows.
type status struct {
	Status      string        `json:"status"`
	Version     string        `json:"version"`
	Ready       bool          `json:"ready"`
	Checks      []checkResult `json:"checks"`
	Leases      []leaseView   `json:"leases"`
	Unprotected []string      `json:"unprotected"`
}

// apiStatus shows what the sidecar is doing.
func (s *Sidecar) apiStatus(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet {
		w.Header().Set("Allow", http.MethodGet)
		s.fail(w, correlation(r), "status", &leaseclient.Error{Code: leaseclient.CodeMethodNotAllowed, Op: "status"})
		return
	}
	checks, ready := s.check(r.Context())
	s.answer(w, http.StatusOK, status{
		Status: "success", Version: s.opts.Version, Ready: ready, Checks: checks, Leases: s.views(), Unprotected: append([]string{}, s.opts.Unprotected...),
	})
}

// views shows the leases that are held.
func (s *Sidecar) views() []leaseView {
	out := []leaseView{}
	for _, k := range s.opts.Table.held() {
		out = append(out, viewOf(k.Lease()))
	}
	return out
}
