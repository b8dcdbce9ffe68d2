package leaseclient

import "time"

// RecordVersion is the version of the record this code writes and reads.
// Another version in the store is treated as corrupt, never guessed at.
const RecordVersion = 1

// State is the externally observable state of a lease. There is no other, and
// nothing terminal becomes active again.
type State string

// The four states of the contract.
const (
	StateActive   State = "active"
	StateExpired  State = "expired"
	StateReleased State = "released"
	StateRevoked  State = "revoked"
)

// Owner says who holds a lease. Renewal and release must match the principal
// and the service instance exactly; a commit is bound to the principal.
type Owner struct {
	// PrincipalID is the authenticated principal.
	PrincipalID string `json:"owner_principal_id"`
	// ClientID names the client software of that principal.
	ClientID string `json:"owner_client_id"`
	// CredentialID names the credential, never its secret.
	CredentialID string `json:"owner_credential_id"`
	// InstanceID names one run of one service process.
	InstanceID string `json:"service_instance_id"`
}

// Lease is one lease as the store recorded it.
type Lease struct {
	RecordVersion int    `json:"record_version"`
	LockKey       string `json:"lock_key"`
	Identity
	LeaseID string `json:"lease_id"`
	Owner
	// Token is the fencing token, immutable for the lifetime of the lease.
	Token uint64 `json:"fencing_token"`
	// AcquiredAt, RenewedAt and ExpiresAt are instants of the store.
	AcquiredAt StoreTime `json:"acquired_at"`
	RenewedAt  StoreTime `json:"renewed_at"`
	ExpiresAt  StoreTime `json:"expires_at"`
	// TTLMillis is the effective TTL that policy chose.
	TTLMillis int64 `json:"ttl_ms"`
	// MaxLifetimeMillis bounds ExpiresAt to AcquiredAt plus itself.
	MaxLifetimeMillis int64  `json:"maximum_lifetime_ms"`
	ExecutionID       string `json:"execution_id"`
	JobID             string `json:"job_id"`
	TraceID           string `json:"trace_id"`
	RequestID         string `json:"request_id"`
	// Metadata is a bounded, non-secret object.
	Metadata map[string]any `json:"metadata"`
	State    State          `json:"state"`
}

// TTL returns the effective TTL.
func (l *Lease) TTL() time.Duration { return time.Duration(l.TTLMillis) * time.Millisecond }

// MaxLifetime returns the bound on the whole life of the lease.
func (l *Lease) MaxLifetime() time.Duration {
	return time.Duration(l.MaxLifetimeMillis) * time.Millisecond
}

// LastInstant returns the store time after which no renewal can keep the lease.
func (l *Lease) LastInstant() StoreTime { return l.AcquiredAt + StoreTime(l.MaxLifetimeMillis) }

// Ref returns what a commit presents to the gate.
func (l *Lease) Ref() Ref {
	return Ref{
		Identity:         l.Identity,
		LockKey:          l.LockKey,
		LeaseID:          l.LeaseID,
		Token:            l.Token,
		OwnerPrincipalID: l.PrincipalID,
		ExecutionID:      l.ExecutionID,
		TraceID:          l.TraceID,
	}
}

// Ref is a lease as a commit presents it. Possessing one is no authority: the
// store decides about every commit at its own instant.
type Ref struct {
	Identity         Identity
	LockKey          string
	LeaseID          string
	Token            uint64
	OwnerPrincipalID string
	ExecutionID      string
	TraceID          string
}
