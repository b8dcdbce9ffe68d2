package fence

import (
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
)

// Leases is the sidecar's table of leases, as the adapters see it. It tells
// which lease a write presents, never whether that lease is current: a lease
// that was lost stays in the table until another takes its place, so that the
// store is asked and says so. It is safe for concurrent use.
type Leases interface {
	// Held returns the latest lease of an identity.
	Held(id leaseclient.Identity) (leaseclient.Ref, bool)
	// Named returns a lease by its id.
	Named(leaseID string) (leaseclient.Ref, bool)
	// Single returns the only lease of the table and how many there are; the
	// lease is set only when there is exactly one.
	Single() (leaseclient.Ref, int)
}

// Choose returns the lease that a write must present: the one its policy
// decision asks for. A worker may name a lease, and then that lease must be of
// the decision's identity. The error is a [*leaseclient.Error]:
//
//   - policy_denied: the policy denies the write, or it needs the sidecar's
//     single lease and there are several and none is named.
//   - lock_mismatch: the named lease is of another identity.
//   - lease_lost: the sidecar holds no such lease.
//
// A decision that asks for no lease is an error of the caller and is denied.
func Choose(l Leases, d policy.Decision, named string) (leaseclient.Ref, error) {
	switch d.Verdict {
	case policy.Fenced:
		return chooseFenced(l, d.Identity, named)
	case policy.SingleLease:
		return chooseSingle(l, named)
	case policy.Deny, policy.Off, policy.Pass:
	}
	return leaseclient.Ref{}, &leaseclient.Error{Code: leaseclient.CodePolicyDenied, Op: "choose lease", Detail: d.Reason}
}

// chooseFenced finds the lease of an identity that policy named.
func chooseFenced(l Leases, id leaseclient.Identity, named string) (leaseclient.Ref, error) {
	if named == "" {
		if ref, ok := l.Held(id); ok {
			return ref, nil
		}
		return leaseclient.Ref{}, noLease("this sidecar holds no lease of the identity that this write needs")
	}
	ref, ok := l.Named(named)
	if !ok {
		return leaseclient.Ref{}, noLease("this sidecar does not hold the named lease")
	}
	if ref.Identity != id {
		return leaseclient.Ref{}, &leaseclient.Error{
			Code: leaseclient.CodeLockMismatch, Op: "choose lease",
			Detail: "the named lease is of another identity than this write needs",
		}
	}
	return ref, nil
}

// chooseSingle finds the lease where no policy names an identity.
func chooseSingle(l Leases, named string) (leaseclient.Ref, error) {
	if named != "" {
		if ref, ok := l.Named(named); ok {
			return ref, nil
		}
		return leaseclient.Ref{}, noLease("this sidecar does not hold the named lease")
	}
	ref, n := l.Single()
	switch n {
	case 0:
		return leaseclient.Ref{}, noLease("this sidecar holds no lease")
	case 1:
		return ref, nil
	}
	return leaseclient.Ref{}, &leaseclient.Error{
		Code: leaseclient.CodePolicyDenied, Op: "choose lease",
		Detail: "this sidecar holds several leases: name one with the write, or give it a policy file",
	}
}

// noLease is the refusal of a write whose lease the sidecar does not have.
func noLease(detail string) error {
	return &leaseclient.Error{Code: leaseclient.CodeLost, Op: "choose lease", Detail: detail}
}
