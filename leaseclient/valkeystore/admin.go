package valkeystore

import (
	"context"
	"fmt"
	"strconv"

	"github.com/starintel/fencerider/leaseclient"
)

// maxAuditEvents is how many events of a shard's administrative operations the
// server keeps, about: it trims them in steps.
const maxAuditEvents = 10_000

// Invalidate implements [leaseclient.Invalidator].
func (s *Store) Invalidate(ctx context.Context, r leaseclient.InvalidateRequest) (*leaseclient.Invalidated, error) {
	op := "force_release"
	if r.To == leaseclient.StateRevoked {
		op = "revoke"
	}
	if err := r.Validate(); err != nil {
		return nil, err
	}
	key := r.Identity.LockKey()
	a, err := s.do(ctx, call{
		op: op, script: scripts.invalidate, lockKey: key, identity: r.Identity, deadline: r.Deadline, durable: true,
		args: func(*layout, int) []string {
			return append(identityArgs(r.Identity),
				r.Digest(), requestName(op, digestText(key), r.Admin.PrincipalID, r.RequestID),
				r.LeaseID, strconv.FormatUint(r.Token, 10), s.retention(s.opts.Policy.MaxLifetimeCeiling),
				op, string(r.To), r.Admin.PrincipalID, r.Admin.ClientID, r.Admin.CredentialID, r.Admin.InstanceID,
				r.Reason, r.Incident, r.RequestID, r.CorrelationID, r.DecisionID, strconv.Itoa(maxAuditEvents))
		},
	})
	if err != nil {
		return nil, err
	}
	switch a.code {
	case "lease_invalidated":
		lease, err := a.lease(2)
		if err != nil {
			return nil, unknown(op, err)
		}
		n, err := strconv.Atoi(a.rest[1])
		if err != nil {
			return nil, unknown(op, fmt.Errorf("script answered with a malformed number"))
		}
		return &leaseclient.Invalidated{Lease: *lease, Replayed: a.rest[0] == "replayed", InFlight: n, Now: a.now}, nil
	case "lease_lost":
		return nil, &leaseclient.Error{Code: leaseclient.CodeLost, Op: op}
	case "idempotency_conflict":
		return nil, &leaseclient.Error{Code: leaseclient.CodeIdempotencyConflict, Op: op}
	}
	return nil, unknown(op, fmt.Errorf("script answered %q", a.code))
}
