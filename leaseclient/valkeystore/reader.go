package valkeystore

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// read runs a script that changes nothing of a lease: a lost answer means that
// nothing is known, not that something may have happened.
func (s *Store) read(ctx context.Context, c call) (*answer, error) {
	a, err := s.do(ctx, c)
	if leaseclient.CodeOf(err) == leaseclient.CodeOutcomeUnknown {
		return nil, unavailable(c.op, err)
	}
	return a, err
}

// leaseIDPattern is the form of the ids that newLeaseID makes.
var leaseIDPattern = regexp.MustCompile(`^lease_([0-9a-f]{3})_[a-z0-9]{1,64}$`)

// shardOfLease reads the shard out of a lease id.
func shardOfLease(id string) (int, bool) {
	m := leaseIDPattern.FindStringSubmatch(id)
	if m == nil {
		return 0, false
	}
	n, err := strconv.ParseInt(m[1], 16, 32)
	return int(n), err == nil
}

// Inspect implements [leaseclient.Store].
func (s *Store) Inspect(ctx context.Context, r leaseclient.InspectRequest) (*leaseclient.Inspected, error) {
	const op = "inspect"
	if err := r.Validate(); err != nil {
		return nil, err
	}
	c := call{op: op, script: scripts.inspect, deadline: r.Deadline}
	if r.LeaseID == "" {
		c.lockKey, c.identity = r.Identity.LockKey(), r.Identity
		c.args = func(*layout, int) []string { return identityArgs(r.Identity) }
	} else {
		shard, ok := shardOfLease(r.LeaseID)
		if !ok {
			// No store has made this id.
			return nil, &leaseclient.Error{Code: leaseclient.CodeNotFound, Op: op}
		}
		c.shard = shard
		c.args = func(*layout, int) []string { return []string{"", "", r.LeaseID} }
	}
	a, err := s.read(ctx, c)
	if err != nil {
		return nil, err
	}
	switch a.code {
	case "lease_inspected":
		lease, err := a.lease(0)
		if err != nil {
			return nil, unavailable(op, err)
		}
		return &leaseclient.Inspected{Lease: *lease, Now: a.now, Sent: a.sent}, nil
	case "lease_not_found":
		return nil, &leaseclient.Error{Code: leaseclient.CodeNotFound, Op: op}
	}
	return nil, unavailable(op, fmt.Errorf("script answered %q", a.code))
}

// lease reads the record that is the rest of an answer from a place on.
func (a *answer) lease(from int) (*leaseclient.Lease, error) {
	if len(a.rest) != from+recordFields {
		return nil, errors.New("script answered with another number of fields")
	}
	return decodeLease(a.rest[from:])
}

// Adopt implements [leaseclient.Adopter].
func (s *Store) Adopt(ctx context.Context, r leaseclient.AdoptRequest) (*leaseclient.Adopted, error) {
	const op = "adopt"
	if err := r.Validate(); err != nil {
		return nil, err
	}
	a, err := s.read(ctx, call{
		op: op, script: scripts.adopt, lockKey: r.LockKey, deadline: r.Deadline, guarded: true,
		args: func(*layout, int) []string {
			return []string{
				r.LeaseID, strconv.FormatUint(r.Token, 10), strconv.FormatInt(int64(r.ExpiresAt), 10), r.ExecutionID, r.TraceID,
			}
		},
	})
	if err != nil {
		return nil, err
	}
	switch a.code {
	case "lease_adopted":
		lease, err := a.lease(0)
		if err != nil {
			return nil, unavailable(op, err)
		}
		// The envelope named no identity; that of the record must be the lock's.
		if lease.Identity.LockKey() != r.LockKey {
			err := unavailable(op, fmt.Errorf("%w: lease: another identity", ErrCorrupt))
			s.alert(call{op: op}, err)
			return nil, err
		}
		return &leaseclient.Adopted{Lease: *lease, Now: a.now, Sent: a.sent}, nil
	case "lease_lost":
		return nil, &leaseclient.Error{Code: leaseclient.CodeLost, Op: op}
	}
	return nil, unavailable(op, fmt.Errorf("script answered %q", a.code))
}

// maxListCalls bounds how many shards one page looks at, so that a listing over
// many empty shards comes in several short calls.
const maxListCalls = 64

// listPlace is where a listing goes on: behind a digest of a shard.
type listPlace struct {
	shard  int
	digest string
}

// parseListPlace reads a cursor that a page handed out.
func parseListPlace(cursor string) (listPlace, error) {
	if cursor == "" {
		return listPlace{}, nil
	}
	invalid := &leaseclient.InvalidError{Field: "cursor", Reason: "is not a place in this listing"}
	shard, digest, ok := strings.Cut(cursor, ".")
	n, err := strconv.Atoi(shard)
	if !ok || err != nil || n < 0 || n >= MaxShards || strconv.Itoa(n) != shard {
		return listPlace{}, invalid
	}
	if digest != "" {
		if _, err := leaseclient.ParseLockKey(leaseclient.LockKeyPrefix + digest); err != nil {
			return listPlace{}, invalid
		}
	}
	return listPlace{n, digest}, nil
}

// String is the cursor.
func (p listPlace) String() string { return strconv.Itoa(p.shard) + "." + p.digest }

// List implements [leaseclient.Reader]. It walks the shards in their order, and
// within a shard the order of the digests.
func (s *Store) List(ctx context.Context, r leaseclient.ListRequest) (*leaseclient.Listed, error) {
	const op = "list"
	if err := r.Validate(); err != nil {
		return nil, err
	}
	place, err := parseListPlace(r.Cursor)
	if err != nil {
		return nil, err
	}
	limit := r.Limit
	if limit == 0 {
		limit = leaseclient.DefaultPage
	}
	filter := []string{string(r.By), r.TenantID, r.ProgramID}
	switch r.By {
	case leaseclient.ListByOwner:
		filter = append(filter, r.PrincipalID, "")
	case leaseclient.ListByTarget:
		filter = append(filter, r.TargetNamespace, r.TargetID)
	default:
		filter = append(filter, "", "")
	}
	shards, err := s.Shards(ctx)
	if err != nil {
		return nil, err
	}
	out := &leaseclient.Listed{Leases: []leaseclient.Lease{}}
	for calls := 0; place.shard < shards; calls++ {
		want := limit - len(out.Leases)
		if want == 0 || calls == maxListCalls {
			out.Next = place.String()
			return out, nil
		}
		a, err := s.read(ctx, call{
			op: op, script: scripts.list, shard: place.shard, deadline: r.Deadline,
			args: func(*layout, int) []string {
				return append([]string{strconv.Itoa(want), place.digest}, filter...)
			},
		})
		if err != nil {
			return nil, err
		}
		if a.code != "listed" || len(a.rest) < 2 || (len(a.rest)-2)%recordFields != 0 {
			return nil, unavailable(op, fmt.Errorf("script answered %q with %d values", a.code, len(a.rest)))
		}
		out.Now = a.now
		for v := a.rest[2:]; len(v) > 0; v = v[recordFields:] {
			l, err := decodeLease(v[:recordFields])
			if err != nil {
				return nil, unavailable(op, err)
			}
			out.Leases = append(out.Leases, *l)
		}
		if a.rest[1] == strconv.Itoa(want) {
			place.digest = a.rest[0]
		} else {
			place = listPlace{shard: place.shard + 1}
		}
	}
	return out, nil
}

// endedFields is how many values a terminal record has on the wire.
const endedFields = recordFields + 4

// History implements [leaseclient.Reader]. Its cursor is the token of the last
// entry of the page before: tokens only grow.
func (s *Store) History(ctx context.Context, r leaseclient.HistoryRequest) (*leaseclient.HistoryPage, error) {
	const op = "history"
	if err := r.Validate(); err != nil {
		return nil, err
	}
	below := uint64(leaseclient.MaxToken) + 1
	if r.Cursor != "" {
		n, err := strconv.ParseUint(r.Cursor, 10, 64)
		if err != nil || n == 0 || n > leaseclient.MaxToken || strconv.FormatUint(n, 10) != r.Cursor {
			return nil, &leaseclient.InvalidError{Field: "cursor", Reason: "is not a place in this history"}
		}
		below = n
	}
	limit := r.Limit
	if limit == 0 {
		limit = leaseclient.DefaultPage
	}
	a, err := s.read(ctx, call{
		op: op, script: scripts.history, lockKey: r.Identity.LockKey(), identity: r.Identity, deadline: r.Deadline,
		args: func(*layout, int) []string {
			return append(identityArgs(r.Identity), strconv.Itoa(limit), strconv.FormatUint(below, 10))
		},
	})
	if err != nil {
		return nil, err
	}
	if a.code != "listed" || len(a.rest) < 1 || (len(a.rest)-1)%endedFields != 0 {
		return nil, unavailable(op, fmt.Errorf("script answered %q with %d values", a.code, len(a.rest)))
	}
	out := &leaseclient.HistoryPage{Entries: []leaseclient.Ended{}, Now: a.now}
	for v := a.rest[1:]; len(v) > 0; v = v[endedFields:] {
		l, err := decodeLease(v[:recordFields])
		if err != nil {
			return nil, unavailable(op, err)
		}
		at, err := strconv.ParseInt(v[recordFields], 10, 64)
		if err != nil {
			return nil, unavailable(op, errors.New("history holds a malformed number"))
		}
		out.Entries = append(out.Entries, leaseclient.Ended{
			Lease: *l, EndedAt: leaseclient.StoreTime(at),
			EndedBy: v[recordFields+1], Reason: v[recordFields+2], Incident: v[recordFields+3],
		})
	}
	if a.rest[0] == "1" && len(out.Entries) > 0 {
		out.Next = strconv.FormatUint(out.Entries[len(out.Entries)-1].Lease.Token, 10)
	}
	return out, nil
}

// InFlight implements [leaseclient.Invalidator].
func (s *Store) InFlight(ctx context.Context, id leaseclient.Identity, deadline time.Time) (int, error) {
	const op = "count in flight"
	if err := (leaseclient.InspectRequest{Identity: id, Deadline: deadline}).Validate(); err != nil {
		return 0, err
	}
	a, err := s.read(ctx, call{op: op, script: scripts.inflight, lockKey: id.LockKey(), identity: id, deadline: deadline})
	if err != nil {
		return 0, err
	}
	n, err := a.numbers(1)
	if err != nil || a.code != "counted" {
		return 0, unavailable(op, fmt.Errorf("script answered %q", a.code))
	}
	return int(n[0]), nil
}
