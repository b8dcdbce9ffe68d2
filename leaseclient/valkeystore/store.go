package valkeystore

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
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
	// OnExpired, when set, is told of every lease whose end a call of this
	// store was the first to see: once for a lease, over all clients of the
	// namespace. OnAlert is told what does not mend itself. Both are called
	// from the calling goroutine and must not block.
	OnExpired func(l leaseclient.Lease)
	OnAlert   func(a Alert)
}

// Bounds of endings that are remembered per lock.
const (
	doneFor     = time.Hour
	doneEntries = 10_000
)

// reclamation is how long a record outlives its lease at the store. It is about
// memory only; until then whoever comes by records that the lease has expired.
const reclamation = 24 * time.Hour

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

	client atomic.Pointer[valkey.Client]
	closed atomic.Bool
	// done is closed when the store is: a subscription waits for it.
	done    chan struct{}
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
	time     timekeeper
}

// layout is what the namespace marker says.
type layout struct {
	generation string
	shards     int
	epoch      uint64
}

var (
	_ leaseclient.Store       = (*Store)(nil)
	_ leaseclient.CommitLog   = (*Store)(nil)
	_ leaseclient.Adopter     = (*Store)(nil)
	_ leaseclient.Reader      = (*Store)(nil)
	_ leaseclient.Invalidator = (*Store)(nil)
	_ leaseclient.Watcher     = (*Store)(nil)
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
	return &Store{
		opts: o, keys: keys, clientOption: co, dialing: make(chan struct{}, 1), dedicated: make(chan struct{}, maxDedicated),
		done: make(chan struct{}),
	}, nil
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
	// identity is the one that the caller presents, for alerts.
	identity leaseclient.Identity
	// guarded operations are refused while the server's clock is not steady:
	// they grant something by it.
	guarded bool
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
		if c.guarded && s.unsteady() {
			// Nothing else may be looking at the clock; so this does.
			s.forgetLayout(nil)
		}
		l, err := s.open(ctx, c.op)
		if err != nil {
			return nil, err
		}
		if c.guarded && s.unsteady() {
			return nil, unavailable(c.op, ErrClock)
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
			err := unavailable(c.op, fmt.Errorf("%w: %s", ErrCorrupt, a.first()))
			s.alert(c, err)
			return nil, err
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
	} else if shard >= l.shards {
		return nil, &leaseclient.Error{Code: leaseclient.CodeNotFound, Op: c.op}
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
	return s.decode(c, res, sent)
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
func (s *Store) decode(c call, res valkey.ValkeyResult, sent time.Duration) (*answer, error) {
	op := c.op
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
	// Behind the time are the leases that the call was the first to see expired.
	at, seen, _ := strings.Cut(values[1], " ")
	ms, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return nil, unknown(op, errors.New("script answered without a time"))
	}
	a := &answer{code: values[0], now: leaseclient.StoreTime(ms), rest: values[2:], sent: sent}
	s.expired(seen)
	if err := s.observe(a.now, sent, received); err != nil {
		s.alert(c, err)
		if c.guarded {
			// What was granted was granted by a clock that is wrong.
			return nil, unknown(op, err)
		}
	}
	return a, nil
}

// expired passes on the leases that a script was the first to see expired.
func (s *Store) expired(list string) {
	if list == "" || s.opts.OnExpired == nil {
		return
	}
	var rows [][]string
	if err := json.Unmarshal([]byte(list), &rows); err != nil {
		return
	}
	for _, row := range rows {
		if len(row) != recordFields {
			continue
		}
		if l, err := decodeLease(row); err == nil {
			s.opts.OnExpired(*l)
		}
	}
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
