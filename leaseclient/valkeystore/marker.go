package valkeystore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/valkey-io/valkey-go"

	"github.com/starintel/fencerider/leaseclient"
)

// DefaultShards is how many shards a namespace gets where nothing else is said.
// A single server does not care; a cluster spreads them over its nodes.
const DefaultShards = 16

// InitOptions describe a namespace that is to be made.
type InitOptions struct {
	// Shards is fixed for the life of the namespace; zero means
	// [DefaultShards], at most [MaxShards].
	Shards int
	// Epoch is the range from which fencing tokens are taken; a higher one
	// than ever before makes every new token higher than all old ones.
	Epoch uint64
}

// ErrInitConflict is wrapped by the error of Init when the namespace exists with
// other settings.
var ErrInitConflict = errors.New("namespace exists with other settings")

// Init makes the namespace marker of every shard, once. It reports whether it
// made anything; an existing namespace with the same settings is left alone. The
// marker that clients look at comes last, so that a namespace which is half made
// is not used, and a repeated call finishes it.
func (s *Store) Init(ctx context.Context, o InitOptions) (made bool, err error) {
	const op = "init"
	if o.Shards == 0 {
		o.Shards = DefaultShards
	}
	if o.Shards < 1 || o.Shards > MaxShards {
		return false, &leaseclient.InvalidError{Field: "shards", Reason: fmt.Sprintf("must be from 1 to %d", MaxShards)}
	}
	if o.Epoch > leaseclient.MaxEpoch {
		return false, &leaseclient.InvalidError{Field: "epoch", Reason: fmt.Sprintf("must be from 0 to %d", leaseclient.MaxEpoch)}
	}
	client, err := s.connect(ctx)
	if err != nil {
		return false, unavailable(op, err)
	}
	if err := s.preflight(ctx, client); err != nil {
		return false, err
	}
	generation, err := s.generation(ctx, client, o.Shards)
	if err != nil {
		return false, err
	}
	for shard := o.Shards - 1; shard >= 0; shard-- {
		args := []string{generation, strconv.Itoa(o.Shards), strconv.FormatUint(o.Epoch, 10)}
		sent := s.opts.Clock.Boot()
		a, err := s.decode(call{op: op}, scripts.init.lua.Exec(ctx, client, []string{s.keys.marker(shard)}, args), sent)
		if err != nil {
			return made, err
		}
		switch a.code {
		case "made":
			made = true
		case "exists":
		default:
			return made, &leaseclient.Error{
				Code: leaseclient.CodeInvalid, Op: op,
				Detail: "namespace " + s.opts.Namespace + " exists with other settings; nothing of it was changed",
				Err:    fmt.Errorf("%w: shard %d: %s", ErrInitConflict, shard, a.first()),
			}
		}
	}
	s.forgetLayout(nil)
	return made, nil
}

// generation returns the generation of a namespace that is half made, or a new
// one: the store's time, so that a later generation is always higher.
func (s *Store) generation(ctx context.Context, client valkey.Client, shards int) (string, error) {
	for shard := range shards {
		a, err := s.readMarker(ctx, "init", client, shard)
		if err != nil {
			return "", err
		}
		if a.code == "ready" {
			return a.first(), nil
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return strconv.FormatInt(int64(s.seenTime), 10), nil
}

// readMarker runs the script that reads the marker of a shard.
func (s *Store) readMarker(ctx context.Context, op string, client valkey.Client, shard int) (*answer, error) {
	sent := s.opts.Clock.Boot()
	res := scripts.marker.lua.Exec(ctx, client, []string{s.keys.marker(shard)}, []string{"0", "0", "0"})
	return s.decode(call{op: op}, res, sent)
}

// open returns the layout of the namespace, reading it on first use and whenever
// a script said that it has changed.
func (s *Store) open(ctx context.Context, op string) (*layout, error) {
	s.mu.Lock()
	l := s.layout
	s.mu.Unlock()
	if l != nil {
		return l, nil
	}
	client, err := s.connect(ctx)
	if err != nil {
		return nil, unavailable(op, err)
	}
	if err := s.preflight(ctx, client); err != nil {
		return nil, err
	}
	a, err := s.readMarker(ctx, op, client, 0)
	if err != nil {
		// Reading the marker changes nothing.
		return nil, unavailable(op, err)
	}
	if a.code != "ready" || len(a.rest) != 3 {
		return nil, unavailable(op, errors.New(a.first()))
	}
	shards, err := strconv.Atoi(a.rest[1])
	if err != nil || shards < 1 || shards > MaxShards {
		return nil, unavailable(op, errors.New("the namespace marker names an impossible number of shards"))
	}
	epoch, err := strconv.ParseUint(a.rest[2], 10, 64)
	if err != nil || epoch > leaseclient.MaxEpoch {
		return nil, unavailable(op, errors.New("the namespace marker names an impossible epoch"))
	}
	l = &layout{generation: a.rest[0], shards: shards, epoch: epoch}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.layout = l
	return l, nil
}

// forgetLayout makes the next call read the marker again. Nil forgets whatever
// is there.
func (s *Store) forgetLayout(l *layout) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l == nil || s.layout == l {
		s.layout = nil
	}
}

// Ready reports whether the store would take work now: reachable, durable and
// with an open namespace. The error is typed like that of any operation.
func (s *Store) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.opts.CallTimeout)
	defer cancel()
	s.forgetLayout(nil)
	_, err := s.open(ctx, "probe")
	return err
}

// preflight looks at what the server says of itself and refuses one that may
// forget or evict. It cannot see "appendfsync no": INFO does not show it, and the
// store's user has no right to read the configuration. On such a server no
// acquisition succeeds, since it never confirms that its log is on disk.
func (s *Store) preflight(ctx context.Context, client valkey.Client) error {
	const op = "inspect server"
	if s.opts.AllowVolatile {
		return nil
	}
	text, err := client.Do(ctx, client.B().Info().Section("persistence", "memory", "replication").Build()).ToString()
	if err != nil {
		return unavailable(op, err)
	}
	info := make(map[string]string)
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			info[k] = v
		}
	}
	switch {
	case info["role"] != "master":
		return unavailable(op, fmt.Errorf("server has role %q, want the primary", info["role"]))
	case info["aof_enabled"] != "1":
		return unavailable(op, fmt.Errorf("%w: appendonly is off", ErrVolatile))
	case info["aof_last_write_status"] != "ok":
		return unavailable(op, fmt.Errorf("%w: the last write of its log failed", ErrVolatile))
	case info["maxmemory_policy"] != "noeviction":
		return unavailable(op, fmt.Errorf("%w: its eviction policy is %q, want noeviction", ErrVolatile, info["maxmemory_policy"]))
	}
	return nil
}

// cutWord splits a server's error at its first space.
func cutWord(s string) (word, rest string, ok bool) { return strings.Cut(s, " ") }

// containsScript reports whether an error was raised while a script ran: the
// server then names the script by its hash.
func containsScript(s string) bool {
	return strings.Contains(s, "script:") || strings.Contains(s, "from script") || strings.Contains(s, "user_script")
}
