package leaseclient

import (
	"context"
	"time"
)

// Adopted is a lease that came in a dispatch envelope, as the store holds it.
type Adopted struct {
	Lease Lease
	Now   StoreTime
	// Sent is the boot time at which the request left, as in [Acquired].
	Sent time.Duration
}

// AdoptRequest presents a lease that another process acquired and handed on in
// a dispatch envelope. It is read only: an adopter commits under the lease, and
// only its acquirer renews or releases it.
type AdoptRequest struct {
	// LockKey, LeaseID, Token, ExecutionID and TraceID must be those of the
	// record; ExpiresAt must not be later than the record says.
	LockKey     string
	LeaseID     string
	Token       uint64
	ExpiresAt   StoreTime
	ExecutionID string
	TraceID     string
	Deadline    time.Time
}

// Adopter verifies leases of dispatch envelopes.
type Adopter interface {
	// Adopt returns the active record, or [CodeLost] when any part of the
	// envelope is not the record's or the record is not active any more.
	Adopt(ctx context.Context, r AdoptRequest) (*Adopted, error)
}

// ListBy names the trusted filter of a listing.
type ListBy string

// The filters. Every one is within one tenant and one program.
const (
	ListByOwner   ListBy = "owner"
	ListByTarget  ListBy = "target"
	ListByProgram ListBy = "program"
)

// ListRequest asks for one page of active leases.
type ListRequest struct {
	By ListBy
	// TenantID and ProgramID are always set.
	TenantID, ProgramID string
	// PrincipalID is set for [ListByOwner].
	PrincipalID string
	// TargetNamespace and TargetID are set for [ListByTarget].
	TargetNamespace, TargetID string
	// Cursor is [Listed.Next] of the page before, or empty. It is opaque, and
	// the caller's edge authenticates it: a store takes what its own pages
	// handed out and refuses everything else as [CodeInvalid].
	Cursor string
	// Limit is the size of the page: zero means [DefaultPage], more than
	// [MaxPage] is refused.
	Limit    int
	Deadline time.Time
}

// Bounds of a page.
const (
	DefaultPage = 100
	MaxPage     = 500
)

// Listed is one page in a stable order. Every row was validated against its
// record when it was read; one that is over or damaged is not in it.
type Listed struct {
	Leases []Lease
	// Next continues the listing; it is empty on the last page. A page may be
	// short, even empty, and still have a next one.
	Next string
	Now  StoreTime
}

// HistoryRequest asks for one page of the terminal records of an identity,
// newest first.
type HistoryRequest struct {
	Identity Identity
	Cursor   string
	Limit    int
	Deadline time.Time
}

// Ended is a terminal record.
type Ended struct {
	Lease Lease
	// EndedAt is the store's time of the end; for an expired lease, its end.
	EndedAt StoreTime
	// Reason and Incident are an administrator's, empty otherwise.
	Reason, Incident string
	// EndedBy is the principal that ended it, empty for an expired lease.
	EndedBy string
}

// HistoryPage is one page of terminal records.
type HistoryPage struct {
	Entries []Ended
	Next    string
	Now     StoreTime
}

// Reader lists and looks back. It changes nothing.
type Reader interface {
	List(ctx context.Context, r ListRequest) (*Listed, error)
	History(ctx context.Context, r HistoryRequest) (*HistoryPage, error)
}

// InvalidateRequest takes a lease away from its holder. The caller's edge has
// authorized it; the store compares it with the record, so that a successor
// that nobody saw is never touched.
type InvalidateRequest struct {
	Call
	// To is [StateReleased] for a force-release, [StateRevoked] for a revoke.
	To       State
	Identity Identity
	// LeaseID and Token are those of the lease that was observed.
	LeaseID string
	Token   uint64
	// Admin is who asks: an administrator with a credential of its own.
	Admin Owner
	// Reason or Incident must be given; each is at most [MaxReasonBytes].
	Reason, Incident string
	// CorrelationID and DecisionID go into the audit event that the same step
	// writes.
	CorrelationID, DecisionID string
}

// Invalidated is the result of a force-release or a revoke.
type Invalidated struct {
	// Lease is the terminal record.
	Lease    Lease
	Replayed bool
	// InFlight is how many accepted commits of the lock were unfinished at
	// that instant. They may still arrive; nothing new is accepted.
	InFlight int
	Now      StoreTime
}

// Invalidator takes leases away.
type Invalidator interface {
	// Invalidate ends exactly the observed lease; else [CodeLost]. Its audit
	// event is written in the same step, and success means that both are on
	// disk.
	Invalidate(ctx context.Context, r InvalidateRequest) (*Invalidated, error)
	// InFlight is how many accepted commits of an identity are unfinished now.
	InFlight(ctx context.Context, id Identity, deadline time.Time) (int, error)
}

// Notice says that a lease has ended before its time.
type Notice struct {
	LockKey string
	LeaseID string
	Token   uint64
	// State is [StateReleased] or [StateRevoked].
	State State
	// Forced tells a force-release from a release by the holder.
	Forced bool
	// Gap says that notices may have been missed: the subscription stands
	// again. All other members are empty then.
	Gap bool
}

// Watcher pushes notices. They save time; nothing depends on them, since every
// commit and renewal is judged at the store.
type Watcher interface {
	// Watch calls f for every notice, from one goroutine, until ctx ends, and
	// returns then. It subscribes anew by itself, with a pause that grows, and
	// reports a [Notice] with Gap each time it stands, the first included:
	// what was sent before was missed.
	Watch(ctx context.Context, f func(Notice)) error
}
