package volumes_test

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// TestSplit: parts of one memory have what was written there, and are written, read and freed each
// by itself, in any order, beside other memory. In the end nothing is handed out.
func TestSplit(t *testing.T) {
	if encrypted {
		t.Skip("needs volumes that are not encrypted: only their memory is split")
	}
	for seed := range testseed.Each(t, 4) {
		rng := rand.New(rand.NewPCG(seed, 1))
		v := open(t, volumes.Config{Capacity: 8 * mib})
		type part struct {
			m    tier.FileMemory
			want []byte
		}
		var parts []part
		used := int64(0)
		for range 300 {
			switch {
			case rng.IntN(3) == 0 && used < 6*mib:
				var sizes []int64
				total := int64(0)
				for range 1 + rng.IntN(20) {
					n := page * (1 + rng.Int64N(5))
					sizes, total = append(sizes, n), total+n
				}
				if v.Together() < total {
					continue
				}
				whole, want := alloc(t, v, total), random(total, rng.Uint64())
				write(t, whole, want, 0)
				all := v.Split(whole, sizes)
				if len(all) != len(sizes) {
					t.Fatalf("%d parts of %d", len(all), len(sizes))
				}
				used += total
				off := int64(0)
				for i, m := range all {
					if m.Size() != sizes[i] {
						t.Fatalf("part %d has %d bytes, want %d", i, m.Size(), sizes[i])
					}
					parts = append(parts, part{m.(tier.FileMemory), want[off : off+sizes[i]]})
					off += sizes[i]
				}
				if err := whole.ReadAt(t.Context(), aligned(page), 0); err == nil {
					t.Fatal("what was split is read as a whole")
				}
			case len(parts) > 0:
				i := rng.IntN(len(parts))
				p := &parts[i]
				if got := read(t, p.m, p.m.Size(), 0); !bytes.Equal(got, p.want) {
					t.Fatalf("part %d of %d has other bytes", i, len(parts))
				}
				if rng.IntN(4) == 0 {
					p.want = random(p.m.Size(), rng.Uint64())
					write(t, p.m, p.want, 0)
				} else {
					used -= p.m.Size()
					free(v, p.m)
					parts = slices.Delete(parts, i, i+1)
				}
			}
			if s := v.Stats(); s.Used != used {
				t.Fatalf("%d bytes are handed out, want %d", s.Used, used)
			}
			if s := v.Stats(); s.Backlog != 0 {
				t.Fatalf("%d bytes wait to be written", s.Backlog)
			}
		}
		for _, p := range parts {
			free(v, p.m)
		}
	}
}

// TestTogetherOfPieces: files are not made longer for the sake of one piece while much of them is
// free in pieces, and are when little is.
func TestTogetherOfPieces(t *testing.T) {
	if encrypted {
		t.Skip("needs volumes that are not encrypted: sealed memory is not split")
	}
	v := open(t, volumes.Config{Capacity: 256 * mib})
	request := v.Stats().Request
	if n := v.Together(); n != request {
		t.Errorf("an empty volume has %d bytes in one piece, want a request's", n)
	}
	var all []tier.FileMemory
	for range 64 * mib / (64 * page) { // as much as a volume takes from the file system at a time
		all = append(all, alloc(t, v, 64*page))
	}
	if n := v.Together(); n != request {
		t.Errorf("a full file can be made longer by %d bytes", n)
	}
	var kept []tier.FileMemory
	for i, m := range all {
		if i%2 == 0 {
			free(v, m)
		} else {
			kept = append(kept, m)
		}
	}
	if n := v.Together(); n != 64*page {
		t.Errorf("%d bytes lie in one piece, want %d", n, 64*page)
	}
	free(v, kept...)
	if n := v.Together(); n != request {
		t.Errorf("%d bytes lie in one piece in an empty file", n)
	}
}

// TestSplitOfUnwritten: what was not written before the split is not expected to be written any more.
func TestSplitOfUnwritten(t *testing.T) {
	if encrypted {
		t.Skip("needs volumes that are not encrypted: only their memory is split")
	}
	v := open(t, volumes.Config{Capacity: mib})
	whole := alloc(t, v, 3*page)
	write(t, whole, random(page, 1), 0)
	parts := v.Split(whole, []int64{page, 2 * page})
	if s := v.Stats(); len(parts) != 2 || s.Backlog != 0 {
		t.Errorf("%d parts: %+v", len(parts), s)
	}
	for _, m := range parts {
		free(v, m.(tier.FileMemory))
	}
}

// TestNotSplit: memory that is encrypted, or recorded by itself, is not.
func TestNotSplit(t *testing.T) {
	for _, cfg := range []volumes.Config{
		{Capacity: mib, Encrypt: true},
		{Capacity: mib, Persist: true},
	} {
		v := open(t, cfg)
		m := alloc(t, v, 2*page)
		if n := v.Together(); n != 0 || v.Split(m, []int64{page, page}) != nil {
			t.Errorf("%+v: %d bytes can be split", cfg, n)
		}
		write(t, m, random(2*page, 1), 0)
		free(v, m)
	}
}
