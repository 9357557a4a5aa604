package quota_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// TestRandomConcurrent lets many goroutines do everything with devices that share a
// budget, while the devices fail and panic on purpose. What is outstanding on them is
// never over the limit, and at every quiet moment the books are exact.
func TestRandomConcurrent(t *testing.T) {
	tiertest.NoLeaks(t)
	for seed := range testseed.Each(t, 5) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) { runModel(t, seed) })
	}
}

const (
	modelLimit   = 256 * kib
	modelWorkers = 8
	modelRounds  = 12
	modelSteps   = 60
)

// errRecording is what Record panics with. Out of Free it says that the free was made.
var errRecording = errors.New("a fault on purpose while recording")

// world is what the goroutines of one run share.
type world struct {
	*testing.T
	b       *quota.Budget
	devices []tier.Device // as the goroutines see them
	raw     []tier.Device
	// held is what the goroutines hold for certain, by their own account: charged
	// after Alloc has returned, credited before Free is called.
	held  atomic.Int64
	quiet atomic.Bool // no faults
}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{T: t, b: newBudget(t, modelLimit)}
	for i := range 3 {
		var ops atomic.Uint64
		raw, err := sim.NewFaulty(sim.Config{Memory: modelLimit}, func(op sim.Op) error {
			r := rand.New(rand.NewPCG(seed<<8|uint64(i), ops.Add(1)))
			if w.quiet.Load() || op.Kind == sim.OpNewStream || r.IntN(12) > 0 {
				return nil
			}
			if op.Stage == sim.Submit && r.IntN(4) == 0 {
				if op.Kind == sim.OpRecord {
					panic(errRecording)
				}
				panic(errFault)
			}
			return errFault
		})
		if err != nil {
			t.Fatal(err)
		}
		var dev tier.Device = raw
		if i == 1 {
			dev = quota.Logged(dev, discard)
		}
		if i == 2 {
			dev = plain{dev}
		}
		wrapped, err := w.b.Wrap(dev)
		if err != nil {
			t.Fatal(err)
		}
		w.raw = append(w.raw, raw)
		w.devices = append(w.devices, wrapped)
		t.Cleanup(func() {
			if err := wrapped.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return w
}

// over checks what must hold at any moment. Each device is queried by itself, so the sum may be
// none that ever was; but none of them may be over the limit, nor what is reserved.
func (w *world) over() {
	for _, d := range w.raw {
		if n := d.Outstanding(); n > modelLimit {
			w.Errorf("%d bytes are outstanding with a limit of %d", n, modelLimit)
		}
	}
	s := w.b.Stats()
	if s.Reserved > modelLimit || s.Peak > modelLimit || s.Reserved < s.Live+s.Retired+s.Pending {
		w.Errorf("%+v", s)
	}
	if n := w.held.Load(); n > modelLimit {
		w.Errorf("%d bytes are held with a limit of %d", n, modelLimit)
	}
}

// piece is an allocation.
type piece struct {
	dev    int
	a      tier.Addr
	charge int64
}

// worker has a stream on each device.
type worker struct {
	*world
	r       *rand.Rand
	streams []tier.Stream
	marks   []tier.Addr // one allocation on each stream, see settle
	pieces  []piece
	gates   []gate
}

// try makes a panic an error.
func try(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panicked: %w", p.(error))
		}
	}()
	return f()
}

func (w *worker) step() {
	i := w.r.IntN(len(w.devices))
	d, s := w.devices[i], w.streams[i]
	switch n := w.r.IntN(10); {
	case n < 4:
		size := 1 + w.r.Int64N(modelLimit/6)
		var a tier.Addr
		err := try(func() (err error) { a, err = d.Alloc(s, size); return err })
		switch {
		case err == nil:
			w.held.Add(d.Charge(size))
			w.pieces = append(w.pieces, piece{i, a, d.Charge(size)})
		case errors.Is(err, errFault) || errors.Is(err, tier.ErrOutOfBudget):
		default: // a device has as much as the budget, if not in one piece
			var full *tier.NoSpaceError
			if !errors.As(err, &full) || full.Available < d.Charge(size) {
				w.Errorf("Alloc: %v", err)
			}
		}
	case n < 7 && len(w.pieces) > 0:
		w.free(w.r.IntN(len(w.pieces)))
	case n == 7 && i != 2 && len(w.gates) < 2: // the plain device would wait for it
		var g gate
		if try(func() (err error) { g, err = closeGate(w, d, s); return err }) == nil {
			w.gates = append(w.gates, g)
		}
	case n == 8:
		w.openGates()
		if again, err := w.b.Wrap(d); err != nil || again != d {
			w.Errorf("Wrap: %v", err)
		}
	default:
		if err := try(func() error { return d.Free(s, tier.Addr(w.r.Uint64())|1) }); err == nil {
			w.Error("a bogus free passed")
		}
	}
	w.over()
}

// free frees a piece, again until the device does not refuse it.
func (w *worker) free(k int) {
	p := w.pieces[k]
	w.pieces[k] = w.pieces[len(w.pieces)-1]
	w.pieces = w.pieces[:len(w.pieces)-1]
	d, s := w.devices[p.dev], w.streams[p.dev]
	w.held.Add(-p.charge)
	for {
		err := try(func() error { return d.Free(s, p.a) })
		if err == nil || errors.Is(err, errRecording) {
			return
		}
		if !errors.Is(err, errFault) {
			w.Errorf("Free: %v", err)
			return
		}
	}
}

// mark allocates on each stream what settle frees.
func (w *worker) mark() {
	w.marks = nil
	for i, s := range w.streams {
		a, err := w.devices[i].Alloc(s, 1)
		if err != nil {
			w.Fatal(err)
		}
		w.marks = append(w.marks, a)
	}
}

// settle waits for the streams after a free on each of them: its event is also after the earlier
// frees, whose own event may have been refused.
func (w *worker) settle() {
	for i, s := range w.streams {
		if err := errors.Join(w.devices[i].Free(s, w.marks[i]), s.Sync()); err != nil {
			w.Fatal(err)
		}
	}
}

func (w *worker) openGates() {
	for _, g := range w.gates {
		g.open()
	}
	w.gates = nil
}

func runModel(t *testing.T, seed uint64) {
	w := newWorld(t, seed)
	w.quiet.Store(true)
	workers := make([]*worker, modelWorkers)
	for i := range workers {
		workers[i] = &worker{world: w, r: rand.New(rand.NewPCG(seed, uint64(i)))}
		for _, d := range w.devices {
			s, err := d.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			workers[i].streams = append(workers[i].streams, s)
		}
		workers[i].mark()
	}
	for round := range modelRounds {
		w.quiet.Store(false)
		var wg sync.WaitGroup
		for _, w := range workers {
			wg.Go(func() {
				for range modelSteps {
					w.step()
				}
				if round == modelRounds-1 {
					for len(w.pieces) > 0 {
						w.free(0)
					}
				}
				w.openGates()
			})
		}
		wg.Wait()
		w.quiet.Store(true)
		for _, w := range workers {
			w.settle()
		}
		w.b.Reap() // a quiet moment
		var live, outstanding int64
		for _, w := range workers {
			for _, p := range w.pieces {
				live += p.charge
			}
		}
		for _, d := range w.raw {
			outstanding += d.Outstanding()
		}
		checkBooks(t, w.b.Stats())
		if s := w.b.Stats(); s.Live != live || s.Retired != 0 || s.Reserved != outstanding {
			t.Fatalf("round %d: live %d and outstanding %d: %+v", round, live, outstanding, s)
		}
		if t.Failed() {
			return
		}
		if round < modelRounds-1 {
			for _, w := range workers {
				w.mark()
			}
		}
	}
	if s := w.b.Stats(); s.Reserved != 0 || s.Refused == 0 {
		t.Errorf("the run has not come to its limit, or something is left: %+v", s)
	}
}
