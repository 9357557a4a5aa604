// Command spillway-device-plugin gives the memory of a node's GPUs to containers of Kubernetes, in
// units of 256 MiB or whole, and limits the containers' Spillway processes to what they got.
//
// It is a device plugin of the kubelet: containers ask for units of an extended resource. With --mode
// dra it is a driver for dynamic resource allocation instead: pods ask for claims. It runs on each node,
// as root; see docs/kubernetes.md.
//
// Its exit status is 0 after SIGINT or SIGTERM, 2 for wrong use, and 1 for any other error. It prints an
// error as one line on standard error.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(Main(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// usageError is an error about wrong use of the command.
type usageError struct{ error }

// Main runs the command with args until ctx ends, and returns its exit status.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot(stderr)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	// An error with several causes has several lines.
	lines := strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' })
	fmt.Fprintf(stderr, "spillway-device-plugin: %s\n", strings.Join(lines, "; "))
	if errors.As(err, new(usageError)) {
		return 2
	}
	return 1
}

func newRoot(stderr io.Writer) *cobra.Command {
	var f flags
	root := &cobra.Command{
		Use:   "spillway-device-plugin",
		Short: "Give the memory of a node's GPUs to containers",
		Long: `Give the memory of a node's GPUs to containers of Kubernetes.
It runs on each node, as root; see docs/kubernetes.md.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("%q is no flag: there are no other arguments", args[0])}
			}
			return nil
		},
		SilenceErrors: true, // Main prints them
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := f.settings()
			if err != nil {
				return usageError{err}
			}
			return s.run(cmd.Context(), slog.New(slog.NewTextHandler(stderr, nil)))
		},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.CompletionOptions.HiddenDefaultCmd = true
	f.add(root.Flags())
	return root
}
