package fencetest

import (
	"fmt"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/leaseclient"
)

// Leases is a table with the leases of one test. Its fields are set between
// requests.
type Leases struct{ Refs []leaseclient.Ref }

var _ fence.Leases = (*Leases)(nil)

// Held implements [fence.Leases].
func (l *Leases) Held(id leaseclient.Identity) (leaseclient.Ref, bool) {
	return l.find(func(r leaseclient.Ref) bool { return r.Identity == id })
}

// Named implements [fence.Leases].
func (l *Leases) Named(leaseID string) (leaseclient.Ref, bool) {
	return l.find(func(r leaseclient.Ref) bool { return r.LeaseID == leaseID })
}

// find returns the first lease that fits.
func (l *Leases) find(fits func(leaseclient.Ref) bool) (leaseclient.Ref, bool) {
	for _, r := range l.Refs {
		if fits(r) {
			return r, true
		}
	}
	return leaseclient.Ref{}, false
}

// Single implements [fence.Leases].
func (l *Leases) Single() (leaseclient.Ref, int) {
	if len(l.Refs) == 1 {
		return l.Refs[0], 1
	}
	return leaseclient.Ref{}, len(l.Refs)
}

// Ref is a lease on a target, with the id "lease_<target>_<token>".
func Ref(target string, token uint64) leaseclient.Ref {
	id := leaseclient.Identity{
		TenantID: "t", ProgramID: "p", TargetNamespace: "n", TargetID: target,
		ActorName: "a", WorkflowName: leaseclient.DefaultComponent, OperationClass: leaseclient.DefaultComponent,
	}
	return leaseclient.Ref{
		Identity: id, LockKey: id.LockKey(), LeaseID: fmt.Sprintf("lease_%s_%d", target, token), Token: token,
		OwnerPrincipalID: "prn", ExecutionID: "e", TraceID: "tr",
	}
}

// EntryOf is the log entry of an accepted commit.
func EntryOf(a *fence.Accepted) leaseclient.Entry {
	return leaseclient.Entry{
		Commit: a.Commit, LockKey: a.Stamp.LockKey, Token: a.Stamp.Token, LeaseID: a.Stamp.LeaseID, ExecutionID: a.Stamp.ExecutionID,
		TraceID: a.Stamp.TraceID, AcceptedAt: a.Stamp.AcceptedAt, NotAfter: a.Stamp.NotAfter, ExpiresAt: a.Stamp.ExpiresAt,
	}
}
