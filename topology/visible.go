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

// The environment variables of CUDA that say which GPUs a process sees.
const (
	visibleDevices = "CUDA_VISIBLE_DEVICES"
	deviceOrder    = "CUDA_DEVICE_ORDER"
)

// noDevices is what Slurm sets visibleDevices to for jobs without GPUs: a word that CUDA does not
// know, so that it shows none.
const noDevices = "NoDevFiles"

// ErrVisibleDevices is what the error of Discover matches then. It says which entry is wrong.
var ErrVisibleDevices = errors.New("CUDA_VISIBLE_DEVICES makes no sense")

// visibleDevicesError says which entry of CUDA_VISIBLE_DEVICES is wrong. CUDA itself
// says nothing, and hides that entry's GPU and all behind it.
type visibleDevicesError struct {
	Value, Entry string
	Reason       string
}

func (e *visibleDevicesError) Error() string {
	return fmt.Sprintf("topology: CUDA_VISIBLE_DEVICES=%s: %s %s", procfs.Quote(e.Value), procfs.Quote(e.Entry), e.Reason)
}

// Is makes the error match ErrVisibleDevices.
func (e *visibleDevicesError) Is(target error) bool { return target == ErrVisibleDevices }

// visible puts those GPUs into top that this process sees.
func (t *tree) visible(top *Topology, listed listing, lookup func(string) (string, bool)) error {
	gpus := listed.gpus
	for i := range gpus {
		gpus[i].MemoryNode = top.MemoryNode(gpus[i].Node)
	}
	top.GPUs = gpus
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
	order, _ := lookup(deviceOrder)
	c := choice{listing: listed, value: value, byBus: order == "PCI_BUS_ID"}
	seen, err := c.choose()
	if err != nil {
		return err
	}
	for _, w := range c.warned {
		t.warnf(visibleDevices, "%s", w)
	}
	top.GPUs = seen
	top.Limits.VisibleDevices = procfs.Label(value)
	for _, g := range gpus {
		if !slices.ContainsFunc(seen, func(s GPU) bool { return s.Index == g.Index }) {
			top.Limits.HiddenGPUs++
		}
	}
	return nil
}

// choice is a value of CUDA_VISIBLE_DEVICES, and what it chooses from.
type choice struct {
	listing
	value  string
	byBus  bool // CUDA counts by PCI address, as the driver does
	warned []string
}

func (c *choice) wrong(entry, reason string) error {
	return &visibleDevicesError{Value: c.value, Entry: entry, Reason: reason}
}

// unknown is for an entry that names nothing that is listed. That is wrong if all is listed; else
// it may name what could not be asked.
func (c *choice) unknown(entry, reason string, all bool) error {
	if all {
		return c.wrong(entry, reason)
	}
	c.warned = append(c.warned, fmt.Sprintf("%s %s, but not all could be asked: it is left out", procfs.Quote(entry), reason))
	return nil
}

// named reports whether the UUIDs of all GPUs are known.
func (c *choice) named() bool {
	return !c.partial && !slices.ContainsFunc(c.gpus, func(g GPU) bool { return g.UUID == "" })
}

// choose returns the GPUs in the order of the value. An empty one hides all, and so
// does -1 what is behind it: CUDA's own documentation uses it for that.
func (c *choice) choose() ([]GPU, error) {
	seen := []GPU{}
	if v := strings.TrimSpace(c.value); v == "" || v == noDevices {
		return seen, nil
	}
	names := map[string]bool{}
	for entry := range strings.SplitSeq(c.value, ",") {
		entry = strings.TrimSpace(entry)
		if entry == "-1" {
			break
		}
		g, known, err := c.find(entry)
		if err != nil {
			return nil, err
		}
		if !known {
			return c.gpus, nil
		}
		if g == nil {
			continue
		}
		name := strconv.Itoa(g.Index)
		if len(g.MIG) == 1 && !isNumbered(entry, "") {
			name += g.MIG[0].UUID
		}
		if names[name] {
			return nil, c.wrong(entry, "is there twice")
		}
		names[name] = true
		seen = append(seen, *g)
	}
	return seen, nil
}

// find returns a copy of the GPU that an entry names; nil if there is none to choose from. known
// reports whether it is certain which it is.
func (c *choice) find(entry string) (g *GPU, known bool, err error) {
	isGPU, isMIG := strings.HasPrefix(entry, "GPU-"), strings.HasPrefix(entry, "MIG-")
	switch {
	case !isNumbered(entry, "") && !isGPU && !isMIG:
		return nil, false, c.wrong(entry, "is neither an index, nor a UUID (GPU-…), nor a MIG instance (MIG-…)")
	case !slices.ContainsFunc(c.gpus, func(g GPU) bool { return foreign(g) == 0 }):
		c.warned = append(c.warned, fmt.Sprintf("%s names a GPU, and the machine has none that is known", procfs.Quote(entry)))
		return nil, true, nil
	case isNumbered(entry, ""):
		g, err = c.byIndex(entry)
		return g, true, err
	case !c.fromDriver:
		c.warned = append(c.warned, fmt.Sprintf("which GPU %s is only the driver's library knows, and it was not queried: all GPUs are listed", procfs.Quote(entry)))
		return nil, false, nil
	case isMIG:
		g, err = c.byInstance(entry)
	default:
		g, err = c.byUUID(entry)
	}
	return g, true, err
}

func (c *choice) byIndex(entry string) (*GPU, error) {
	countable := slices.DeleteFunc(slices.Clone(c.gpus), func(g GPU) bool { return foreign(g) != 0 })
	i, err := strconv.Atoi(entry)
	at := slices.IndexFunc(countable, func(g GPU) bool { return g.Index == i })
	if err != nil || at < 0 {
		return nil, c.unknown(entry, fmt.Sprintf("is no GPU's index: there are %d", len(countable)), !c.partial)
	}
	if !c.byBus && slices.ContainsFunc(countable, func(g GPU) bool { return g.Name != countable[0].Name || g.DeviceID != countable[0].DeviceID }) {
		c.warned = append(c.warned, "the GPUs differ, and CUDA counts the fastest first: set CUDA_DEVICE_ORDER=PCI_BUS_ID to have it count as is done here")
	}
	return &countable[at], nil
}

func (c *choice) byUUID(entry string) (*GPU, error) {
	var named []GPU
	for _, g := range c.gpus {
		if begins(g.UUID, entry) {
			named = append(named, g)
		}
	}
	return c.only(entry, "GPU", named)
}

// byInstance finds MIG-<UUID>, or MIG-<UUID of the GPU>/<GPU instance>/<compute
// instance> as drivers before 470 have it.
func (c *choice) byInstance(entry string) (*GPU, error) {
	var named []GPU
	for _, g := range c.gpus {
		for _, m := range g.MIG {
			old := fmt.Sprintf("MIG-%s/%d/%d", g.UUID, m.GPUInstance, m.ComputeInstance)
			if begins(m.UUID, entry) || strings.EqualFold(old, entry) {
				part := g
				part.MIG, part.MemoryBytes, part.FreeBytes = []MIGInstance{m}, m.MemoryBytes, m.FreeBytes
				named = append(named, part)
			}
		}
	}
	return c.only(entry, "MIG instance", named)
}

// only returns the one of a kind that an entry names.
func (c *choice) only(entry, kind string, named []GPU) (*GPU, error) {
	switch {
	case len(named) > 1:
		return nil, c.wrong(entry, "is the beginning of more than one "+kind+"'s UUID")
	case entry == "GPU-" || entry == "MIG-":
		return nil, c.wrong(entry, "is no "+kind+"'s UUID")
	case len(named) == 0:
		return nil, c.unknown(entry, "is no "+kind+"'s UUID", c.named())
	}
	return &named[0], nil
}

// begins reports whether s begins with prefix, in capital letters or not.
func begins(s, prefix string) bool {
	return len(s) >= len(prefix) && strings.EqualFold(s[:len(prefix)], prefix)
}
