package units

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
)

const (
	mi = int64(1) << 20
	gi = int64(1) << 30
)

func TestCount(t *testing.T) {
	for _, c := range []struct {
		memory int64
		ratio  *big.Rat
		unit   int64
		want   int
	}{
		{16 * gi, nil, 256 * mi, 64},
		{16 * gi, big.NewRat(3, 2), 256 * mi, 96},
		{16*gi + 255*mi, nil, 256 * mi, 64},
		{gi, big.NewRat(1, 3), 256 * mi, 1},
	} {
		n, err := Layout{c.unit, c.ratio}.Count(gpus.GPU{UUID: "GPU-a", Memory: c.memory})
		if err != nil || n != c.want {
			t.Errorf("%d bytes times %v in units of %d: %d units, %v; want %d", c.memory, c.ratio, c.unit, n, err, c.want)
		}
	}
	_, err := Layout{Unit: 2 * gi}.Count(gpus.GPU{UUID: "GPU-a", Memory: gi})
	if err == nil || !strings.Contains(err.Error(), "GPU-a has 1.0 GiB") {
		t.Errorf("a unit larger than the GPU: %v", err)
	}
}

func TestParse(t *testing.T) {
	for _, id := range []string{ID("GPU-1-2", 0), ID("MIG-3", 65535)} {
		uuid, n, err := Parse(id)
		if err != nil || ID(uuid, n) != id {
			t.Errorf("%s is read as %s and %d: %v", id, uuid, n, err)
		}
	}
	for _, id := range []string{"", "GPU-1", "::1", "GPU-1::", "GPU-1::-1", "GPU-1::01", "GPU-1::+1", "GPU-1::1::2", "GPU-1::99999999999999999999"} {
		if _, _, err := Parse(id); err == nil {
			t.Errorf("%q is a unit", id)
		}
	}
}

func list(uuid string, from, to int) (ids []string) {
	for n := from; n < to; n++ {
		ids = append(ids, ID(uuid, n))
	}
	return ids
}

func TestChoose(t *testing.T) {
	a, b := list("GPU-a", 0, 4), list("GPU-b", 0, 8)
	both := slices.Concat(a, b)
	for name, c := range map[string]struct {
		available, must []string
		size            int
		loads           map[string]Load
		want            string // the GPU, or what the error says
	}{
		"least loaded by units":    {both, nil, 2, map[string]Load{"GPU-a": {2, 1}, "GPU-b": {1, 5}}, "GPU-b"},
		"then by holders":          {both, nil, 2, map[string]Load{"GPU-a": {2, 2}, "GPU-b": {2, 1}}, "GPU-b"},
		"then by UUID":             {both, nil, 2, nil, "GPU-a"},
		"only what has room":       {both, nil, 5, map[string]Load{"GPU-b": {100, 1}}, "GPU-b"},
		"must decides":             {both, b[7:], 3, map[string]Load{"GPU-b": {100, 1}}, "GPU-b"},
		"must is all":              {both, b[2:4], 2, nil, "GPU-b"},
		"must of a full GPU":       {both, a[:1], 5, nil, "the most is 4"},
		"must of two GPUs":         {both, []string{a[0], b[0]}, 3, nil, "one GPU only"},
		"more than any GPU has":    {both, nil, 9, nil, "no GPU has 9 units free; the most is 8"},
		"more in must than wanted": {both, a[:3], 2, nil, "must be among them"},
		"nothing wanted":           {both, nil, 0, nil, "0 units are wanted"},
		"strange ids":              {[]string{"x"}, nil, 1, nil, "is no unit"},
		"nothing available":        {nil, nil, 1, nil, "the most is 0"},
	} {
		available, must := slices.Clone(c.available), slices.Clone(c.must)
		got, err := Choose(available, must, c.size, func(uuid string) Load { return c.loads[uuid] })
		if !slices.Equal(available, c.available) || !slices.Equal(must, c.must) {
			t.Errorf("%s: what was passed is changed", name)
		}
		if !strings.HasPrefix(c.want, "GPU-") {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v, %v", name, got, err)
			}
			continue
		}
		if uuid, _ := GPUOf(got); err != nil || uuid != c.want || len(got) != c.size {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// Whatever is asked, what is chosen is of one GPU, available, complete and holds all that it must.
func TestChooseAnything(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var available, must []string
		for g := range 1 + r.IntN(4) {
			for _, id := range list(fmt.Sprintf("GPU-%d", g), 0, r.IntN(20)) {
				if r.IntN(3) > 0 {
					available = append(available, id)
				}
			}
		}
		if len(available) > 0 && r.IntN(2) == 0 {
			must = append(must, available[r.IntN(len(available))])
		}
		r.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
		want := 1 + r.IntN(12)
		got, err := Choose(available, must, want, func(uuid string) Load { return Load{Units: len(uuid)} })
		if err != nil {
			count := map[string]int{}
			for _, id := range available {
				uuid, _, _ := Parse(id)
				if len(must) == 0 || strings.HasPrefix(must[0], uuid+separator) {
					count[uuid]++
				}
			}
			for uuid, n := range count {
				if n >= want {
					t.Fatalf("%s has %d of %d units: %v", uuid, n, want, err)
				}
			}
			continue
		}
		if _, err := GPUOf(got); err != nil || len(got) != want {
			t.Fatalf("%v: %v", got, err)
		}
		slices.Sort(got)
		if len(slices.Compact(got)) != want {
			t.Fatalf("%v: some twice", got)
		}
		for _, id := range got {
			if !slices.Contains(available, id) {
				t.Fatalf("%s is not available", id)
			}
		}
		for _, id := range must {
			if !slices.Contains(got, id) {
				t.Fatalf("%s is left out", id)
			}
		}
	}
}
