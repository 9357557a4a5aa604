package tiertest_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// Each backend here breaks one promise of the contract, and the suites must find it. A test cannot
// observe the failure of another, so each broken backend is tested in a process of its own.

const flawVariable = "SPILLWAY_TIERTEST_FLAW"

func TestReferencePoolConforms(t *testing.T) {
	for _, flaw := range []string{"", "reclaims late"} { // reclaiming late is allowed
		tiertest.RunPool(t, func(t *testing.T, capacity int64) tier.Pool { return newReferencePool(capacity, flaw) })
	}
}

// TestDeviceThatCannotFail checks that a backend that cannot fail on purpose, such as a real GPU,
// passes: the tests of failures are skipped.
func TestDeviceThatCannotFail(t *testing.T) {
	tiertest.RunDevice(t, func(t *testing.T, memory int64, faults tiertest.FaultFunc) tier.Device {
		if faults != nil {
			t.Skip("needs a device that fails on purpose")
		}
		return newFlawedDevice(t, memory, nil, "")
	})
}

// poolFlaws maps a flaw to the part of the suite that must find it.
var poolFlaws = map[string]string{
	"charges too little":                 "Charge",
	"charges more for less":              "Charge",
	"has another size":                   "Shape",
	"starts between pages":               "Shape",
	"all memories are one":               "Exhaustion",
	"more than the capacity":             "Exhaustion",
	"splits anywhere":                    "Cuts",
	"never splits":                       "Fragmentation",
	"does not tell the largest piece":    "Fragmentation",
	"loses a piece":                      "Fragmentation",
	"reclaims twice":                     "ReclaimedOnce",
	"reclaims before the bytes are free": "AllocInReclaimed",
	"does not wait in Close":             "CloseWaits",
	"allocates after Close":              "AfterClose",
}

// deviceFlaws does the same for devices.
var deviceFlaws = map[string]string{
	"charges too little":           "Charge",
	"addresses are not aligned":    "Alloc",
	"memories overlap":             "Alloc",
	"no room is any error":         "OutOfMemory",
	"frees at once":                "Retire",
	"copies a byte less":           "Alignments",
	"fills a byte more":            "OrderOnStream",
	"does regions one by one":      "Regions",
	"copies to a peer at any time": "Peer",
	"takes any address":            "Mistakes",
	"copies at any time":           "OrderOnStream",
	"events are done at once":      "NoOrderAcrossStreams",
	"does not wait for events":     "Events",
	"closed streams work":          "StreamClose",
	"does what it refuses":         "Refused",
	"refuses and keeps the memory": "Refused",
	"keeps failures to itself":     "Failed",
	"one failure fails all":        "Failed",
	"leaves a goroutine behind":    "Info",
}

// TestFlaw is the test that the other processes run.
func TestFlaw(t *testing.T) {
	suite, flaw, ok := strings.Cut(os.Getenv(flawVariable), "/")
	if !ok {
		t.Skip("needs TestSuitesFindFlaws, which runs it")
	}
	tiertest.SetLeakPatience(time.Second)
	switch suite {
	case "pool":
		tiertest.RunPool(t, func(t *testing.T, capacity int64) tier.Pool { return newReferencePool(capacity, flaw) })
	case "device":
		tiertest.RunDevice(t, func(t *testing.T, memory int64, faults tiertest.FaultFunc) tier.Device {
			return newFlawedDevice(t, memory, faults, flaw)
		})
	}
}

func TestSuitesFindFlaws(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for suite, flaws := range map[string]map[string]string{"pool": poolFlaws, "device": deviceFlaws} {
		for flaw, part := range flaws {
			t.Run(suite+"/"+flaw, func(t *testing.T) {
				t.Parallel() // some processes wait for goroutines that never end
				cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestFlaw$/^"+part+"$", "-test.timeout=20s")
				cmd.Env = append(os.Environ(), flawVariable+"="+suite+"/"+flaw)
				out, err := cmd.CombinedOutput()
				var exit *exec.ExitError
				if err != nil && !errors.As(err, &exit) {
					t.Fatal(err)
				}
				failed := err != nil && strings.Contains(string(out), "--- FAIL: TestFlaw/"+part)
				if !failed || strings.Contains(string(out), "panic: ") {
					t.Errorf("%s does not find a backend that %s:\n%s", part, flaw, out)
				}
			})
		}
	}
}

// flawedDevice is a simulated device that breaks one promise.
type flawedDevice struct {
	tier.Device
	flaw   string
	aside  tier.Stream // for work that is done out of order
	failed error
}

func newFlawedDevice(t *testing.T, memory int64, faults tiertest.FaultFunc, flaw string) tier.Device {
	d := &flawedDevice{flaw: flaw}
	var hook func(sim.Op) error
	if faults != nil {
		hook = func(op sim.Op) error {
			err := faults(op.Index, op.Stage == sim.Run)
			switch {
			case flaw == "does what it refuses" && op.Kind == sim.OpFill,
				flaw == "refuses and keeps the memory" && op.Kind == sim.OpAlloc:
				if err != nil {
					d.failed = err
				}
				return nil
			}
			return err
		}
	}
	dev, err := sim.NewFaulty(sim.Config{Memory: memory}, hook)
	if err != nil {
		t.Fatal(err)
	}
	d.Device = dev
	if d.aside, err = d.Device.NewStream(); err != nil {
		t.Fatal(err)
	}
	if flaw == "leaves a goroutine behind" {
		go func() { select {} }()
	}
	return d
}

func (d *flawedDevice) Unwrap() tier.Device { return d.Device }

func (d *flawedDevice) refused() error {
	err := d.failed
	d.failed = nil
	return err
}

func (d *flawedDevice) Charge(size int64) int64 {
	if d.flaw == "charges too little" {
		return size / 256 * 256
	}
	return d.Device.Charge(size)
}

func (d *flawedDevice) Alloc(s tier.Stream, size int64) (tier.Addr, error) {
	a, err := d.Device.Alloc(s, size)
	switch {
	case d.flaw == "addresses are not aligned" && err == nil:
		a += 8
	case d.flaw == "memories overlap" && err == nil:
		a &^= 1<<16 - 1
	case d.flaw == "no room is any error" && err != nil:
		err = errors.New("no room")
	case d.failed != nil:
		return 0, d.refused()
	}
	return a, err
}

func (d *flawedDevice) Free(s tier.Stream, a tier.Addr) error {
	if d.flaw == "frees at once" {
		s = d.aside
	}
	return d.Device.Free(s, a)
}

func (d *flawedDevice) CopyPeer(s tier.Stream, dst tier.Addr, dev tier.Device, src tier.Addr, size int64) error {
	if d.flaw == "copies to a peer at any time" {
		return nil
	}
	return d.Device.CopyPeer(s, dst, dev, src, size)
}

func (d *flawedDevice) CopyRegions(s tier.Stream, regions []tier.Region) error {
	to := len(regions) == 1 && regions[0].HostSrc != nil
	back := len(regions) == 1 && len(regions[0].HostDst) > 0
	switch d.flaw {
	case "takes any address", "closed streams work":
		err := d.Device.CopyRegions(s, regions)
		if to && (d.flaw == "closed streams work") == errors.Is(err, tier.ErrClosed) {
			return nil
		}
		return err
	case "copies at any time":
		if back {
			s = d.aside
		}
		return d.Device.CopyRegions(s, regions)
	case "copies a byte less":
		regions = slices.Clone(regions)
		for i := range regions {
			regions[i].Size = max(0, regions[i].Size-1)
		}
		return d.Device.CopyRegions(s, regions)
	case "does regions one by one":
	default:
		return d.Device.CopyRegions(s, regions)
	}
	for i := range regions {
		if err := d.Device.CopyRegions(s, regions[i:i+1]); err != nil {
			return err
		}
	}
	return nil
}

func (d *flawedDevice) Fill(s tier.Stream, dst tier.Addr, value byte, size int64) error {
	if d.flaw == "fills a byte more" && size > 0 && d.Device.Fill(s, dst, value, size+1) == nil {
		return nil
	}
	err := d.Device.Fill(s, dst, value, size)
	if d.failed != nil && d.flaw == "does what it refuses" {
		_ = d.Device.Free(s, dst)
		return d.refused()
	}
	return err
}

func (d *flawedDevice) Record(s tier.Stream) (tier.Event, error) {
	e, err := d.Device.Record(s)
	if err == nil {
		switch d.flaw {
		case "events are done at once":
			return flawedEvent{Event: e, done: true}, nil
		case "keeps failures to itself":
			return flawedEvent{Event: e}, nil
		}
	}
	return e, err
}

func (d *flawedDevice) WaitEvent(s tier.Stream, e tier.Event) error {
	if d.flaw == "does not wait for events" {
		return nil
	}
	return d.Device.WaitEvent(s, e)
}

func (d *flawedDevice) NewStream() (tier.Stream, error) {
	if d.flaw == "one failure fails all" && d.aside.Err() == nil {
		s, err := d.Device.NewStream()
		if err == nil {
			d.aside = s // the first stream and all that follow are one
		}
	}
	if d.flaw == "one failure fails all" {
		return d.aside, nil
	}
	return d.Device.NewStream()
}

// flawedEvent has no error, or is always done.
type flawedEvent struct {
	tier.Event
	done bool
}

func (e flawedEvent) Err() error { return nil }

func (e flawedEvent) Done() <-chan struct{} {
	if !e.done {
		return e.Event.Done()
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx.Done()
}
