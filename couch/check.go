package couch

import (
	"net/http"

	"github.com/starintel/fencerider/fence"
	"github.com/starintel/fencerider/leaseclient"
)

// errConflict is a write that does not extend the winner.
var errConflict = &errAnswered{http.StatusConflict, "conflict", "Document update conflict."}

// check judges a write against the winner it is going to replace: the revision
// must fit, and the stamp must not be of another lock or a later lease. The error
// is [errConflict] or a [*leaseclient.Error].
func check(d *document, rev revision, lockKey, leaseID string, token uint64, shared bool) error {
	if err := checkStamp(d.stamp, lockKey, leaseID, token, shared); err != nil {
		return err
	}
	switch {
	case !d.exists, d.deleted:
		// CouchDB itself would take any revision for a document that is not
		// there, and refuses the revision of a tombstone.
		if !rev.none() {
			return errConflict
		}
	case rev != d.rev:
		return errConflict
	}
	return nil
}

// checkStamp compares a write's lease with the stamp of what it replaces.
func checkStamp(s *fence.Stamp, lockKey, leaseID string, token uint64, shared bool) error {
	switch {
	case s == nil:
		return nil
	case s.LockKey != lockKey:
		if shared {
			return nil
		}
		return &leaseclient.Error{
			Code: leaseclient.CodeLockMismatch, Op: "check winner",
			Detail: "the stored document was written under the lease of another target",
		}
	case s.Token > token, s.Token == token && s.LeaseID != leaseID:
		return &leaseclient.Error{
			Code: leaseclient.CodeLost, Op: "check winner",
			Detail: "the stored document was written under a later lease",
		}
	}
	return nil
}
