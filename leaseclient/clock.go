package leaseclient

import "time"

// Clock tells how long the machine has been up. It must count time that the
// machine was suspended: a lease runs out at the store while a laptop sleeps,
// and a clock that sleeps too would believe that it still holds it.
type Clock interface {
	// Boot is the time since some fixed instant, never going back.
	Boot() time.Duration
}

// StoreTime is an instant on the store's clock, in milliseconds since the Unix
// epoch. It is a type of its own so that it is never compared with local time
// by mistake.
type StoreTime int64

// TimeFormat is how instants are written in JSON: UTC with milliseconds.
const TimeFormat = "2006-01-02T15:04:05.000Z"

// String formats the instant as the contract's JSON does.
func (t StoreTime) String() string {
	return time.UnixMilli(int64(t)).UTC().Format(TimeFormat)
}

// MarshalText makes StoreTime appear in JSON in [TimeFormat].
func (t StoreTime) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText reads [TimeFormat].
func (t *StoreTime) UnmarshalText(b []byte) error {
	v, err := time.Parse(TimeFormat, string(b))
	if err != nil {
		return err
	}
	*t = StoreTime(v.UnixMilli())
	return nil
}

// Add returns the instant d later, cut to milliseconds.
func (t StoreTime) Add(d time.Duration) StoreTime { return t + StoreTime(d.Milliseconds()) }

// Sub returns how long t is after u.
func (t StoreTime) Sub(u StoreTime) time.Duration {
	return time.Duration(t-u) * time.Millisecond
}
