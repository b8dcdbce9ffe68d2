package fence

import (
	"encoding/json"
	"fmt"

	"github.com/starintel/fencerider/leaseclient"
)

// Stamp says under which lease a write was accepted. It is part of the same
// revision or message as the write, so that anybody can judge it later.
type Stamp struct {
	LockKey     string
	LeaseID     string
	Token       uint64
	ExecutionID string
	TraceID     string
	CommitID    string
	// AcceptedAt, NotAfter and ExpiresAt are the store's time.
	AcceptedAt leaseclient.StoreTime
	NotAfter   leaseclient.StoreTime
	ExpiresAt  leaseclient.StoreTime
}

// StampOf returns the stamp of a log entry. It equals the one that the entry's
// own sidecar used, so that a repeated write has the same bytes.
func StampOf(e leaseclient.Entry) Stamp {
	return Stamp{
		LockKey: e.LockKey, LeaseID: e.LeaseID, Token: e.Token,
		ExecutionID: e.ExecutionID, TraceID: e.TraceID, CommitID: e.ID,
		AcceptedAt: e.AcceptedAt, NotAfter: e.NotAfter, ExpiresAt: e.ExpiresAt,
	}
}

// documentStamp is the stamp's form inside a document.
type documentStamp struct {
	LockKey     string                `json:"lock_key"`
	LeaseID     string                `json:"lease_id"`
	Token       uint64                `json:"fencing_token"`
	ExecutionID string                `json:"execution_id"`
	TraceID     string                `json:"trace_id"`
	CommitID    string                `json:"commit_id"`
	AcceptedAt  leaseclient.StoreTime `json:"accepted_at"`
	NotAfter    leaseclient.StoreTime `json:"not_after"`
}

// Document returns the stamp as the JSON object that goes into a document,
// always the same bytes for the same stamp.
func (s Stamp) Document() []byte {
	b, err := json.Marshal(documentStamp{
		LockKey: s.LockKey, LeaseID: s.LeaseID, Token: s.Token, ExecutionID: s.ExecutionID,
		TraceID: s.TraceID, CommitID: s.CommitID, AcceptedAt: s.AcceptedAt, NotAfter: s.NotAfter,
	})
	if err != nil {
		// Strings and numbers always encode.
		panic(fmt.Sprintf("encode stamp: %v", err))
	}
	return b
}

// ParseDocument reads a stamp out of a stored document. Members it does not
// know are ignored; the four that are compared must be there.
func ParseDocument(raw []byte) (Stamp, error) {
	var d documentStamp
	if err := json.Unmarshal(raw, &d); err != nil {
		return Stamp{}, fmt.Errorf("parse stamp: %w", err)
	}
	if d.LockKey == "" || d.LeaseID == "" || d.CommitID == "" || d.Token == 0 {
		return Stamp{}, fmt.Errorf("parse stamp: a member is missing")
	}
	return Stamp{
		LockKey: d.LockKey, LeaseID: d.LeaseID, Token: d.Token, ExecutionID: d.ExecutionID,
		TraceID: d.TraceID, CommitID: d.CommitID, AcceptedAt: d.AcceptedAt, NotAfter: d.NotAfter,
	}, nil
}

// Headers of a stamped message. Names with this prefix from a worker are
// dropped before the stamp is put in.
const (
	HeaderPrefix    = "x-fence-"
	HeaderToken     = "x-fence-fencing-token"
	HeaderLeaseID   = "x-fence-lease-id"
	HeaderExpiresAt = "x-fence-expires-at"
	HeaderLockKey   = "x-fence-lock-key"
	HeaderExecution = "x-fence-execution-id"
	HeaderTrace     = "x-fence-trace-id"
	HeaderCommitID  = "x-fence-commit-id"
)

// MessageHeader is one header of a stamped message. Int is used when Text is
// empty; both forms are decoded alike by every client library.
type MessageHeader struct {
	Key  string
	Text string
	Int  int64
}

// Message returns the stamp as message headers, always in the same order.
func (s Stamp) Message() []MessageHeader {
	return []MessageHeader{
		{Key: HeaderToken, Int: int64(s.Token)},
		{Key: HeaderLeaseID, Text: s.LeaseID},
		{Key: HeaderExpiresAt, Text: s.ExpiresAt.String()},
		{Key: HeaderLockKey, Text: s.LockKey},
		{Key: HeaderExecution, Text: s.ExecutionID},
		{Key: HeaderTrace, Text: s.TraceID},
		{Key: HeaderCommitID, Text: s.CommitID},
	}
}
