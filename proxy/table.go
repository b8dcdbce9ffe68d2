package proxy

import (
	"slices"
	"sync"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/leaseclient"
)

// maxLost bounds lost leases that are remembered.
const maxLost = 1000

// entry is one lease of the table.
type entry struct {
	keeper *leaseclient.Keeper
	// at orders entries by arrival.
	at uint64
}

// lost reports whether the lease is gone.
func (e *entry) lost() bool { return e.keeper.Loss().Reason != "" }

// Table holds the leases of this sidecar. It implements [fence.Leases] and is
// safe for concurrent use.
type Table struct {
	mu     sync.Mutex
	byID   map[string]*entry
	latest map[string]*entry
	next   uint64
}

var _ fence.Leases = (*Table)(nil)

// NewTable returns an empty table. It is made before the adapters, which look
// leases up in it, and before the sidecar, which fills it.
func NewTable() *Table {
	return &Table{byID: make(map[string]*entry), latest: make(map[string]*entry)}
}

// add enters a lease. The one before it of the same identity goes when it is
// lost; so does the oldest lost one when there are too many.
func (t *Table) add(k *leaseclient.Keeper) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := k.Lease()
	if old := t.latest[l.LockKey]; old != nil && old.lost() {
		delete(t.byID, old.keeper.Lease().LeaseID)
	}
	t.next++
	e := &entry{keeper: k, at: t.next}
	t.byID[l.LeaseID], t.latest[l.LockKey] = e, e
	var oldest *entry
	n := 0
	for _, e := range t.byID {
		if !e.lost() {
			continue
		}
		if n++; oldest == nil || e.at < oldest.at {
			oldest = e
		}
	}
	if n > maxLost {
		gone := oldest.keeper.Lease()
		delete(t.byID, gone.LeaseID)
		if t.latest[gone.LockKey] == oldest {
			delete(t.latest, gone.LockKey)
		}
	}
}

// keeper returns the keeper of a lease; nil when the table does not have it.
func (t *Table) keeper(leaseID string) *leaseclient.Keeper {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.byID[leaseID]; e != nil {
		return e.keeper
	}
	return nil
}

// held returns the keepers of leases that are not lost, in order of arrival.
func (t *Table) held() []*leaseclient.Keeper {
	t.mu.Lock()
	defer t.mu.Unlock()
	var es []*entry
	for _, e := range t.byID {
		if !e.lost() {
			es = append(es, e)
		}
	}
	slices.SortFunc(es, func(a, b *entry) int { return int(a.at) - int(b.at) })
	out := make([]*leaseclient.Keeper, len(es))
	for i, e := range es {
		out[i] = e.keeper
	}
	return out
}

// Held implements [fence.Leases].
func (t *Table) Held(id leaseclient.Identity) (leaseclient.Ref, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.latest[id.LockKey()]; e != nil {
		l := e.keeper.Lease()
		return l.Ref(), true
	}
	return leaseclient.Ref{}, false
}

// Named implements [fence.Leases].
func (t *Table) Named(leaseID string) (leaseclient.Ref, bool) {
	if k := t.keeper(leaseID); k != nil {
		l := k.Lease()
		return l.Ref(), true
	}
	return leaseclient.Ref{}, false
}

// Single implements [fence.Leases]. Leases that are not lost are counted; where
// there is none, a single lost one is presented, so that the store refuses it.
func (t *Table) Single() (leaseclient.Ref, int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var live, last *entry
	n := 0
	for _, e := range t.latest {
		if !e.lost() {
			live = e
			n++
		}
		if last == nil || e.at > last.at {
			last = e
		}
	}
	switch {
	case n == 1:
		l := live.keeper.Lease()
		return l.Ref(), 1
	case n == 0 && last != nil:
		l := last.keeper.Lease()
		return l.Ref(), 1
	}
	return leaseclient.Ref{}, n
}
