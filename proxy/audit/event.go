package audit

import (
	"fmt"
	"slices"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// Type says what was asked.
type Type string

// The closed set of event types.
const (
	TypeAcquire        Type = "target_lease_acquire"
	TypeRenew          Type = "target_lease_renew"
	TypeRelease        Type = "target_lease_release"
	TypeForceRelease   Type = "target_lease_force_release"
	TypeRevoke         Type = "target_lease_revoke"
	TypeInspect        Type = "target_lease_inspect"
	TypeList           Type = "target_lease_list"
	TypeHistory        Type = "target_lease_history"
	TypeAdopt          Type = "target_lease_adopt"
	TypeExpire         Type = "target_lease_expire"
	TypeCommitRejected Type = "target_lease_commit_rejected"
	TypeInit           Type = "target_lease_init"
	TypeKey            Type = "target_lease_key"
	TypeRecover        Type = "target_lease_recover"
	TypeSettle         Type = "target_lease_settle"
	TypeQuarantine     Type = "target_lease_quarantine"
	TypeReload         Type = "target_lease_reload"
	// TypeRequest is a request that reached no operation.
	TypeRequest Type = "target_lease_request"
)

// Types returns the closed set.
func Types() []Type {
	return []Type{
		TypeAcquire, TypeRenew, TypeRelease, TypeForceRelease, TypeRevoke, TypeInspect, TypeList, TypeHistory, TypeAdopt,
		TypeExpire, TypeCommitRejected, TypeInit, TypeKey, TypeRecover, TypeSettle, TypeQuarantine, TypeReload, TypeRequest,
	}
}

// Privileged reports whether events of the type must be durable before their
// operation reports success.
func (t Type) Privileged() bool {
	return t == TypeForceRelease || t == TypeRevoke || t == TypeRecover
}

// PrincipalClass says what kind of caller it was.
type PrincipalClass string

// The closed set of principal classes.
const (
	// ClassLocal is a process that may open the control socket.
	ClassLocal PrincipalClass = "local"
	// ClassAPIKey holds an API key.
	ClassAPIKey PrincipalClass = "api_key"
	// ClassAnonymous showed no valid credential.
	ClassAnonymous PrincipalClass = "anonymous"
	// ClassSystem is the sidecar itself.
	ClassSystem PrincipalClass = "system"
)

// DeadlineClass says how long the caller gave the operation, without telling
// when exactly.
type DeadlineClass string

// The closed set of deadline classes.
const (
	// DeadlineNone: the operation has none.
	DeadlineNone DeadlineClass = "none"
	// DeadlineDefault: the caller named none and got the server's.
	DeadlineDefault DeadlineClass = "default"
	// DeadlinePast: it had passed when the request came.
	DeadlinePast DeadlineClass = "past"
	// DeadlineShort, DeadlineMedium and DeadlineLong: up to a second, up to ten,
	// longer.
	DeadlineShort  DeadlineClass = "short"
	DeadlineMedium DeadlineClass = "medium"
	DeadlineLong   DeadlineClass = "long"
	// DeadlineCapped: it was later than the server's ceiling, which applied.
	DeadlineCapped DeadlineClass = "capped"
)

// ClassOfDeadline classes a deadline that the caller named.
func ClassOfDeadline(left time.Duration) DeadlineClass {
	switch {
	case left <= 0:
		return DeadlinePast
	case left <= time.Second:
		return DeadlineShort
	case left <= 10*time.Second:
		return DeadlineMedium
	}
	return DeadlineLong
}

// BackendHealth says how the lease store took part.
type BackendHealth string

// The closed set of backend health classes.
const (
	// BackendOK: it answered.
	BackendOK BackendHealth = "ok"
	// BackendUnavailable: it could give no safe answer, and nothing was done.
	BackendUnavailable BackendHealth = "unavailable"
	// BackendUnknown: its answer was lost.
	BackendUnknown BackendHealth = "unknown"
	// BackendNotAsked: the request was decided before.
	BackendNotAsked BackendHealth = "not_asked"
)

// TimeSource says whose time an event carries.
type TimeSource string

// The closed set of time sources.
const (
	TimeOfStore  TimeSource = "store"
	TimeOfServer TimeSource = "server"
)

// Event is one request and what came of it. What a caller leaves out is either
// filled in by [Log.Record] or not in the event.
type Event struct {
	EventType  Type                   `json:"event_type"`
	At         leaseclient.StoreTime  `json:"at"`
	TimeSource TimeSource             `json:"time_source"`
	LatencyMS  int64                  `json:"latency_ms"`
	Class      leaseclient.AuditClass `json:"class"`

	RequestID     string `json:"request_id,omitempty"`
	CorrelationID string `json:"correlation_id"`
	DecisionID    string `json:"decision_id"`
	TraceID       string `json:"trace_id,omitempty"`
	ExecutionID   string `json:"execution_id,omitempty"`
	JobID         string `json:"job_id,omitempty"`

	PrincipalClass PrincipalClass `json:"principal_class"`
	PrincipalID    string         `json:"principal_id,omitempty"`
	CredentialID   string         `json:"credential_id,omitempty"`
	InstanceID     string         `json:"service_instance_id,omitempty"`

	leaseclient.Identity

	LeaseID string `json:"lease_id,omitempty"`
	Token   uint64 `json:"fencing_token,omitempty"`

	RequestedTTL  int64         `json:"requested_ttl_ms,omitempty"`
	EffectiveTTL  int64         `json:"effective_ttl_ms,omitempty"`
	DeadlineClass DeadlineClass `json:"deadline_class"`

	PreviousState  leaseclient.State `json:"previous_state,omitempty"`
	ResultingState leaseclient.State `json:"resulting_state,omitempty"`

	Code          leaseclient.Code `json:"code"`
	Retryable     bool             `json:"retryable"`
	BackendHealth BackendHealth    `json:"backend_health"`

	Reason     string `json:"reason,omitempty"`
	IncidentID string `json:"incident_id,omitempty"`
	// InFlight is how many accepted commits an invalidated lease left.
	InFlight int `json:"in_flight,omitempty"`
	// Adapter says where a rejected commit came from: "couch" or "rabbit".
	Adapter string `json:"adapter,omitempty"`
}

// OfLease fills in what may be told of a lease: its scope, ids and state.
func (e *Event) OfLease(l leaseclient.Lease) {
	e.Identity = l.Identity
	e.LeaseID, e.Token = l.LeaseID, l.Token
	e.TraceID, e.ExecutionID, e.JobID = l.TraceID, l.ExecutionID, l.JobID
	e.EffectiveTTL = l.TTLMillis
	e.ResultingState = l.State
}

// complete derives what follows from the rest.
func (e *Event) complete(now time.Time) {
	if e.At == 0 {
		e.At, e.TimeSource = leaseclient.StoreTime(now.UnixMilli()), TimeOfServer
	} else if e.TimeSource == "" {
		e.TimeSource = TimeOfStore
	}
	info := e.Code.Info()
	e.Class, e.Retryable = info.Audit, info.Retryable
	if e.CorrelationID == "" {
		e.CorrelationID = leaseclient.NewID("corr")
	}
	if e.DecisionID == "" {
		e.DecisionID = leaseclient.NewID("decision")
	}
	if e.DeadlineClass == "" {
		e.DeadlineClass = DeadlineNone
	}
	if e.PrincipalClass == "" {
		e.PrincipalClass = ClassSystem
	}
	if e.BackendHealth == "" {
		switch e.Code {
		case leaseclient.CodeUnavailable:
			e.BackendHealth = BackendUnavailable
		case leaseclient.CodeOutcomeUnknown:
			e.BackendHealth = BackendUnknown
		case leaseclient.CodeInvalid, leaseclient.CodeInvalidCredential, leaseclient.CodeAccessDenied, leaseclient.CodeRateLimited,
			leaseclient.CodeTooLarge, leaseclient.CodeRouteNotFound, leaseclient.CodeMethodNotAllowed, leaseclient.CodeUnsupportedMedia,
			leaseclient.CodePolicyDenied, leaseclient.CodeUnsupported, leaseclient.CodeInternal:
			e.BackendHealth = BackendNotAsked
		default:
			e.BackendHealth = BackendOK
		}
	}
}

// check reports a member outside its closed set: a mistake of this program.
func (e *Event) check() error {
	if !slices.Contains(Types(), e.EventType) {
		return fmt.Errorf("audit event of the unknown type %q", e.EventType)
	}
	if e.Code.Info().Code != e.Code {
		return fmt.Errorf("audit event with the unknown code %q", e.Code)
	}
	return nil
}
