package journal

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
)

// sampleManifest is a manifest with a record of each kind.
func sampleManifest(generation uint64) []byte {
	p := AppendHeader(nil, generation, seal.Mark{})
	add := func(kind Kind, key uint64, body []byte) {
		p = AppendFrame(p, generation, int64(len(p)), kind, key, body)
	}
	memory := Memory{Size: 3*tier.Page + 5, Pieces: []Piece{{Segment: 1, Off: tier.Page, Len: 2 * tier.Page}, {Off: 0, Len: tier.Page + 5}}}
	add(Whole, 0, nil)
	add(Live, 1, appendKept(nil, 0, []Memory{memory}, []byte("first")))
	add(Live, 2, appendKept(nil, 0, []Memory{memory, memory}, nil))
	add(Live, 3, appendKept(nil, 1, []Memory{memory}, []byte("in place of the first")))
	add(Ended, 2, nil)
	return p
}

// appendKept appends the body of a record that is not sealed.
func appendKept(p []byte, replaces uint64, memories []Memory, meta []byte) []byte {
	rec := &Record{Replaces: replaces, Memories: memories}
	return append(rec.append(p, len(meta)), meta...)
}

// unitsOfPieces counts units as who reads them will.
func unitsOfPieces(pieces []Piece) int {
	var all []seal.Stretch
	off := int64(0)
	for _, p := range pieces {
		all = append(all, seal.Stretch{Off: off, Len: p.Len})
		off += p.Len
	}
	seals, err := new(seal.Sealer).NewUnits(all).Seals(context.Background())
	if err != nil {
		panic(err)
	}
	return len(seals)
}

// sampleSealedBy is a manifest with records of a volume that encrypts.
func sampleSealedBy(v *seal.Sealer, generation uint64) []byte {
	p := AppendHeader(nil, generation, v.Mark())
	for key := range uint64(3) {
		rec := &Record{Replaces: key - 1, Salts: []seal.Salt{v.Own().Salt(), {1, 2, 3}}}
		for i := range 2 {
			m := Memory{Size: 2*seal.Unit + 5, Pieces: []Piece{{Segment: 1, Off: tier.Page, Len: seal.Unit + tier.Page}, {Len: seal.Unit - tier.Page + 5}}, Salt: i, Number: 7}
			m.Seals = make([]seal.Seal, unitsOfPieces(m.Pieces))
			rec.Memories = append(rec.Memories, m)
		}
		body := rec.body(v, Live, key, []byte("some meta"))
		p = AppendFrame(p, generation, int64(len(p)), Live, key, body)
	}
	return AppendFrame(p, generation, int64(len(p)), Whole, 3, nil)
}

func sealing(tb testing.TB) *seal.Sealer {
	s, err := seal.NewSealer(make([]byte, 32))
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

func TestManifestSaysWhatWasWritten(t *testing.T) {
	l, err := parseManifest(sampleManifest(7), 7)
	if err != nil || !l.whole || l.broken != 0 || l.next != 4 || len(l.live) != 1 {
		t.Fatalf("%+v, %v", l, err)
	}
	rec, err := ParseRecord(l.live[3].Body)
	if err != nil || string(rec.meta) != "in place of the first" || len(rec.Memories) != 1 || len(rec.Memories[0].Pieces) != 2 {
		t.Errorf("%+v, %v", rec, err)
	}
	if _, err := parseManifest(sampleManifest(7), 8); err == nil {
		t.Error("a manifest passes for another generation's")
	}
}

// TestRecordsDoNotMove: a sound record that stands elsewhere in the file, or in the meta
// of another after that was damaged, is none.
func TestRecordsDoNotMove(t *testing.T) {
	inner := AppendFrame(nil, 1, HeaderSize, Live, 9, appendKept(nil, 0, []Memory{{Size: 1, Pieces: []Piece{{Len: 1}}}}, nil))
	p := AppendHeader(nil, 1, seal.Mark{})
	p = AppendFrame(p, 1, int64(len(p)), Live, 1, inner)
	p[HeaderSize+8] ^= 1
	if l, err := parseManifest(p, 1); err != nil || len(l.live) != 0 || l.broken == 0 {
		t.Errorf("%+v, %v", l, err)
	}
}

// TestSealedRecordsOpenAsTheyWere: with the right key and as the same record, and with the units
// that they had. One that is not sealed is none for a volume that encrypts, nor the other way
// round.
func TestSealedRecordsOpenAsTheyWere(t *testing.T) {
	v := sealing(t)
	l, err := parseManifest(sampleSealedBy(v, 1), 1)
	if err != nil || len(l.live) != 1 || l.mark == nil || *l.mark != v.Mark() {
		t.Fatalf("%+v, %v", l, err)
	}
	later := sealing(t) // the next one, with the same key of the user's
	r := l.live[2]
	rec, err := ParseRecord(r.Body)
	if err != nil || len(rec.Memories) != 2 || rec.Memories[1].Number != 7 || rec.Memories[1].Salt != 1 || len(rec.Memories[1].Seals) != 4 {
		t.Fatalf("%+v, %v", rec, err)
	}
	meta, keys, err := rec.open(later, r)
	if err != nil || string(meta) != "some meta" || len(keys) != 2 || keys[0].Salt() != v.Own().Salt() {
		t.Errorf("%q, %v", meta, err)
	}
	if _, _, err := rec.open(nil, r); !errors.Is(err, errSealed) {
		t.Errorf("opened without a key: %v", err)
	}
	r.Key++
	if _, _, err := rec.open(later, r); !errors.Is(err, errSealed) {
		t.Errorf("opened as another record: %v", err)
	}
	r.Key--
	r.Kind = Shared
	if _, _, err := rec.open(later, r); !errors.Is(err, errSealed) {
		t.Errorf("opened as a record of another kind: %v", err)
	}
	plain, err := ParseRecord(appendKept(nil, 0, nil, []byte("some meta")))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := plain.open(later, r); !errors.Is(err, errSealed) {
		t.Errorf("what is not sealed was believed: %v", err)
	}
}

// TestTakenRoom: no two Spans overlap, on whichever side of each other they begin.
func TestTakenRoom(t *testing.T) {
	taken := &takenRoom{segments: make(map[int]*btree.BTreeG[Span])}
	for _, s := range []struct {
		segment int
		Span
		free bool
	}{
		{0, Span{10, 10}, true},
		{0, Span{10, 10}, false},
		{0, Span{10, 1}, false},
		{0, Span{15, 10}, false}, // from inside to behind
		{0, Span{5, 10}, false},  // from before to inside
		{0, Span{5, 30}, false},  // around
		{0, Span{12, 2}, false},
		{1, Span{5, 30}, true}, // of another segment
		{0, Span{20, 5}, true},
		{0, Span{5, 5}, true},
		{0, Span{9, 1}, false},
		{0, Span{24, 1}, false},
	} {
		if free := taken.add(s.segment, s.Span); free != s.free {
			t.Errorf("%d bytes at %d of segment %d: free is %v", s.Len, s.Off, s.segment, free)
		}
	}
}

// FuzzManifest: no bytes make the reader panic, or hand out room that makes no sense. With
// fix set the sums are made right first, so that what is behind them is reached.
func FuzzManifest(f *testing.F) {
	f.Add(sampleManifest(1), true)
	f.Add(sampleManifest(1), false)
	f.Add(sampleManifest(1)[:200], true)
	f.Add(sampleSealedBy(sealing(f), 1), true)
	f.Add(sampleSealedBy(sealing(f), 1), false)
	f.Fuzz(func(t *testing.T, p []byte, fix bool) {
		if fix {
			p = mendSums(bytes.Clone(p), 1, seal.Mark{Sealed: len(p) > 12 && p[12] != 0})
		}
		l, err := parseManifest(p, 1)
		if err != nil {
			return
		}
		for key, r := range l.live {
			if key >= l.next && key != 1<<64-1 {
				t.Errorf("key %d is not below %d", key, l.next)
			}
			rec, err := ParseRecord(r.Body)
			if err != nil {
				continue
			}
			if len(rec.meta)+len(rec.said) > len(p) {
				t.Errorf("%d bytes of meta in %d", len(rec.meta), len(p))
			}
			for _, m := range rec.Memories {
				sum := int64(0)
				for i, e := range m.Pieces {
					if e.Off < 0 || e.Off%tier.Page != 0 || e.Len <= 0 || e.Segment < 0 || i < len(m.Pieces)-1 && e.Len%tier.Page != 0 {
						t.Errorf("piece %+v", e)
					}
					sum += e.Len
				}
				if sum != m.Size {
					t.Errorf("%d bytes in a memory of %d", sum, m.Size)
				}
				if len(rec.Salts) > 0 && (m.Salt >= len(rec.Salts) || len(m.Seals) != unitsOfPieces(m.Pieces)) {
					t.Errorf("%d seals, with salt %d of %d, for %+v", len(m.Seals), m.Salt, len(rec.Salts), m.Pieces)
				}
			}
		}
	})
}

// mendSums writes the right sums into whatever looks like a header and records.
func mendSums(p []byte, generation uint64, mark seal.Mark) []byte {
	if len(p) < HeaderSize {
		return p
	}
	copy(p, AppendHeader(nil, generation, mark))
	for at := int64(HeaderSize); at+FrameSize <= int64(len(p)); {
		r := p[at:]
		binary.LittleEndian.PutUint32(r, frameMagic)
		n := binary.LittleEndian.Uint64(r[16:])
		if n > uint64(len(r)-FrameSize) {
			n %= uint64(len(r)-FrameSize) + 1
			binary.LittleEndian.PutUint64(r[16:], n)
		}
		binary.LittleEndian.PutUint64(r[24:], sumOf(r[:24], r[FrameSize:FrameSize+n], seedOf(generation, at)))
		at += (FrameSize + int64(n) + 7) &^ 7
	}
	return p
}

// TestOpeningComparesFewSpans: how many pieces of room are compared when what is kept is found
// grows with their number, and a little more, in whatever order they were kept.
func TestOpeningComparesFewSpans(t *testing.T) {
	for _, order := range []string{"up", "down", "mixed"} {
		few, many := spansCompared(t, 1000, order), spansCompared(t, 32000, order)
		if many > 2*32*few || few < 1000 {
			t.Errorf("%s: %d comparisons for 1000 records, %d for 32 times as many", order, few, many)
		}
	}
}

// spansCompared returns how many spans are compared when the room of n records, of a page each,
// is found, which were kept upwards, downwards or mixed.
func spansCompared(t *testing.T, n int, order string) int {
	f := &Found{manifest: manifest{live: make(map[uint64]Frame)}, Segments: make(map[int]*Segment)}
	for i := range n {
		at := i
		switch order {
		case "down":
			at = n - 1 - i
		case "mixed":
			at = i * 7919 % n // no divisor of n
		}
		memory := Memory{Size: tier.Page, Pieces: []Piece{{Off: int64(at) * tier.Page, Len: tier.Page}}}
		f.manifest.live[uint64(i+1)] = Frame{Kind: Live, Key: uint64(i + 1), Body: appendKept(nil, 0, []Memory{memory}, nil)}
	}
	room := &takenRoom{lengths: map[int]int64{0: int64(n) * tier.Page}, segments: make(map[int]*btree.BTreeG[Span])}
	f.resolve(room)
	if len(f.Records) != n || f.Segments[0].Used != int64(n)*tier.Page {
		t.Fatal("records were lost")
	}
	return room.compared
}
