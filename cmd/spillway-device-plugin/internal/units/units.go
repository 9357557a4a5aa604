// Package units divides the memory of GPUs into units of one size, which the kubelet counts and
// gives away. A unit's id has the GPU's UUID in it; units of one GPU are all alike.
//
//	Layout ── Count(GPU) ──▶ how many there are
//	ID, Parse            ──▶ GPU-…::17
//	Choose               ──▶ which ones a container should get: all of one GPU
//
// Everything here is pure, and may be called at the same time.
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

// Layout says how memory is divided.
type Layout struct {
	Unit  int64    // bytes of a unit, whole MiB
	Ratio *big.Rat // units may promise that much of a GPU's memory; nil means 1
}

// Count returns how many units a GPU has: those that fit into what its memory, times the ratio,
// allows. None is an error.
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

// Share returns the bytes of each share of a GPU that is given in n of them, whole MiB. None is an
// error.
func (l Layout) Share(g gpus.GPU, n int) (int64, error) {
	all, err := leases.Advertised(g.Memory, l.Ratio)
	if err != nil {
		return 0, err
	}
	share := all / int64(n) &^ (1<<20 - 1)
	if share == 0 {
		return 0, fmt.Errorf("%s has %s to give away, which is less than 1 MiB for each of %d shares: choose fewer by --shares",
			g.UUID, size.Approx(all), n)
	}
	return share, nil
}

// separator is between a UUID and a number. No UUID has it.
const separator = "::"

// ID returns the name of unit n, from 0, of a GPU.
func ID(uuid string, n int) string { return uuid + separator + strconv.Itoa(n) }

// Parse reads what ID returned.
func Parse(id string) (uuid string, n int, err error) {
	uuid, digits, ok := strings.Cut(id, separator)
	n, err = strconv.Atoi(digits)
	if !ok || uuid == "" || err != nil || ID(uuid, n) != id || n < 0 {
		return "", 0, fmt.Errorf("%.100q is no unit of GPU memory", id)
	}
	return uuid, n, nil
}

// GPUOf returns the one GPU that all units belong to.
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

// Load is how much of a GPU is given away: S58 orders GPUs by bytes, then holders, then UUID.
type Load struct {
	Units   int
	Holders int
}

// Choose returns size units of one GPU, out of available. All of must are among them, and decide on
// the GPU. Otherwise it is the least loaded GPU that has room. Nothing is changed.
// If no GPU has enough units the error says how many the best has.
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
		return nil, fmt.Errorf("no GPU has %d units free; the most is %d: a container gets memory of one GPU only", size, most)
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
