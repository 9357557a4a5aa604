// Package batch holds the batch: one Arrow record batch with a stable id, whose
// data may be in any tier and moves between them while the engine works.
//
//	Batch ──payload──▶ Payload          the form that the data has now: an Image in some
//	 │  ▲                │              space, a Table, or what a user's converter makes
//	 │  │                ├─▶ Descriptor  what the bytes mean; shared by all forms
//	 │  │                └─▶ Shared      a dictionary in that space, which batches share
//	 │  ├── Handle       reads the data where it is; many at once
//	 │  └── Transit      gives the data another form; one at a time
//	 ├─▶ Place           where it stands in its plan; set by the repository
//	 └─▶ Observer        is told of every change: the monitor's index
//
// Ids come from one IDs for all batches that meet: an engine's, by its NewBatch. An
// observer that is a Registrar refuses a second batch of an id.
//
// What may happen when is the table at State. An operation that the state does
// not allow is a StateError at once; only for the end of a transit is waited,
// by the methods that take a context.
//
// # Ownership
//
// A payload owns its memory and one reference to each dictionary that it shares.
// A batch owns its payload. Commit swaps it for another and releases the old one;
// Drop releases it, with handles open when the last of them is closed. Whoever
// holds a batch must hand it over or drop it; whoever opens a Handle or a
// Transit must end it. An invariants build panics when one that is still open is
// found by the garbage collector, with the stack that took it.
//
// # Locks
//
// One mutex a batch, of rank Batch: it may be taken under a repository's and
// never under a space's. Nothing is called under it: observers, clocks and
// payload releases run on the caller's goroutine with no lock held.
//
//	Monitor → Manager → Repository → [Batch] → Registry → Reservation → Space → …
package batch
