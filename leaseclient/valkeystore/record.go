package valkeystore

import (
	"encoding/json"
	"errors"
	"strconv"

	"github.com/starintel/fencerider/leaseclient"
)

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
