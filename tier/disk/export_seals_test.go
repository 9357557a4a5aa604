package disk

import (
	"encoding/binary"
	"fmt"
	"os"

	"github.com/spillway-db/spillway/tier"
)

// Nonce is a nonce that was used, with the salt of its key.
type Nonce struct {
	Salt  [saltSize]byte
	Nonce uint64
}

// NoncesIn returns all nonces in the records of a manifest, each with what it is for.
func NoncesIn(path string) (map[Nonce]string, error) {
	p, generation, err := readTestManifest(path)
	if err != nil {
		return nil, err
	}
	out := make(map[Nonce]string)
	add := func(n Nonce, what string) {
		if n.Nonce == unwritten {
			return
		}
		if was, ok := out[n]; ok && was != what {
			err = fmt.Errorf("nonce %d is used twice in a manifest: %s, %s", n.Nonce, was, what)
		}
		out[n] = what
	}
	for at := int64(manifestHeader); at < int64(len(p)); {
		r, ok := parseRecordAt(p[at:], generation, at)
		if !ok {
			return nil, fmt.Errorf("%s: no record at %d", path, at)
		}
		at += r.n
		if r.kind != kindKept && r.kind != kindShared {
			continue
		}
		rec, failed := parseKept(r.body)
		if failed != nil {
			return nil, failed
		}
		add(Nonce{rec.salts[0], rec.seal.nonce}, fmt.Sprintf("record %d, tag %x", r.key, rec.seal.tag))
		for _, m := range rec.memories {
			for u, s := range m.units {
				add(Nonce{rec.salts[m.salt], s.nonce}, fmt.Sprintf("memory %d, unit %d, tag %x", m.number, u, s.tag))
			}
		}
	}
	return out, err
}

func readTestManifest(path string) (p []byte, generation uint64, err error) {
	if p, err = os.ReadFile(path); err != nil {
		return nil, 0, err
	}
	generation = binary.LittleEndian.Uint64(p[16:])
	_, err = parseManifestHeader(p, generation)
	return p, generation, err
}

// Forge changes a byte of a manifest and makes its checksums right, as who wants to deceive
// would. It says what the byte is of.
func Forge(path string, at int, bit byte) (what string, err error) {
	p, generation, err := readTestManifest(path)
	if err != nil {
		return "", err
	}
	what = "header"
	for start := int64(manifestHeader); start < int64(len(p)); {
		r, _ := parseRecordAt(p[start:], generation, start)
		if off := int64(at) - start; off >= 0 && off < r.n {
			switch {
			case off < recordHeader: // with another key it may be another record's end
				what = "frame"
			case r.kind != kindKept && r.kind != kindShared, off >= recordHeader+int64(len(r.body)):
				what = "nothing"
			case off >= recordHeader && off < recordHeader+8:
				what = "replaces"
			default:
				what = "sealed"
			}
		}
		start += r.n
	}
	p[at] ^= bit
	if what == "header" {
		mark := keyMark{sealed: p[12] != 0, salt: [saltSize]byte(p[24:]), proof: [saltSize]byte(p[24+saltSize:])}
		generation = binary.LittleEndian.Uint64(p[16:])
		header := appendManifestHeader(nil, generation, mark)
		copy(p[manifestHeader-8:], header[manifestHeader-8:])
	} else {
		header := [manifestHeader]byte(p)
		mendSums(p, generation, keyMark{})
		copy(p, header[:])
	}
	return what, os.WriteFile(path, p, 0o600)
}

// SpansCompared returns how many spans are compared when the room of n records, of a page
// each, is found, which were kept upwards, downwards or mixed.
func SpansCompared(n int, order string) int {
	l := log{live: make(map[uint64]rawRecord)}
	f := &found{lengths: map[int]int64{0: int64(n) * tier.Page}, segments: make(map[int]*segment), own: new(ownDir)}
	for i := range n {
		at := i
		switch order {
		case "down":
			at = n - 1 - i
		case "mixed":
			at = i * 7919 % n // no divisor of n
		}
		rec := &keptRecord{memories: []keptMemory{{size: tier.Page, pieces: []keptPiece{{off: int64(at) * tier.Page, len: tier.Page}}}}}
		l.live[uint64(i+1)] = rawRecord{kind: kindKept, key: uint64(i + 1), body: rec.append(nil, 0)}
	}
	new(Volume).resolve(f, l)
	if len(f.entries) != n || f.segments[0].used != int64(n)*tier.Page {
		panic("records were lost")
	}
	return f.compared
}

// ManifestHeader is how long a manifest's header is.
const ManifestHeader = manifestHeader
