// Package jsonedit reads and changes JSON texts without re-encoding them.
//
// It exists because a document must arrive at CouchDB as the worker wrote it, save for the members that the
// fence owns: the order of members, the spelling of numbers (1.0, 1e2, thirty-digit integers), duplicate and
// unknown members and white space are all visible, either to readers or through the revision hash. A decode
// followed by an encode loses them, so members are spliced on the level of tokens instead.
//
// The package owns one decision that everything above relies on: which of several members of one name counts.
// CouchDB takes the last, whatever the escaping of the names, and so does every reader here. A reader that took
// the first would judge another document than the one CouchDB stores.
//
// It must never accept a text that CouchDB refuses (it may refuse more: nesting, sizes, absurd numbers), never
// do I/O, and never hand out bytes of a text that it has not validated as a whole.
//
// Decisions:
//   - A member that is set goes to the end of its object, and all others of its name are removed. The end is the
//     safe place: were a spelling of the name ever overlooked, the last one is what CouchDB takes.
//   - Setting the same members again changes no byte, and removing them after setting equals removing them
//     before. Both laws are fuzzed.
//   - The experimental JSON v2 of the standard library would do the scanning, but it is still behind a build
//     flag, and its default for duplicate names is to refuse them, which CouchDB does not.
package jsonedit
