package valkeystore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// Acquire implements [leaseclient.Store].
func (s *Store) Acquire(ctx context.Context, r leaseclient.AcquireRequest) (*leaseclient.Acquired, error) {
	const op = "acquire"
	if err := r.Validate(); err != nil {
		return nil, err
	}
	ttl, life, err := s.opts.Policy.Effective(r.TTL, r.MaxLifetime)
	if err != nil {
		return nil, err
	}
	metadata, err := leaseclient.EncodeMetadata(r.Metadata)
	if err != nil {
		return nil, err
	}
	key := r.Identity.LockKey()
	a, err := s.do(ctx, call{
		op: op, script: scripts.acquire, lockKey: key, identity: r.Identity, guarded: true, deadline: r.Deadline, durable: true,
		args: func(_ *layout, shard int) []string {
			return append(identityArgs(r.Identity),
				r.Digest(ttl, life), requestName(op, digestText(key), r.Owner.PrincipalID, r.RequestID), newLeaseID(shard),
				r.Owner.PrincipalID, r.Owner.ClientID, r.Owner.CredentialID, r.Owner.InstanceID,
				millis(ttl), millis(life), r.ExecutionID, r.JobID, r.TraceID, r.RequestID, metadata,
				s.retention(life), millis(reclamation))
		},
	})
	if err != nil {
		return nil, err
	}
	switch a.code {
	case "lease_acquired":
		if len(a.rest) != 2+recordFields {
			return nil, unknown(op, errors.New("script answered with another number of fields"))
		}
		lease, err := decodeLease(a.rest[2:])
		if err != nil {
			return nil, unknown(op, err)
		}
		return &leaseclient.Acquired{
			Lease: *lease, Replayed: a.rest[0] == "replayed", Current: leaseclient.State(a.rest[1]), Now: a.now, Sent: a.sent,
		}, nil
	case "lease_conflict":
		return nil, &leaseclient.Error{Code: leaseclient.CodeConflict, Op: op, RetryAfter: conflictRetry()}
	case "idempotency_conflict":
		return nil, &leaseclient.Error{Code: leaseclient.CodeIdempotencyConflict, Op: op}
	case "exhausted":
		err := unavailable(op, ErrExhausted)
		s.alert(call{op: op, identity: r.Identity}, err)
		return nil, err
	}
	return nil, unknown(op, fmt.Errorf("script answered %q", a.code))
}

// conflictRetry says when a refused acquisition may try again. It says nothing of
// when the lease in the way ends: that is its owner's matter. The jitter keeps a
// crowd from coming back at once.
func conflictRetry() time.Duration {
	return 250*time.Millisecond + rand.N(250*time.Millisecond)
}

// Renew implements [leaseclient.Store].
func (s *Store) Renew(ctx context.Context, r leaseclient.RenewRequest) (*leaseclient.Renewed, error) {
	const op = "renew"
	if err := r.Validate(); err != nil {
		return nil, err
	}
	key := r.Identity.LockKey()
	retention := s.retention(s.opts.Policy.MaxLifetimeCeiling)
	if r.Once {
		retention = "0"
	}
	a, err := s.do(ctx, call{
		op: op, script: scripts.renew, lockKey: key, identity: r.Identity, guarded: true, deadline: r.Deadline,
		args: func(*layout, int) []string {
			return append(identityArgs(r.Identity),
				r.Digest(), requestName(op, digestText(key), r.PrincipalID, r.RequestID),
				r.LeaseID, r.PrincipalID, r.InstanceID, strconv.FormatUint(r.Token, 10),
				retention, millis(reclamation))
		},
	})
	if err != nil {
		return nil, err
	}
	lease, replayed, err := s.mutated(op, "lease_renewed", a)
	if err != nil {
		return nil, err
	}
	return &leaseclient.Renewed{Lease: *lease, Replayed: replayed, Now: a.now, Sent: a.sent}, nil
}

// Release implements [leaseclient.Store].
func (s *Store) Release(ctx context.Context, r leaseclient.ReleaseRequest) (*leaseclient.Released, error) {
	const op = "release"
	if err := r.Validate(); err != nil {
		return nil, err
	}
	key := r.Identity.LockKey()
	a, err := s.do(ctx, call{
		op: op, script: scripts.release, lockKey: key, identity: r.Identity, deadline: r.Deadline,
		args: func(*layout, int) []string {
			return append(identityArgs(r.Identity),
				r.Digest(), requestName(op, digestText(key), r.PrincipalID, r.RequestID),
				r.LeaseID, r.PrincipalID, r.InstanceID, strconv.FormatUint(r.Token, 10),
				s.retention(s.opts.Policy.MaxLifetimeCeiling))
		},
	})
	if err != nil {
		return nil, err
	}
	lease, replayed, err := s.mutated(op, "lease_released", a)
	if err != nil {
		return nil, err
	}
	return &leaseclient.Released{Lease: *lease, Replayed: replayed, Now: a.now}, nil
}

// mutated reads the answer of a renewal or a release.
func (s *Store) mutated(op, success string, a *answer) (*leaseclient.Lease, bool, error) {
	switch a.code {
	case success:
		if len(a.rest) != 1+recordFields {
			return nil, false, unknown(op, errors.New("script answered with another number of fields"))
		}
		lease, err := decodeLease(a.rest[1:])
		if err != nil {
			return nil, false, unknown(op, err)
		}
		return lease, a.rest[0] == "replayed", nil
	case "lease_lost":
		return nil, false, &leaseclient.Error{Code: leaseclient.CodeLost, Op: op}
	case "idempotency_conflict":
		return nil, false, &leaseclient.Error{Code: leaseclient.CodeIdempotencyConflict, Op: op}
	}
	return nil, false, unknown(op, fmt.Errorf("script answered %q", a.code))
}
