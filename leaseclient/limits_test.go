package leaseclient

import (
	"errors"
	"testing"
	"time"
)

func TestPolicyNeedsWholeMilliseconds(t *testing.T) {
	if err := DefaultTimePolicy().Validate(); err != nil {
		t.Fatal(err)
	}
	for field, change := range map[string]func(*TimePolicy){
		"default_ttl": func(p *TimePolicy) { p.MinTTL, p.DefaultTTL = 0, time.Millisecond-1 },
		"maximum_lifetime": func(p *TimePolicy) {
			p.MinTTL, p.DefaultTTL, p.DefaultMaxLifetime = 0, time.Millisecond, time.Millisecond-1
		},
		"retry_window": func(p *TimePolicy) { p.RetryWindow = time.Millisecond - 1 },
	} {
		p := DefaultTimePolicy()
		change(&p)
		if e, ok := errors.AsType[*InvalidError](p.Validate()); !ok || e.Field != field {
			t.Errorf("%s: %v", field, p.Validate())
		}
	}
	// What is above the minimum by less than a millisecond is at it.
	p := DefaultTimePolicy()
	p.DefaultTTL = p.MinTTL + time.Millisecond - 1
	if e, ok := errors.AsType[*InvalidError](p.Validate()); !ok || e.Field != "default_ttl" {
		t.Errorf("default TTL at the minimum: %v", p.Validate())
	}
}

func TestEffectiveTimesAreWholeMilliseconds(t *testing.T) {
	p := DefaultTimePolicy()
	p.MinTTL = 0
	p.DefaultTTL, p.DefaultMaxLifetime = 1500*time.Microsecond, 2500*time.Microsecond
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		ttl, life         time.Duration
		wantTTL, wantLife time.Duration
		field             string
	}{
		{0, 0, time.Millisecond, 2 * time.Millisecond, ""},
		{2999 * time.Microsecond, 3999 * time.Microsecond, 2 * time.Millisecond, 3 * time.Millisecond, ""},
		{time.Millisecond, time.Millisecond, time.Millisecond, time.Millisecond, ""},
		{999 * time.Microsecond, time.Second, 0, 0, "ttl_ms"},
		{-time.Microsecond, time.Second, 0, 0, "ttl_ms"},
		{time.Millisecond, 999 * time.Microsecond, 0, 0, "maximum_lifetime_ms"},
		{time.Millisecond, -time.Microsecond, 0, 0, "maximum_lifetime_ms"},
		{p.MaxTTL + 1, p.MaxLifetimeCeiling, 0, 0, "ttl_ms"},
		{p.MaxTTL, p.MaxLifetimeCeiling + 1, 0, 0, "maximum_lifetime_ms"},
	} {
		ttl, life, err := p.Effective(tc.ttl, tc.life)
		field := ""
		if e, ok := errors.AsType[*InvalidError](err); ok {
			field = e.Field
		}
		if ttl != tc.wantTTL || life != tc.wantLife || field != tc.field {
			t.Errorf("%v, %v: %v, %v, %v", tc.ttl, tc.life, ttl, life, err)
		}
	}
}
