package topology

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

// The environment variables of CUDA that limit which GPUs a process sees, and number them; see
// "CUDA Environment Variables" in the CUDA C++ Programming Guide.
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

// visible reduces top.GPUs to those that this process sees, in the order of CUDA_VISIBLE_DEVICES,
// and sets their MemoryNode. If the variable is not set, all stay.
//
// The rules are CUDA's: an empty value hides all GPUs, and -1 hides all entries behind it, for
// which CUDA's own documentation uses it. An index counts the GPUs that are not foreign. A UUID may
// be shortened as long as it is unique. A MIG instance is MIG-<UUID>, or MIG-<UUID of the GPU>/<GPU
// instance>/<compute instance> as drivers before 470 have it.
//
// One rule differs on purpose. At an entry that makes no sense CUDA stops and hides it and all
// behind it, without a message, so a typing error costs GPUs that nobody misses. visible returns an
// error that matches ErrVisibleDevices. If an entry may name a GPU that could not be queried, it is
// a warning instead.
func (t *tree) visible(lookup func(string) (string, bool)) error {
	top := t.top
	// First what all entries need: MemoryNode, how many GPUs an index can name, and whether a UUID
	// that no GPU has is a mistake.
	countable, named := 0, true
	for i := range top.GPUs {
		g := &top.GPUs[i]
		g.MemoryNode = top.MemoryNode(g.Node)
		countable += 1 - foreign(*g)
		named = named && g.UUID != ""
	}
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
	top.Limits.VisibleDevices = label(value)
	order, _ := lookup(deviceOrder)
	entries := strings.Split(value, ",")
	if v := strings.TrimSpace(value); v == "" || v == noDevices {
		entries = nil
	}
	// seen are the GPUs of the entries so far; names guards against listing one twice.
	seen, names := []GPU{}, map[string]bool{}
	for _, entry := range entries {
		if entry = strings.TrimSpace(entry); entry == "-1" {
			break
		}
		// CUDA itself reports nothing, and hides that entry's GPU and all behind it.
		refuse := func(reason string) error {
			return fmt.Errorf("topology: %w: in %s, %s %s", ErrVisibleDevices, quote(value), quote(entry), reason)
		}
		isIndex, kind := isNumbered(entry, ""), "GPU"
		if strings.HasPrefix(entry, "MIG-") {
			kind = "MIG instance"
		} else if !isIndex && !strings.HasPrefix(entry, "GPU-") {
			return refuse("is neither an index, nor a UUID (GPU-…), nor a MIG instance (MIG-…)")
		}
		if countable == 0 {
			t.warnf(visibleDevices, "%s names a GPU, and the machine has none that is known", quote(entry))
			continue
		}
		// The PCI bus has no UUIDs. To list too many GPUs is better than none.
		if !isIndex && !t.fromDriver {
			t.warnf(visibleDevices,
				"which GPU %s is only the driver's library knows, and it was not queried: "+
					"all GPUs are listed", quote(entry))
			return nil
		}
		// Find the GPU, or the MIG instance, that the entry names. Case does not matter.
		var found []GPU
		index, err := strconv.Atoi(entry)
		begins := func(id string) bool {
			return !isIndex && len(id) >= len(entry) && strings.EqualFold(id[:len(entry)], entry)
		}
		for _, g := range top.GPUs {
			if begins(g.UUID) || isIndex && err == nil && g.Index == index && foreign(g) == 0 {
				found = append(found, g)
			}
			for _, m := range g.MIG {
				// The name of drivers before 470, which CUDA still accepts.
				old := fmt.Sprintf("MIG-%s/%d/%d", g.UUID, m.GPUInstance, m.ComputeInstance)
				if begins(m.UUID) || strings.EqualFold(entry, old) {
					// A MIG instance is listed as a GPU with the instance's memory, because that is
					// what the process can allocate.
					part := g
					part.MIG, part.MemoryBytes, part.FreeBytes = []MIGInstance{m}, m.MemoryBytes, m.FreeBytes
					found = append(found, part)
				}
			}
		}
		switch {
		case len(found) > 1:
			// An index finds at most one, so it is a UUID that is too short.
			return refuse("is the beginning of more than one " + kind + "'s UUID")
		case entry == "GPU-" || entry == "MIG-":
			return refuse("is no " + kind + "'s UUID")
		case len(found) == 0:
			reason := "is no " + kind + "'s UUID"
			if isIndex {
				reason = fmt.Sprintf("is no GPU's index: there are %d", countable)
			}
			if !t.partial && (isIndex || named) {
				return refuse(reason)
			}
			// It may name a GPU that could not be asked.
			t.warnf(visibleDevices, "%s %s, but not all could be asked: it is left out", quote(entry), reason)
			continue
		}
		g := found[0]
		// Two instances of one GPU differ. Whether a process may use both is CUDA's concern.
		name := strconv.Itoa(g.Index)
		if len(g.MIG) == 1 && !isIndex {
			name += g.MIG[0].UUID
		}
		if names[name] {
			return refuse("is there twice")
		}
		names[name] = true
		seen = append(seen, g)
		// By default CUDA numbers GPUs by speed (FASTEST_FIRST), which is not known here. It only
		// matters if the GPUs are not all of one model.
		differ := func(o GPU) bool { return foreign(o) == 0 && (o.Name != g.Name || o.DeviceID != g.DeviceID) }
		if isIndex && order != "PCI_BUS_ID" && slices.ContainsFunc(top.GPUs, differ) {
			t.warnf(visibleDevices,
				"the GPUs differ, and CUDA counts the fastest first: "+
					"set CUDA_DEVICE_ORDER=PCI_BUS_ID to have it count as is done here")
		}
	}
	// Last count those that no entry names. Two instances of one GPU are one GPU here.
	for _, g := range top.GPUs {
		if !slices.ContainsFunc(seen, func(s GPU) bool { return s.Index == g.Index }) {
			top.Limits.HiddenGPUs++
		}
	}
	top.GPUs = seen
	return nil
}
