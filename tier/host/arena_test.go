package host

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

func open(t testing.TB, cfg Config) *Arena {
	t.Helper()
	a, err := NewArena(cfg)
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

func alloc(t testing.TB, a *Arena, size int64, cuts ...int64) tier.HostMemory {
	t.Helper()
	m, err := a.Alloc(size, cuts)
	if err != nil {
		t.Fatalf("Alloc(%d): %v", size, err)
	}
	return m.(tier.HostMemory)
}

func free(a *Arena, ms ...tier.HostMemory) {
	for _, m := range ms {
		a.Free(m, func() {})
	}
}

func TestArenaKeepsThePoolContract(t *testing.T) {
	for _, cfg := range []Config{
		{Node: -1},
		{Node: -1, Touch: true, Huge: true},
		{Node: 0, Lock: true},
	} {
		t.Run(fmt.Sprintf("node=%d,lock=%v,touch=%v", cfg.Node, cfg.Lock, cfg.Touch), func(t *testing.T) {
			tiertest.RunPool(t, func(t *testing.T, capacity int64) tier.Pool {
				cfg := cfg
				cfg.Capacity = capacity
				a, err := NewArena(cfg)
				if err != nil {
					t.Fatal(err)
				}
				return a
			})
		})
	}
}

func TestConfig(t *testing.T) {
	for _, cfg := range []Config{{}, {Capacity: -1}, {Capacity: tier.Page - 1}, {Capacity: tier.Page, Node: -2}} {
		if a, err := NewArena(cfg); err == nil {
			a.Close()
			t.Errorf("%+v was accepted", cfg)
		}
	}
	a := open(t, Config{Capacity: 3*tier.Page + 5, Node: -1})
	if got := a.Stats().Capacity; got != 3*tier.Page {
		t.Errorf("capacity %d: want it rounded down to whole pages", got)
	}
}

// faulty is a mapping whose calls fail as told. Nil functions pass.
type faulty struct {
	mapping
	onLock    func(b []byte) error
	onTouch   func(b []byte) error
	onDiscard func(b []byte) error
	onHide    func()
	onHuge    error
	onBind    error
	onShow    error
	released  *atomic.Int64
}

func (f *faulty) lock(b []byte) error {
	if f.onLock != nil {
		return f.onLock(b)
	}
	return f.mapping.lock(b)
}

func (f *faulty) touch(b []byte) error {
	if f.onTouch != nil {
		if err := f.onTouch(b); err != nil {
			return err
		}
	}
	return f.mapping.touch(b)
}

func (f *faulty) discard(b []byte) error {
	if f.onDiscard != nil {
		if err := f.onDiscard(b); err != nil {
			return err
		}
	}
	return f.mapping.discard(b)
}

func (f *faulty) hide(b []byte) error {
	if f.onHide != nil {
		f.onHide()
	}
	return f.mapping.hide(b)
}

func (f *faulty) huge() error {
	if f.onHuge != nil {
		return f.onHuge
	}
	return f.mapping.huge()
}

func (f *faulty) bind(node int) error {
	if f.onBind != nil {
		return f.onBind
	}
	return f.mapping.bind(node)
}

func (f *faulty) show(b []byte) error {
	if f.onShow != nil {
		return f.onShow
	}
	return f.mapping.show(b)
}

func (f *faulty) release() error {
	if f.released != nil {
		f.released.Add(1)
	}
	return f.mapping.release()
}

func openFaulty(t *testing.T, cfg Config, f *faulty) *Arena {
	t.Helper()
	a, err := newArena(cfg, func(size int64) (mapping, error) {
		m, err := reserve(size)
		f.mapping = m
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
	_, err := newArena(Config{Capacity: 1 << 20}, func(int64) (mapping, error) { return nil, cause })
	if !errors.Is(err, cause) || !strings.Contains(err.Error(), "1048576 bytes") || !strings.Contains(err.Error(), "vm.overcommit_memory") {
		t.Fatalf("got %v", err)
	}
}

func TestWhatIsRefusedIsWarnedOf(t *testing.T) {
	a := openFaulty(t, Config{Capacity: 1 << 20, Node: 3, Huge: true, Lock: true}, &faulty{
		onHuge: errors.New("no huge pages here"),
		onBind: errors.New("no such node"),
		onLock: func([]byte) error { return errors.New("not permitted") },
	})
	w := a.Warnings()
	if len(w) != 3 {
		t.Fatalf("warnings: %q", w)
	}
	for i, want := range []string{"huge pages were refused (no huge pages here): 1048576 bytes", "NUMA node 3 (no such node)", "0 of 1048576 bytes are locked (not permitted; "} {
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

func TestLockGoesAsFarAsTheLimit(t *testing.T) {
	const capacity = 64 << 20
	for _, limit := range []int64{0, tier.Page, 8 << 20, 8<<20 + 3*tier.Page, capacity - tier.Page, capacity} {
		var locked int64
		a := openFaulty(t, Config{Capacity: capacity, Node: -1, Lock: true}, &faulty{
			onLock: func(b []byte) error {
				if locked+int64(len(b)) > limit {
					return errors.New("cannot allocate memory")
				}
				locked += int64(len(b))
				return nil
			},
		})
		s := a.Stats()
		if s.Locked != limit || locked != limit {
			t.Errorf("limit %d: %d bytes locked, %d reported", limit, locked, s.Locked)
		}
		if warned := len(s.Warnings) > 0; warned != (limit < capacity) {
			t.Errorf("limit %d: warnings %q", limit, s.Warnings)
		}
		if limit < capacity && runtime.GOOS == "linux" && !strings.Contains(s.Warnings[0].Remedy, "ulimit -l") {
			t.Errorf("the warning %q names no remedy", s.Warnings[0])
		}
	}
}

// vmLocked reads how much memory the process has locked.
func vmLocked(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip("no /proc")
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmLck:"); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Skip("no VmLck")
	return 0
}

// TestLockedIsWhatTheKernelSays: the figure is not wishful, whatever the limits of
// this process are.
func TestLockedIsWhatTheKernelSays(t *testing.T) {
	before := vmLocked(t)
	a := open(t, Config{Capacity: 6 << 20, Node: -1, Lock: true})
	if got := vmLocked(t) - before; got != a.Stats().Locked {
		t.Errorf("the kernel locked %d bytes, the arena says %d (%q)", got, a.Stats().Locked, a.Warnings())
	}
	m := alloc(t, a, 6<<20)
	fill(m, 1)
	free(a, m)
	a.Trim()
	if got := vmLocked(t) - before; got != a.Stats().Locked {
		t.Errorf("after Trim the kernel locked %d bytes, the arena says %d (%q)", got, a.Stats().Locked, a.Warnings())
	}
	a.Close()
	if got := vmLocked(t); got != before {
		t.Errorf("%d bytes are still locked after Close", got-before)
	}
}

func fill(m tier.HostMemory, b byte) {
	for _, e := range m.Extents() {
		for i := range e {
			e[i] = b
		}
	}
}

func holds(m tier.HostMemory, b byte) bool {
	for _, e := range m.Extents() {
		if bytes.Count(e, []byte{b}) != len(e) {
			return false
		}
	}
	return true
}

func TestTouchAheadReachesTheEndAndChangesNothing(t *testing.T) {
	tiertest.NoLeaks(t)
	const capacity = 5*step + 3*tier.Page
	begin := make(chan struct{})
	a := openFaulty(t, Config{Capacity: capacity, Node: -1, Touch: true}, &faulty{
		onTouch: func([]byte) error { <-begin; return nil },
	})
	m := alloc(t, a, capacity)
	fill(m, 0x5a)
	close(begin)
	<-a.touchDone
	if !holds(m, 0x5a) {
		t.Error("touching changed bytes in use")
	}
	if s := a.Stats(); s.Touched != capacity || s.Committed != capacity {
		t.Errorf("touched %d, committed %d of %d", s.Touched, s.Committed, capacity)
	}
	free(a, m)
}

// TestIdleArenaTouchesLittle: pages are touched some way ahead of what was used, and no
// further.
func TestIdleArenaTouchesLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const capacity = 512 * step
		var steps int
		a := openFaulty(t, Config{Capacity: capacity, Node: -1, Touch: true}, &faulty{
			onTouch: func([]byte) error { steps++; return nil },
		})
		var held []tier.HostMemory
		for _, c := range []struct {
			alloc int64
			want  int // steps
		}{{0, 32}, {100, 33}, {32 * step, 65}, {4 * step, 73}, {100, 73}} {
			if c.alloc > 0 {
				held = append(held, alloc(t, a, c.alloc))
			}
			synctest.Wait()
			if s := a.Stats(); steps != c.want || s.Touched != int64(steps)*step {
				t.Errorf("after %d bytes: %d steps were touched, %d bytes; want %d steps", c.alloc, steps, s.Touched, c.want)
			}
		}
		free(a, held...)
		synctest.Wait()
		if steps != 73 {
			t.Errorf("giving memory back touched %d steps", steps-73)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestTouchPagesLosesNoWrite(t *testing.T) {
	b := make([]byte, 64*tier.Page)
	for i := range b {
		b[i] = byte(i)
	}
	want := bytes.Clone(b)
	touchPages(b[8 : len(b)-8])
	if !bytes.Equal(b, want) {
		t.Error("bytes were changed")
	}
}

func TestCloseEndsTouching(t *testing.T) {
	tiertest.NoLeaks(t)
	var touches atomic.Int64
	entered := make(chan struct{}, 100)
	a := openFaulty(t, Config{Capacity: 100 * step, Node: -1, Touch: true}, &faulty{
		onTouch: func([]byte) error {
			touches.Add(1)
			entered <- struct{}{}
			return nil
		},
	})
	<-entered
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	n := touches.Load()
	if got := a.Stats().Touched; got != n*step {
		t.Errorf("%d bytes touched by %d steps", got, n)
	}
}

func TestFailedTouchEndsWithAWarning(t *testing.T) {
	if poison {
		t.Skip("freed pages refuse to be touched in this build, so failures are not reported")
	}
	var touches atomic.Int64
	a := openFaulty(t, Config{Capacity: 5 * step, Node: -1, Touch: true}, &faulty{
		onTouch: func([]byte) error {
			if touches.Add(1) == 3 {
				return errors.New("out of memory")
			}
			return nil
		},
	})
	<-a.touchDone
	if s := a.Stats(); s.Touched != 2*step || len(s.Warnings) != 1 || !strings.Contains(s.Warnings[0].What, "out of memory") {
		t.Errorf("%+v", s)
	}
}

func TestCommittedCountsStepsOnce(t *testing.T) {
	a := open(t, Config{Capacity: 4 * step, Node: -1})
	if c := a.Stats().Committed; c != 0 {
		t.Fatalf("%d bytes committed in a new arena", c)
	}
	small := []tier.HostMemory{alloc(t, a, 1), alloc(t, a, 1), alloc(t, a, step)}
	if c := a.Stats().Committed; c != 2*step {
		t.Errorf("committed %d, want two steps", c)
	}
	free(a, small...)
	if c := a.Stats().Committed; c != 2*step {
		t.Errorf("committed %d after Free: pages stay until Trim", c)
	}
}

func TestTrimGivesFreeStepsBack(t *testing.T) {
	const capacity = 8*step + 5*tier.Page
	var discarded atomic.Int64
	a := openFaulty(t, Config{Capacity: capacity, Node: -1}, &faulty{
		onDiscard: func(b []byte) error { discarded.Add(int64(len(b))); return nil },
	})
	low, mid, high := alloc(t, a, 2*step), alloc(t, a, step+tier.Page), alloc(t, a, 5*step+4*tier.Page)
	for i, m := range []tier.HostMemory{low, mid, high} {
		fill(m, byte(i+1))
	}
	free(a, low, high)
	// high begins one page into step 3, so that step stays; the end does not.
	want := int64(2*step + 4*step + 5*tier.Page)
	if got := a.Trim(); got != want || discarded.Load() != want {
		t.Errorf("Trim gave %d bytes back, discarded %d, want %d", got, discarded.Load(), want)
	}
	if !holds(mid, 2) {
		t.Error("Trim touched memory in use")
	}
	if s := a.Stats(); s.Committed != capacity-want || s.LargestFree != 5*step+4*tier.Page {
		t.Errorf("after Trim: %+v", s)
	}
	if got := a.Trim(); got != 0 {
		t.Errorf("a second Trim gave %d bytes back", got)
	}
	again := alloc(t, a, 2*step)
	fill(again, 9)
	if !holds(again, 9) {
		t.Error("trimmed memory does not hold what is written")
	}
	free(a, mid, again)
	if s := a.Stats(); s.Used != 0 || s.LargestFree != capacity {
		t.Errorf("in the end: %+v", s)
	}
}

// present returns how many bytes of whole pages have one, in memory or swapped out. What
// the process has beside them, which comes and goes, does not count.
func present(t *testing.T, pages []byte) (n int64) {
	t.Helper()
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Skip("no pagemap in /proc")
	}
	defer f.Close()
	page := int64(os.Getpagesize())
	entries := make([]byte, int64(len(pages))/page*8)
	if _, err := f.ReadAt(entries, int64(address(pages))/page*8); err != nil {
		t.Fatal(err)
	}
	for ; len(entries) > 0; entries = entries[8:] {
		if entries[7]&0xc0 != 0 { // the two highest bits: present, swapped
			n += page
		}
	}
	return n
}

func TestPagesComeAndGo(t *testing.T) {
	const capacity = 64 << 20
	a := open(t, Config{Capacity: capacity, Node: -1, Huge: true})
	if onHeap {
		t.Skip("this build takes the arena from the heap")
	}
	empty := present(t, a.mem)
	m := alloc(t, a, capacity)
	fill(m, 1)
	full := present(t, a.mem)
	free(a, m)
	a.Trim()
	if trimmed := present(t, a.mem); empty != 0 || full != capacity || trimmed != 0 {
		t.Errorf("present: %d bytes when new, %d of %d when written, %d when trimmed", empty, full, capacity, trimmed)
	}
}

func TestFailedTrimIsWarnedOfAndLosesNothing(t *testing.T) {
	a := openFaulty(t, Config{Capacity: 4 * step, Node: -1}, &faulty{
		onDiscard: func([]byte) error { return errors.New("invalid argument") },
	})
	free(a, alloc(t, a, 4*step))
	if n := a.Trim(); n != 0 {
		t.Errorf("gave %d bytes back", n)
	}
	if s := a.Stats(); s.LargestFree != 4*step || len(s.Warnings) != 1 {
		t.Errorf("%+v", s)
	}
}

// TestAllocWaitsForTrim: what Trim works on is not missing for those who have
// room in the books.
func TestAllocWaitsForTrim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		leave := make(chan struct{})
		a := openFaulty(t, Config{Capacity: 4 * step, Node: -1}, &faulty{
			onDiscard: func([]byte) error { <-leave; return nil },
		})
		free(a, alloc(t, a, 4*step))
		trimmed, got := make(chan int64, 1), make(chan error, 1)
		go func() { trimmed <- a.Trim() }()
		synctest.Wait()
		go func() {
			m, err := a.Alloc(4*step, nil)
			if err == nil {
				a.Free(m, func() {})
			}
			got <- err
		}()
		synctest.Wait()
		if len(got) > 0 {
			t.Errorf("Alloc returned %v while Trim has all", <-got)
		}
		close(leave)
		if err := <-got; err != nil {
			t.Errorf("Alloc while Trim works: %v", err)
		}
		if n := <-trimmed; n != 4*step {
			t.Errorf("Trim gave %d bytes back", n)
		}
	})
}

func TestMappingStaysUntilTheLastFree(t *testing.T) {
	var released atomic.Int64
	a := openFaulty(t, Config{Capacity: 4 * step, Node: -1, Touch: true}, &faulty{released: &released})
	x, y := alloc(t, a, 100), alloc(t, a, step)
	<-a.touchDone
	fill(x, 1)
	fill(y, 2)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if !holds(x, 1) || !holds(y, 2) {
		t.Error("Close changed memory that is handed out")
	}
	if n := a.Trim(); n != 0 {
		t.Errorf("Trim gave %d bytes of a closed arena back", n)
	}
	free(a, x)
	if !holds(y, 2) || released.Load() != 0 {
		t.Error("the mapping went before the last memory")
	}
	free(a, y)
	if released.Load() != 1 {
		t.Errorf("released %d times after the last Free", released.Load())
	}
	b := openFaulty(t, Config{Capacity: 4 * step, Node: -1}, &faulty{released: &released})
	if err := b.Close(); err != nil || released.Load() != 2 {
		t.Errorf("closing an empty arena: %v, released %d times", err, released.Load())
	}
}

// TestLastFreeLeavesTheToucherItsPages: the mapping stays also while a goroutine of
// the arena's works on it.
func TestLastFreeLeavesTheToucherItsPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var released atomic.Int64
		leave := make(chan struct{})
		a := openFaulty(t, Config{Capacity: 4 * step, Node: -1, Touch: true}, &faulty{
			released: &released,
			onTouch:  func([]byte) error { <-leave; return nil },
		})
		m := alloc(t, a, 100)
		synctest.Wait() // the toucher is under way
		closed := make(chan error, 1)
		go func() { closed <- a.Close() }()
		synctest.Wait()
		free(a, m)
		if released.Load() != 0 {
			t.Error("the mapping went while pages are touched")
		}
		close(leave)
		if err := <-closed; err != nil || released.Load() != 1 {
			t.Errorf("Close: %v; released %d times", err, released.Load())
		}
	})
}

// TestUnmappedWhenTheLastSlabIsHidden: the mapping stays while the pages of an empty slab
// are made unreadable.
func TestUnmappedWhenTheLastSlabIsHidden(t *testing.T) {
	if !poison {
		t.Skip("only an invariants build without -race hides pages")
	}
	var released atomic.Int64
	f := &faulty{released: &released}
	hidden := 0
	f.onHide = func() {
		if hidden++; released.Load() != 0 {
			t.Error("pages were hidden that are not mapped any more")
		}
	}
	a := openFaulty(t, Config{Capacity: 4 * step, Node: -1}, f)
	m := alloc(t, a, 100)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	free(a, m)
	if hidden == 0 || released.Load() != 1 {
		t.Errorf("hidden %d times, released %d times", hidden, released.Load())
	}
}

func TestFreeTwicePanics(t *testing.T) {
	a := open(t, Config{Capacity: step, Node: -1})
	m := alloc(t, a, 100)
	free(a, m)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
		if u := a.Stats().Used; u != 0 {
			t.Errorf("used %d", u)
		}
	}()
	free(a, m)
}

func TestHugeRequestsAreRefused(t *testing.T) {
	a := open(t, Config{Capacity: step, Node: -1})
	for _, size := range []int64{step + 1, 1<<63 - 1, 1<<63 - tier.Page} {
		var full *tier.NoSpaceError
		if _, err := a.Alloc(size, nil); !errors.As(err, &full) || full.Available != step || full.Largest != 0 {
			t.Errorf("Alloc(%d): %v", size, err)
		}
	}
	for _, size := range []int64{0, -1} {
		if _, err := a.Alloc(size, nil); err == nil || errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("Alloc(%d): %v", size, err)
		}
	}
}

// TestConcurrentTrim lets owners check their bytes while Trim runs again and
// again, and all of it is there in the end.
func TestConcurrentTrim(t *testing.T) {
	tiertest.NoLeaks(t)
	// The other two hold at most 2 × most, and so cut what is free, 3 × most, into
	// three pieces at most. One of these is as long as most.
	const most = 3 * step
	const capacity = 5 * most
	a := open(t, Config{Capacity: capacity, Node: -1, Touch: true})
	var owners sync.WaitGroup
	for g := range uint64(3) {
		owners.Go(func() {
			r := rand.New(rand.NewPCG(g, 1))
			for i := range 60 {
				size := 1 + r.Int64N(most)
				m, err := a.Alloc(size, nil)
				if err != nil {
					t.Errorf("Alloc(%d): %v", size, err)
					return
				}
				h := m.(tier.HostMemory)
				e := h.Extents()[0]
				mark := byte(g<<6) | byte(i)
				e[0], e[len(e)/2], e[len(e)-1] = mark, mark, mark
				runtime.Gosched()
				if e[0] != mark || e[len(e)/2] != mark || e[len(e)-1] != mark {
					t.Error("bytes in use were changed")
				}
				free(a, h)
			}
		})
	}
	done := make(chan struct{})
	go func() { owners.Wait(); close(done) }()
	for {
		a.Trim()
		runtime.Gosched() // or who waits for what Trim had finds that the next one has it
		select {
		case <-done:
			a.Trim() // which gives back slabs that are kept
			if s := a.Stats(); s.Used != 0 || s.LargestFree != capacity {
				t.Errorf("%+v", s)
			}
			return
		default:
		}
	}
}

func TestFailedShowGivesAllBack(t *testing.T) {
	if !invariants.Enabled || !poison {
		t.Skip("only an invariants build without -race hides pages")
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

// TestFreedMemoryFaults reads freed memory, which must fault.
func TestFreedMemoryFaults(t *testing.T) {
	if !poison {
		t.Skip("only an invariants build without -race hides pages")
	}
	a := open(t, Config{Capacity: 4 * step, Node: -1})
	m, other := alloc(t, a, 3*tier.Page), alloc(t, a, tier.Page)
	fill(m, 1)
	fill(other, 2)
	e := m.Extents()[0]
	free(a, m)
	if !faults(func() { sink = e[tier.Page] }) {
		t.Error("freed memory can be read")
	}
	if !holds(other, 2) {
		t.Error("a neighbour was hidden too")
	}
	again := alloc(t, a, 3*tier.Page)
	fill(again, 3)
	if !holds(again, 3) {
		t.Error("memory that is handed out again does not work")
	}
	free(a, other, again)
}
