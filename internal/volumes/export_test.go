package volumes

import (
	"encoding/binary"
	"fmt"
	"os"

	"github.com/spillway-db/spillway/internal/volumes/internal/journal"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
)

// UnderWay is how many bytes of reads and writes the volume's window has under way.
func (v *Volume) UnderWay() int64 { return v.window.UnderWay() }

// Mapped returns how many bytes of memory a volume has mapped for what it seals.
func (v *Volume) Mapped() int64 { return v.sealed.Mapped() }

// ManifestHeader is how long a manifest's header is.
const ManifestHeader = journal.HeaderSize

// Nonce is a nonce that was used, with the salt of its key.
type Nonce struct {
	Salt  seal.Salt
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
		if n.Nonce == seal.Unwritten {
			return
		}
		if was, ok := out[n]; ok && was != what {
			err = fmt.Errorf("nonce %d is used twice in a manifest: %s, %s", n.Nonce, was, what)
		}
		out[n] = what
	}
	for at := int64(journal.HeaderSize); at < int64(len(p)); {
		f, ok := journal.ParseFrame(p[at:], generation, at)
		if !ok {
			return nil, fmt.Errorf("%s: no record at %d", path, at)
		}
		at += f.Len
		if f.Kind != journal.Live && f.Kind != journal.Shared {
			continue
		}
		rec, failed := journal.ParseRecord(f.Body)
		if failed != nil {
			return nil, failed
		}
		add(Nonce{rec.Salts[0], rec.Seal.Nonce}, fmt.Sprintf("record %d, tag %x", f.Key, rec.Seal.Tag))
		for _, m := range rec.Memories {
			for u, s := range m.Seals {
				add(Nonce{rec.Salts[m.Salt], s.Nonce}, fmt.Sprintf("memory %d, unit %d, tag %x", m.Number, u, s.Tag))
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
	_, err = journal.ParseHeader(p, generation)
	return p, generation, err
}

// Forge changes a byte of a manifest and corrects its checksums, as an attacker would. It returns
// what the byte is of.
func Forge(path string, at int, bit byte) (what string, err error) {
	p, generation, err := readTestManifest(path)
	if err != nil {
		return "", err
	}
	what = "header"
	for start := int64(journal.HeaderSize); start < int64(len(p)); {
		f, _ := journal.ParseFrame(p[start:], generation, start)
		if off := int64(at) - start; off >= 0 && off < f.Len {
			switch {
			case off < journal.FrameSize: // with another key it may be another record's end
				what = "frame"
			case f.Kind != journal.Live && f.Kind != journal.Shared, off >= journal.FrameSize+int64(len(f.Body)):
				what = "nothing"
			case off < journal.FrameSize+8:
				what = "replaces"
			default:
				what = "sealed"
			}
		}
		start += f.Len
	}
	p[at] ^= bit
	if what == "header" {
		mark := seal.Mark{
			Sealed: p[12] != 0, Salt: seal.Salt(p[24:]), Proof: [seal.SaltSize]byte(p[24+seal.SaltSize:]),
		}
		header := journal.AppendHeader(nil, binary.LittleEndian.Uint64(p[16:]), mark)
		copy(p[journal.HeaderSize-8:], header[journal.HeaderSize-8:])
	} else {
		mendFrames(p, generation)
	}
	return what, os.WriteFile(path, p, 0o600)
}

// mendFrames writes the right sums into whatever looks like frames.
func mendFrames(p []byte, generation uint64) {
	for at := int64(journal.HeaderSize); at+journal.FrameSize <= int64(len(p)); {
		r := p[at:]
		n := binary.LittleEndian.Uint64(r[16:])
		if n > uint64(len(r)-journal.FrameSize) {
			n %= uint64(len(r)-journal.FrameSize) + 1
		}
		kind, key := journal.Kind(binary.LittleEndian.Uint32(r[4:])), binary.LittleEndian.Uint64(r[8:])
		copy(r, journal.AppendFrame(nil, generation, at, kind, key, r[journal.FrameSize:journal.FrameSize+n])[:journal.FrameSize])
		at += (journal.FrameSize + int64(n) + 7) &^ 7
	}
}
