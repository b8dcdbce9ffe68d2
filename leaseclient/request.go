package leaseclient

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Call holds what every mutating request carries.
type Call struct {
	// RequestID is globally unique. A repetition with the same id and the
	// same inputs returns the first result and changes nothing.
	RequestID string
	// Deadline is the caller's own time by which the operation must have
	// begun. It must be set; the store is asked to refuse after it.
	Deadline time.Time
}

// AcquireRequest asks for a lease on a free identity.
type AcquireRequest struct {
	Call
	Identity Identity
	Owner    Owner
	// TTL and MaxLifetime of zero ask for the policy's defaults.
	TTL         time.Duration
	MaxLifetime time.Duration
	ExecutionID string
	JobID       string
	TraceID     string
	// Metadata is a bounded, non-secret JSON object; nil means empty.
	Metadata map[string]any
}

// RenewRequest asks to extend a lease. Every field must match the record.
type RenewRequest struct {
	Call
	Identity    Identity
	LeaseID     string
	PrincipalID string
	InstanceID  string
	Token       uint64
	// Once says that the request id will never be used again, so that its
	// result need not be remembered. A keeper renews thousands of times and
	// asks anew instead of repeating itself.
	Once bool
}

// ReleaseRequest gives a lease back. Every field must match the record.
type ReleaseRequest struct {
	Call
	Identity    Identity
	LeaseID     string
	PrincipalID string
	InstanceID  string
	Token       uint64
}

// InspectRequest reads a record by its identity or by its lease id; exactly one
// of them is set.
type InspectRequest struct {
	Identity Identity
	LeaseID  string
	Deadline time.Time
}

// NewID returns a fresh random identifier with the given prefix, such as
// "request". It carries 128 random bits.
func NewID(prefix string) string {
	return prefix + "_" + strings.ToLower(rand.Text())
}

// identifierPattern bounds identifiers that the caller makes up. They go into
// logs, headers and JSON, so only characters that need no escaping are allowed.
var identifierPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:@/+=-]*$`)

// ValidateIdentifier checks an identifier of a request, such as a request id.
func ValidateIdentifier(field, value string) error {
	switch {
	case value == "":
		return &InvalidError{Field: field, Reason: "missing"}
	case len(value) > MaxIdentifierBytes:
		return &InvalidError{Field: field, Reason: fmt.Sprintf("longer than %d bytes", MaxIdentifierBytes)}
	case strings.Contains(value, ".."):
		return &InvalidError{Field: field, Reason: "contains path syntax"}
	case !identifierPattern.MatchString(value):
		return &InvalidError{Field: field, Reason: "must start with a letter or a digit and hold only letters, digits and . _ : @ / + = -"}
	}
	return nil
}

// validate checks what every call carries.
func (c Call) validate() error {
	if err := ValidateIdentifier("request_id", c.RequestID); err != nil {
		return err
	}
	return validateDeadline(c.Deadline)
}

// validateExact checks the tuple that renewal and release compare.
func validateExact(c Call, id Identity, leaseID, principal, instance string, token uint64) error {
	if err := c.validate(); err != nil {
		return err
	}
	if err := id.validate(); err != nil {
		return err
	}
	if err := validateIdentifiers(
		named{"lease_id", leaseID}, named{"owner_principal_id", principal}, named{"service_instance_id", instance},
	); err != nil {
		return err
	}
	return validateToken(token)
}

// Validate checks the request's form; the store decides everything else.
func (r RenewRequest) Validate() error {
	return validateExact(r.Call, r.Identity, r.LeaseID, r.PrincipalID, r.InstanceID, r.Token)
}

// Validate checks the request's form; the store decides everything else.
func (r ReleaseRequest) Validate() error {
	return validateExact(r.Call, r.Identity, r.LeaseID, r.PrincipalID, r.InstanceID, r.Token)
}

// Validate checks the request's form. TTL and lifetime are judged by the
// store's [TimePolicy].
func (r AcquireRequest) Validate() error {
	if err := r.Call.validate(); err != nil {
		return err
	}
	if err := r.Identity.validate(); err != nil {
		return err
	}
	if err := validateIdentifiers(
		named{"owner_principal_id", r.Owner.PrincipalID}, named{"owner_client_id", r.Owner.ClientID},
		named{"owner_credential_id", r.Owner.CredentialID}, named{"service_instance_id", r.Owner.InstanceID},
		named{"execution_id", r.ExecutionID}, named{"job_id", r.JobID}, named{"trace_id", r.TraceID},
	); err != nil {
		return err
	}
	_, err := EncodeMetadata(r.Metadata)
	return err
}

// Validate checks the request's form.
func (r InspectRequest) Validate() error {
	if err := validateDeadline(r.Deadline); err != nil {
		return err
	}
	if r.LeaseID == "" {
		return r.Identity.validate()
	}
	if r.Identity != (Identity{}) {
		return &InvalidError{Field: "lease_id", Reason: "is there beside an identity; want one of them"}
	}
	return ValidateIdentifier("lease_id", r.LeaseID)
}

// Validate checks the request's form; the store decides everything else.
func (r AdoptRequest) Validate() error {
	if err := validateDeadline(r.Deadline); err != nil {
		return err
	}
	if _, err := ParseLockKey(r.LockKey); err != nil {
		return &InvalidError{Field: "lock_key", Reason: err.Error()}
	}
	if err := validateIdentifiers(
		named{"lease_id", r.LeaseID}, named{"execution_id", r.ExecutionID}, named{"trace_id", r.TraceID},
	); err != nil {
		return err
	}
	if r.ExpiresAt <= 0 || r.ExpiresAt > MaxToken {
		return &InvalidError{Field: "expires_at", Reason: "out of range"}
	}
	return validateToken(r.Token)
}

// Validate checks the request's form. What a store's own pages hand out as a
// cursor is judged by the store.
func (r ListRequest) Validate() error {
	if err := validateDeadline(r.Deadline); err != nil {
		return err
	}
	if err := validateLimit(r.Limit); err != nil {
		return err
	}
	want := []named{{"tenant_id", r.TenantID}, {"program_id", r.ProgramID}}
	switch r.By {
	case ListByOwner:
		if err := ValidateIdentifier("owner_principal_id", r.PrincipalID); err != nil {
			return err
		}
	case ListByTarget:
		want = append(want, named{"target_namespace", r.TargetNamespace}, named{"target_id", r.TargetID})
	case ListByProgram:
	default:
		return &InvalidError{Field: "by", Reason: "want owner, target or program"}
	}
	for _, f := range want {
		if v, err := normalizeComponent(f.value); err != nil {
			return &InvalidError{Field: f.name, Reason: err.Error()}
		} else if v != f.value {
			return &InvalidError{Field: f.name, Reason: "not in canonical form"}
		}
	}
	return nil
}

// Validate checks the request's form.
func (r HistoryRequest) Validate() error {
	if err := validateDeadline(r.Deadline); err != nil {
		return err
	}
	if err := validateLimit(r.Limit); err != nil {
		return err
	}
	return r.Identity.validate()
}

// Validate checks the request's form; whether the caller may is its edge's
// matter.
func (r InvalidateRequest) Validate() error {
	if r.To != StateReleased && r.To != StateRevoked {
		return &InvalidError{Field: "to", Reason: "want released or revoked"}
	}
	if err := validateExact(r.Call, r.Identity, r.LeaseID, r.Admin.PrincipalID, r.Admin.InstanceID, r.Token); err != nil {
		return err
	}
	if err := validateIdentifiers(
		named{"owner_client_id", r.Admin.ClientID}, named{"owner_credential_id", r.Admin.CredentialID},
		named{"correlation_id", r.CorrelationID}, named{"decision_id", r.DecisionID},
	); err != nil {
		return err
	}
	if r.Reason == "" && r.Incident == "" {
		return &InvalidError{Field: "reason", Reason: "missing; a reason or an incident_id is needed"}
	}
	if err := ValidateText("reason", r.Reason); err != nil {
		return err
	}
	if r.Incident == "" {
		return nil
	}
	return ValidateIdentifier("incident_id", r.Incident)
}

// ValidateText checks a text for people: bounded, one line, valid UTF-8. An
// empty one is allowed.
func ValidateText(field, value string) error {
	switch {
	case len(value) > MaxReasonBytes:
		return &InvalidError{Field: field, Reason: fmt.Sprintf("longer than %d bytes", MaxReasonBytes)}
	case !utf8.ValidString(value):
		return &InvalidError{Field: field, Reason: "not valid UTF-8"}
	case strings.ContainsFunc(value, unicode.IsControl):
		return &InvalidError{Field: field, Reason: "contains a control character"}
	case value != "" && strings.TrimSpace(value) == "":
		return &InvalidError{Field: field, Reason: "is blank"}
	}
	return nil
}

// named is a value and what the caller calls it.
type named struct{ name, value string }

// validateIdentifiers checks several identifiers in turn.
func validateIdentifiers(list ...named) error {
	for _, f := range list {
		if err := ValidateIdentifier(f.name, f.value); err != nil {
			return err
		}
	}
	return nil
}

// validateDeadline wants a deadline.
func validateDeadline(t time.Time) error {
	if t.IsZero() {
		return &InvalidError{Field: "deadline_at", Reason: "missing"}
	}
	return nil
}

// validateToken wants a token that can exist.
func validateToken(token uint64) error {
	if token == 0 || token > MaxToken {
		return &InvalidError{Field: "fencing_token", Reason: "out of range"}
	}
	return nil
}

// validateLimit wants the size of a page.
func validateLimit(n int) error {
	if n < 0 || n > MaxPage {
		return &InvalidError{Field: "limit", Reason: fmt.Sprintf("must be from 1 to %d", MaxPage)}
	}
	return nil
}

// digestOf hashes a value's JSON. Struct order makes it deterministic, and the
// operation's name keeps two operations apart.
func digestOf(op string, v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		// Requests are validated before they are digested; what is left cannot
		// fail to encode.
		panic(fmt.Sprintf("digest of %s request: %v", op, err))
	}
	h := sha256.New()
	h.Write([]byte(op + "\n"))
	h.Write(b)
	return hex.EncodeToString(h.Sum(nil))
}

// Digest covers every input that changes what the operation does. The deadline
// is left out: a retry has another one and is still the same request.
func (r AcquireRequest) Digest(ttl, maxLifetime time.Duration) string {
	meta, err := EncodeMetadata(r.Metadata)
	if err != nil {
		panic(fmt.Sprintf("digest of unvalidated acquire request: %v", err))
	}
	return digestOf("acquire", []string{
		r.Identity.Canonical(), r.Owner.PrincipalID, r.Owner.ClientID, r.Owner.CredentialID, r.Owner.InstanceID,
		fmt.Sprint(ttl.Milliseconds()), fmt.Sprint(maxLifetime.Milliseconds()),
		r.ExecutionID, r.JobID, r.TraceID, meta,
	})
}

// Digest covers every input that changes what the operation does.
func (r RenewRequest) Digest() string {
	return digestOf("renew", []string{r.Identity.Canonical(), r.LeaseID, r.PrincipalID, r.InstanceID, fmt.Sprint(r.Token)})
}

// Digest covers every input that changes what the operation does.
func (r ReleaseRequest) Digest() string {
	return digestOf("release", []string{r.Identity.Canonical(), r.LeaseID, r.PrincipalID, r.InstanceID, fmt.Sprint(r.Token)})
}

// Digest covers every input that changes what the operation does, and what is
// recorded of it.
func (r InvalidateRequest) Digest() string {
	return digestOf("invalidate", []string{
		string(r.To), r.Identity.Canonical(), r.LeaseID, fmt.Sprint(r.Token),
		r.Admin.PrincipalID, r.Reason, r.Incident,
	})
}

// secretKey matches member names that would hold a credential.
var secretKey = regexp.MustCompile(`(?i)(pass(word|wd|phrase)?$|secret|token$|api[_-]?key|authorization|credential|private[_-]?key|bearer|cookie|connection[_-]?string|dsn$)`)

// secretValue matches texts that are a credential by their form: bearer and basic
// authorization, this project's API keys, private keys, signed tokens, keys of
// widespread services, and URLs with a password.
var secretValue = regexp.MustCompile(strings.Join([]string{
	`(?i:\b(bearer|basic)\s+[A-Za-z0-9._~+/-]{8,})`,
	`\bstar_sk_v[0-9]+_`,
	`-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----`,
	`\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.`,
	`\b(AKIA|ASIA)[A-Z0-9]{16}\b`,
	`\bgh[pousr]_[A-Za-z0-9]{20,}`,
	`\bxox[abprs]-[A-Za-z0-9-]{10,}`,
	`\bsk-[A-Za-z0-9_-]{20,}`,
	`[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@`,
}, "|"))

// EncodeMetadata validates metadata and returns its JSON with members sorted.
// The error is an [*InvalidError] on the field "metadata".
func EncodeMetadata(m map[string]any) (string, error) {
	if len(m) == 0 {
		return "{}", nil
	}
	if len(m) > MaxMetadataKeys {
		return "", &InvalidError{Field: "metadata", Reason: fmt.Sprintf("more than %d members", MaxMetadataKeys)}
	}
	if reason := checkMetadata(m, 1); reason != "" {
		return "", &InvalidError{Field: "metadata", Reason: reason}
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(m); err != nil {
		return "", &InvalidError{Field: "metadata", Reason: "cannot be written as JSON"}
	}
	s := strings.TrimSuffix(b.String(), "\n")
	if len(s) > MaxMetadataBytes {
		return "", &InvalidError{Field: "metadata", Reason: fmt.Sprintf("longer than %d bytes as JSON", MaxMetadataBytes)}
	}
	return s, nil
}

// checkMetadata walks a metadata value and says what is not allowed in it.
func checkMetadata(v any, depth int) string {
	switch v.(type) {
	case map[string]any, []any:
		if depth > MaxMetadataDepth {
			return fmt.Sprintf("nested deeper than %d levels", MaxMetadataDepth)
		}
	}
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			if k == "" || len(k) > MaxIdentifierBytes || !utf8.ValidString(k) || strings.ContainsFunc(k, unicode.IsControl) {
				return "has a member whose name is empty, too long or not printable"
			}
			if secretKey.MatchString(k) {
				return "has a member whose name says that it holds a credential"
			}
			if s := checkMetadata(e, depth+1); s != "" {
				return s
			}
		}
	case []any:
		for _, e := range v {
			if s := checkMetadata(e, depth+1); s != "" {
				return s
			}
		}
	case string:
		if !utf8.ValidString(v) {
			return "holds text that is not valid UTF-8"
		}
		if secretValue.MatchString(v) {
			return "holds text that looks like a credential"
		}
	case nil, bool, float64, json.Number, int, int64:
	default:
		return "holds a value that JSON cannot express"
	}
	return ""
}
