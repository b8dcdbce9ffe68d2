package valkeystore

import (
	"errors"

	"github.com/starintel/fencerider/leaseclient"
)

// AlertKind says what an operator must look at.
type AlertKind string

// The closed set of alerts.
const (
	// AlertCorrupt: a record is not whole. It was left as it is, its lock is
	// listed as corrupt, and nothing is granted over it.
	AlertCorrupt AlertKind = "corrupt"
	// AlertExhausted: the fencing tokens of a lock are used up.
	AlertExhausted AlertKind = "exhausted"
	// AlertClock: the server's clock has jumped or stood still.
	AlertClock AlertKind = "clock"
)

// Alert is something that does not mend itself.
type Alert struct {
	Kind AlertKind
	// Op is what was being done.
	Op string
	// Identity is the one that the caller presented; the zero value when it
	// presented none.
	Identity leaseclient.Identity
	// Err says what is wrong, for the log.
	Err error
}

// alert tells the owner of the store.
func (s *Store) alert(c call, err error) {
	if s.opts.OnAlert == nil {
		return
	}
	a := Alert{Op: c.op, Identity: c.identity, Err: err}
	switch {
	case errors.Is(err, ErrCorrupt):
		a.Kind = AlertCorrupt
	case errors.Is(err, ErrExhausted):
		a.Kind = AlertExhausted
	case errors.Is(err, ErrClock):
		a.Kind = AlertClock
	default:
		return
	}
	s.opts.OnAlert(a)
}
