package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/tier"
)

// sampleManifest is a manifest with a record of each kind.
func sampleManifest(generation uint64) []byte {
	p := appendManifestHeader(nil, generation, keyMark{})
	add := func(kind uint32, key uint64, body []byte) {
		p = appendRecord(p, generation, int64(len(p)), kind, key, body)
	}
	memory := keptMemory{size: 3*tier.Page + 5, pieces: []keptPiece{{segment: 1, off: tier.Page, len: 2 * tier.Page}, {off: 0, len: tier.Page + 5}}}
	add(kindWhole, 0, nil)
	add(kindKept, 1, appendKept(nil, 0, []keptMemory{memory}, []byte("first")))
	add(kindKept, 2, appendKept(nil, 0, []keptMemory{memory, memory}, nil))
	add(kindKept, 3, appendKept(nil, 1, []keptMemory{memory}, []byte("in place of the first")))
	add(kindGone, 2, nil)
	return p
}

// appendKept appends the body of a record that is not sealed.
func appendKept(p []byte, replaces uint64, memories []keptMemory, meta []byte) []byte {
	rec := &keptRecord{replaces: replaces, memories: memories}
	return append(rec.append(p, len(meta)), meta...)
}

// unitsOfPieces counts units as who reads them will.
func unitsOfPieces(pieces []keptPiece) int {
	var all []piece
	off := int64(0)
	for _, p := range pieces {
		all = append(all, piece{Off: off, Len: p.len})
		off += p.len
	}
	return len(newSeals(nil, 0, all).units)
}

// sampleSealedBy is a manifest with records of a volume that encrypts.
func sampleSealedBy(v *Volume, generation uint64) []byte {
	p := appendManifestHeader(nil, generation, v.sealer.mark)
	for key := range uint64(3) {
		rec := &keptRecord{replaces: key - 1, salts: [][saltSize]byte{v.sealer.own.salt, {1, 2, 3}}}
		for i := range 2 {
			m := keptMemory{size: 2*unit + 5, pieces: []keptPiece{{segment: 1, off: tier.Page, len: unit + tier.Page}, {len: unit - tier.Page + 5}}, salt: i, number: 7}
			m.units = make([]seal, unitsOfPieces(m.pieces))
			rec.memories = append(rec.memories, m)
		}
		body := v.sealRecord(rec, kindKept, key, []byte("some meta"))
		p = appendRecord(p, generation, int64(len(p)), kindKept, key, body)
	}
	return appendRecord(p, generation, int64(len(p)), kindWhole, 3, nil)
}

// sealing is as much of a volume as sealing takes.
func sealing(tb testing.TB) *Volume {
	v := new(Volume)
	var err error
	if v.sealer, err = newSealer(v, make([]byte, 32)); err != nil {
		tb.Fatal(err)
	}
	return v
}

func TestManifestSaysWhatWasWritten(t *testing.T) {
	l, err := parseManifest(sampleManifest(7), 7)
	if err != nil || !l.whole || l.broken != 0 || l.next != 4 || len(l.live) != 1 {
		t.Fatalf("%+v, %v", l, err)
	}
	rec, err := parseKept(l.live[3].body)
	if err != nil || string(rec.meta) != "in place of the first" || len(rec.memories) != 1 || len(rec.memories[0].pieces) != 2 {
		t.Errorf("%+v, %v", rec, err)
	}
	if _, err := parseManifest(sampleManifest(7), 8); err == nil {
		t.Error("a manifest passes for another generation's")
	}
}

// TestRecordsDoNotMove: a sound record that stands elsewhere in the file, or in the meta
// of another after that was damaged, is none.
func TestRecordsDoNotMove(t *testing.T) {
	inner := appendRecord(nil, 1, manifestHeader, kindKept, 9, appendKept(nil, 0, []keptMemory{{size: 1, pieces: []keptPiece{{len: 1}}}}, nil))
	p := appendManifestHeader(nil, 1, keyMark{})
	p = appendRecord(p, 1, int64(len(p)), kindKept, 1, inner)
	p[manifestHeader+8] ^= 1
	if l, err := parseManifest(p, 1); err != nil || len(l.live) != 0 || l.broken == 0 {
		t.Errorf("%+v, %v", l, err)
	}
}

// TestSealedRecordsOpenAsTheyWere: with the right key and as the same record, and with the units
// that they had. One that is not sealed is none for a volume that encrypts, nor the other way round.
func TestSealedRecordsOpenAsTheyWere(t *testing.T) {
	v := sealing(t)
	l, err := parseManifest(sampleSealedBy(v, 1), 1)
	if err != nil || len(l.live) != 1 || l.mark == nil || *l.mark != v.sealer.mark {
		t.Fatalf("%+v, %v", l, err)
	}
	later := sealing(t) // the next one, with the same key of the user's
	r := l.live[2]
	rec, err := parseKept(r.body)
	if err != nil || len(rec.memories) != 2 || rec.memories[1].number != 7 || rec.memories[1].salt != 1 || len(rec.memories[1].units) != 4 {
		t.Fatalf("%+v, %v", rec, err)
	}
	meta, keys, err := later.openRecord(rec, r)
	if err != nil || string(meta) != "some meta" || len(keys) != 2 || !bytes.Equal(keys[0].key, v.sealer.own.key) {
		t.Errorf("%q, %v", meta, err)
	}
	if _, _, err := new(Volume).openRecord(rec, r); !errors.Is(err, errSealed) {
		t.Errorf("opened without a key: %v", err)
	}
	r.key++
	if _, _, err := later.openRecord(rec, r); !errors.Is(err, errSealed) {
		t.Errorf("opened as another record: %v", err)
	}
	r.key--
	r.kind = kindShared
	if _, _, err := later.openRecord(rec, r); !errors.Is(err, errSealed) {
		t.Errorf("opened as a record of another kind: %v", err)
	}
	plain, err := parseKept(appendKept(nil, 0, nil, []byte("some meta")))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := later.openRecord(plain, r); !errors.Is(err, errSealed) {
		t.Errorf("what is not sealed was believed: %v", err)
	}
}

// TestTakenRoom: no two spans overlap, on whichever side of each other they begin.
func TestTakenRoom(t *testing.T) {
	taken := &takenRoom{segments: make(map[int]*btree.BTreeG[span])}
	for _, s := range []struct {
		segment int
		span
		free bool
	}{
		{0, span{10, 10}, true},
		{0, span{10, 10}, false},
		{0, span{10, 1}, false},
		{0, span{15, 10}, false}, // from inside to behind
		{0, span{5, 10}, false},  // from before to inside
		{0, span{5, 30}, false},  // around
		{0, span{12, 2}, false},
		{1, span{5, 30}, true}, // of another segment
		{0, span{20, 5}, true},
		{0, span{5, 5}, true},
		{0, span{9, 1}, false},
		{0, span{24, 1}, false},
	} {
		if free := taken.add(s.segment, s.span); free != s.free {
			t.Errorf("%d bytes at %d of segment %d: free is %v", s.n, s.off, s.segment, free)
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
			p = mendSums(bytes.Clone(p), 1, keyMark{sealed: len(p) > 12 && p[12] != 0})
		}
		l, err := parseManifest(p, 1)
		if err != nil {
			return
		}
		for key, r := range l.live {
			if key >= l.next && key != 1<<64-1 {
				t.Errorf("key %d is not below %d", key, l.next)
			}
			rec, err := parseKept(r.body)
			if err != nil {
				continue
			}
			if len(rec.meta)+len(rec.said) > len(p) {
				t.Errorf("%d bytes of meta in %d", len(rec.meta), len(p))
			}
			for _, m := range rec.memories {
				sum := int64(0)
				for i, e := range m.pieces {
					if e.off < 0 || e.off%tier.Page != 0 || e.len <= 0 || e.segment < 0 || i < len(m.pieces)-1 && e.len%tier.Page != 0 {
						t.Errorf("piece %+v", e)
					}
					sum += e.len
				}
				if sum != m.size {
					t.Errorf("%d bytes in a memory of %d", sum, m.size)
				}
				if len(rec.salts) > 0 && (m.salt >= len(rec.salts) || len(m.units) != unitsOfPieces(m.pieces)) {
					t.Errorf("%d seals, with salt %d of %d, for %+v", len(m.units), m.salt, len(rec.salts), m.pieces)
				}
			}
		}
	})
}

// mendSums writes the right sums into whatever looks like a header and records.
func mendSums(p []byte, generation uint64, mark keyMark) []byte {
	if len(p) < manifestHeader {
		return p
	}
	copy(p, appendManifestHeader(nil, generation, mark))
	for at := int64(manifestHeader); at+recordHeader <= int64(len(p)); {
		r := p[at:]
		binary.LittleEndian.PutUint32(r, recordMagic)
		n := binary.LittleEndian.Uint64(r[16:])
		if n > uint64(len(r)-recordHeader) {
			n %= uint64(len(r)-recordHeader) + 1
			binary.LittleEndian.PutUint64(r[16:], n)
		}
		binary.LittleEndian.PutUint64(r[24:], sumOf(r[:24], r[recordHeader:recordHeader+n], seedOf(generation, at)))
		at += (recordHeader + int64(n) + 7) &^ 7
	}
	return p
}
