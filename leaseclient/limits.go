package leaseclient

import "time"

// Limits of the contract, in UTF-8 bytes unless said otherwise.
const (
	// MaxIdentifierBytes bounds every component of an identity and every
	// identifier of a request.
	MaxIdentifierBytes = 256
	// MaxReasonBytes bounds an administrator's reason.
	MaxReasonBytes = 512
	// MaxMetadataBytes bounds the serialized metadata object.
	MaxMetadataBytes = 4096
	// MaxMetadataKeys bounds the members of the metadata object.
	MaxMetadataKeys = 64
	// MaxMetadataDepth bounds nesting inside the metadata object.
	MaxMetadataDepth = 4
	// MaxToken is the highest fencing token. JavaScript in CouchDB must be
	// able to compare it exactly, so it is 2^53 - 1.
	MaxToken = 1<<53 - 1
	// EpochShift separates the token ranges of two epochs.
	EpochShift = 40
	// MaxEpoch is the last epoch whose whole range lies below MaxToken.
	MaxEpoch = 1<<(53-EpochShift) - 1
)

// TimePolicy is the server's policy for lease times. A request is held to it;
// it is never widened by a request. The store counts in whole milliseconds, so
// parts of one do not count anywhere: a lease of less would have ended when it
// began.
type TimePolicy struct {
	// MinTTL is exclusive: a TTL equal to it is refused.
	MinTTL time.Duration
	// DefaultTTL applies when a request names none.
	DefaultTTL time.Duration
	// MaxTTL is inclusive.
	MaxTTL time.Duration
	// DefaultMaxLifetime applies when a request names none.
	DefaultMaxLifetime time.Duration
	// MaxLifetimeCeiling is the longest maximum lifetime a request may ask for.
	MaxLifetimeCeiling time.Duration
	// RetryWindow is how long after a lease's last possible instant a repeated
	// request still finds its first result.
	RetryWindow time.Duration
}

// DefaultTimePolicy returns the times that apply where nothing is configured.
func DefaultTimePolicy() TimePolicy {
	return TimePolicy{
		MinTTL:             time.Second,
		DefaultTTL:         30 * time.Second,
		MaxTTL:             300 * time.Second,
		DefaultMaxLifetime: time.Hour,
		MaxLifetimeCeiling: 24 * time.Hour,
		RetryWindow:        24 * time.Hour,
	}
}

// Validate says which of the times contradict each other.
func (p TimePolicy) Validate() error {
	switch {
	case p.MinTTL < 0:
		return &InvalidError{Field: "minimum_ttl", Reason: "negative"}
	case p.DefaultTTL < time.Millisecond:
		return &InvalidError{Field: "default_ttl", Reason: "below one millisecond"}
	case p.DefaultTTL.Truncate(time.Millisecond) <= p.MinTTL:
		return &InvalidError{Field: "default_ttl", Reason: "not above the minimum TTL"}
	case p.MaxTTL < p.DefaultTTL:
		return &InvalidError{Field: "maximum_ttl", Reason: "below the default TTL"}
	case p.DefaultMaxLifetime < time.Millisecond:
		return &InvalidError{Field: "maximum_lifetime", Reason: "below one millisecond"}
	case p.MaxLifetimeCeiling < p.DefaultMaxLifetime:
		return &InvalidError{Field: "maximum_lifetime_ceiling", Reason: "below the default maximum lifetime"}
	case p.RetryWindow < time.Millisecond:
		return &InvalidError{Field: "retry_window", Reason: "below one millisecond"}
	}
	return nil
}

// Effective returns the TTL and the maximum lifetime that apply to a request,
// in whole milliseconds and at least one, or an [*InvalidError] when the request
// is outside the policy. Zero means that the request named none.
func (p TimePolicy) Effective(ttl, maxLifetime time.Duration) (time.Duration, time.Duration, error) {
	if ttl == 0 {
		ttl = p.DefaultTTL
	}
	if maxLifetime == 0 {
		maxLifetime = p.DefaultMaxLifetime
	}
	wholeTTL, wholeLife := ttl.Truncate(time.Millisecond), maxLifetime.Truncate(time.Millisecond)
	switch {
	case wholeTTL < time.Millisecond:
		return 0, 0, &InvalidError{Field: "ttl_ms", Reason: "below one millisecond"}
	case wholeTTL <= p.MinTTL:
		return 0, 0, &InvalidError{Field: "ttl_ms", Reason: "not above the minimum of " + p.MinTTL.String()}
	case ttl > p.MaxTTL:
		return 0, 0, &InvalidError{Field: "ttl_ms", Reason: "above the maximum of " + p.MaxTTL.String()}
	case wholeLife < time.Millisecond:
		return 0, 0, &InvalidError{Field: "maximum_lifetime_ms", Reason: "below one millisecond"}
	case maxLifetime > p.MaxLifetimeCeiling:
		return 0, 0, &InvalidError{Field: "maximum_lifetime_ms", Reason: "above the ceiling of " + p.MaxLifetimeCeiling.String()}
	case wholeLife < wholeTTL:
		return 0, 0, &InvalidError{Field: "maximum_lifetime_ms", Reason: "shorter than the TTL"}
	}
	return wholeTTL, wholeLife, nil
}
