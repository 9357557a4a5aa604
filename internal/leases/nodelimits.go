package leases

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spillway-db/spillway/internal/size"
)

// A node gives a container its limits as a file. A process obeys them even if it does not have the
// container's environment, as in a login session.
//
//	LimitsDir/environment   lines NAME=value; root's alone to write
//	LedgerDir               where the node's ledger is mounted
//
//	FormatLimits ──▶ the file ──▶ LookupLimits: the file's variables before those of the environment
const (
	// LimitsDir is where containers have the directory with the limits.
	LimitsDir = "/run/spillway/limits"
	// LedgerDir is where containers have the ledger.
	LedgerDir = "/run/spillway/ledger"

	// LimitsFile is the name of the file with the limits in such a directory.
	LimitsFile = "environment"

	maxLimits = 64 << 10
)

// FormatLimits returns the text of a file with the limits in env.
func FormatLimits(env map[string]string) ([]byte, error) {
	var text bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if strings.ContainsAny(name, "=\n\x00") || name == "" || strings.ContainsAny(env[name], "\n\x00") {
			return nil, fmt.Errorf("%q=%q does not fit into a line", name, env[name])
		}
		fmt.Fprintf(&text, "%s=%s\n", name, env[name])
	}
	return text.Bytes(), nil
}

// LookupLimits returns a function that finds variables in the node's limits in LimitsDir, or else by env. A process
// may have a lower limit than the node's, never a higher one. If the node sets the limit by nvshare's
// variable alone, it is a default: a limit of the process's own, by either name, replaces it. Without a
// file of limits LookupLimits returns env. A file that users other than root can write to, or that cannot be
// read, is an error.
func LookupLimits(env func(string) (string, bool)) (func(string) (string, bool), error) {
	return lookupLimits(LimitsDir, env)
}

func lookupLimits(dir string, env func(string) (string, bool)) (func(string) (string, bool), error) {
	limits, err := readLimits(filepath.Join(dir, LimitsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return env, nil
	}
	if err != nil {
		return nil, fmt.Errorf("quota: the node's limits: %w", err)
	}
	if own, ok := ownLimit(limits, env); ok {
		limits[limitVar] = own
	}
	_, fixed := limits[limitVar]
	if _, own := env(otherLimitVar); own && !fixed {
		delete(limits, otherLimitVar) // a default
	}
	return func(name string) (string, bool) {
		if value, ok := limits[name]; ok {
			return value, true
		}
		return env(name)
	}, nil
}

const (
	limitVar        = "SPILLWAY_GPU_MEMORY_LIMIT"
	otherLimitVar   = "NVSHARE_GPU_MEMORY_LIMIT"
	physicalVar     = "SPILLWAY_GPU_PHYSICAL_MEMORY_MB"
	mebi            = 1 << 20
	largestPhysical = 1 << 43 // MiB
)

// ownLimit returns the process's own limit, from the environment, if it counts: because it is below the
// node's, or because it is not a limit, and is to be refused as it is without a node's. The node sets
// both variables for a container, so one that has the node's value is not the process's own.
func ownLimit(limits map[string]string, env func(string) (string, bool)) (string, bool) {
	most, err := size.Parse(limits[limitVar])
	if err != nil {
		return "", false // the node has none, or one that will be refused
	}
	own, ok := env(limitVar)
	if !ok || own == limits[limitVar] {
		if other, set := env(otherLimitVar); set {
			own, ok = other, true
		}
	}
	if !ok {
		return "", false
	}
	n, err := size.Parse(own)
	if err != nil {
		share, err := size.ParseShare(own)
		if err != nil {
			return own, true
		}
		physical, err := strconv.ParseInt(limits[physicalVar], 10, 64)
		if err != nil || physical <= 0 || physical >= largestPhysical {
			return "", false
		}
		if n, err = size.Part(share, physical*mebi); err != nil {
			return own, true
		}
	}
	return own, n < most
}

// readLimits reads a file of variables. Only root may be able to write to it.
func readLimits(path string) (map[string]string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || !info.Mode().IsRegular() || st.Uid != 0 ||
		info.Mode()&0o022 != 0 {
		return nil, fmt.Errorf("%s is not a file that only root can write to", path)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxLimits+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxLimits {
		return nil, fmt.Errorf("%s has more than %d bytes", path, maxLimits)
	}
	limits := map[string]string{}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		name, value, ok := strings.Cut(lines.Text(), "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("%s: %.60q is no NAME=value", path, lines.Text())
		}
		limits[name] = value
	}
	return limits, nil
}
