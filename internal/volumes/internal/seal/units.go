package seal

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Unit is how many bytes of a memory are sealed as a whole. It divides the chunks that images
// have checksums for, so that a read of one of those reads no more. Smaller units would need
// more tags in memory; larger ones make a change of a part dearer.
const Unit = 64 << 10

// Nonces that seal nothing.
const (
	Unwritten = 0              // nothing was ever written there
	Lost      = math.MaxUint64 // writing what is there failed, over what was there before
)

// Stretch is a piece of a memory: its place in the memory, and its length.
type Stretch struct{ Off, Len int64 }

// Units are a memory's. The first and the last of a stretch may be shorter than others: a unit
// begins at a multiple of its length in the memory, or with the stretch, and what lies in two
// stretches is two units. The last of a stretch ends on a page, as its room does.
type Units struct {
	sealer    *Sealer
	key       *Key
	number    uint64 // of the memory, under that key
	stretches []Stretch
	first     []int  // the first unit of each stretch
	seals     []Seal // read by holders of a unit, written by the one that holds it for writing

	mu struct {
		lockrank.Mutex[lockrank.Device]
		holds []*Hold // in the order in which they came
		lost  error   // why a unit was lost first
	}
}

// UnitsIn is how many units n > 0 bytes at off of a memory are.
func UnitsIn(off, n int64) int64 { return (off+n-1)/Unit - off/Unit + 1 }

// NewUnits returns the units of a new memory: none of them written.
func (s *Sealer) NewUnits(stretches []Stretch) *Units {
	return s.units(s.own, s.memories.Add(1), stretches)
}

// OldUnits returns the units of a memory that was sealed with a key of KeyOf's, as they were.
// They can be read.
func (s *Sealer) OldUnits(key *Key, number uint64, stretches []Stretch, seals []Seal) *Units {
	u := s.units(key, number, stretches)
	copy(u.seals, seals)
	return u
}

func (s *Sealer) units(key *Key, number uint64, stretches []Stretch) *Units {
	u := &Units{sealer: s, key: key, number: number, stretches: stretches, first: make([]int, len(stretches))}
	n := 0
	for i, p := range stretches {
		u.first[i] = n
		n += int(UnitsIn(p.Off, p.Len))
	}
	u.seals = make([]Seal, n)
	return u
}

// ReadOnly reports whether the units were sealed by an earlier volume.
func (u *Units) ReadOnly() bool { return u.key != u.sealer.own }

// Key returns what the units are sealed with, and Number which memory they are under it.
func (u *Units) Key() *Key      { return u.key }
func (u *Units) Number() uint64 { return u.number }

// Seals returns a copy of the seals once no write is in progress. Lost data is an error.
func (u *Units) Seals(ctx context.Context) ([]Seal, error) {
	h, err := u.hold(ctx, 0, len(u.seals), false)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	for i := range u.seals {
		if err := u.whyLost(i); err != nil {
			return nil, err
		}
	}
	return slices.Clone(u.seals), nil
}

// Hold is a request's right to some units: to all of them at once, so that no request waits for
// units while it has others. Reads share. It is not a mutex, because the disk is read and written
// under it.
type Hold struct {
	units      *Units
	first, end int
	write      bool
	over       chan struct{}
}

// Hold waits until no earlier Hold needs the units of n > 0 bytes, at off of the memory
// and in one stretch, in another way. The caller must release what it gets.
func (u *Units) Hold(ctx context.Context, stretch int, off, n int64, write bool) (*Hold, error) {
	zero := u.first[stretch] - int(u.stretches[stretch].Off/Unit)
	return u.hold(ctx, zero+int(off/Unit), zero+int((off+n-1)/Unit)+1, write)
}

func (u *Units) hold(ctx context.Context, first, end int, write bool) (*Hold, error) {
	h := &Hold{units: u, first: first, end: end, write: write, over: make(chan struct{})}
	var before []*Hold
	u.mu.Lock()
	for _, o := range u.mu.holds {
		if o.first < end && first < o.end && (o.write || write) {
			before = append(before, o)
		}
	}
	u.mu.holds = append(u.mu.holds, h)
	u.mu.Unlock()
	for _, o := range before {
		select {
		case <-o.over:
		case <-ctx.Done():
			h.Release()
			return nil, context.Cause(ctx)
		}
	}
	return h, nil
}

// Release lets those have the units that wait for them.
func (h *Hold) Release() {
	u := h.units
	u.mu.Lock()
	i := slices.Index(u.mu.holds, h)
	u.mu.holds = slices.Delete(u.mu.holds, i, i+1)
	u.mu.Unlock()
	close(h.over)
}

// lose notes that writing units failed: what they held, if anything, may be gone. They are
// held for writing.
func (u *Units) lose(first, end int, err error) {
	for i := first; i < end; i++ {
		if u.seals[i].Nonce == Unwritten { // nothing to lose
			continue
		}
		u.seals[i].Nonce = Lost
		u.mu.Lock()
		if u.mu.lost == nil {
			u.mu.lost = err
		}
		u.mu.Unlock()
	}
}

// whyLost returns why what a unit held is gone, if it is. The unit is held.
func (u *Units) whyLost(i int) error {
	if u.seals[i].Nonce != Lost {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	return fmt.Errorf("writing it failed before: %w", u.mu.lost)
}

// bounds returns where unit i of a stretch begins and ends in the memory.
func (u *Units) bounds(stretch, i int) (begin, end int64) {
	p := &u.stretches[stretch]
	begin = (int64(i-u.first[stretch]) + p.Off/Unit) * Unit
	room := (p.Len + tier.Page - 1) &^ (tier.Page - 1)
	return max(begin, p.Off), min(begin+Unit, p.Off+room)
}

// extra is what the tag of unit i says beside its bytes: which unit it is, of which memory.
func (u *Units) extra(i int) (x [16]byte) {
	binary.BigEndian.PutUint64(x[:8], u.number)
	binary.BigEndian.PutUint64(x[8:], uint64(i))
	return x
}

// seal seals plain, which is unit i, into out, which begins where plain does or beside it. out
// has TagSize bytes more, which are left as they were.
func (u *Units) seal(out, plain []byte, i int) (made Seal) {
	made.Nonce = u.sealer.nonces.Add(1)
	nonce, extra := nonceOf(made.Nonce), u.extra(i)
	n := len(plain)
	behind := out[n : n+TagSize]
	saved := [TagSize]byte(behind)
	u.key.aead.Seal(out[:0:n+TagSize], nonce[:], plain, extra[:])
	made.Tag = [TagSize]byte(behind)
	copy(behind, saved[:])
	return made
}

// open opens unit i, the first n bytes of sealed, into out, which begins where sealed does or
// beside it. sealed has TagSize bytes more, which are left as they were. It reports whether the
// bytes are those that were sealed; else out holds none of them.
func (u *Units) open(out, sealed []byte, n, i int) bool {
	known := u.seals[i]
	nonce, extra := nonceOf(known.Nonce), u.extra(i)
	behind := sealed[n : n+TagSize]
	saved := [TagSize]byte(behind)
	copy(behind, known.Tag[:])
	_, err := u.key.aead.Open(out[:0:n], nonce[:], sealed[:n+TagSize], extra[:])
	copy(behind, saved[:])
	return err == nil
}
