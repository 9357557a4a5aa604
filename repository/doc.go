// Package repository holds the stores of batches between a plan's operators: one
// operator puts, the next takes, and in between the batches lie in whatever memory
// has room.
//
//	Manager ──Key──▶ Repository ──number──▶ partition ──in order of arrival──▶ batch.Batch
//	 one a plan       between two             a queue
//	                  operators
//
// Put lays a record out in the fastest memory with room and queues it; Take hands
// the oldest batch over that can move to a state; Drain brings one after the other to
// a tier, and Reader makes Arrow records of them again. Claim sets batches apart for a
// task, which may fail and must leave them where they were; ClaimAll does so for a task
// that needs the whole partition. Taking and counting do not depend on how many batches
// there are.
//
// # Order
//
// Batches leave a partition in the order in which they came. A batch that the monitor is
// moving is waited for: a move waits for no memory and for no taker, so this ends. Waits
// end with their contexts. A batch whose move fails, or whose GPU is lost, stays first,
// and whoever takes it gets the error. Several takers of one partition get different
// batches, each in ascending order. Restored batches stand where they stood. Consumers
// that need no order say Unordered, and then skip what is in transit.
//
// # Ownership
//
// A repository owns what was put until somebody takes it; from then on the taker
// must drop it or hand it on. A batch can be in one repository at a time, and in it once
// (see batch.Batch.Store). Whatever fails on the way out leaves the batch in its
// place; whatever fails on the way in leaves nothing behind. The manager owns the
// repositories: closing it wakes all who wait and drops what is left.
//
// # Locks
//
// One mutex a manager, of rank Manager, and one a repository, of rank Repository.
// States of batches are read under the latter; all that changes a batch, moves
// bytes, or calls an observer happens with no lock held, between a claim, by which a batch is
// set apart for one taker, and its end.
//
//	Monitor → [Manager] → [Repository] → Batch → Registry → Reservation → Space → …
package repository
