package leaseclient

import (
	"errors"
	"fmt"
	"net/http"
	"time"
)

// Code is the stable name of a result. It is what callers decide on; texts may
// change, codes do not.
type Code string

// The closed set of result codes. The contract's own come first; those after
// CodeNotFound are answers of the sidecar that the contract leaves open.
const (
	CodeAcquired  Code = "lease_acquired"
	CodeRenewed   Code = "lease_renewed"
	CodeReleased  Code = "lease_released"
	CodeInspected Code = "lease_inspected"
	CodeListed    Code = "lease_listed"
	CodeRevoked   Code = "lease_revoked"
	// CodeAdopted is the sidecar's own: a lease of a dispatch envelope is the
	// current one.
	CodeAdopted Code = "lease_adopted"

	CodeInvalid             Code = "invalid_lease_request"
	CodeInvalidCredential   Code = "invalid_credential"
	CodeAccessDenied        Code = "access_denied"
	CodeConflict            Code = "lease_conflict"
	CodeLost                Code = "lease_lost"
	CodeIdempotencyConflict Code = "idempotency_conflict"
	CodeDeadlineExceeded    Code = "deadline_exceeded"
	CodeRateLimited         Code = "lease_rate_limited"
	CodeUnavailable         Code = "lease_backend_unavailable"
	CodeOutcomeUnknown      Code = "lease_outcome_unknown"
	CodeNotFound            Code = "lease_not_found"

	// CodePolicyDenied: no rule of the policy lets this write through, or a
	// rule names an identity that cannot be resolved from it.
	CodePolicyDenied Code = "policy_denied"
	// CodeUnsupported: the operation cannot be fenced, so it is refused in a
	// fenced database or exchange.
	CodeUnsupported Code = "operation_not_fenced"
	// CodeLockMismatch: the stored document was written under another lock.
	CodeLockMismatch Code = "lock_mismatch"
	// CodeUpstreamUnavailable: CouchDB or RabbitMQ could not be reached and
	// nothing was sent.
	CodeUpstreamUnavailable Code = "upstream_unavailable"
	// CodeTooLarge: a request, document or message is over its limit.
	CodeTooLarge Code = "too_large"
	// CodeRouteNotFound, CodeMethodNotAllowed, CodeUnsupportedMedia and
	// CodeInternal name the HTTP answers that belong to no operation.
	CodeRouteNotFound    Code = "route_not_found"
	CodeMethodNotAllowed Code = "method_not_allowed"
	CodeUnsupportedMedia Code = "unsupported_media_type"
	CodeInternal         Code = "internal_error"
)

// AuditClass is the class under which a result is audited. The set is closed.
type AuditClass string

// The audit classes of the contract.
const (
	AuditAccepted       AuditClass = "accepted"
	AuditDenied         AuditClass = "denied"
	AuditConflicted     AuditClass = "conflicted"
	AuditStale          AuditClass = "stale"
	AuditExpired        AuditClass = "expired"
	AuditRateLimited    AuditClass = "rate_limited"
	AuditBackendFailed  AuditClass = "backend_failed"
	AuditOutcomeUnknown AuditClass = "outcome_unknown"
)

// CodeInfo is one row of the result table.
type CodeInfo struct {
	// Code names the row.
	Code Code
	// HTTP is the status of the control API. A data path may answer with
	// another one, because the clients there have habits of their own.
	HTTP int
	// Retryable says whether the same request may succeed later.
	Retryable bool
	// Audit is the class of the audit event.
	Audit AuditClass
	// Message is the public text. It never names another owner.
	Message string
}

// codeTable is the single source of every layer's answers, in the order in
// which documentation shows them.
var codeTable = []CodeInfo{
	{CodeAcquired, http.StatusOK, false, AuditAccepted, "Target lease acquired"},
	{CodeRenewed, http.StatusOK, false, AuditAccepted, "Target lease renewed"},
	{CodeReleased, http.StatusOK, false, AuditAccepted, "Target lease released"},
	{CodeInspected, http.StatusOK, false, AuditAccepted, "Target lease inspected"},
	{CodeListed, http.StatusOK, false, AuditAccepted, "Target leases listed"},
	{CodeRevoked, http.StatusOK, false, AuditAccepted, "Target lease revoked"},
	{CodeAdopted, http.StatusOK, false, AuditAccepted, "Target lease adopted"},
	{CodeInvalid, http.StatusBadRequest, false, AuditDenied, "Request is malformed"},
	{CodeInvalidCredential, http.StatusUnauthorized, false, AuditDenied, "Credential is not valid"},
	{CodeAccessDenied, http.StatusForbidden, false, AuditDenied, "Access is denied"},
	{CodeConflict, http.StatusConflict, true, AuditConflicted, "Target lease is unavailable"},
	{CodeLost, http.StatusConflict, false, AuditStale, "Target lease is not held"},
	{CodeIdempotencyConflict, http.StatusConflict, false, AuditConflicted, "Request id was used with other inputs"},
	{CodeDeadlineExceeded, http.StatusRequestTimeout, true, AuditExpired, "Deadline passed before the operation began"},
	{CodeRateLimited, http.StatusTooManyRequests, true, AuditRateLimited, "Limit reached, try again later"},
	{CodeUnavailable, http.StatusServiceUnavailable, true, AuditBackendFailed, "Lease store cannot give a safe answer"},
	{CodeOutcomeUnknown, http.StatusServiceUnavailable, true, AuditOutcomeUnknown, "Operation may have taken effect, resolve it by its request id"},
	{CodeNotFound, http.StatusNotFound, false, AuditAccepted, "Target lease was not found"},
	{CodePolicyDenied, http.StatusForbidden, false, AuditDenied, "Policy does not allow this write"},
	{CodeUnsupported, http.StatusForbidden, false, AuditDenied, "Operation cannot be fenced"},
	{CodeLockMismatch, http.StatusForbidden, false, AuditDenied, "Document belongs to another lock"},
	{CodeUpstreamUnavailable, http.StatusBadGateway, true, AuditBackendFailed, "Upstream cannot be reached, nothing was sent"},
	{CodeTooLarge, http.StatusRequestEntityTooLarge, false, AuditDenied, "Request is over its size limit"},
	{CodeRouteNotFound, http.StatusNotFound, false, AuditDenied, "No such route"},
	{CodeMethodNotAllowed, http.StatusMethodNotAllowed, false, AuditDenied, "Method is not allowed here"},
	{CodeUnsupportedMedia, http.StatusUnsupportedMediaType, false, AuditDenied, "Content type must be application/json"},
	{CodeInternal, http.StatusInternalServerError, false, AuditBackendFailed, "Internal error"},
}

// Codes returns a copy of the result table.
func Codes() []CodeInfo {
	return append([]CodeInfo(nil), codeTable...)
}

// Info returns the row of a code. A code outside the closed set is answered as
// [CodeInternal], so that nothing unknown is ever taken for a success.
func (c Code) Info() CodeInfo {
	for _, row := range codeTable {
		if row.Code == c {
			return row
		}
	}
	return CodeInternal.Info()
}

// Error is a typed refusal or failure. Code decides; Detail is safe to show
// outside; the wrapped cause is for the log only.
type Error struct {
	// Code is the stable name.
	Code Code
	// Op is what was being done, as a verb: "acquire", "begin".
	Op string
	// Detail is a public text, without secrets or another owner's data.
	Detail string
	// RetryAfter is a hint for retryable codes; zero means none.
	RetryAfter time.Duration
	// Err is the private cause; it may name hosts and keys.
	Err error
}

// Error returns the private form, for logs.
func (e *Error) Error() string {
	s := fmt.Sprintf("%s: %s", e.Op, e.Code)
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns the private cause.
func (e *Error) Unwrap() error { return e.Err }

// Public returns the text that may be shown outside.
func (e *Error) Public() string {
	if e.Detail != "" {
		return e.Detail
	}
	return e.Code.Info().Message
}

// AsError returns the typed form of any error. What is not typed becomes
// [CodeInternal] (or [CodeInvalid] for an [*InvalidError]), so that no edge
// ever shows a raw error. It returns nil for nil.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	if e, ok := errors.AsType[*InvalidError](err); ok {
		return &Error{Code: CodeInvalid, Op: "validate", Detail: e.Error(), Err: err}
	}
	return &Error{Code: CodeInternal, Op: "handle", Err: err}
}

// CodeOf returns the code of an error, and the empty code for nil.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	return AsError(err).Code
}

// InvalidError says which field of a request is at fault and why. It never
// repeats the value.
type InvalidError struct {
	// Field is the name the caller used.
	Field string
	// Reason says what is wrong, in words for the caller.
	Reason string
}

// Error returns "field: reason".
func (e *InvalidError) Error() string { return e.Field + ": " + e.Reason }
