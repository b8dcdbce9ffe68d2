package proxy

import "github.com/starintel/fencerider/leaseclient"

// leaseView is a lease as workers see it: without the lock key, the owner's
// credential, and metadata.
type leaseView struct {
	Identity    leaseclient.Identity  `json:"lock_identity"`
	LeaseID     string                `json:"lease_id"`
	Token       uint64                `json:"fencing_token"`
	AcquiredAt  leaseclient.StoreTime `json:"acquired_at"`
	RenewedAt   leaseclient.StoreTime `json:"renewed_at"`
	ExpiresAt   leaseclient.StoreTime `json:"expires_at"`
	TTLMillis   int64                 `json:"ttl_ms"`
	ExecutionID string                `json:"execution_id,omitempty"`
	JobID       string                `json:"job_id,omitempty"`
	TraceID     string                `json:"trace_id,omitempty"`
	State       leaseclient.State     `json:"state"`
}

// viewOf shows a lease of this sidecar.
func viewOf(l leaseclient.Lease) leaseView {
	return leaseView{
		Identity: l.Identity, LeaseID: l.LeaseID, Token: l.Token, AcquiredAt: l.AcquiredAt, RenewedAt: l.RenewedAt, ExpiresAt: l.ExpiresAt,
		TTLMillis: l.TTLMillis, ExecutionID: l.ExecutionID, JobID: l.JobID, TraceID: l.TraceID, State: l.State,
	}
}

// viewOfOther shows a lease that may be another owner's: only what the contract
// lets everybody in scope see.
func viewOfOther(l leaseclient.Lease) leaseView {
	v := viewOf(l)
	v.LeaseID, v.ExecutionID, v.JobID, v.TraceID = "", "", "", ""
	return v
}
