package test

import (
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// TestValidate: what cannot be is refused without the machine, by its name.
func TestValidate(t *testing.T) {
	wrong := tier.Marks{Limit: 0.5, Trigger: 0.9, Stop: 0.1}
	for _, c := range []struct {
		want string
		cfg  spillway.Config
	}{
		{"gpu:1: Memory: -1 bytes", spillway.Config{GPUs: []spillway.GPUConfig{{}, {Memory: spillway.Bytes(-1)}}}},
		{"gpu:0: Memory: 2813 bytes are too little: the least is 4096", spillway.Config{GPUs: []spillway.GPUConfig{{Memory: spillway.Bytes(2813)}}}},
		{"gpu:0: Memory: a simulated GPU has no memory to take a share of", spillway.Config{GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Share(1)}}}},
		{"HostMemory: 4096 bytes are too little", spillway.Config{HostMemory: spillway.Bytes(4096)}},
		{"disk:0: Capacity: -1 bytes", spillway.Config{Disks: []spillway.DiskConfig{{Capacity: spillway.Bytes(-1)}}}},
		{"disk:1: Reserve is -1", spillway.Config{Disks: []spillway.DiskConfig{{}, {Reserve: -1}}}},
		{"disk:0: with Persist it needs a capacity", spillway.Config{Disks: []spillway.DiskConfig{{Persist: true}}}},
		{"gpu marks: ", spillway.Config{GPUMarks: wrong}},
		{"host marks: ", spillway.Config{HostMarks: wrong}},
		{"disk marks: ", spillway.Config{DiskMarks: wrong}},
		{"gpu:0: Marks: ", spillway.Config{GPUs: []spillway.GPUConfig{{Marks: wrong}}}},
		{"host:1: Marks: ", spillway.Config{Hosts: []spillway.HostConfig{{Memory: spillway.Bytes(1 << 20)},
			{Memory: spillway.Bytes(1 << 20), Marks: tier.Marks{Trigger: 0.5}}}}},
		{"disk:0: Marks: ", spillway.Config{Disks: []spillway.DiskConfig{{Marks: wrong}}}},
		{"-1 moves per edge", spillway.Config{MovesPerEdge: -1}},
		{"1025 moves per edge", spillway.Config{MovesPerEdge: monitor.MaxMovesPerEdge + 1}},
		{"moves per edge", spillway.Config{MovesPerEdge: math.MaxInt}},
		{"codec", spillway.Config{Codec: 99}},
	} {
		if err := c.cfg.Validate(); err == nil || !strings.HasPrefix(err.Error(), "spillway: ") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
	both := spillway.Config{HostMemory: spillway.Bytes(-1), GPUs: []spillway.GPUConfig{{Memory: spillway.Bytes(-1)}}}
	if err := both.Validate(); err == nil || !strings.Contains(err.Error(), "gpu:0: ") || !strings.Contains(err.Error(), "HostMemory") {
		t.Errorf("of two faults it says %v", err)
	}
}

// TestSizesThatOpenRefuses: the error has the numbers that were compared.
func TestSizesThatOpenRefuses(t *testing.T) {
	for want, change := range map[string]func(*spillway.Config){
		`and a reserve of 4096: 0.0000000001% of the rest is less than 4096 bytes`: func(c *spillway.Config) {
			c.Disks[0].Capacity, c.Disks[0].Reserve = spillway.Share(1e-12), 4096
		},
		"simulated GPU memory of 4398046511104 are more": func(c *spillway.Config) {
			half := spillway.GPUConfig{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 41)}
			c.GPUs = []spillway.GPUConfig{half, half}
		},
		"simulated GPU memory of 9223372036854775807 are more": func(c *spillway.Config) {
			most := spillway.GPUConfig{Backend: spillway.Sim, Memory: spillway.Bytes(math.MaxInt64)}
			c.GPUs = []spillway.GPUConfig{most, most}
		},
	} {
		cfg := plainConfig(t)
		change(&cfg)
		if _, err := spillway.Open(t.Context(), cfg); !errors.Is(err, tier.ErrNoSpace) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestHints: an error for more than a space has names the setting that would help.
func TestHints(t *testing.T) {
	cfg := plainConfig(t)
	told := func(want ...string) {
		t.Helper()
		eng, err := spillway.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		for i, k := range []tier.Kind{tier.GPU, tier.Host, tier.Disk} {
			_, err := eng.Reservations().TryReserve(reservation.Specific(spaceAt(eng, k, 0).ID()), 1<<40, nil)
			var e *reservation.ExceededError
			if !errors.As(err, &e) || e.Hint != want[i] {
				t.Errorf("%v; want the hint %q", err, want[i])
			}
		}
		closeClean(t, eng)
	}
	host, onDisk := "more host memory would help", "a larger disk capacity of "+cfg.Disks[0].Dir+" would help"
	told("a larger GPU memory would help", host, onDisk)
	cfg.Limits.Quota = &quota.Settings{Limit: limitOf(t, "512Ki"), Source: "THE_LIMIT"}
	told("a larger GPU memory, or a higher limit by THE_LIMIT, would help", host, onDisk)
	cfg.Limits.Quota = &quota.Settings{}
	cfg.GPUs[0].Wrap = wrapIn(newBudget(t, 512<<10))
	told("a larger GPU memory, or a higher limit of its budget, would help", host, onDisk)
}

// TestSettings: an engine heeds each field of its configuration, and one where the field is not
// set does something else.
func TestSettings(t *testing.T) {
	for _, s := range settings {
		t.Run(s.field, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for _, isSet := range []bool{true, false} {
					testSetting(t, s, isSet)
				}
			})
		})
	}
}

// testSetting opens an engine, and looks whether it heeds the setting, which it should if it has
// it.
func testSetting(t *testing.T, s setting, isSet bool) {
	cfg := plainConfig(t)
	if s.with != nil {
		s.with(t, &cfg)
	}
	other := cfg
	other.GPUs, other.Hosts, other.Disks = slices.Clone(cfg.GPUs), slices.Clone(cfg.Hosts), slices.Clone(cfg.Disks)
	settings, top := *cfg.Limits.Quota, *cfg.Topology
	other.Limits.Quota, other.Topology = &settings, &top
	top.Nodes = slices.Clone(top.Nodes)
	heeded := s.set(t, &other)
	if isSet {
		cfg = other
	}
	gpus, disks := slices.Clone(cfg.GPUs), slices.Clone(cfg.Disks)
	eng, err := spillway.Open(t.Context(), cfg)
	for i := range gpus {
		if cfg.GPUs[i].Memory != gpus[i].Memory {
			t.Error("opening has changed the program's GPUs")
		}
	}
	if !reflect.DeepEqual(cfg.Disks, disks) {
		t.Error("opening has changed the program's Disks")
	}
	switch {
	case err != nil && isSet:
		if s.refused == nil || !errors.Is(err, s.refused) {
			t.Errorf("opening: %v", err)
		}
		return
	case err != nil: // without it there is none
		return
	case s.refused != nil:
		if isSet {
			t.Error("it was opened")
		}
	case heeded(eng) != isSet:
		t.Errorf("where it is set, %v: it is heeded, %v", isSet, !isSet)
	}
	if err := eng.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
		t.Error(err)
	}
}

// TestEverySettingIsTested: a field of the configuration that TestSettings does not know is an
// error.
func TestEverySettingIsTested(t *testing.T) {
	var fields []string
	var add func(of reflect.Type, path string)
	add = func(of reflect.Type, path string) {
		for i := range of.NumField() {
			f := of.Field(i)
			at := f.Type
			for at.Kind() == reflect.Slice || at.Kind() == reflect.Pointer {
				at = at.Elem()
			}
			switch { // those of which the engine reads the fields itself
			case at == reflect.TypeFor[quota.Settings](), at == reflect.TypeFor[spillway.Limits]():
				add(at, path+f.Name+".")
				continue
			case at.Kind() == reflect.Struct && at.PkgPath() == of.PkgPath() && path == "":
				add(at, path+f.Name+".")
			}
			fields = append(fields, path+f.Name)
		}
	}
	add(reflect.TypeFor[spillway.Config](), "")
	tested := make(map[string]bool)
	for _, s := range settings {
		if tested[s.field] = true; !slices.Contains(fields, s.field) {
			t.Errorf("there is no field %s", s.field)
		}
	}
	for _, f := range fields {
		if !tested[f] {
			t.Errorf("no setting of %s is tested", f)
		}
	}
}
