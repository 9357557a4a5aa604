package disk

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// sampleManifest is a manifest with a record of each kind.
func sampleManifest(generation uint64) []byte {
	p := appendManifestHeader(nil, generation)
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

func TestManifestSaysWhatWasWritten(t *testing.T) {
	l, err := parseManifest(sampleManifest(7), 7)
	if err != nil || !l.whole || l.broken != 0 || l.next != 4 || len(l.live) != 1 {
		t.Fatalf("%+v, %v", l, err)
	}
	memories, meta, err := parseKept(l.live[3].body)
	if err != nil || string(meta) != "in place of the first" || len(memories) != 1 || len(memories[0].pieces) != 2 {
		t.Errorf("%+v, %q, %v", memories, meta, err)
	}
	if _, err := parseManifest(sampleManifest(7), 8); err == nil {
		t.Error("a manifest passes for another generation's")
	}
}

// TestRecordsDoNotMove: a sound record that stands elsewhere in the file, or in the meta
// of another after that was damaged, is none.
func TestRecordsDoNotMove(t *testing.T) {
	inner := appendRecord(nil, 1, manifestHeader, kindKept, 9, appendKept(nil, 0, []keptMemory{{size: 1, pieces: []keptPiece{{len: 1}}}}, nil))
	p := appendManifestHeader(nil, 1)
	p = appendRecord(p, 1, int64(len(p)), kindKept, 1, inner)
	p[manifestHeader+8] ^= 1
	if l, err := parseManifest(p, 1); err != nil || len(l.live) != 0 || l.broken == 0 {
		t.Errorf("%+v, %v", l, err)
	}
}

// FuzzManifest: no bytes make the reader panic, or hand out room that makes no sense. With
// fix set the sums are made right first, so that what is behind them is reached.
func FuzzManifest(f *testing.F) {
	f.Add(sampleManifest(1), true)
	f.Add(sampleManifest(1), false)
	f.Add(sampleManifest(1)[:100], true)
	f.Fuzz(func(t *testing.T, p []byte, fix bool) {
		if fix {
			p = mendSums(bytes.Clone(p))
		}
		l, err := parseManifest(p, 1)
		if err != nil {
			return
		}
		for key, r := range l.live {
			if key >= l.next && key != 1<<64-1 {
				t.Errorf("key %d is not below %d", key, l.next)
			}
			memories, meta, err := parseKept(r.body)
			if err != nil {
				continue
			}
			if len(meta) > len(p) {
				t.Errorf("%d bytes of meta in %d", len(meta), len(p))
			}
			for _, m := range memories {
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
			}
		}
	})
}

// mendSums writes the right sums into whatever looks like a header and records.
func mendSums(p []byte) []byte {
	if len(p) < manifestHeader {
		return p
	}
	copy(p, appendManifestHeader(nil, 1))
	for at := int64(manifestHeader); at+recordHeader <= int64(len(p)); {
		r := p[at:]
		binary.LittleEndian.PutUint32(r, recordMagic)
		n := binary.LittleEndian.Uint64(r[16:])
		if n > uint64(len(r)-recordHeader) {
			n %= uint64(len(r)-recordHeader) + 1
			binary.LittleEndian.PutUint64(r[16:], n)
		}
		binary.LittleEndian.PutUint64(r[24:], sumOf(r[:24], r[recordHeader:recordHeader+n], seedOf(1, at)))
		at += (recordHeader + int64(n) + 7) &^ 7
	}
	return p
}
