package valkeystore

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"regexp"
	"strings"

	"github.com/starintel/fencerider/leaseclient"
)

// MaxShards bounds the shards of a namespace; a lease id has three hexadecimal
// digits for its own.
const MaxShards = 4096

// namespacePattern bounds namespaces: they stand inside a hash tag.
var namespacePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,63}$`)

// keyspace names the keys of one namespace.
type keyspace struct {
	namespace string
}

// newKeyspace validates a namespace.
func newKeyspace(namespace string) (keyspace, error) {
	if !namespacePattern.MatchString(namespace) {
		return keyspace{}, &leaseclient.InvalidError{
			Field:  "namespace",
			Reason: "must start with a lower-case letter or a digit and hold at most 64 of a-z, 0-9, '.', '_' and '-'",
		}
	}
	return keyspace{namespace: namespace}, nil
}

// marker is the one declared key of every script; the others follow from it.
func (k keyspace) marker(shard int) string {
	return fmt.Sprintf("{%s:s%d}:marker", k.namespace, shard)
}

// notices is the channel on which every shard of the namespace tells of leases
// that ended before their time.
func (k keyspace) notices() string { return "{" + k.namespace + "}:notices" }

// shardOf returns the shard of a lock.
func shardOf(digest [sha256.Size]byte, shards int) int {
	return int(binary.BigEndian.Uint64(digest[:8]) % uint64(shards))
}

// newLeaseID proposes a lease id. The store refuses one that exists.
func newLeaseID(shard int) string {
	return fmt.Sprintf("lease_%03x_%s", shard, strings.ToLower(rand.Text()))
}

// digestText is the form of a digest inside key names.
func digestText(lockKey string) string { return strings.TrimPrefix(lockKey, leaseclient.LockKeyPrefix) }

// requestName hashes what scopes an idempotency result: the operation, the
// owner and the request id. The lock is part of the key beside it.
func requestName(op, digest, principal, requestID string) string {
	sum := sha256.Sum256([]byte(op + "\x00" + digest + "\x00" + principal + "\x00" + requestID))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}
