package host

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// faulty is a mapping whose calls fail as told. Nil functions pass.
type faulty struct {
	Mapping
	onLock    func(b []byte) error
	onTouch   func(b []byte) error
	onDiscard func(b []byte) error
	onHuge    error
	onBind    error
	onShow    error
	released  *atomic.Int64
}

func (f *faulty) lock(b []byte) error {
	if f.onLock != nil {
		return f.onLock(b)
	}
	return f.Mapping.lock(b)
}

func (f *faulty) Touch(b []byte) error {
	if f.onTouch != nil {
		if err := f.onTouch(b); err != nil {
			return err
		}
	}
	return f.Mapping.Touch(b)
}

func (f *faulty) discard(b []byte) error {
	if f.onDiscard != nil {
		if err := f.onDiscard(b); err != nil {
			return err
		}
	}
	return f.Mapping.discard(b)
}

func (f *faulty) huge() error {
	if f.onHuge != nil {
		return f.onHuge
	}
	return f.Mapping.huge()
}

func (f *faulty) bind(node int) error {
	if f.onBind != nil {
		return f.onBind
	}
	return f.Mapping.bind(node)
}

func (f *faulty) show(b []byte) error {
	if f.onShow != nil {
		return f.onShow
	}
	return f.Mapping.show(b)
}

func (f *faulty) Release() error {
	if f.released != nil {
		f.released.Add(1)
	}
	return f.Mapping.Release()
}

func openFaulty(t *testing.T, cfg Config, f *faulty) *Arena {
	t.Helper()
	a, err := newArena(cfg, func(size int64) (Mapping, error) {
		m, err := reserve(size)
		if f.Mapping != nil { // only the range of the arena is faulty
			return m, err
		}
		f.Mapping = m
		return f, err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
	})
	return a
}

func TestRefusedMapping(t *testing.T) {
	cause := errors.New("cannot allocate memory")
	_, err := newArena(Config{Capacity: 1 << 20}, func(int64) (Mapping, error) { return nil, cause })
	if !errors.Is(err, cause) || !strings.Contains(err.Error(), "1048576 bytes") ||
		!strings.Contains(err.Error(), "vm.overcommit_memory") {
		t.Fatalf("got %v", err)
	}
}

func TestWhatIsRefusedIsWarnedOf(t *testing.T) {
	a := openFaulty(t, Config{Capacity: 1 << 20, Node: 3, Huge: true, Lock: true}, &faulty{
		onHuge: errors.New("no huge pages here"),
		onBind: errors.New("no such node"),
		onLock: func([]byte) error { return errors.New("not permitted") },
	})
	w := a.Stats().Warnings
	if len(w) != 3 {
		t.Fatalf("warnings: %q", w)
	}
	for i, want := range []string{
		"huge pages were refused (no huge pages here): 1048576 bytes", "NUMA node 3 (no such node)",
		"0 of 1048576 bytes are locked (not permitted)",
	} {
		if !strings.Contains(w[i].What, want) || w[i].Remedy == "" {
			t.Errorf("warning %q: want %q in it, and a remedy", w[i], want)
		}
	}
	if m := alloc(t, a, 100); len(m.Extents()[0]) != 100 {
		t.Error("the arena does not work")
	} else {
		free(a, m)
	}
}

func TestFailedShowGivesAllBack(t *testing.T) {
	if !invariants.Enabled || !poison {
		t.Skip("needs -tags invariants without -race, to hide pages")
	}
	f := &faulty{onShow: errors.New("too many mappings")}
	a := openFaulty(t, Config{Capacity: 4 * step, Node: -1}, f)
	if _, err := a.Alloc(step, nil); !errors.Is(err, f.onShow) {
		t.Fatalf("got %v", err)
	}
	if s := a.Stats(); s.Used != 0 || s.LargestFree != 4*step {
		t.Errorf("%+v", s)
	}
}
