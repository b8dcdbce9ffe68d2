package proxy

import (
	"context"
	"math/rand/v2"
	"time"

	"go.uber.org/zap"

	"github.com/starintel/fencerider/leaseclient"
)

// Pauses between attempts at the lease of the environment.
const (
	acquireFirst = 250 * time.Millisecond
	acquireMax   = 5 * time.Second
)

// keep enters an acquired lease into the table and starts its keeper. A lease
// that is kept already (a repeated request) is left as it is.
func (s *Sidecar) keep(a *leaseclient.Acquired) *leaseclient.Keeper {
	s.keeping.Lock()
	defer s.keeping.Unlock()
	if k := s.opts.Table.keeper(a.Lease.LeaseID); k != nil {
		return k
	}
	k := leaseclient.StartKeeper(s.work, leaseclient.KeeperOptions{
		Store: s.opts.Store, Clock: s.opts.Clock, Acquired: a,
		OnRenewed: func(leaseclient.Lease) { s.opts.Metrics.renewals.WithLabelValues("renewed").Inc() },
		OnFailed: func(l leaseclient.Lease, err error) {
			s.opts.Metrics.renewals.WithLabelValues("failed").Inc()
			s.log.Warn("a renewal failed", zap.String("lease_id", l.LeaseID), zap.Error(err))
		},
	})
	s.opts.Table.add(k)
	l := k.Lease()
	s.log.Info("lease acquired", zap.String("lease_id", l.LeaseID), zap.Uint64("fencing_token", l.Token), zap.Int64("ttl_ms", l.TTLMillis))
	e, v := newEvent(eventAcquired), viewOf(l)
	e.Lease = &v
	s.hub.publish(e)
	s.group.Go(func() { s.follow(k) })
	return k
}

// follow tells everybody when a lease is lost.
func (s *Sidecar) follow(k *leaseclient.Keeper) {
	<-k.Lost()
	loss, l := k.Loss(), k.Lease()
	name := eventLost
	if loss.Reason == leaseclient.LossReleased {
		name = eventReleased
		l.State = leaseclient.StateReleased
	}
	e, v := newEvent(name), viewOf(l)
	e.Lease, e.Reason = &v, loss.Reason
	if name == eventLost {
		e.Code = leaseclient.CodeLost
	}
	s.hub.publish(e)
	s.opts.Metrics.losses.WithLabelValues(string(loss.Reason)).Inc()
	s.log.Info("lease ended", zap.String("lease_id", l.LeaseID), zap.Uint64("fencing_token", l.Token), zap.String("reason", string(loss.Reason)), zap.NamedError("cause", loss.Err))
	k.Wait()
}

// environment acquires the lease that the configuration names, and acquires it
// anew when it is lost, until ctx ends. The error says that it was not to be had
// in the configured time.
func (s *Sidecar) environment(ctx context.Context) error {
	el := s.opts.EnvLease
	limit := time.Time{}
	if el.Wait > 0 {
		limit = time.Now().Add(el.Wait)
	}
	for {
		k, err := s.acquireEnvironment(ctx, limit)
		if err != nil {
			return err
		}
		if k == nil {
			return nil
		}
		select {
		case <-k.Lost():
		case <-ctx.Done():
			return nil
		}
		if !el.Again || s.ending() {
			return nil
		}
		limit = time.Time{}
	}
}

// acquireEnvironment tries until it has the lease. Every request id is repeated
// until its outcome is known, so that a lost answer does not leave a lease that
// nobody keeps.
func (s *Sidecar) acquireEnvironment(ctx context.Context, limit time.Time) (*leaseclient.Keeper, error) {
	pause := acquireFirst
	req := s.opts.EnvLease.Request
	req.RequestID = leaseclient.NewID("request")
	for {
		req.Deadline = time.Now().Add(s.opts.Deadline)
		a, err := s.opts.Store.Acquire(ctx, req)
		switch {
		case ctx.Err() != nil:
			return nil, nil
		case err == nil && a.Current == leaseclient.StateActive:
			return s.keep(a), nil
		case err == nil:
			// The answer was lost for so long that the lease is over.
			req.RequestID = leaseclient.NewID("request")
			continue
		}
		e := leaseclient.AsError(err)
		if !e.Code.Info().Retryable {
			return nil, err
		}
		if !limit.IsZero() && time.Now().After(limit) {
			return nil, err
		}
		s.log.Info("the configured lease is not to be had yet", zap.String("code", string(e.Code)), zap.NamedError("cause", err))
		wait := max(pause, min(e.RetryAfter, acquireMax))
		t := time.NewTimer(wait + rand.N(wait/4+1))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, nil
		}
		pause = min(2*pause, acquireMax)
	}
}

// releaseAll gives every held lease back.
func (s *Sidecar) releaseAll(ctx context.Context) {
	for _, k := range s.opts.Table.held() {
		call := leaseclient.Call{RequestID: leaseclient.NewID("request"), Deadline: time.Now().Add(s.opts.Deadline)}
		if _, err := k.Release(ctx, call); err != nil {
			l := k.Lease()
			s.log.Warn("a lease was not given back; it runs out by itself", zap.String("lease_id", l.LeaseID), zap.Error(err))
		}
	}
}
