package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
)

// A manifest says what persists in a directory. All numbers are little-endian; everything begins
// at a multiple of 8 bytes.
//
//	header   "SPILLKPT" · version u32 · sealed u32 · generation u64 · salt [32] · proof [32] · sum u64
//	frame    "SPRC" · kind u32 · key u64 · length u64 · sum u64 · length bytes · zeros to a multiple of 8
//	…
//
// A sum is xxh3-64 of what is before it and, in a frame, of the bytes behind it. Its seed is
// made of the generation and the place in the file. So no frame passes for another, wherever a
// copy of it lies. After damage the next sound one can be looked for at every multiple of 8.
//
//	live     a Record; see record.go
//	shared   a Record without memories. Its meta is what other records have in common, which name
//	         it by its key, and stand behind it
//	ended    nothing, or what the record was before: what has the key persists no more, nor what
//	         that replaced
//	whole    nothing: everything that persisted when the file was begun is before this; no
//	         key before was higher than this frame's
//
// The file's name holds the generation. A new one is written when most of the old is dead, and
// counts once it is whole; then the old one is removed. So there is always a whole one, and of
// two the younger is right.

const (
	magic   = "SPILLKPT"
	version = 3

	// HeaderSize and FrameSize are how long a header is, and the beginning of a frame.
	HeaderSize = 96
	FrameSize  = 32
	frameMagic = 'S' | 'P'<<8 | 'R'<<16 | 'C'<<24

	// maxBody bounds what one frame may say: a batch of 2 TiB has checksums of 256 MiB, and 768 MiB
	// of seals where it is encrypted.
	maxBody = 1 << 30
)

// Kind is what a frame says.
type Kind uint32

const (
	Live   Kind = 1
	Ended  Kind = 2
	Whole  Kind = 3
	Shared Kind = 4
)

var errManifest = errors.New("not a manifest that this version reads")

func seedOf(generation uint64, at int64) uint64 {
	return generation*0x9e3779b97f4a7c15 + uint64(at) // an odd number: no two generations share a seed by chance
}

// AppendHeader appends the beginning of a manifest.
func AppendHeader(p []byte, generation uint64, mark seal.Mark) []byte {
	start := len(p)
	sealed := uint32(0)
	if mark.Sealed {
		sealed = 1
	}
	p = append(p, magic...)
	p = binary.LittleEndian.AppendUint32(p, version)
	p = binary.LittleEndian.AppendUint32(p, sealed)
	p = binary.LittleEndian.AppendUint64(p, generation)
	p = append(p, mark.Salt[:]...)
	p = append(p, mark.Proof[:]...)
	return binary.LittleEndian.AppendUint64(p, xxh3.Hash(p[start:]))
}

// checkVersion reports whether a file, of which there may be little, begins as a manifest of
// another version, or as no manifest.
func checkVersion(p []byte) error {
	if len(p) < 12 || string(p[:8]) != magic {
		return errManifest
	}
	if v := binary.LittleEndian.Uint32(p[8:]); v != version {
		return fmt.Errorf("%w: version %d, not %d", errManifest, v, version)
	}
	return nil
}

// ParseHeader reads the beginning of a manifest.
func ParseHeader(p []byte, generation uint64) (mark seal.Mark, err error) {
	if err := checkVersion(p); err != nil {
		return mark, err
	}
	const end = HeaderSize - 8 // of what the sum covers
	if len(p) < HeaderSize || binary.LittleEndian.Uint64(p[end:]) != xxh3.Hash(p[:end]) || binary.LittleEndian.Uint64(p[16:]) != generation {
		return mark, fmt.Errorf("%w: its header is damaged", errManifest)
	}
	return seal.Mark{
		Sealed: binary.LittleEndian.Uint32(p[12:]) != 0,
		Salt:   seal.Salt(p[24:]), Proof: [seal.SaltSize]byte(p[24+seal.SaltSize:]),
	}, nil
}

// place is where a frame is in its file, and how long, with the zeros behind it.
type place struct{ at, n int64 }

// Frame is a sound frame of a manifest.
type Frame struct {
	Kind Kind
	Key  uint64
	At   int64 // in the file
	Len  int64 // with all that belongs to it
	Body []byte
}

// AppendFrame appends a frame that will begin at the offset at of its file.
func AppendFrame(p []byte, generation uint64, at int64, kind Kind, key uint64, body []byte) []byte {
	start := len(p)
	p = binary.LittleEndian.AppendUint32(p, frameMagic)
	p = binary.LittleEndian.AppendUint32(p, uint32(kind))
	p = binary.LittleEndian.AppendUint64(p, key)
	p = binary.LittleEndian.AppendUint64(p, uint64(len(body)))
	p = binary.LittleEndian.AppendUint64(p, sumOf(p[start:start+24], body, seedOf(generation, at)))
	p = append(p, body...)
	for len(p)%8 != start%8 {
		p = append(p, 0)
	}
	return p
}

func sumOf(head, body []byte, seed uint64) uint64 {
	return xxh3.HashSeed(body, xxh3.HashSeed(head, seed))
}

// ParseFrame returns the frame that p, at an offset of a file, begins with; false if that is no
// sound one.
func ParseFrame(p []byte, generation uint64, at int64) (Frame, bool) {
	if len(p) < FrameSize || binary.LittleEndian.Uint32(p) != frameMagic {
		return Frame{}, false
	}
	n := binary.LittleEndian.Uint64(p[16:])
	if n > maxBody || n > uint64(len(p)-FrameSize) {
		return Frame{}, false
	}
	body := p[FrameSize : FrameSize+n]
	if binary.LittleEndian.Uint64(p[24:]) != sumOf(p[:24], body, seedOf(generation, at)) {
		return Frame{}, false
	}
	return Frame{
		Kind: Kind(binary.LittleEndian.Uint32(p[4:])), Key: binary.LittleEndian.Uint64(p[8:]),
		At: at, Len: min(int64(len(p)), (FrameSize+int64(n)+7)&^7), Body: body,
	}, true
}

// manifest is what a file says.
type manifest struct {
	mark   *seal.Mark       // nil: not even the header was written
	live   map[uint64]Frame // by key
	shared map[uint64]Frame // by key
	next   uint64           // a key that no frame has
	whole  bool
	broken int64 // bytes that are in no sound frame
}

// parseManifest reads a whole file. The bodies of its frames are the file's bytes.
func parseManifest(file []byte, generation uint64) (manifest, error) {
	m := manifest{live: make(map[uint64]Frame), shared: make(map[uint64]Frame), next: 1}
	mark, err := ParseHeader(file, generation)
	if err != nil {
		return m, err
	}
	m.mark = &mark
	for at := int64(HeaderSize); at < int64(len(file)); {
		f, ok := ParseFrame(file[at:], generation, at)
		if !ok {
			n := min(8, int64(len(file))-at)
			m.broken += n
			at += n
			continue
		}
		at += f.Len
		m.add(f)
	}
	return m, nil
}

func (m *manifest) add(f Frame) {
	if f.Key < math.MaxUint64 {
		m.next = max(m.next, f.Key+1)
	}
	switch f.Kind {
	case Live:
		delete(m.live, replacedBy(f.Body))
		m.live[f.Key] = f
	case Ended:
		delete(m.live, replacedBy(f.Body))
		delete(m.live, f.Key)
	case Shared:
		m.shared[f.Key] = f
	case Whole:
		m.whole = true
	}
}
