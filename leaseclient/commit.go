package leaseclient

import (
	"context"
	"time"
)

// Kind says which adapter can finish a commit.
type Kind string

// The kinds of effects a commit can have.
const (
	// KindDocument is one revision-conditioned document write.
	KindDocument Kind = "document"
	// KindPublish is one message.
	KindPublish Kind = "publish"
)

// Outcome says how a commit ended.
type Outcome string

// The outcomes of a commit. OutcomeUnknown never ends an entry of the log; it
// is what a caller learns when nobody can tell yet.
const (
	// OutcomeConfirmed: the effect is in its store.
	OutcomeConfirmed Outcome = "confirmed"
	// OutcomeRefused: the effect's own store refused it, or a check did.
	OutcomeRefused Outcome = "refused"
	// OutcomeCancelled: it was withdrawn before its effect was sent.
	OutcomeCancelled Outcome = "cancelled"
	// OutcomeQuarantined: it cannot be delivered and was set aside.
	OutcomeQuarantined Outcome = "quarantined"
	// OutcomeUnknown: not known yet.
	OutcomeUnknown Outcome = "unknown"
)

// Commit is one authoritative effect that asks to be accepted.
type Commit struct {
	// ID is globally unique; a repeated Begin with it finds the first one, as
	// long as kind, target and effect are the same.
	ID string
	// Kind says who can finish it.
	Kind Kind
	// Target names the database and document, or the exchange and routing
	// key. It is for operators and for observing an effect that the log does
	// not carry; at most MaxTargetBytes.
	Target string
	// Effect is what anybody needs to finish the commit, without its stamp.
	// Empty means that it is too large for the log.
	Effect []byte
}

// MaxTargetBytes bounds [Commit.Target].
const MaxTargetBytes = 4096

// Entry is an accepted commit as the log keeps it.
type Entry struct {
	Commit
	Identity Identity
	LockKey  string
	// Seq is the position in the lock's log; it never goes back.
	Seq         uint64
	Token       uint64
	LeaseID     string
	ExecutionID string
	TraceID     string
	// Attempt is the attempt that made the entry; empty when it named none.
	Attempt string
	// AcceptedAt is the linearization point; from NotAfter on nobody but a
	// settler may send the effect; ExpiresAt is the lease's end as it stood.
	AcceptedAt StoreTime
	NotAfter   StoreTime
	ExpiresAt  StoreTime
}

// BeginRequest asks the store to accept commits of one lock, in order, all or
// none.
type BeginRequest struct {
	Ref      Ref
	Deadline time.Time
	Commits  []Commit
	// Attempt names this attempt of the caller. A repetition under the same
	// name finds what it accepted; under another name it meets an
	// [*InFlightError] while the commit is open. A withdrawal that names it
	// takes back no entry of another attempt at the same commit id.
	Attempt string
}

// BegunCommit is the store's word on one commit of an accepted batch.
type BegunCommit struct {
	// Seq, AcceptedAt and NotAfter are those of the first acceptance.
	Seq        uint64
	AcceptedAt StoreTime
	NotAfter   StoreTime
	ExpiresAt  StoreTime
	// Repeated: this commit id had been accepted before.
	Repeated bool
	// Prior is set when the commit ended before: nothing may be sent.
	Prior Outcome
}

// Begun is an accepted batch.
type Begun struct {
	Commits []BegunCommit
	Now     StoreTime
	// Sent is the boot time at which the request left.
	Sent time.Duration
}

// UnsettledError is returned by Begin while commits of an earlier lease of the
// same lock are unfinished. They must be settled first.
type UnsettledError struct {
	// Count is how many entries the log holds.
	Count int
	// Wait is how long until the oldest may be settled by anybody.
	Wait time.Duration
}

// Error implements error.
func (e *UnsettledError) Error() string { return "commits of an earlier lease are not settled" }

// InFlightError is returned by Begin while a commit of this id is open that
// another attempt under the same lease made. Nothing of the batch was accepted:
// only that attempt, or a settler, may send the effect or end the commit.
type InFlightError struct {
	// Wait is how long until nobody but a settler may send the effect; zero when
	// that is now.
	Wait time.Duration
}

// Error implements error.
func (e *InFlightError) Error() string { return "another attempt at this commit is in flight" }

// LogFullError is returned by Begin when the lock's log is at its limit.
type LogFullError struct {
	// Entries and Bytes are what the log holds.
	Entries int
	Bytes   int64
}

// Error implements error.
func (e *LogFullError) Error() string { return "commit log of this lock is full" }

// Ending takes a commit out of the log.
type Ending struct {
	ID      string
	Outcome Outcome
	// Attempt, when set, ends the entry only if that attempt made it.
	Attempt string
}

// ClaimMode says which entries a settler may take.
type ClaimMode string

// The claim modes. In each of them entries are taken oldest first, and only
// from not_after on, except ClaimOwn.
const (
	// ClaimBefore takes entries of leases with a lower token: what a
	// successor does before its own first commit.
	ClaimBefore ClaimMode = "before"
	// ClaimSweep takes entries whose lease is not active any more: what the
	// sweeper does for locks that nobody takes again.
	ClaimSweep ClaimMode = "sweep"
	// ClaimOwn takes the named entries at once: what their own sidecar does
	// after it has made sure that it will not send them any more.
	ClaimOwn ClaimMode = "own"
)

// ClaimRequest asks for entries to settle. A claim on a lock runs out by
// itself; while it stands no other settler gets one.
type ClaimRequest struct {
	LockKey string
	Mode    ClaimMode
	// Claimer names the settler; a claim is extended by the same name.
	Claimer string
	// Token bounds ClaimBefore, exclusively.
	Token uint64
	// IDs names the entries of ClaimOwn.
	IDs []string
	// MaxEntries and MaxBytes bound the answer; at least one entry is
	// returned whatever its size.
	MaxEntries int
	MaxBytes   int64
	Deadline   time.Time
}

// UnsettledCursor is a place in the list of unsettled locks of one shard: the
// last lock of a page. It stays good when that lock leaves the list.
type UnsettledCursor struct {
	// Since is the time by which the lock is listed, as the store writes it.
	Since string
	// LockKey is the lock.
	LockKey string
}

// MaxUnsettled bounds a page of [CommitLog.Unsettled].
const MaxUnsettled = 1000

// Claimed is what a claim brought.
type Claimed struct {
	// Entries are to be settled in this order.
	Entries []Entry
	// Wait is set when there are none yet: entries are not old enough, or
	// another settler has the claim.
	Wait time.Duration
	// Settled says that nothing is left for this mode.
	Settled bool
	// Ended holds the outcomes of those IDs of ClaimOwn that are not in the
	// log any more; an id the log never saw is not in it.
	Ended map[string]Outcome
	// Until is the boot time at which the claim may have run out. No effect
	// may be sent for it any more from then on.
	Until time.Duration
	Now   StoreTime
}

// CommitLog is the store's half of the fence. Like [Store] it decides by the
// store's clock, in one step each, and fails with an [*Error]. The one of Begin
// may wrap an [*UnsettledError], an [*InFlightError] or a [*LogFullError].
type CommitLog interface {
	// Begin accepts commits while the lease is active at the store, and
	// raises the high-water mark. It is idempotent by commit id.
	Begin(ctx context.Context, r BeginRequest) (*Begun, error)
	// End takes entries out of the log; ids that are not there are ignored.
	// A claimer's name, when set, must hold the claim; else [CodeLost].
	End(ctx context.Context, lockKey, claimer string, endings []Ending) error
	// Claim hands out entries to settle.
	Claim(ctx context.Context, r ClaimRequest) (*Claimed, error)
	// Unclaim gives a claim up early.
	Unclaim(ctx context.Context, lockKey, claimer string) error
	// Unsettled lists lock keys of one shard whose oldest entry is past its
	// not_after, the longest waiting first, at most limit and at most
	// [MaxUnsettled]. The first page is that after the zero cursor, and next is
	// the zero cursor when there are no more. The pages are no snapshot: a lock
	// that changes its place in between may be missed or be there twice, one
	// that stays where it is is there once.
	Unsettled(ctx context.Context, shard int, after UnsettledCursor, limit int) (keys []string, next UnsettledCursor, err error)
	// Shards is how many shards the namespace has.
	Shards(ctx context.Context) (int, error)
}
