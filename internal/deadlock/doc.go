// Package deadlock finds the waits that cannot end, among those who hold something and wait for
// more. It is pure: it knows no locks, no clock and no callbacks but one.
//
//	what is held ─┐
//	who waits    ─┼─▶ Books ── stuck ──▶ Judge ──▶ those of whom one must give way
//	what is free ─┘                       ▲ now, what can be moved
//
// An owner can go on while one of its goroutines runs, or while one of its waits may be served. A
// wait may be served where there is, or may come to be, room for it in one of its lines; behind
// a shut door only the head may be. Owners that cannot go on are stuck
//
//   - for certain: even if all others give back everything that they hold. Two looks that find
//     the same waits are enough, as what is read at two moments may not fit together.
//   - as things stand: all owners wait, nothing that is free is enough for any of them, nothing
//     can be moved, and nothing has changed for Judge.Grace.
//
// A wait without an owner is judged by itself. It is stuck if handles and records of unknown
// owners keep so much in each of its lines that it could not be served whatever else became
// free, and nothing has changed in those lines for Judge.Strangers.
package deadlock
