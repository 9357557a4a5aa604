// Command spillbench runs Spillway on this machine and measures it: it moves a table several times
// larger than the GPU's memory, or the files that it is given, through all tiers, works on them, and
// verifies them.
//
//	spillbench                      a generated table, end to end
//	spillbench run F…               the same with Parquet, Arrow or CSV files
//	spillbench verify F…            every batch along every edge and back
//	spillbench bandwidth            every edge, and the machine's own limit for each
//	spillbench compare --peer P     the same data spilled without Spillway
//	spillbench topo                 the machine's processors, memory, GPUs and disks
//	spillbench quota                the limits of this process, and the holders on this node
//	spillbench trace                a run again, with other policies and on other machines
//	spillbench inspect DIR          the batches that persist in a spill directory
//	spillbench report A [B]         a page of a result, or of two compared
//	spillbench schema               the JSON Schema of all results
//
// Its exit status is 0 if all is well, 1 if data was wrong or a fault of --fault was not survived, 2
// for wrong use, 3 if the machine cannot do it, and 130 if it was interrupted. An error is one line
// on standard error.
//
// Package cobra parses the command line, prints help and suggestions, and completes words in shells:
// the standard library's flag package has no subcommands. In the files of this package,
//
//	command.go         has the tree of commands, the exit status, and checks of arguments
//	options.go         has the options of every engine and the types of their flags
//	engine.go          opens the engine that the options describe, with the disks of disks.go
//	output.go          writes results to files and standard output
//	run.go and others  have one subcommand each
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
)

func main() {
	os.Exit(interruptible(func(ctx context.Context) int { return Main(ctx, os.Args[1:], os.Stdout, os.Stderr) }))
}

// patience is the maximum time for an interrupted command to return. Some steps, such as joining the
// rows of a huge batch or releasing a lot of memory, cannot be interrupted and may take longer.
const patience = 700 * time.Millisecond

// interruptible runs f with a context that the first SIGINT, SIGTERM or SIGHUP cancels. If f does not
// return within patience, the process exits. That leaves no spill files: they have no names, or the next
// volume in their directory removes them.
func interruptible(f func(context.Context) int) int {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // under nohup the command outlives its terminal
		signals = append(signals, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	defer stop()
	ended := make(chan struct{})
	defer close(ended)
	defer context.AfterFunc(ctx, func() {
		stop() // a second signal ends the process as it would any other
		defer time.AfterFunc(patience, func() {
			if progress.OnTerminal(os.Stderr) {
				fmt.Fprint(os.Stderr, "\r\x1b[K") // clears the progress line
			}
			fmt.Fprintln(os.Stderr, "spillbench: interrupted")
			os.Exit(fail.Interrupted)
		}).Stop()
		<-ended
	})()
	return f(ctx)
}
