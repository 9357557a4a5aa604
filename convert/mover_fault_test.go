package convert

import (
	"context"
	"errors"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// script takes one batch along every edge.
var script = []tier.Kind{tier.Host, tier.Disk, tier.GPU, tier.Disk, tier.Host, tier.GPU}

// TestEveryDeviceOperationFailsOnce runs the script with each operation of the
// device refused, failed or cancelled once: whatever happens the batch is whole where it
// was, and the script can go on.
func TestEveryDeviceOperationFailsOnce(t *testing.T) {
	t.Parallel()
	t.Run("plain", func(t *testing.T) { everyDeviceOperationFailsOnce(t, CodecNone, numbered(0, 6000)) })
	t.Run("dictionary", func(t *testing.T) { everyDeviceOperationFailsOnce(t, CodecNone, codedBriefly()) })
	t.Run("packed", func(t *testing.T) { everyDeviceOperationFailsOnce(t, CodecS2, codedBriefly()) })
}

// faultShare is which operation fails of each move of a walk: in the n-th walk the n-th. Hurried
// tests skip some, others in each move.
type faultShare struct{ first, step int }

func shareOfFaults(t *testing.T) faultShare {
	first, step := testseed.Share(t, 4)
	return faultShare{first, step}
}

func (s faultShare) all() bool { return s.step == 1 }

func (s faultShare) nth(walk, move int) int { return (s.first+move)%s.step + walk*s.step }

// codedBriefly makes records whose body is about as long as their dictionary's.
func codedBriefly() arrow.RecordBatch { return coded(0, 1500) }

func everyDeviceOperationFailsOnce(t *testing.T, codec Codec, rec arrow.RecordBatch) {
	injected := errors.New("injected")
	share := shareOfFaults(t)
	for _, stage := range []sim.Stage{sim.Submit, sim.Run} {
		for _, how := range []string{"fail", "cancel"} {
			hits := 0
			for walk, hit := 0, true; hit; walk++ {
				var armed atomic.Bool
				var seen, n atomic.Int64
				var cancel context.CancelCauseFunc
				m := newMachine(t, machineConfig{codec: codec, faults: func(op sim.Op) error {
					if op.Stage != stage || op.Kind == sim.OpFree || !armed.Load() {
						return nil // a free that is refused stays retired, which is a test of the pool's
					}
					if seen.Add(1) != n.Load()+1 {
						return nil
					}
					if how == "cancel" {
						cancel(injected)
						return nil
					}
					return injected
				}})
				b := m.put(t, rec, tier.GPU)
				hit = false
				m.runScript(t, b, injected, func(move int) (ctx context.Context, disarm func(failed bool)) {
					ctx, cancel = context.WithCancelCause(t.Context())
					seen.Store(0)
					n.Store(int64(share.nth(walk, move)))
					armed.Store(true)
					return ctx, func(bool) {
						armed.Store(false)
						cancel(nil)
						if seen.Load() > n.Load() {
							hit = true
							hits++
						}
					}
				})
			}
			if share.all() && hits < 10 {
				t.Errorf("%v %s: only %d operations", stage, how, hits)
			}
		}
	}
}

func TestEveryFileOperationFailsOnce(t *testing.T) {
	t.Parallel()
	everyFileOperation(t, false)
}

// TestEveryFileOperationFailsOnceEncrypted is the same on a volume that encrypts.
func TestEveryFileOperationFailsOnceEncrypted(t *testing.T) {
	t.Parallel()
	everyFileOperation(t, true)
}

func everyFileOperation(t *testing.T, encrypt bool) {
	plain, dictionary := numbered(0, 6000), codedBriefly()
	t.Run("plain", func(t *testing.T) { everyFileOperationFailsOnce(t, CodecNone, encrypt, plain) })
	if !encrypt { // which is all the same to the volume
		t.Run("dictionary", func(t *testing.T) { everyFileOperationFailsOnce(t, CodecNone, encrypt, dictionary) })
		t.Run("s2", func(t *testing.T) { everyFileOperationFailsOnce(t, CodecS2, encrypt, numbered(0, 72_000)) })
	}
	t.Run("zstd", func(t *testing.T) { everyFileOperationFailsOnce(t, CodecZstd, encrypt, dictionary) })
}

func everyFileOperationFailsOnce(t *testing.T, codec Codec, encrypt bool, rec arrow.RecordBatch) {
	for name, c := range map[string]struct {
		ops    []string
		effect func(cancel func()) faultfs.Effect
		want   error
		may    bool // it may succeed all the same
	}{
		"EIO":    {[]string{"read", "write"}, func(func()) faultfs.Effect { return faultfs.Fail(syscall.EIO) }, syscall.EIO, false},
		"ENOSPC": {[]string{"write"}, func(func()) faultfs.Effect { return faultfs.Fail(syscall.ENOSPC) }, tier.ErrNoSpace, false},
		"short":  {[]string{"read", "write"}, func(func()) faultfs.Effect { return faultfs.Short() }, nil, true},
		"flip":   {[]string{"read"}, func(func()) faultfs.Effect { return faultfs.BitFlip() }, image.ErrCorrupt, false},
		"cancel": {[]string{"read", "write"}, func(cancel func()) faultfs.Effect {
			return faultfs.Do(func(string, string) { cancel() })
		}, context.Canceled, true},
	} {
		t.Run(name, func(t *testing.T) {
			hits := 0
			share := shareOfFaults(t)
			for walk, hit := 0, true; hit; walk++ {
				m := newMachine(t, machineConfig{codec: codec, encrypt: encrypt})
				b := m.put(t, rec, tier.GPU)
				hit = false
				m.runScript(t, b, c.want, func(move int) (ctx context.Context, disarm func(failed bool)) {
					ctx, cancel := context.WithCancel(t.Context())
					n := share.nth(walk, move)
					before := m.files.Hits()
					remove := m.files.Add(faultfs.Rule{Ops: c.ops, Skip: n, Times: 1, Effect: c.effect(cancel)})
					return ctx, func(failed bool) {
						met := m.files.Hits() != before
						remove()
						cancel()
						if met && !failed && !c.may {
							t.Fatalf("operation %d was hit by %s and nobody noticed", n, name)
						}
						if met {
							hit = true
							hits++
						}
					}
				})
			}
			if share.all() && hits < 4 {
				t.Errorf("there are only %d operations", hits)
			}
		})
	}
}

// runScript moves b along the script. Before each move arm makes a fault, and returns the context
// of the move; disarm is called after it, with whether it failed. A move that fails must do so with
// want; then b must be whole where it was, and the move is done again. b must be whole at the end.
func (m *machine) runScript(t *testing.T, b *batch.Batch, want error, arm func(move int) (ctx context.Context, disarm func(failed bool))) {
	t.Helper()
	for move, k := range script {
		from := b.Info().Space.Kind
		ctx, disarm := arm(move)
		err := m.mover.Move(ctx, b, reservation.AnyInTier(k))
		if err != nil {
			if !errors.Is(err, want) {
				t.Fatalf("%s to %s: %v, want %v", from, k, err, want)
			}
			var c *image.CorruptError
			if errors.As(err, &c) && (c.Batch != b.ID() || c.Volume == "" || c.Want == c.Got && c.Cause == nil) {
				t.Errorf("corruption is told as %+v", c)
			}
			m.whole(t, b, from) // the fault is over
			if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
				t.Fatalf("%s to %s again: %v", from, k, err)
			}
		}
		m.rests(t, b, k)
		disarm(err != nil)
	}
	m.whole(t, b, script[len(script)-1])
}
