// Package labels names the goroutines that an engine starts, for profiles (runtime/pprof). Each has
// the label "spillway", and as its value what it does. So a CPU profile shows what the engine
// itself works on:
//
//	go tool pprof -tagfocus 'spillway=move' …
//
// A function that runs as a goroutine begins with Set. That stores one pointer, and allocates
// nothing, so it is cheap enough for goroutines that work on a single request. It replaces the
// labels that the goroutine has from the one that started it. A test of internal/archtest asks for
// it.
package labels

import (
	"context"
	"runtime/pprof"
)

// Key is the label's name.
const Key = "spillway"

// Label is what a goroutine does.
type Label struct{ ctx context.Context }

// Set gives the label to the calling goroutine, in place of those that it has.
func (l Label) Set() { pprof.SetGoroutineLabels(l.ctx) }

// String returns the label's value.
func (l Label) String() string {
	value, _ := pprof.Label(l.ctx, Key)
	return value
}

func value(does string) Label {
	return Label{pprof.WithLabels(context.Background(), pprof.Labels(Key, does))}
}

// What goroutines do. A goroutine that moves batches for the monitor has "move" with the labels
// "edge" and "reason".
var (
	Monitor    = value("monitor")     // looks at the memories, and decides
	Move       = value("move")        // moves batches for the monitor
	WriteAhead = value("write ahead") // copies batches to disks before they have to leave
	DropCopies = value("drop copies") // frees copies
	WatchGPUs  = value("watch gpus")  // samples what others hold of them
	WatchDisks = value("watch disks") // asks their file systems for room
	Transfer   = value("transfer")    // moves pieces of a batch beside the one that moves it
	Copy       = value("copy")        // copies parts of memory beside the one that copies it
	ReadAhead  = value("read ahead")  // brings the next batches of a Drain or a Reader
	TaskAhead  = value("task ahead")  // brings the inputs of waiting tasks
	Watch      = value("watch")       // ends a wait that has become useless
	Cancel     = value("cancel")      // ends what a Close or a loss ends
	Drop       = value("drop")        // drops batches of a repository
	Trim       = value("trim")        // gives room back to a disk
	SlowDisk   = value("slow disk")   // says that a request takes long
	Alarm      = value("alarm")       // reports a wait that takes long
	Reclaim    = value("reclaim")     // gives back memory that is not in batches
	Touch      = value("touch")       // makes memory present ahead of use
	Free       = value("free")        // frees device memory when the device is done with it
	GPU        = value("gpu")         // makes a GPU's driver calls, or waits for its work
	SimGPU     = value("simulated gpu")
	Quota      = value("quota")  // looks at the ledger that processes share
	Report     = value("report") // samples what httpui shows
)
