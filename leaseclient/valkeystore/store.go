package valkeystore

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valkey-io/valkey-go"

	"github.com/starintel/fencerider/leaseclient"
)

// Options configure a [Store]. Zero values mean the defaults named here.
type Options struct {
	// URL is valkey://, valkeys://, redis://, rediss:// or unix://.
	URL string
	// Username and Password override those in the URL.
	Username, Password string
	// TLS overrides certificates of a valkeys:// URL.
	TLS *tls.Config
	// Namespace separates deployments on one server; "fencerider".
	Namespace string
	// Policy bounds lease times; [leaseclient.DefaultTimePolicy].
	Policy leaseclient.TimePolicy
	// Clock measures locally; [leaseclient.SystemClock].
	Clock leaseclient.Clock
	// Bound is how long after its acceptance an effect may be sent; 5 s.
	Bound time.Duration
	// MaxEntries and MaxBytes bound the commit log of one lock; 10,000 and
	// 64 MiB.
	MaxEntries int
	MaxBytes   int64
	// ClaimTime is how long a settler may work before another may; 10 s.
	ClaimTime time.Duration
	// MaxQuarantined bounds what is set aside per lock; 1,000.
	MaxQuarantined int
	// CallTimeout bounds a call whose context has no earlier end; 5 s.
	CallTimeout time.Duration
	// DialTimeout bounds one connection attempt; 2 s.
	DialTimeout time.Duration
	// AllowVolatile accepts a server that may forget or evict. It is for
	// development: every guarantee ends with such a server.
	AllowVolatile bool
}

// Bounds of endings that are remembered per lock.
const (
	doneFor     = time.Hour
	doneEntries = 10_000
)

// reclamation is how long a record outlives its lease at the store. It is about
// memory only.
const reclamation = time.Minute

// withDefaults fills what was left out and refuses what cannot be.
func (o Options) withDefaults() (Options, error) {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if o.Namespace == "" {
		o.Namespace = "fencerider"
	}
	if o.Policy == (leaseclient.TimePolicy{}) {
		o.Policy = leaseclient.DefaultTimePolicy()
	}
	if o.Clock == nil {
		o.Clock = leaseclient.SystemClock()
	}
	def(&o.Bound, 5*time.Second)
	def(&o.ClaimTime, 10*time.Second)
	def(&o.CallTimeout, 5*time.Second)
	def(&o.DialTimeout, 2*time.Second)
	if o.MaxEntries == 0 {
		o.MaxEntries = 10_000
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 64 << 20
	}
	if o.MaxQuarantined == 0 {
		o.MaxQuarantined = 1000
	}
	if o.Bound < time.Millisecond || o.ClaimTime < time.Millisecond || o.MaxEntries < 1 || o.MaxBytes < 1 || o.MaxQuarantined < 1 {
		return o, &leaseclient.InvalidError{Field: "lease store options", Reason: "a bound is not positive"}
	}
	return o, o.Policy.Validate()
}

// Store keeps leases and commit logs in Valkey. It is safe for concurrent use.
// Close it when done.
type Store struct {
	opts         Options
	keys         keyspace
	clientOption valkey.ClientOption

	client  atomic.Pointer[valkey.Client]
	closed  atomic.Bool
	dialing chan struct{}
	// dedicated is taken for as long as a dedicated connection is. The client
	// library waits for one without an end, so it must never have to.
	dedicated chan struct{}

	mu     sync.Mutex
	layout *layout
	// seenTime and seenBoot tie the store's clock to the boot clock: at boot
	// time seenBoot the store's clock showed at least seenTime.
	seenTime leaseclient.StoreTime
	seenBoot time.Duration
}

// layout is what the namespace marker says.
type layout struct {
	generation string
	shards     int
	epoch      uint64
}

var (
	_ leaseclient.Store     = (*Store)(nil)
	_ leaseclient.CommitLog = (*Store)(nil)
)

// Open validates the options. It does not connect: the first call does, and a
// store out of reach answers [leaseclient.CodeUnavailable] until it is there.
func Open(o Options) (*Store, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	keys, err := newKeyspace(o.Namespace)
	if err != nil {
		return nil, err
	}
	co, err := clientOption(o)
	if err != nil {
		return nil, err
	}
	return &Store{opts: o, keys: keys, clientOption: co, dialing: make(chan struct{}, 1), dedicated: make(chan struct{}, maxDedicated)}, nil
}

// ErrCorrupt is wrapped by the error of an operation that met a record which is
// not whole. The record was left as it is and nothing was granted.
var ErrCorrupt = errors.New("record at the lease store is damaged")

// ErrExhausted is wrapped by the error of an acquisition whose fencing token
// would pass the limit.
var ErrExhausted = errors.New("fencing tokens of this lock are used up")

// ErrVolatile is wrapped by every error while the server may forget or evict.
var ErrVolatile = errors.New("lease store may lose what it acknowledged")

// unavailable says that nothing was done.
func unavailable(op string, err error) error {
	return &leaseclient.Error{Code: leaseclient.CodeUnavailable, Op: op, RetryAfter: time.Second, Err: err}
}

// unknown says that the operation may have been done.
func unknown(op string, err error) error {
	return &leaseclient.Error{Code: leaseclient.CodeOutcomeUnknown, Op: op, RetryAfter: time.Second, Err: err}
}

// answer is what a script returned.
type answer struct {
	code string
	now  leaseclient.StoreTime
	rest []string
	sent time.Duration
}

// call is one run of a script.
type call struct {
	op     string
	script *script
	// lockKey decides the shard; shard does where there is no lock.
	lockKey string
	shard   int
	// deadline is the caller's; the zero value means that there is none, for
	// operations that must go through whenever they can.
	deadline time.Time
	// durable waits for the log of the server to be on disk.
	durable bool
	args    func(l *layout, shard int) []string
}

// do runs a script once and translates everything that can go wrong. It
// repeats the call only after the script has said that it did nothing because
// the layout of the namespace has changed.
func (s *Store) do(ctx context.Context, c call) (*answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.opts.CallTimeout)
	defer cancel()
	for attempt := 0; ; attempt++ {
		if err := ctx.Err(); err != nil {
			return nil, &leaseclient.Error{Code: leaseclient.CodeDeadlineExceeded, Op: c.op, Err: err}
		}
		l, err := s.open(ctx, c.op)
		if err != nil {
			return nil, err
		}
		a, err := s.run(ctx, c, l)
		if err != nil {
			return nil, err
		}
		switch a.code {
		case "moved":
			s.forgetLayout(l)
			if attempt == 0 {
				continue
			}
			return nil, unavailable(c.op, errors.New(a.first()))
		case "unavailable":
			s.forgetLayout(l)
			return nil, unavailable(c.op, errors.New(a.first()))
		case "corrupt":
			return nil, unavailable(c.op, fmt.Errorf("%w: %s", ErrCorrupt, a.first()))
		case "deadline_exceeded":
			return nil, &leaseclient.Error{Code: leaseclient.CodeDeadlineExceeded, Op: c.op}
		}
		return a, nil
	}
}

// run sends a script and reads its answer.
func (s *Store) run(ctx context.Context, c call, l *layout) (*answer, error) {
	client, err := s.connect(ctx)
	if err != nil {
		return nil, unavailable(c.op, err)
	}
	shard, digest := c.shard, ""
	if c.lockKey != "" {
		d, err := leaseclient.ParseLockKey(c.lockKey)
		if err != nil {
			return nil, &leaseclient.InvalidError{Field: "lock_key", Reason: err.Error()}
		}
		shard, digest = shardOf(d, l.shards), digestText(c.lockKey)
	}
	args := []string{l.generation, strconv.Itoa(l.shards), s.storeDeadline(c.deadline)}
	if c.lockKey != "" {
		args = append(args, digest, c.lockKey)
	}
	if c.args != nil {
		args = append(args, c.args(l, shard)...)
	}
	keys := []string{s.keys.marker(shard)}

	durable := c.durable && !s.opts.AllowVolatile
	if durable {
		select {
		case s.dedicated <- struct{}{}:
			defer func() { <-s.dedicated }()
		case <-ctx.Done():
			return nil, &leaseclient.Error{
				Code: leaseclient.CodeDeadlineExceeded, Op: c.op, Err: fmt.Errorf("wait for a dedicated connection: %w", ctx.Err()),
			}
		}
	}
	sent := s.opts.Clock.Boot()
	var res valkey.ValkeyResult
	if !durable {
		res = c.script.lua.Exec(ctx, client, keys, args)
	} else {
		// The wait must be on the connection that wrote.
		dedicated, release := client.Dedicate()
		defer release()
		res = dedicated.Do(ctx, dedicated.B().Eval().Script(c.script.source).Numkeys(1).Key(keys...).Arg(args...).Build())
		if res.Error() == nil {
			if err := s.waitDurable(ctx, dedicated); err != nil {
				return nil, unknown(c.op, err)
			}
		}
	}
	return s.decode(c.op, res, sent)
}

// waitDurable waits until the server's own log, on disk, holds everything that
// this connection wrote. The server goes by the connection's last write: on one
// that only read it confirms at once, and that proves nothing. So every script
// whose answer must be durable writes, a repetition included; the log is in
// order, and what is behind the grant in it proves the grant.
func (s *Store) waitDurable(ctx context.Context, c valkey.DedicatedClient) error {
	n, err := c.Do(ctx, c.B().Waitaof().Numlocal(1).Numreplicas(0).Timeout(s.opts.CallTimeout.Milliseconds()).Build()).AsIntSlice()
	if err != nil {
		return fmt.Errorf("wait for durability: %w", err)
	}
	if len(n) != 2 || n[0] < 1 {
		return errors.New("wait for durability: the server did not confirm in time")
	}
	return nil
}

// first returns the first value behind the code, for messages.
func (a *answer) first() string {
	if len(a.rest) == 0 {
		return a.code
	}
	return a.rest[0]
}

// decode turns a result into an answer, or into what is known about the call.
func (s *Store) decode(op string, res valkey.ValkeyResult, sent time.Duration) (*answer, error) {
	values, err := res.AsStrSlice()
	received := s.opts.Clock.Boot()
	if err != nil {
		if nothingRan(err) {
			return nil, unavailable(op, err)
		}
		return nil, unknown(op, err)
	}
	if len(values) < 2 {
		return nil, unknown(op, errors.New("script answered with too little"))
	}
	ms, err := strconv.ParseInt(values[1], 10, 64)
	if err != nil {
		return nil, unknown(op, errors.New("script answered without a time"))
	}
	a := &answer{code: values[0], now: leaseclient.StoreTime(ms), rest: values[2:], sent: sent}
	s.observe(a.now, received)
	return a, nil
}

// refusals are the answers that a server gives before it runs a script.
var refusals = map[string]bool{
	"NOSCRIPT": true, "OOM": true, "LOADING": true, "READONLY": true, "MISCONF": true, "NOAUTH": true,
	"WRONGPASS": true, "MASTERDOWN": true, "BUSY": true, "CLUSTERDOWN": true, "TRYAGAIN": true,
	"NOREPLICAS": true, "MOVED": true, "ASK": true, "NOPERM": true, "DENIED": true,
}

// nothingRan reports whether an error proves that the script did not run. An
// error raised inside a script names the script, whatever its class: what came
// before it in the script has been done.
func nothingRan(err error) bool {
	if _, ok := errors.AsType[*dialError](err); ok {
		return true
	}
	if errors.Is(err, valkey.ErrClosing) || errors.Is(err, valkey.ErrNoAddr) {
		return true
	}
	e, ok := errors.AsType[*valkey.ValkeyError](err)
	if !ok || e.IsNil() {
		return false
	}
	class, text, _ := cutWord(e.Error())
	return refusals[class] && !containsScript(text)
}

// observe ties the two clocks together once more.
func (s *Store) observe(now leaseclient.StoreTime, received time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seenTime, s.seenBoot = now, received
}

// storeDeadline carries a caller's deadline over to the store's clock. It may
// come out early by as long as an answer was under way, never late.
func (s *Store) storeDeadline(deadline time.Time) string {
	if deadline.IsZero() {
		return strconv.FormatInt(leaseclient.MaxToken, 10)
	}
	boot := s.opts.Clock.Boot() + time.Until(deadline)
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.seenTime.Add(boot - s.seenBoot)
	return strconv.FormatInt(max(0, min(int64(at), leaseclient.MaxToken)), 10)
}

// identityArgs are the arguments of operations that present an identity.
func identityArgs(id leaseclient.Identity) []string {
	return []string{
		id.Canonical(), id.TenantID, id.ProgramID, id.TargetNamespace, id.TargetID,
		id.ActorName, id.WorkflowName, id.OperationClass,
	}
}

// millis writes a duration for a script.
func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// retention is how long first results are kept: past the last instant of the
// lease and the whole window in which a client may repeat itself.
func (s *Store) retention(maxLifetime time.Duration) string {
	return millis(maxLifetime + s.opts.Policy.RetryWindow)
}

// Acquire implements [leaseclient.Store].
func (s *Store) Acquire(ctx context.Context, r leaseclient.AcquireRequest) (*leaseclient.Acquired, error) {
	const op = "acquire"
	if err := r.Validate(); err != nil {
		return nil, err
	}
	ttl, life, err := s.opts.Policy.Effective(r.TTL, r.MaxLifetime)
	if err != nil {
		return nil, err
	}
	metadata, err := leaseclient.EncodeMetadata(r.Metadata)
	if err != nil {
		return nil, err
	}
	key := r.Identity.LockKey()
	a, err := s.do(ctx, call{
		op: op, script: scripts.acquire, lockKey: key, deadline: r.Deadline, durable: true,
		args: func(_ *layout, shard int) []string {
			return append(identityArgs(r.Identity),
				r.Digest(ttl, life), requestName(op, digestText(key), r.Owner.PrincipalID, r.RequestID), newLeaseID(shard),
				r.Owner.PrincipalID, r.Owner.ClientID, r.Owner.CredentialID, r.Owner.InstanceID,
				millis(ttl), millis(life), r.ExecutionID, r.JobID, r.TraceID, r.RequestID, metadata,
				s.retention(life), millis(reclamation))
		},
	})
	if err != nil {
		return nil, err
	}
	switch a.code {
	case "lease_acquired":
		if len(a.rest) != 2+recordFields {
			return nil, unknown(op, errors.New("script answered with another number of fields"))
		}
		lease, err := decodeLease(a.rest[2:])
		if err != nil {
			return nil, unknown(op, err)
		}
		return &leaseclient.Acquired{
			Lease: *lease, Replayed: a.rest[0] == "replayed", Current: leaseclient.State(a.rest[1]), Now: a.now, Sent: a.sent,
		}, nil
	case "lease_conflict":
		return nil, &leaseclient.Error{Code: leaseclient.CodeConflict, Op: op, RetryAfter: conflictRetry(a.first())}
	case "idempotency_conflict":
		return nil, &leaseclient.Error{Code: leaseclient.CodeIdempotencyConflict, Op: op}
	case "exhausted":
		return nil, unavailable(op, ErrExhausted)
	}
	return nil, unknown(op, fmt.Errorf("script answered %q", a.code))
}

// conflictRetry says when a refused acquisition may try again: when the lease in
// the way would run out, but no longer than a second, since it may be released
// at any time. The jitter keeps a crowd from coming back at once.
func conflictRetry(remaining string) time.Duration {
	ms, err := strconv.ParseInt(remaining, 10, 64)
	if err != nil || ms <= 0 || ms > 1000 {
		ms = 1000
	}
	return time.Duration(ms)*time.Millisecond + rand.N(250*time.Millisecond)
}

// Renew implements [leaseclient.Store].
func (s *Store) Renew(ctx context.Context, r leaseclient.RenewRequest) (*leaseclient.Renewed, error) {
	const op = "renew"
	if err := r.Validate(); err != nil {
		return nil, err
	}
	key := r.Identity.LockKey()
	retention := s.retention(s.opts.Policy.MaxLifetimeCeiling)
	if r.Once {
		retention = "0"
	}
	a, err := s.do(ctx, call{
		op: op, script: scripts.renew, lockKey: key, deadline: r.Deadline,
		args: func(*layout, int) []string {
			return append(identityArgs(r.Identity),
				r.Digest(), requestName(op, digestText(key), r.PrincipalID, r.RequestID),
				r.LeaseID, r.PrincipalID, r.InstanceID, strconv.FormatUint(r.Token, 10),
				retention, millis(reclamation))
		},
	})
	if err != nil {
		return nil, err
	}
	lease, replayed, err := s.mutated(op, "lease_renewed", a)
	if err != nil {
		return nil, err
	}
	return &leaseclient.Renewed{Lease: *lease, Replayed: replayed, Now: a.now, Sent: a.sent}, nil
}

// Release implements [leaseclient.Store].
func (s *Store) Release(ctx context.Context, r leaseclient.ReleaseRequest) (*leaseclient.Released, error) {
	const op = "release"
	if err := r.Validate(); err != nil {
		return nil, err
	}
	key := r.Identity.LockKey()
	a, err := s.do(ctx, call{
		op: op, script: scripts.release, lockKey: key, deadline: r.Deadline,
		args: func(*layout, int) []string {
			return append(identityArgs(r.Identity),
				r.Digest(), requestName(op, digestText(key), r.PrincipalID, r.RequestID),
				r.LeaseID, r.PrincipalID, r.InstanceID, strconv.FormatUint(r.Token, 10),
				s.retention(s.opts.Policy.MaxLifetimeCeiling))
		},
	})
	if err != nil {
		return nil, err
	}
	lease, replayed, err := s.mutated(op, "lease_released", a)
	if err != nil {
		return nil, err
	}
	return &leaseclient.Released{Lease: *lease, Replayed: replayed, Now: a.now}, nil
}

// mutated reads the answer of a renewal or a release.
func (s *Store) mutated(op, success string, a *answer) (*leaseclient.Lease, bool, error) {
	switch a.code {
	case success:
		if len(a.rest) != 1+recordFields {
			return nil, false, unknown(op, errors.New("script answered with another number of fields"))
		}
		lease, err := decodeLease(a.rest[1:])
		if err != nil {
			return nil, false, unknown(op, err)
		}
		return lease, a.rest[0] == "replayed", nil
	case "lease_lost":
		return nil, false, &leaseclient.Error{Code: leaseclient.CodeLost, Op: op}
	case "idempotency_conflict":
		return nil, false, &leaseclient.Error{Code: leaseclient.CodeIdempotencyConflict, Op: op}
	}
	return nil, false, unknown(op, fmt.Errorf("script answered %q", a.code))
}

// Inspect implements [leaseclient.Store].
func (s *Store) Inspect(ctx context.Context, r leaseclient.InspectRequest) (*leaseclient.Inspected, error) {
	const op = "inspect"
	if n, err := r.Identity.Normalize(); err != nil {
		return nil, err
	} else if n != r.Identity {
		return nil, &leaseclient.InvalidError{Field: "lock_identity", Reason: "not in canonical form"}
	}
	if r.Deadline.IsZero() {
		return nil, &leaseclient.InvalidError{Field: "deadline_at", Reason: "missing"}
	}
	a, err := s.do(ctx, call{
		op: op, script: scripts.inspect, lockKey: r.Identity.LockKey(), deadline: r.Deadline,
		args: func(*layout, int) []string { return identityArgs(r.Identity) },
	})
	if err != nil {
		// A read that got no answer has changed nothing.
		if leaseclient.CodeOf(err) == leaseclient.CodeOutcomeUnknown {
			return nil, unavailable(op, err)
		}
		return nil, err
	}
	switch a.code {
	case "lease_inspected":
		if len(a.rest) != recordFields {
			return nil, unavailable(op, errors.New("script answered with another number of fields"))
		}
		lease, err := decodeLease(a.rest)
		if err != nil {
			return nil, unavailable(op, err)
		}
		return &leaseclient.Inspected{Lease: *lease, Now: a.now}, nil
	case "lease_not_found":
		return nil, &leaseclient.Error{Code: leaseclient.CodeNotFound, Op: op}
	}
	return nil, unavailable(op, fmt.Errorf("script answered %q", a.code))
}

// recordFields is how many values a record has on the wire.
const recordFields = 26

// decodeLease reads a record in wire order, the order of FIELDS in the prelude.
func decodeLease(v []string) (*leaseclient.Lease, error) {
	l := &leaseclient.Lease{
		RecordVersion: leaseclient.RecordVersion,
		LockKey:       v[1],
		Identity: leaseclient.Identity{
			TenantID: v[2], ProgramID: v[3], TargetNamespace: v[4], TargetID: v[5],
			ActorName: v[6], WorkflowName: v[7], OperationClass: v[8],
		},
		LeaseID:     v[9],
		Owner:       leaseclient.Owner{PrincipalID: v[10], ClientID: v[11], CredentialID: v[12], InstanceID: v[13]},
		ExecutionID: v[20], JobID: v[21], TraceID: v[22], RequestID: v[23],
		State: leaseclient.State(v[25]),
	}
	if v[0] != strconv.Itoa(leaseclient.RecordVersion) {
		return nil, errors.New("record has an unknown version")
	}
	var err error
	num := func(i int) int64 {
		n, e := strconv.ParseInt(v[i], 10, 64)
		if e != nil || n < 0 || n > leaseclient.MaxToken {
			err = errors.New("record holds a malformed number")
		}
		return n
	}
	l.Token = uint64(num(14))
	l.AcquiredAt, l.RenewedAt, l.ExpiresAt = leaseclient.StoreTime(num(15)), leaseclient.StoreTime(num(16)), leaseclient.StoreTime(num(17))
	l.TTLMillis, l.MaxLifetimeMillis = num(18), num(19)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(v[24]), &l.Metadata); err != nil {
		return nil, errors.New("record holds malformed metadata")
	}
	switch l.State {
	case leaseclient.StateActive, leaseclient.StateExpired, leaseclient.StateReleased, leaseclient.StateRevoked:
	default:
		return nil, errors.New("record has an unknown state")
	}
	return l, nil
}
