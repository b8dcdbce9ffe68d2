package leaseclient

// LossReason says why a lease is not held any more.
type LossReason string

// The closed set of reasons. A worker hears exactly one of them, once.
const (
	// LossExpired: the end of the lease came before a renewal did.
	LossExpired LossReason = "expired"
	// LossRenewalRejected: the store said that this is not the lease of this
	// owner any more.
	LossRenewalRejected LossReason = "renewal_rejected"
	// LossBackendUnavailable: no renewal was confirmed by the end of the lease
	// less the safety margin.
	LossBackendUnavailable LossReason = "backend_unavailable"
	// LossReleased: the worker, or the sidecar on its behalf, gave it back.
	LossReleased LossReason = "released"
	// LossForceReleased and LossRevoked: an administrator took it.
	LossForceReleased LossReason = "force_released"
	LossRevoked       LossReason = "revoked"
	// LossMaxLifetime: the lease has reached the age that no renewal passes.
	LossMaxLifetime LossReason = "max_lifetime"
	// LossShuttingDown: the sidecar ends.
	LossShuttingDown LossReason = "shutting_down"
)

// LossReasons returns the closed set, in the order of the documentation.
func LossReasons() []LossReason {
	return []LossReason{
		LossExpired, LossRenewalRejected, LossBackendUnavailable, LossReleased,
		LossForceReleased, LossRevoked, LossMaxLifetime, LossShuttingDown,
	}
}

// Loss is the end of a lease as its keeper saw it.
type Loss struct {
	Reason LossReason
	// Err is the last failure that led to it, for logs; it may be nil.
	Err error
}
