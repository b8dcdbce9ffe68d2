package valkeystore

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// MaxBatch bounds the commits of one Begin and the endings of one End, so that
// no script holds the server for long.
const MaxBatch = 256

// noAttempt stands where a request names no attempt.
const noAttempt = "-"

// Begin implements [leaseclient.CommitLog].
func (s *Store) Begin(ctx context.Context, r leaseclient.BeginRequest) (*leaseclient.Begun, error) {
	const op = "begin"
	if err := validateBegin(r); err != nil {
		return nil, err
	}
	attempt := r.Attempt
	if attempt == "" {
		attempt = noAttempt
	}
	a, err := s.do(ctx, call{
		op: op, script: scripts.begin, lockKey: r.Ref.LockKey, identity: r.Ref.Identity, guarded: true, deadline: r.Deadline,
		args: func(*layout, int) []string {
			args := append(identityArgs(r.Ref.Identity),
				r.Ref.LeaseID, r.Ref.OwnerPrincipalID, strconv.FormatUint(r.Ref.Token, 10),
				millis(s.opts.Bound), strconv.Itoa(s.opts.MaxEntries), strconv.FormatInt(s.opts.MaxBytes, 10),
				attempt, r.Ref.ExecutionID, r.Ref.TraceID, strconv.Itoa(len(r.Commits)))
			for _, c := range r.Commits {
				args = append(args, c.ID, string(c.Kind), c.Target, string(c.Effect), commitDigest(c))
			}
			return args
		},
	})
	if err != nil {
		return nil, err
	}
	switch a.code {
	case "begun":
		return decodeBegun(a, len(r.Commits))
	case "lease_lost":
		return nil, &leaseclient.Error{Code: leaseclient.CodeLost, Op: op}
	case "idempotency_conflict":
		return nil, &leaseclient.Error{
			Code: leaseclient.CodeIdempotencyConflict, Op: op, Detail: "commit id was used for another effect",
		}
	case "in_flight":
		n, err := a.numbers(1)
		if err != nil {
			return nil, unavailable(op, err)
		}
		wait := time.Duration(n[0]) * time.Millisecond
		return nil, &leaseclient.Error{
			Code: leaseclient.CodeOutcomeUnknown, Op: op, RetryAfter: min(max(wait, 100*time.Millisecond), time.Second),
			Detail: "an earlier request with this id is still on its way; nothing new was accepted",
			Err:    &leaseclient.InFlightError{Wait: wait},
		}
	case "unsettled":
		n, err := a.numbers(2)
		if err != nil {
			return nil, unavailable(op, err)
		}
		wait := time.Duration(n[1]) * time.Millisecond
		return nil, &leaseclient.Error{
			Code: leaseclient.CodeUnavailable, Op: op, RetryAfter: max(wait, 100*time.Millisecond),
			Detail: "commits of an earlier lease are not settled yet",
			Err:    &leaseclient.UnsettledError{Count: int(n[0]), Wait: wait},
		}
	case "log_full":
		n, err := a.numbers(2)
		if err != nil {
			return nil, unavailable(op, err)
		}
		return nil, &leaseclient.Error{
			Code: leaseclient.CodeRateLimited, Op: op, RetryAfter: time.Second,
			Detail: "too many commits of this lease are in flight",
			Err:    &leaseclient.LogFullError{Entries: int(n[0]), Bytes: n[1]},
		}
	}
	return nil, unknown(op, fmt.Errorf("script answered %q", a.code))
}

// commitDigest says whether two requests with one id ask for the same. The log
// forgets the effect of a commit when it ends, so it keeps this instead.
func commitDigest(c leaseclient.Commit) string {
	h := sha256.New()
	for _, part := range [...][]byte{[]byte(c.Kind), []byte(c.Target), c.Effect} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		h.Write(part)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// validateBegin checks what the script relies on.
func validateBegin(r leaseclient.BeginRequest) error {
	if len(r.Commits) == 0 || len(r.Commits) > MaxBatch {
		return &leaseclient.InvalidError{Field: "commits", Reason: fmt.Sprintf("must be from 1 to %d", MaxBatch)}
	}
	if r.Ref.LockKey != r.Ref.Identity.LockKey() {
		return &leaseclient.InvalidError{Field: "lock_key", Reason: "is not the key of the identity"}
	}
	if r.Deadline.IsZero() {
		return &leaseclient.InvalidError{Field: "deadline_at", Reason: "missing"}
	}
	for _, f := range [...]struct{ name, value string }{
		{"lease_id", r.Ref.LeaseID},
		{"owner_principal_id", r.Ref.OwnerPrincipalID},
		{"execution_id", r.Ref.ExecutionID},
		{"trace_id", r.Ref.TraceID},
	} {
		if err := leaseclient.ValidateIdentifier(f.name, f.value); err != nil {
			return err
		}
	}
	if r.Attempt != "" {
		if err := leaseclient.ValidateIdentifier("attempt", r.Attempt); err != nil {
			return err
		}
	}
	seen := make(map[string]bool, len(r.Commits))
	for _, c := range r.Commits {
		if err := leaseclient.ValidateIdentifier("commit_id", c.ID); err != nil {
			return err
		}
		if seen[c.ID] {
			return &leaseclient.InvalidError{Field: "commit_id", Reason: "is there twice"}
		}
		seen[c.ID] = true
		if c.Kind != leaseclient.KindDocument && c.Kind != leaseclient.KindPublish {
			return &leaseclient.InvalidError{Field: "kind", Reason: "unknown"}
		}
		if len(c.Target) > leaseclient.MaxTargetBytes {
			return &leaseclient.InvalidError{Field: "target", Reason: fmt.Sprintf("longer than %d bytes", leaseclient.MaxTargetBytes)}
		}
	}
	return nil
}

// numbers reads the first n values behind the code.
func (a *answer) numbers(n int) ([]int64, error) {
	if len(a.rest) < n {
		return nil, errors.New("script answered with too little")
	}
	out := make([]int64, n)
	for i := range out {
		v, err := strconv.ParseInt(a.rest[i], 10, 64)
		if err != nil {
			return nil, errors.New("script answered with a malformed number")
		}
		out[i] = v
	}
	return out, nil
}

// decodeBegun reads six values a commit.
func decodeBegun(a *answer, n int) (*leaseclient.Begun, error) {
	if len(a.rest) != 6*n {
		return nil, unknown("begin", errors.New("script answered with another number of commits"))
	}
	out := &leaseclient.Begun{Now: a.now, Sent: a.sent, Commits: make([]leaseclient.BegunCommit, n)}
	for i := range out.Commits {
		v := answer{rest: a.rest[6*i : 6*i+6]}
		num, err := v.numbers(4)
		if err != nil {
			return nil, unknown("begin", err)
		}
		out.Commits[i] = leaseclient.BegunCommit{
			Seq: uint64(num[0]), AcceptedAt: leaseclient.StoreTime(num[1]), NotAfter: leaseclient.StoreTime(num[2]),
			ExpiresAt: leaseclient.StoreTime(num[3]), Repeated: v.rest[4] == "repeated", Prior: leaseclient.Outcome(v.rest[5]),
		}
	}
	return out, nil
}

// End implements [leaseclient.CommitLog].
func (s *Store) End(ctx context.Context, lockKey, claimer string, endings []leaseclient.Ending) error {
	const op = "end"
	if len(endings) == 0 || len(endings) > MaxBatch {
		return &leaseclient.InvalidError{Field: "endings", Reason: fmt.Sprintf("must be from 1 to %d", MaxBatch)}
	}
	for _, e := range endings {
		if err := leaseclient.ValidateIdentifier("commit_id", e.ID); err != nil {
			return err
		}
		switch e.Outcome {
		case leaseclient.OutcomeConfirmed, leaseclient.OutcomeRefused, leaseclient.OutcomeCancelled, leaseclient.OutcomeQuarantined:
		case leaseclient.OutcomeUnknown:
			return &leaseclient.InvalidError{Field: "outcome", Reason: "an unknown outcome ends nothing"}
		default:
			return &leaseclient.InvalidError{Field: "outcome", Reason: "not one of the outcomes"}
		}
	}
	a, err := s.do(ctx, call{
		op: op, script: scripts.end, lockKey: lockKey,
		args: func(*layout, int) []string {
			args := []string{claimer, millis(doneFor), strconv.Itoa(doneEntries), strconv.Itoa(s.opts.MaxQuarantined), strconv.Itoa(len(endings))}
			for _, e := range endings {
				args = append(args, e.ID, string(e.Outcome), e.Attempt)
			}
			return args
		},
	})
	if err != nil {
		return err
	}
	switch a.code {
	case "ended":
		return nil
	case "lease_lost":
		return &leaseclient.Error{Code: leaseclient.CodeLost, Op: op, Detail: "the claim on this commit log has run out"}
	case "quarantine_full":
		return &leaseclient.Error{
			Code: leaseclient.CodeRateLimited, Op: op, RetryAfter: time.Minute,
			Detail: "the quarantine of this lock is full",
		}
	}
	return unknown(op, fmt.Errorf("script answered %q", a.code))
}

// Claim implements [leaseclient.CommitLog].
func (s *Store) Claim(ctx context.Context, r leaseclient.ClaimRequest) (*leaseclient.Claimed, error) {
	const op = "claim"
	switch r.Mode {
	case leaseclient.ClaimBefore, leaseclient.ClaimSweep, leaseclient.ClaimOwn:
	default:
		return nil, &leaseclient.InvalidError{Field: "mode", Reason: "not one of the claim modes"}
	}
	if err := leaseclient.ValidateIdentifier("claimer", r.Claimer); err != nil {
		return nil, err
	}
	if len(r.IDs) > MaxBatch || (r.Mode == leaseclient.ClaimOwn) == (len(r.IDs) == 0) {
		return nil, &leaseclient.InvalidError{Field: "ids", Reason: fmt.Sprintf("want 1 to %d with the mode own, and none otherwise", MaxBatch)}
	}
	if r.Deadline.IsZero() {
		return nil, &leaseclient.InvalidError{Field: "deadline_at", Reason: "missing"}
	}
	if r.MaxEntries <= 0 || r.MaxEntries > MaxBatch {
		r.MaxEntries = MaxBatch
	}
	if r.MaxBytes <= 0 {
		r.MaxBytes = 8 << 20
	}
	a, err := s.do(ctx, call{
		op: op, script: scripts.claim, lockKey: r.LockKey, guarded: true, deadline: r.Deadline,
		args: func(*layout, int) []string {
			args := []string{
				string(r.Mode), r.Claimer, millis(s.opts.ClaimTime), strconv.FormatUint(r.Token, 10),
				strconv.Itoa(r.MaxEntries), strconv.FormatInt(r.MaxBytes, 10), strconv.Itoa(len(r.IDs)),
			}
			return append(args, r.IDs...)
		},
	})
	if err != nil {
		return nil, err
	}
	if a.code != "claimed" {
		return nil, unknown(op, fmt.Errorf("script answered %q", a.code))
	}
	return s.decodeClaimed(a, r.LockKey)
}

// decodeClaimed reads: wait, settled, identity, n, three values an entry, then
// pairs of id and outcome.
func (s *Store) decodeClaimed(a *answer, lockKey string) (*leaseclient.Claimed, error) {
	bad := func(err error) (*leaseclient.Claimed, error) { return nil, unavailable("claim", err) }
	if len(a.rest) < 4 {
		return bad(errors.New("script answered with too little"))
	}
	wait, err := strconv.ParseInt(a.rest[0], 10, 64)
	if err != nil {
		return bad(errors.New("script answered with a malformed number"))
	}
	n, err := strconv.Atoi(a.rest[3])
	if err != nil || n < 0 || len(a.rest) < 4+3*n || (len(a.rest)-4-3*n)%2 != 0 {
		return bad(errors.New("script answered with another number of entries"))
	}
	out := &leaseclient.Claimed{
		Wait: time.Duration(wait) * time.Millisecond, Settled: a.rest[1] == "settled", Now: a.now,
		Until: a.sent + s.opts.ClaimTime, Ended: make(map[string]leaseclient.Outcome),
	}
	if n > 0 {
		id, err := leaseclient.ParseCanonical(a.rest[2])
		if err != nil || id.LockKey() != lockKey {
			return bad(fmt.Errorf("%w: fence: another identity", ErrCorrupt))
		}
		for i := range n {
			v := a.rest[4+3*i:]
			e, err := parseEntry(v[0], v[1], v[2])
			if err != nil {
				return bad(err)
			}
			e.Identity, e.LockKey = id, lockKey
			out.Entries = append(out.Entries, e)
		}
	}
	for i := 4 + 3*n; i < len(a.rest); i += 2 {
		out.Ended[a.rest[i]] = leaseclient.Outcome(a.rest[i+1])
	}
	return out, nil
}

// parseEntry reads what the log keeps of a commit; see parse_entry in the
// prelude.
func parseEntry(id, meta, effect string) (leaseclient.Entry, error) {
	p := strings.SplitN(meta, " ", 14)
	if len(p) != 14 || p[0] != "1" {
		return leaseclient.Entry{}, fmt.Errorf("%w: log: an entry is damaged", ErrCorrupt)
	}
	var n [6]uint64
	for i := range n {
		v, err := strconv.ParseUint(p[1+i], 10, 53)
		if err != nil {
			return leaseclient.Entry{}, fmt.Errorf("%w: log: a number is malformed", ErrCorrupt)
		}
		n[i] = v
	}
	e := leaseclient.Entry{
		Commit: leaseclient.Commit{ID: id, Kind: leaseclient.Kind(p[9]), Target: p[13]},
		Seq:    n[0], Token: n[1],
		AcceptedAt: leaseclient.StoreTime(n[2]), NotAfter: leaseclient.StoreTime(n[3]), ExpiresAt: leaseclient.StoreTime(n[4]),
		LeaseID: p[10], ExecutionID: p[11], TraceID: p[12],
	}
	if p[7] != noAttempt {
		e.Attempt = p[7]
	}
	if effect != "" {
		e.Effect = []byte(effect)
	}
	return e, nil
}

// Unclaim implements [leaseclient.CommitLog].
func (s *Store) Unclaim(ctx context.Context, lockKey, claimer string) error {
	_, err := s.do(ctx, call{
		op: "unclaim", script: scripts.unclaim, lockKey: lockKey,
		args: func(*layout, int) []string { return []string{claimer} },
	})
	return err
}

// Unsettled implements [leaseclient.CommitLog].
func (s *Store) Unsettled(ctx context.Context, shard int, after leaseclient.UnsettledCursor, limit int) ([]string, leaseclient.UnsettledCursor, error) {
	const op = "list unsettled"
	var end leaseclient.UnsettledCursor
	limit = min(max(limit, 1), leaseclient.MaxUnsettled)
	since, digest := "-inf", ""
	if after != end {
		if _, err := strconv.ParseFloat(after.Since, 64); err != nil {
			return nil, end, &leaseclient.InvalidError{Field: "after", Reason: "is not a place in the list"}
		}
		since, digest = after.Since, digestText(after.LockKey)
	}
	a, err := s.do(ctx, call{
		op: op, script: scripts.unsettled, shard: shard,
		args: func(*layout, int) []string { return []string{strconv.Itoa(limit), since, digest} },
	})
	if err != nil {
		if leaseclient.CodeOf(err) == leaseclient.CodeOutcomeUnknown {
			return nil, end, unavailable(op, err)
		}
		return nil, end, err
	}
	if len(a.rest)%2 != 0 {
		return nil, end, unavailable(op, errors.New("script answered with half a lock"))
	}
	keys := make([]string, 0, len(a.rest)/2)
	for i := 0; i < len(a.rest); i += 2 {
		key := leaseclient.LockKeyPrefix + a.rest[i]
		if _, err := leaseclient.ParseLockKey(key); err != nil {
			return nil, end, unavailable(op, fmt.Errorf("%w: unsettled: not a digest", ErrCorrupt))
		}
		keys = append(keys, key)
	}
	if len(keys) < limit {
		return keys, end, nil
	}
	return keys, leaseclient.UnsettledCursor{Since: a.rest[len(a.rest)-1], LockKey: keys[len(keys)-1]}, nil
}

// Shards implements [leaseclient.CommitLog].
func (s *Store) Shards(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, s.opts.CallTimeout)
	defer cancel()
	l, err := s.open(ctx, "read layout")
	if err != nil {
		return 0, err
	}
	return l.shards, nil
}
