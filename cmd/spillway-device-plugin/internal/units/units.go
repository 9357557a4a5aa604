// Package units divides the memory of GPUs into units of one size, which the kubelet counts and
// allocates. A unit's id contains the GPU's UUID; the units of a GPU are interchangeable.
//
//	Layout.Count ──▶ how many units a GPU has
//	ID, Parse    ──▶ GPU-…::17
//	Choose       ──▶ which units a container should get: all of one GPU
//
// All functions are pure and safe for concurrent use.
package units

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/size"
)

// Layout is how the plugin divides memory.
type Layout struct {
	Unit  int64    // bytes of a unit, whole MiB
	Ratio *big.Rat // the units add up to this multiple of a GPU's memory; nil means 1
}

// Count returns how many units a GPU has: those that fit into its memory times the ratio. It fails if no
// unit fits.
func (l Layout) Count(g gpus.GPU) (int, error) {
	n, err := leases.Advertised(g.Memory, l.Ratio)
	if err != nil {
		return 0, err
	}
	if n < l.Unit {
		return 0, fmt.Errorf("%s has %s to give away, which is less than a unit of %s: choose a smaller unit",
			g.UUID, size.Approx(n), size.Format(l.Unit))
	}
	return int(n / l.Unit), nil
}

// Share returns the bytes, in whole MiB, of each share of a GPU that has n shares. It fails if that is less
// than 1 MiB.
func (l Layout) Share(g gpus.GPU, n int) (int64, error) {
	all, err := leases.Advertised(g.Memory, l.Ratio)
	if err != nil {
		return 0, err
	}
	share := all / int64(n) &^ (1<<20 - 1)
	if share == 0 {
		return 0, fmt.Errorf("%s has %s to give away, which is less than 1 MiB for each of %d shares: choose fewer "+
			"by --shares", g.UUID, size.Approx(all), n)
	}
	return share, nil
}

// separator is between a UUID and a number. No UUID contains it.
const separator = "::"

// ID returns the id of unit n of a GPU, from 0.
func ID(uuid string, n int) string { return uuid + separator + strconv.Itoa(n) }

// Parse is the inverse of ID.
func Parse(id string) (uuid string, n int, err error) {
	uuid, digits, ok := strings.Cut(id, separator)
	n, err = strconv.Atoi(digits)
	if !ok || uuid == "" || err != nil || ID(uuid, n) != id || n < 0 {
		return "", 0, fmt.Errorf("%.100q is no unit of GPU memory", id)
	}
	return uuid, n, nil
}

// GPUOf returns the UUID of the GPU that all units belong to. It fails if they belong to several.
func GPUOf(ids []string) (uuid string, err error) {
	if len(ids) == 0 {
		return "", errors.New("no unit of GPU memory is named")
	}
	for _, id := range ids {
		of, _, err := Parse(id)
		switch {
		case err != nil:
			return "", err
		case uuid != "" && of != uuid:
			return "", fmt.Errorf("units of %s and %s: a container gets memory of one GPU only", uuid, of)
		}
		uuid = of
	}
	return uuid, nil
}

// Load is how much of a GPU is allocated. Choose orders GPUs by units, then holders, then UUID, as an
// engine does that picks a GPU by the ledger.
type Load struct {
	Units   int
	Holders int
}

// Choose returns size units of one GPU out of available, including those in must. If must is empty, it
// picks the least loaded GPU that has room. If no GPU has room, the error has the largest number of units
// that one GPU has. available includes must.
func Choose(available, must []string, size int, load func(uuid string) Load) ([]string, error) {
	if size < len(must) || size < 1 {
		return nil, fmt.Errorf("%d units are wanted, with %d that must be among them", size, len(must))
	}
	taken := map[string]bool{}
	for _, id := range must {
		taken[id] = true
	}
	free := map[string][]int{} // by GPU
	for _, id := range available {
		uuid, n, err := Parse(id)
		if err != nil {
			return nil, err
		}
		if !taken[id] {
			free[uuid] = append(free[uuid], n)
		}
	}
	candidates := slices.Collect(maps.Keys(free))
	if len(must) > 0 {
		uuid, err := GPUOf(must)
		if err != nil {
			return nil, err
		}
		candidates = []string{uuid}
	}
	most, fit := 0, candidates[:0]
	for _, uuid := range candidates {
		n := len(must) + len(free[uuid])
		most = max(most, n)
		if n >= size {
			fit = append(fit, uuid)
		}
	}
	if len(fit) == 0 {
		return nil, fmt.Errorf("no GPU has %d units free; the most is %d: a container gets memory of one GPU only",
			size, most)
	}
	best := slices.MinFunc(fit, func(a, b string) int {
		la, lb := load(a), load(b)
		return cmp.Or(cmp.Compare(la.Units, lb.Units), cmp.Compare(la.Holders, lb.Holders), strings.Compare(a, b))
	})
	slices.Sort(free[best])
	chosen := slices.Clone(must)
	for _, n := range free[best][:size-len(must)] {
		chosen = append(chosen, ID(best, n))
	}
	return chosen, nil
}
