package leaseclient

import (
	"context"
	"time"
)

// Acquired is the result of an acquisition.
type Acquired struct {
	// Lease is the grant as it was first made.
	Lease Lease
	// Replayed says that an earlier request with this id made the grant.
	Replayed bool
	// Current is the state the lease is in now. Where it is not
	// [StateActive], the caller must acquire again with a new request id.
	Current State
	// Now is the store's time of the decision.
	Now StoreTime
	// Sent is the boot time at which the request left. The local end of the
	// lease counts from here, never from when the answer arrived.
	Sent time.Duration
}

// Renewed is the result of a renewal.
type Renewed struct {
	Lease    Lease
	Replayed bool
	Now      StoreTime
	Sent     time.Duration
}

// Released is the result of a release.
type Released struct {
	Lease    Lease
	Replayed bool
	Now      StoreTime
}

// Inspected is what the store holds for an identity or a lease id.
type Inspected struct {
	// Lease is the record, in state expired when its end has passed.
	Lease Lease
	Now   StoreTime
	// Sent is the boot time at which the request left, as in [Acquired].
	Sent time.Duration
}

// Store is the lease contract. Every method is one atomic step at the store,
// decides by the store's clock, and fails with an [*Error]:
//
//   - [CodeUnavailable]: nothing was changed.
//   - [CodeOutcomeUnknown]: the step may have taken effect. The same request id
//     resolves it; nothing in this package repeats it blindly.
//
// Implementations are safe for concurrent use.
type Store interface {
	// Acquire grants the lease if no unexpired one exists; else
	// [CodeConflict].
	Acquire(ctx context.Context, r AcquireRequest) (*Acquired, error)
	// Renew extends the lease of exactly this owner, instance and token; else
	// [CodeLost].
	Renew(ctx context.Context, r RenewRequest) (*Renewed, error)
	// Release gives back the lease of exactly this owner, instance and token;
	// else [CodeLost]. It never touches a successor.
	Release(ctx context.Context, r ReleaseRequest) (*Released, error)
	// Inspect returns the record of an identity while it is active, and when
	// its last lease ran out; or that of a lease id whatever became of it. Else
	// [CodeNotFound].
	Inspect(ctx context.Context, r InspectRequest) (*Inspected, error)
}
