// Command spillbench runs Spillway on this machine and measures it: a table
// several times larger than the GPU's memory, or the files that it is given, go
// through all tiers, are worked on, and are verified.
//
//	spillbench                      a generated table, end to end
//	spillbench run --input F        the same with Parquet, Arrow or CSV files
//	spillbench verify F…            every batch along every edge and back
//	spillbench topo                 what the machine has
//
// Its exit status is 0 if all is well, 1 if data was not what it should be, 2
// for wrong use, 3 if the machine cannot do it, and 130 if it was interrupted.
// An error is one line on standard error.
//
// The command line is spf13/cobra's: subcommands that share flags, GNU long
// flags and help for each are its trade, and the flag package of the standard
// library has no subcommands.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second signal ends the process as it would any other.
	context.AfterFunc(ctx, stop)
	os.Exit(Main(ctx, os.Args[1:], os.Stdout, os.Stderr))
}
