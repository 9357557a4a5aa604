package topology

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/internal/procfs"
)

// The environment variables of CUDA that limit which GPUs a process sees.
const (
	visibleDevices = "CUDA_VISIBLE_DEVICES"
	deviceOrder    = "CUDA_DEVICE_ORDER"
)

// noDevices is what Slurm sets visibleDevices to for jobs without GPUs: CUDA does not know the word,
// so it shows none.
const noDevices = "NoDevFiles"

// ErrVisibleDevices matches the error of Discover if CUDA_VISIBLE_DEVICES makes no sense. The error
// names the entry that is wrong.
var ErrVisibleDevices = errors.New("CUDA_VISIBLE_DEVICES makes no sense")

// visibleDevicesError names the entry of CUDA_VISIBLE_DEVICES that is wrong. CUDA itself reports
// nothing, and hides that entry's GPU and all behind it.
type visibleDevicesError struct {
	Value, Entry string
	Reason       string
}

func (e *visibleDevicesError) Error() string {
	return fmt.Sprintf("topology: CUDA_VISIBLE_DEVICES=%s: %s %s", procfs.Quote(e.Value), procfs.Quote(e.Entry),
		e.Reason)
}

// Is makes the error match ErrVisibleDevices.
func (e *visibleDevicesError) Is(target error) bool { return target == ErrVisibleDevices }

// visible puts those GPUs into top that this process sees, in the order of CUDA_VISIBLE_DEVICES. An
// empty value hides all, and -1 hides all GPUs behind it: CUDA's own documentation uses it for that.
func (t *tree) visible(top *Topology, listed listing, lookup func(string) (string, bool)) error {
	for i := range listed.gpus {
		listed.gpus[i].MemoryNode = top.MemoryNode(listed.gpus[i].Node)
	}
	top.GPUs = listed.gpus
	if lookup == nil && t.live {
		lookup = os.LookupEnv
	}
	if lookup == nil {
		return nil
	}
	value, set := lookup(visibleDevices)
	if !set {
		return nil
	}
	top.Limits.VisibleDevices = procfs.Label(value)
	order, _ := lookup(deviceOrder)
	countable := slices.DeleteFunc(slices.Clone(listed.gpus), func(g GPU) bool { return foreign(g) != 0 })
	entries := strings.Split(value, ",")
	if v := strings.TrimSpace(value); v == "" || v == noDevices {
		entries = nil
	}
	seen, names := []GPU{}, map[string]bool{}
	for _, entry := range entries {
		if entry = strings.TrimSpace(entry); entry == "-1" {
			break
		}
		isIndex := isNumbered(entry, "")
		if !isIndex && !strings.HasPrefix(entry, "GPU-") && !strings.HasPrefix(entry, "MIG-") {
			return &visibleDevicesError{value, entry,
				"is neither an index, nor a UUID (GPU-…), nor a MIG instance (MIG-…)"}
		}
		if len(countable) == 0 {
			t.warnf(visibleDevices, "%s names a GPU, and the machine has none that is known", procfs.Quote(entry))
			continue
		}
		if !isIndex && !listed.fromDriver {
			t.warnf(visibleDevices,
				"which GPU %s is only the driver's library knows, and it was not queried: "+
					"all GPUs are listed", procfs.Quote(entry))
			return nil
		}
		differ := func(g GPU) bool { return g.Name != countable[0].Name || g.DeviceID != countable[0].DeviceID }
		found, reason := listed.find(entry, countable)
		if reason == "" && isIndex && order != "PCI_BUS_ID" && slices.ContainsFunc(countable, differ) {
			t.warnf(visibleDevices,
				"the GPUs differ, and CUDA counts the fastest first: "+
					"set CUDA_DEVICE_ORDER=PCI_BUS_ID to have it count as is done here")
		}
		name := strconv.Itoa(found.Index)
		if len(found.MIG) == 1 && !isIndex {
			name += found.MIG[0].UUID
		}
		switch known := !listed.partial && (isIndex || !slices.ContainsFunc(listed.gpus,
			func(g GPU) bool { return g.UUID == "" })); {
		case reason == "" && names[name]:
			return &visibleDevicesError{value, entry, "is there twice"}
		case reason == "":
			names[name] = true
			seen = append(seen, found)
		case known || entry == "GPU-" || entry == "MIG-" || strings.Contains(reason, "more than one"):
			return &visibleDevicesError{value, entry, reason}
		default: // it may name a GPU that could not be asked
			t.warnf(visibleDevices, "%s %s, but not all could be asked: it is left out", procfs.Quote(entry), reason)
		}
	}
	for _, g := range listed.gpus {
		if !slices.ContainsFunc(seen, func(s GPU) bool { return s.Index == g.Index }) {
			top.Limits.HiddenGPUs++
		}
	}
	top.GPUs = seen
	return nil
}

// find returns a copy of the GPU that an entry names, or the reason why there is none: an index
// counts the countable ones. A MIG instance is MIG-<UUID>, or MIG-<UUID of the GPU>/<GPU
// instance>/<compute instance> as drivers before 470 have it. The beginning of a UUID is enough.
func (l listing) find(entry string, countable []GPU) (found GPU, reason string) {
	if isNumbered(entry, "") {
		index, err := strconv.Atoi(entry)
		i := slices.IndexFunc(countable, func(g GPU) bool { return g.Index == index })
		if err != nil || i < 0 {
			return found, fmt.Sprintf("is no GPU's index: there are %d", len(countable))
		}
		return countable[i], ""
	}
	begins := func(uuid string) bool { return len(uuid) >= len(entry) && strings.EqualFold(uuid[:len(entry)], entry) }
	kind, n := "GPU", 0
	if strings.HasPrefix(entry, "MIG-") {
		kind = "MIG instance"
	}
	for _, g := range l.gpus {
		if begins(g.UUID) {
			found = g
			n++
		}
		for _, m := range g.MIG {
			if begins(m.UUID) || strings.EqualFold(entry, fmt.Sprintf("MIG-%s/%d/%d", g.UUID, m.GPUInstance,
				m.ComputeInstance)) {
				found = g
				found.MIG, found.MemoryBytes, found.FreeBytes = []MIGInstance{m}, m.MemoryBytes, m.FreeBytes
				n++
			}
		}
	}
	switch {
	case n > 1:
		return found, "is the beginning of more than one " + kind + "'s UUID"
	case n == 0 || entry == "GPU-" || entry == "MIG-":
		return found, "is no " + kind + "'s UUID"
	}
	return found, ""
}
