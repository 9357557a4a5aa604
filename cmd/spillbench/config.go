package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/configfile"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/suggest"
)

const configName = "config"

func registerConfig(f *pflag.FlagSet, name *string) {
	f.StringVar(name, configName, "", "read flags from a YAML `FILE`, or from standard input if it is -; flags of the command line count more")
}

// notInFiles are the flags that no file of --config has: they are about this call.
var notInFiles = []string{configName, "help", "version", "cpuprofile", "memprofile", "trace"}

// pathFlags are the flags whose values begin with a path.
var pathFlags = []string{"disk", "input", "json", "html", "perfetto"}

// readConfig sets the flags of a command that its --config has, but for those that the command line
// has. A key that another command knows is not used, so that one file serves all.
func readConfig(cmd *cobra.Command) error {
	given := cmd.Flags().Lookup(configName)
	if given == nil || !given.Changed {
		return nil
	}
	name := given.Value.String()
	text, err := configText(name)
	if err != nil {
		return fail.Usagef("--config %s cannot be read: %w", name, pathless(err))
	}
	entries, err := configfile.Parse(text)
	if err != nil {
		return fail.Usagef("--config %s: %w", name, err)
	}
	known := configKeys(cmd.Root())
	for _, e := range entries {
		if !slices.Contains(known, e.Key) {
			return fail.Usagef("--config %s, line %d: %q is unknown (%ssee spillbench run --help for the flags: their names are the keys)",
				name, e.Line, e.Key, suggest.Hint(strings.TrimLeft(e.Key, "-"), "", known))
		}
		f := cmd.Flags().Lookup(e.Key)
		if f == nil || f.Changed {
			continue
		}
		if len(e.Values) > 1 && !repeatable(f) {
			return fail.Usagef("--config %s, line %d: %s takes one value, and not a list", name, e.Line, e.Key)
		}
		for _, v := range e.Values {
			if slices.Contains(pathFlags, e.Key) {
				v = besideFile(name, v)
			}
			if err := f.Value.Set(v); err != nil {
				return fail.Usagef("--config %s, line %d: %s %q: %w (see %s --help)", name, e.Line, e.Key, v, wanted(f, err), cmd.CommandPath())
			}
		}
		f.Changed = true
	}
	return nil
}

// configText reads the file, or standard input.
func configText(name string) (text []byte, err error) {
	from := os.Stdin
	switch name {
	case "":
		return nil, errors.New("want FILE or -")
	case "-":
	default:
		if from, err = os.Open(name); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, from.Close()) }()
	}
	return io.ReadAll(io.LimitReader(from, configfile.MaxBytes+1))
}

// configKeys returns the names of the flags of all commands that have --config.
func configKeys(root *cobra.Command) (keys []string) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if c.LocalNonPersistentFlags().Lookup(configName) != nil {
			c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
				if !slices.Contains(keys, f.Name) && !slices.Contains(notInFiles, f.Name) {
					keys = append(keys, f.Name)
				}
			})
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
	slices.Sort(keys)
	return keys
}

// repeatable reports whether a flag may be given several times.
func repeatable(f *pflag.Flag) bool {
	_, several := f.Value.(pflag.SliceValue)
	return several || f.Name == "disk" || f.Name == "fault"
}

// besideFile returns a path of the file: a relative one begins at the file's directory, so that it
// means the same wherever the command is started. What follows the path stays as it is.
func besideFile(file, path string) string {
	if file == "-" || path == "-" || path == "" || filepath.IsAbs(path) {
		return path
	}
	return strings.TrimSuffix(filepath.Dir(file), string(filepath.Separator)) + string(filepath.Separator) + path
}
