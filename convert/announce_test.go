package convert

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestConcurrentPutsOfOneDictionary: Puts that come while the first makes the copy of the
// dictionary that they share reserve room for their own bodies alone, so that all fit where they
// fit one after the other. If the first fails, the next makes it.
func TestConcurrentPutsOfOneDictionary(t *testing.T) {
	const puts = 8
	for name, fails := range map[string]bool{"all goes well": false, "the first fails": true} {
		t.Run(name, func(t *testing.T) {
			var armed atomic.Bool
			begun, hold, failed := make(chan struct{}), make(chan struct{}), errors.New("the copy failed")
			m := newMachine(t, machineConfig{wrap: func(d tier.Device) tier.Device {
				return slowCopies{d, &armed, func() error {
					close(begun)
					<-hold
					if fails {
						return failed
					}
					return nil
				}}
			}})
			gpu := m.spaces[tier.GPU]
			dict := words(5000)
			var recs []arrow.RecordBatch
			for i := range int64(puts) {
				recs = append(recs, codedBy(dict, i, 100))
			}
			// Learn what one takes, and leave room for one dictionary and all bodies.
			first := m.make(t, recs[0], tier.GPU)
			body := first.Info().Bytes
			copied := m.mover.DictionaryBytes(gpu.ID())
			drop(t, first)
			m.settle()
			rest, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), gpu.Available()-copied-puts*body)
			if err != nil {
				t.Fatal(err)
			}
			armed.Store(true)
			got, errs := make([]batch.Payload, puts), make([]error, puts)
			var all sync.WaitGroup
			var over atomic.Int64
			put := func(i int) {
				all.Go(func() {
					defer over.Add(1)
					got[i], errs[i] = m.mover.Ingest(t.Context(), recs[i], reservation.AnyInTiers(tier.GPU, tier.Host))
				})
			}
			put(0)
			<-begun
			for i := int64(1); i < puts; i++ { // each until it has its room, or was put elsewhere
				before, was := gpu.Used(), over.Load()
				put(int(i))
				for gpu.Used() < before+body && over.Load() == was {
					runtime.Gosched()
				}
			}
			close(hold)
			all.Wait()
			in := 0
			for i, p := range got {
				switch {
				case i == 0 && fails:
					if !errors.Is(errs[0], failed) {
						t.Errorf("the first ends with %v", errs[0])
					}
					continue
				case errs[i] != nil:
					t.Errorf("put %d: %v", i, errs[i])
					continue
				case p.Space() == gpu:
					in++
				}
				if err := p.Release(); err != nil {
					t.Error(err)
				}
			}
			if in != puts && !fails {
				t.Errorf("%d of %d are in the GPU", in, puts)
			}
			if err := rest.Release(); err != nil {
				t.Error(err)
			}
			m.settle()
			m.holds(t, tier.GPU, 0)
			m.holds(t, tier.Host, 0)
		})
	}
}

// slowCopies is a device whose first copy from the host, once it is armed, does what it is told
// before.
type slowCopies struct {
	tier.Device
	armed *atomic.Bool
	first func() error
}

func (d slowCopies) CopyToDevice(s tier.Stream, to tier.Addr, p []byte) error {
	if d.armed.CompareAndSwap(true, false) {
		if err := d.first(); err != nil {
			return err
		}
	}
	return d.Device.CopyToDevice(s, to, p)
}
