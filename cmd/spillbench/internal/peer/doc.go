// Package peer is what spillbench compare does: it spills the same batches by
// Spillway and as a Go program does without it, by arrow-go's ipc.FileWriter, reads
// them back, and times both by turns.
//
//	verify    ours ─▶ compare with the source        ipc ─▶ compare with the source
//	round 1   ours: host ─▶ disk ─▶ host, touch      ipc: heap ─▶ file, sync ─▶ drop cache ─▶ heap, touch
//	round 2   the same, the peer first
//
// In each round an engine of its own is opened for our side and closed before it is
// the peer's turn, so that the memory of one is not held while the other works, and
// both begin with files that do not exist yet. The peer does everything once before it is
// timed, so that the memory it takes is the machine's already. The batches are read from their source
// anew, one at a time, and put as often as asked for; neither that nor laying them out
// in host memory is in what is compared (the latter is told beside it).
//
// # What is timed
//
// Writing, ours: as many batches as the host space takes without the monitor acting
// are put there; moving them to disk is timed; then come the next. The peer:
// every Write, the footer, and the sync of the file. Reading, both: until every byte
// of every Arrow buffer has been hashed and the batch is given up; the digest must be
// that of the verified pass, in every round. Our batches
// are moved and read by several goroutines, which a Mover allows; a FileWriter and a
// FileReader belong to one.
//
// The peer's heap may grow by as much as our host space has: the runtime's memory
// limit is set for that while it works, which is the process's, so one Run at a time.
//
// # Ownership
//
// Run owns what it opens: engines, goroutines, files without a name. All of it is
// gone when it returns. The package takes no locks.
package peer
