//go:build gateoff

package fence

import (
	"time"

	"github.com/starintel/fencerider/leaseclient"
)

// gateOff makes every check of this build a check that must fail. A build with
// this tag protects nothing; it exists so that the tests of the fence can be
// seen to notice.
const gateOff = true

// waveThrough accepts without asking anybody, as a proxy without a fence would.
func (c *Coordinator) waveThrough(ref leaseclient.Ref, commits []leaseclient.Commit) []*Accepted {
	out := make([]*Accepted, len(commits))
	now := leaseclient.StoreTime(time.Now().UnixMilli())
	for i, cm := range commits {
		out[i] = NewAccepted(cm, Stamp{
			LockKey: ref.LockKey, LeaseID: ref.LeaseID, Token: ref.Token,
			ExecutionID: ref.ExecutionID, TraceID: ref.TraceID, CommitID: cm.ID,
			AcceptedAt: now, NotAfter: now.Add(time.Hour), ExpiresAt: now.Add(time.Hour),
		}, c.opts.Clock, c.opts.Clock.Boot()+time.Hour, "")
	}
	return out
}
