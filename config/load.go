package config

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caarlos0/env/v11"

	"github.com/starintel/fencerider/fence/policy"
)

// errURL never repeats what it could not read.
var errURL = errors.New("must be an address such as scheme://host:port")

// maxSecretFile bounds a file with a secret.
const maxSecretFile = 64 << 10

// field is one setting.
type field struct {
	name, def, doc, min, max string
	need, file               bool
	index                    int
}

// fields reads the struct's tags.
func fields() []field {
	t := reflect.TypeFor[Config]()
	out := make([]field, 0, t.NumField())
	for i := range t.NumField() {
		g := t.Field(i).Tag
		out = append(out, field{
			name: Prefix + g.Get("env"), def: g.Get("default"), doc: g.Get("doc"), min: g.Get("min"), max: g.Get("max"),
			need: g.Get("need") == "yes", file: g.Get("file") == "yes", index: i,
		})
	}
	return out
}

// Names returns every variable that is read, those with _FILE included.
func Names() []string {
	var out []string
	for _, f := range fields() {
		out = append(out, f.name)
		if f.file {
			out = append(out, f.name+"_FILE")
		}
	}
	return out
}

// ignored reports whether a variable with the prefix is somebody else's: tests',
// or the links that Kubernetes puts into containers beside a service of this name.
func ignored(name string) bool {
	rest := strings.TrimPrefix(name, Prefix)
	return strings.HasPrefix(rest, "TEST_") || strings.HasPrefix(rest, "SERVICE_") || rest == "PORT" || strings.HasPrefix(rest, "PORT_")
}

// Error holds everything that is wrong with a configuration.
type Error struct {
	// Problems are lines that begin with the name of the variable.
	Problems []string
}

// Error joins the problems.
func (e *Error) Error() string { return strings.Join(e.Problems, "\n") }

// Load reads a configuration from an environment in the form of [os.Environ].
// The error is an [*Error].
func Load(environ []string) (*Config, error) {
	vars := make(map[string]string)
	var problems []string
	bad := func(name, format string, args ...any) {
		problems = append(problems, name+": "+fmt.Sprintf(format, args...))
	}
	known := Names()
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, Prefix) || ignored(name) {
			continue
		}
		if !slices.Contains(known, name) {
			if near := policy.Nearest(name[:min(len(name), 128)], known); near != "" {
				bad(name, "is not a setting; did you mean %s?", near)
			} else {
				bad(name, "is not a setting; `fencerider config --table` lists them")
			}
			continue
		}
		// A variable that is set to nothing is one that is not set: that is how
		// templates leave one out.
		if value != "" {
			vars[name] = value
		}
	}
	for _, f := range fields() {
		if !f.file {
			continue
		}
		path, ok := vars[f.name+"_FILE"]
		if !ok {
			continue
		}
		delete(vars, f.name+"_FILE")
		if _, both := vars[f.name]; both {
			bad(f.name, "is set, and %s_FILE is, too; set one", f.name)
			continue
		}
		secret, err := readSecret(path)
		if err != nil {
			bad(f.name+"_FILE", "%v", err)
			continue
		}
		vars[f.name] = secret
	}
	c := &Config{}
	err := env.ParseWithOptions(c, env.Options{Environment: vars, Prefix: Prefix, DefaultValueTagName: "default"})
	if agg, ok := errors.AsType[env.AggregateError](err); ok {
		for _, e := range agg.Errors {
			bad(nameOf(e), "%s", reasonOf(e))
		}
	} else if err != nil {
		bad("environment", "cannot be read")
	}
	if len(problems) == 0 {
		check(c, bad)
	}
	if len(problems) > 0 {
		slices.Sort(problems)
		return nil, &Error{Problems: problems}
	}
	return c, nil
}

// nameOf finds the variable that an error of the library is about.
func nameOf(err error) string {
	if pe, ok := errors.AsType[env.ParseError](err); ok {
		if f, found := reflect.TypeFor[Config]().FieldByName(pe.Name); found {
			return Prefix + f.Tag.Get("env")
		}
	}
	return "environment"
}

// reasonOf says what kind of value was wanted, without the value.
func reasonOf(err error) string {
	pe, ok := errors.AsType[env.ParseError](err)
	if !ok {
		return "cannot be read"
	}
	switch pe.Type {
	case reflect.TypeFor[time.Duration]():
		return "must be a time such as 500ms, 30s or 1h"
	case reflect.TypeFor[bool]():
		return "must be true or false"
	case reflect.TypeFor[URL]():
		return errURL.Error()
	}
	return "must be a number"
}

// readSecret reads a file whose mode keeps others out, and cuts one line end.
func readSecret(path string) (string, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("cannot be read: %s", reason(err))
	}
	switch {
	case !fi.Mode().IsRegular():
		return "", errors.New("is not a regular file")
	case fi.Mode().Perm()&0o037 != 0:
		return "", fmt.Errorf("has mode %04o; others must not get at it (0600, 0400 or 0640)", fi.Mode().Perm())
	case fi.Size() > maxSecretFile:
		return "", fmt.Errorf("is longer than %d bytes", maxSecretFile)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("cannot be read: %s", reason(err))
	}
	s := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
	if s == "" {
		return "", errors.New("is empty")
	}
	return s, nil
}

// reason is the cause without the path, which the variable names already.
func reason(err error) string {
	if pe, ok := errors.AsType[*os.PathError](err); ok {
		return pe.Err.Error()
	}
	return "unknown"
}

// check judges ranges and contradictions.
func check(c *Config, bad func(name, format string, args ...any)) {
	v := reflect.ValueOf(*c)
	for _, f := range fields() {
		value := v.Field(f.index)
		if f.need && value.IsZero() {
			bad(f.name, "is not set, and nothing runs without it")
		}
		if f.min == "" {
			continue
		}
		var n, low, high int64
		if value.Type() == reflect.TypeFor[time.Duration]() {
			n, low, high = value.Int(), int64(duration(f.min)), int64(duration(f.max))
		} else {
			n, low, high = value.Int(), number(f.min), number(f.max)
		}
		if n < low || n > high {
			bad(f.name, "must be from %s to %s", f.min, f.max)
		}
	}
	p := Prefix
	if c.CouchDBURL.u == nil && c.AMQPURL.u == nil {
		bad(p+"COUCHDB_URL", "is not set, and %sAMQP_URL is not either: there is nothing to stand in front of", p)
	}
	for name, u := range map[string]struct {
		u       URL
		schemes []string
	}{
		"VALKEY_URL": {c.ValkeyURL, []string{"valkey", "valkeys", "redis", "rediss", "unix"}}, "COUCHDB_URL": {c.CouchDBURL, []string{"http", "https"}}, "AMQP_URL": {c.AMQPURL, []string{"amqp", "amqps"}},
	} {
		if u.u.u != nil && !slices.Contains(u.schemes, u.u.u.Scheme) {
			bad(p+name, "has the scheme %q; known are %s", u.u.u.Scheme, strings.Join(u.schemes, ", "))
		}
	}
	if _, err := strconv.ParseUint(c.SocketMode, 8, 9); err != nil {
		bad(p+"SOCKET_MODE", "must be an octal mode such as 0600")
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, c.LogLevel) {
		bad(p+"LOG_LEVEL", "must be debug, info, warn or error")
	}
	if c.TTLDefault <= c.TTLMin {
		bad(p+"TTL_DEFAULT", "must be longer than %sTTL_MIN", p)
	}
	if c.TTLMax < c.TTLDefault {
		bad(p+"TTL_MAX", "must not be shorter than %sTTL_DEFAULT", p)
	}
	if c.MaxLifetimeCeiling < c.MaxLifetimeDefault {
		bad(p+"MAX_LIFETIME_CEILING", "must not be shorter than %sMAX_LIFETIME_DEFAULT", p)
	}
	if c.DeadlineCeiling < c.Deadline {
		bad(p+"DEADLINE_CEILING", "must not be shorter than %sDEADLINE_DEFAULT", p)
	}
	if c.LeaseTargetID != "" {
		for name, value := range map[string]string{
			"LEASE_TENANT_ID": c.LeaseTenantID, "LEASE_PROGRAM_ID": c.LeaseProgramID, "LEASE_TARGET_NAMESPACE": c.LeaseTargetNamespace, "LEASE_ACTOR_NAME": c.LeaseActorName,
		} {
			if value == "" {
				bad(p+name, "is not set, and %sLEASE_TARGET_ID is: an identity needs all of it", p)
			}
		}
	}
	if c.ValkeyCAFile != "" && c.ValkeyURL.u != nil && c.ValkeyURL.u.Scheme != "valkeys" && c.ValkeyURL.u.Scheme != "rediss" {
		bad(p+"VALKEY_CA_FILE", "is set, and %sVALKEY_URL is not valkeys://", p)
	}
}

// duration and number read the ranges, which are part of the program.
func duration(s string) time.Duration {
	d, err := time.ParseDuration(s)
	if err != nil {
		panic("config: range of a setting: " + err.Error())
	}
	return d
}

func number(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		panic("config: range of a setting: " + err.Error())
	}
	return n
}
