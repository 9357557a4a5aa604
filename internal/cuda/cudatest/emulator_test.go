//go:build linux && (amd64 || arm64)

package cudatest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/cuda"
)

// TestEnviron checks that a program that gets only variables and a path finds the configured
// devices.
func TestEnviron(t *testing.T) {
	const variable, doesNotStart = "CUDATEST_CHILD_LOADS", "the CUDA driver does not start"
	if path := os.Getenv(variable); path != "" {
		describe(path)
		return
	}
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{
			Config{Devices: 3, Memory: 1 << 20, Version: 13000, NoPeer: true, Delay: time.Microsecond},
			"13.0, 3 devices of 1048576 bytes, peers false",
		},
		{Config{Devices: 2}, "12.8, 2 devices of 67108864 bytes, peers true"},
		{Config{Devices: -1}, doesNotStart},
	} {
		e := New(t, Config{})
		cmd := exec.Command(os.Args[0], "-test.run=^TestEnviron$")
		cmd.Env = append(append(os.Environ(), variable+"="+e.Path), c.cfg.Environ()...)
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), c.want) {
			t.Errorf("the program prints %q (%v), want %q", out, err, c.want)
		}
	}
}

func describe(path string) {
	lib, err := cuda.Load(path)
	if err != nil {
		fmt.Println(err)
		return
	}
	infos, err := lib.Devices()
	if err != nil {
		fmt.Println(err)
		return
	}
	peers, err := lib.CanAccessPeer(0, 1)
	fmt.Printf("%s, %d devices of %d bytes, peers %v %v\n", lib.Version(), len(infos), infos[0].Memory, peers, err)
}

// TestStateOfItsOwn checks that two libraries of one test share no state.
func TestStateOfItsOwn(t *testing.T) {
	a, b := New(t, Config{Devices: 2}), New(t, Config{})
	for _, c := range []struct {
		e    *Emulator
		want int
	}{{a, 2}, {b, 1}} {
		lib, err := cuda.Load(c.e.Path)
		if err != nil {
			t.Fatal(err)
		}
		infos, err := lib.Devices()
		if err != nil || len(infos) != c.want {
			t.Errorf("%d devices (%v), want %d", len(infos), err, c.want)
		}
	}
	if a.Calls("cuDeviceGetName") != 2 || b.Calls("cuDeviceGetName") != 1 {
		t.Error("calls were counted in the wrong library")
	}
}

// TestContextEndsWithItsPools checks that a context destroys its own pools when it ends, and not
// those of the context that follows it.
func TestContextEndsWithItsPools(t *testing.T) {
	e := New(t, Config{Devices: 2})
	lib, err := cuda.Load(e.Path)
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ok(err)
	open := func(ordinal int) (*cuda.Device, cuda.Pool) {
		t.Helper()
		d, err := lib.Open(ordinal, 0)
		ok(err)
		var p cuda.Pool
		ok(d.Here(func(c *cuda.Calls) (err error) { p, err = c.NewPool(); return err }))
		return d, p
	}
	// A stream of another device's waits for a word, and one of the first context for that stream:
	// so the context does not end before the word is written.
	other, _ := open(1)
	var word uintptr
	var event cuda.Event
	ok(other.Here(func(c *cuda.Calls) error {
		s, err := c.NewStream()
		ok(err)
		word, err = c.AllocHost(4)
		ok(err)
		at, err := c.HostDevicePtr(word)
		ok(err)
		event, err = c.NewEvent()
		ok(err)
		return errors.Join(c.WaitValue(s, at, 1), c.Record(event, s))
	}))
	first, _ := open(0)
	ok(first.Here(func(c *cuda.Calls) error {
		s, err := c.NewStream()
		ok(err)
		return c.WaitEvent(s, event)
	}))
	closed := make(chan error, 1)
	go func() { closed <- first.Close() }()
	for e.Calls("cuDevicePrimaryCtxRelease_v2") == 0 {
		runtime.Gosched()
	}
	second, p := open(0)
	cuda.StoreWord(word, 1)
	ok(<-closed)
	if err := second.Here(func(c *cuda.Calls) error { return c.DestroyPool(p) }); err != nil {
		t.Errorf("the pool of the second context: %v", err)
	}
	ok(other.Here(func(c *cuda.Calls) error { return c.FreeHost(word) }))
	ok(errors.Join(second.Close(), other.Close()))
	if want := "2 pools destroyed with their context"; !slices.Contains(e.Leaks(), want) {
		t.Errorf("not among %q: %s", e.Leaks(), want)
	}
}
