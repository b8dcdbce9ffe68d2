// Package valkeystore keeps leases and commit logs in Valkey. It is the one
// implementation of [leaseclient.Store], [leaseclient.CommitLog] and the
// interfaces beside them for production.
//
// # What it owns
//
// The layout of the keys, the Lua scripts that are the only way to change them,
// the namespace marker, and the translation of everything that a connection can
// do into the closed set of results.
//
// # What it must never do
//
// It never reads and then writes from Go: every operation is one script, which
// reads the server's clock once and decides by that. It never repeats a script
// whose answer was lost. It never lets a raw server error out, and it never
// repairs a record that is not whole: that is refused, left as it is, and listed.
//
// # Layout
//
// A namespace has a fixed number of shards, chosen when it is made. All keys of
// a shard begin with its hash tag, "{<namespace>:s<N>}:", so that one script
// stays within one slot of a cluster. A lock belongs to the shard that its
// digest names. <d> is the digest of the lock key, <l> a lease id.
//
//	marker          hash    version, generation, shards, epoch, state, history
//	unsettled       zset    digests of locks with open commits, by the oldest not_after
//	corrupt         hash    digests of locks that were refused as damaged, and why
//	audit           stream  force-releases and revokes, written in their own step
//	ix:<h>          zset    digests of active leases by owner, target or program
//	lease:<d>       hash    the active record, 26 fields, numbers in milliseconds
//	fence:<d>       hash    identity, counter, high-water mark, log position; never expires
//	idem:<h>        hash    first result of an acquisition or release, by request
//	rnw:<l>         hash    first results of the renewals of one lease
//	lid:<l>         hash    evidence of a lease and its terminal state
//	hist:<d>        list    terminal records, the latest first, bounded
//	logq:<d>        zset    commit ids by their position in the log
//	logm:<d>        hash    what is known of each open commit
//	loge:<d>        hash    the effect of each open commit
//	done:<d>        hash    how commits ended, and their digests; doneq:<d> orders them
//	                        by time; bounded
//	claim:<d>       hash    who may settle the log, and until when
//	qtn:<d>, qte:<d> hash   quarantined commits and their effects
//
// Leases that end before their time are told on the channel "{<namespace>}:notices".
//
// A lease id begins with its shard ("lease_01f_..."), so that it can be looked
// up by itself.
//
// # Decisions
//
//   - The physical expiry of a key is reclamation only and comes a day after the
//     lease's own end. Expiry events are not listened to. Until then whoever comes
//     by first, with whatever operation, moves the lease to the history as
//     expired, in the same step, so that it is told once and stays over even if
//     the clock goes back. One that nobody comes by for a day leaves no history.
//   - Listings are not ordered by time but by shard and digest: that order never
//     changes, so a page neither misses nor repeats a lease that stands all along.
//   - The server's clock is compared with the boot clock at every answer. After
//     it has jumped or stood still by more than a second, nothing is granted
//     until it has run steadily for five: no acquisition, renewal, begin, adoption
//     or claim. Release, force-release and revoke go on, since they only take
//     away. A process that has just started has nothing to compare with.
//   - A repeated request is answered from its first result before its deadline
//     is judged: the mutation has happened, and saying otherwise would be a lie.
//   - A commit id stands for one kind, target and effect, open or ended. What was
//     withdrawn before its effect was sent leaves its id free.
//   - A refusal is not remembered. Only mutations are, so that a request that
//     met a conflict may be repeated under its id until it succeeds.
//   - A request that was cancelled while its script was on the way is
//     lease_outcome_unknown, even if the chance is small. Only a connection that
//     could not be made, or an answer that the server gives before it runs a
//     script, is lease_backend_unavailable.
//   - The caller's deadline is judged by the script. It is carried over to the
//     store's clock by the last answer seen: at that moment the store's clock
//     showed at least what the answer says, so a deadline is never stretched.
//   - Release, renewal, endings and claims run when the server's memory is full;
//     acquisitions and begins are refused then.
package valkeystore
