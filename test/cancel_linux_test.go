package test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// meter counts the bytes that pass a file system, and calls cancel once so many have.
type meter struct {
	disk.FS
	mu      sync.Mutex
	cancel  func() // nil: nothing is counted
	limit   int64
	passed  int64 // of requests that have ended
	over    int64 // of those that ended after it was cancelled
	stopped bool
}

// count makes it count from now on, or not if cancel is nil. It returns what it has
// counted so far.
func (m *meter) count(limit int64, cancel func()) (passed, over int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	passed, over = m.passed, m.over
	m.cancel, m.limit = cancel, limit
	m.passed, m.over, m.stopped = 0, 0, false
	return passed, over
}

func (m *meter) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	f, err := m.FS.OpenAnonymous(dir, direct)
	return metered{f, m}, err
}

type metered struct {
	disk.File
	m *meter
}

func (f metered) ReadAt(p []byte, off int64) (int, error)  { return f.m.pass(f.File.ReadAt, p, off) }
func (f metered) WriteAt(p []byte, off int64) (int, error) { return f.m.pass(f.File.WriteAt, p, off) }

func (m *meter) pass(do func([]byte, int64) (int, error), p []byte, off int64) (int, error) {
	n, err := do(p, off)
	m.mu.Lock()
	m.passed += int64(n)
	if m.stopped {
		m.over += int64(n)
	}
	stop := m.cancel != nil && !m.stopped && m.passed >= m.limit
	m.stopped = m.stopped || stop
	m.mu.Unlock()
	if stop {
		m.cancel()
	}
	return n, err
}

// halfRandom is a record of so many bytes, half of which a codec finds nothing in.
func halfRandom(bytes int) arrow.RecordBatch {
	values := make([]int64, bytes/8)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range values {
		if i%128 < 64 {
			values[i] = rng.Int64()
		}
	}
	data := array.NewData(arrow.PrimitiveTypes.Int64, len(values), []*memory.Buffer{nil, memory.NewBufferBytes(arrow.Int64Traits.CastToBytes(values))}, nil, 0, 0)
	defer data.Release()
	schema := arrow.NewSchema([]arrow.Field{{Name: "n", Type: arrow.PrimitiveTypes.Int64}}, nil)
	return array.NewRecordBatch(schema, []arrow.Array{array.NewInt64Data(data)}, int64(len(values)))
}

// TestCancelledMoveEnds: a move between a slow disk and anything else ends with its context, after
// the requests in progress. They are few, however much is left. On a disk of 100 MiB/s the at most
// 16 MiB take 160 ms; here not time is measured, but the bytes that pass. The batch is whole where
// it was, and can be moved again.
func TestCancelledMoveEnds(t *testing.T) {
	const (
		size     = 48 << 20 // compressed half of it, and more than what may be under way still
		before   = 2 << 20
		underWay = 2 * volumes.DefaultRequest * volumes.DefaultDepth // two transfers at full depth
	)
	top := discover(t)
	leavesNothing(t, t.TempDir()) // of all; in its directory each looks itself
	rec := halfRandom(size)
	t.Cleanup(rec.Release)
	for i, codec := range []convert.Codec{convert.CodecNone, convert.CodecS2} {
		for j, edge := range [][2]tier.Kind{{tier.Host, tier.Disk}, {tier.GPU, tier.Disk}, {tier.Disk, tier.Host}, {tier.Disk, tier.GPU}} {
			if testseed.Hurried() && j%3 != i {
				continue
			}
			t.Run(fmt.Sprintf("%s %s to %s", codec, edge[0], edge[1]), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					dir := t.TempDir()
					files := faultfs.New(disk.OS(), 1)
					m := &meter{FS: files}
					cfg := spillConfig(dir, m, top)
					cfg.GPUs[0].Memory, cfg.HostMemory, cfg.Disks[0].Capacity = spillway.Bytes(size*3/2), spillway.Bytes(size*3/2), spillway.Bytes(4*size)
					cfg.Codec, cfg.MonitorPeriod = codec, time.Hour
					s := openSpill(t, cfg)
					must(t, s.repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(min(edge[0], tier.Host)))))
					must(t, s.eng.Mover().Move(t.Context(), s.batch(0), reservation.AnyInTier(edge[0]))) // as a spill is
					s.records = append(s.records, rec)
					held := spaceUse(s.eng)

					ctx, cancel := context.WithCancelCause(t.Context())
					why := errors.New("enough")
					slow := files.Add(faultfs.Rule{Ops: []string{"read", "write"}, Effect: faultfs.Throttle(100 << 20)})
					m.count(before, func() { cancel(why) })
					err := s.eng.Mover().Move(ctx, s.batch(0), reservation.AnyInTier(edge[1]))
					passed, over := m.count(0, nil)
					slow()
					if !errors.Is(err, why) {
						t.Fatalf("after %d bytes: %v", passed, err)
					}
					t.Logf("%d KiB passed before the move was cancelled, %d KiB after", (passed-over)>>10, over>>10)
					if over > underWay {
						t.Errorf("%d bytes passed after the move was cancelled, want at most %d", over, int64(underWay))
					}
					if at := s.batch(0).Info().Space.Kind; at != edge[0] {
						t.Errorf("the batch is in %s", at)
					}
					if now := spaceUse(s.eng); now != held {
						t.Errorf("the spaces hold %s, and held %s", now, held)
					}
					s.whole()
					m.count(0, nil)
					must(t, s.eng.Mover().Move(t.Context(), s.batch(0), reservation.AnyInTier(edge[1])))
					if passed, _ := m.count(0, nil); (codec == convert.CodecNone) != (passed >= size) || passed < size/3 {
						t.Errorf("moved with codec %s, it is %d bytes on disk", codec, passed)
					}
					s.whole()
					s.close()
					if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
						t.Errorf("%v is left, %v", left, err)
					}
				})
			})
		}
	}
}

// spaceUse describes what all spaces hold, once devices are done with what was freed.
func spaceUse(eng *spillway.Engine) (all string) {
	for _, s := range eng.Stats().Spaces {
		space, _ := eng.Reservations().Spaces().ByID(s.ID)
		settled(space)
		u := space.State().Usage
		all += fmt.Sprintf("%s %d live, %d retired, %d reserved; ", s.ID, u.Live, u.Retired, u.Reserved)
	}
	return all
}
