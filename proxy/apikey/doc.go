// Package apikey is who may use the API from elsewhere: API keys, the
// capabilities and scopes that they carry, and the file that keeps them.
//
// # What it owns
//
// The form of a key, "star_sk_v1_<credential id>_<secret>"; its verification; the
// file of keys, of which only argon2id hashes of peppered secrets are kept; and
// [Grant], which says what a holder may do to which targets.
//
// # What it must never do
//
// It never keeps, logs or returns a secret after the one time that [File.Create]
// shows it. It never tells one kind of bad credential from another: an unknown
// id, a wrong secret, a key that is revoked or has run out and a text that is no
// key at all take the same work and get the same answer. It never grants by
// default: what a scope does not name is not in it, and what is denied stays
// denied whatever else allows it.
//
// # Decisions
//
//   - The file is looked at for every verification, so a revocation counts for
//     the next request. A file that cannot be read, or that others could read,
//     refuses everybody.
//   - Verified keys are remembered for a while, since argon2id is slow on purpose.
//     The memory is keyed by a keyed hash of the whole key under a secret of this
//     process, never by the key, and an entry counts only while the hash in the
//     file is the one that it was verified against.
package apikey
