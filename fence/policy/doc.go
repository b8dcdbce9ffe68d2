// Package policy answers one question: which lease does this write need.
//
// It owns the types and the parser of the policy file, the patterns that select
// writes, the templates that build an identity out of a write, and the order in
// which rules are tried. A decision is a value; whether the lease is held, and
// whether the write goes out, is decided elsewhere.
//
// It must never do I/O, never ask whether a lease is held, never look at a
// clock, and never show a value it read from a document or a message: refusals
// name the rule and the source, not what stood there.
//
// Decisions taken:
//
//   - The first matching rule wins and the rest is not looked at, so that a
//     file can be read from top to bottom. A rule that can never be reached is
//     an error, because it is always a mistake and sometimes a hole.
//   - The zero [Decision] is a denial. Whatever is forgotten fails closed.
//   - A document id that starts with an underscore is matched only by a pattern
//     that starts with one. "*" would otherwise open design documents, which
//     hold code that runs inside the database. For the same reason "unmatched:
//     pass" never lets such an id through in a fenced database.
//   - A member that appears twice on the way to a source is refused. CouchDB
//     takes the last one, other readers take the first; an identity must not
//     depend on who reads.
//   - Numbers count as text only when they are integers: 1, 1.0 and 1e0 are one
//     value in three spellings and would be three identities.
//   - Anchors, aliases and merge keys of YAML are refused. They make a rule
//     depend on text somewhere else, and a trusted record should read as it
//     stands.
package policy
