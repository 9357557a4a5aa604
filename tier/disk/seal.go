package disk

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"sync/atomic"

	"github.com/spillway-db/spillway/tier"
)

const (
	// unit is how many bytes of a memory are sealed as a whole. It divides the chunks
	// that images have checksums for, so that who reads one of those reads no more;
	// smaller units would need more tags in memory, larger ones make a change of a
	// part dearer.
	unit = 64 << 10
	// tagSize is what GCM adds to a unit.
	tagSize = 16
	// madeKey is the length of a key that the volume makes: AES-256.
	madeKey = 32
	// saltSize is the length of what makes a derived key another than all others.
	saltSize = sha256.Size
)

// sealer encrypts what a volume writes. Each unit is sealed anew, with a nonce of its
// own, whenever a byte of it changes; its tag and its nonce stay in memory. So
// what the file gives back is what was written last there, or is noticed: another
// unit's bytes, older ones, and changed ones do not fit the tag.
//
// What an earlier volume has kept is opened with that one's key, which is derived anew from
// the salt that the record has. Nothing is sealed with it again, for nobody knows which nonces
// that volume has used.
type sealer struct {
	own    *volumeKey
	nonces atomic.Uint64 // used so far with own, from 1 on
	memory atomic.Uint64 // numbers given to memories so far
	mark   keyMark       // of own, for manifests

	// While the volume is being opened.
	users []byte
	old   map[[saltSize]byte]*volumeKey

	buffers buffers
}

// volumeKey is what one volume seals with.
type volumeKey struct {
	salt  [saltSize]byte // what it was derived with; of a key that was made, nothing
	key   []byte
	block cipher.Block
	aead  cipher.AEAD
}

// newSealer makes a key, or derives one from the user's. That one may be in use for
// other volumes, whose nonces are counted from 1 as well; so no volume works with it,
// but each with a key of its own, which a random salt makes.
func newSealer(v *Volume, users []byte) (*sealer, error) {
	s := &sealer{buffers: buffers{v: v}, users: users, old: make(map[[saltSize]byte]*volumeKey)}
	if len(users) == 0 {
		s.own = &volumeKey{key: make([]byte, madeKey)}
		rand.Read(s.own.key) // never fails
		return s, s.own.expand()
	}
	s.mark.sealed = true
	rand.Read(s.mark.salt[:])
	var err error
	if s.mark.proof, err = proofOf(users, s.mark.salt); err != nil {
		return nil, err
	}
	s.own, err = deriveKey(users, s.mark.salt)
	return s, err
}

// deriveKey returns the key that a salt makes of the user's.
func deriveKey(users []byte, salt [saltSize]byte) (*volumeKey, error) {
	k := &volumeKey{salt: salt}
	var err error
	if k.key, err = hkdf.Key(sha256.New, users, salt[:], "spillway spill volume", len(users)); err != nil {
		return nil, err
	}
	return k, k.expand()
}

// proofOf returns what tells the user's key from others, and nothing else.
func proofOf(users []byte, salt [saltSize]byte) (proof [saltSize]byte, err error) {
	p, err := hkdf.Key(sha256.New, users, salt[:], "spillway spill volume: which key it is", saltSize)
	copy(proof[:], p)
	return proof, err
}

// expand makes the cipher of the key.
func (k *volumeKey) expand() (err error) {
	if k.block, err = aes.NewCipher(k.key); err == nil {
		k.aead, err = cipher.NewGCM(k.block)
	}
	return err
}

// keyOf returns the key of an earlier volume, whose salt a record has.
func (s *sealer) keyOf(salt [saltSize]byte) (*volumeKey, error) {
	if k := s.old[salt]; k != nil {
		return k, nil
	}
	k, err := deriveKey(s.users, salt)
	if err == nil {
		s.old[salt] = k
	}
	return k, err
}

// forget overwrites the keys and what they were expanded to, and gives the buffers back.
// Nothing can be sealed or opened any more. Where there is none, there is nothing to do.
func (s *sealer) forget() error {
	if s == nil {
		return nil
	}
	s.users = nil
	s.own.wipe()
	for _, k := range s.old {
		k.wipe()
	}
	return s.buffers.unmap()
}

func (k *volumeKey) wipe() {
	clear(k.key)
	wipe(k.block)
	wipe(k.aead)
}

// CheckKey says what is wrong with a Config's Encrypt and Key, or with both and its Keep.
func CheckKey(encrypt bool, key []byte, keep bool) error {
	switch {
	case key == nil && encrypt && keep:
		return errors.New("Keep with Encrypt needs a Key: one that the volume makes is gone with the process, and what was kept with it")
	case key == nil:
		return nil
	case !encrypt:
		return errors.New("there is a key, and Encrypt is not set")
	}
	switch len(key) {
	case 16, 24, 32:
		return nil
	}
	return fmt.Errorf("the key has %d bytes, and must have 16, 24 or 32 (none at all: one is made)", len(key))
}

// seal is what is known of a unit beside what is on the disk.
type seal struct {
	nonce uint64 // unwritten and lost are none
	tag   [tagSize]byte
}

const (
	unwritten = 0              // nothing was ever written there
	lost      = math.MaxUint64 // writing what is there failed, over what was there before
)

// extra is what a unit's tag says beside its bytes: which unit it is, of which memory.
type extra [16]byte

func (s *seals) extra(u int) (x extra) {
	binary.BigEndian.PutUint64(x[:8], s.number)
	binary.BigEndian.PutUint64(x[8:], uint64(u))
	return x
}

// nonceOf returns the nonce with a number.
func nonceOf(n uint64) (nonce [12]byte) {
	binary.BigEndian.PutUint64(nonce[4:], n)
	return nonce
}

// seal seals plain, which is unit u, into out, which begins where plain does or beside
// it. Behind the len(plain) bytes of out there are tagSize more, which are left as they
// were.
func (s *sealer) seal(out, plain []byte, of *seals, u int) (made seal) {
	made.nonce = s.nonces.Add(1)
	nonce, extra := nonceOf(made.nonce), of.extra(u)
	n := len(plain)
	behind := out[n : n+tagSize]
	kept := [tagSize]byte(behind)
	of.key.aead.Seal(out[:0:n+tagSize], nonce[:], plain, extra[:])
	made.tag = [tagSize]byte(behind)
	copy(behind, kept[:])
	return made
}

// open opens unit u, the n bytes of sealed, into out, which begins where sealed does or
// beside it. Behind the bytes of sealed there are tagSize more, which are left as
// they were. It says whether the bytes are those that were sealed; else out holds none
// of them.
func (s *sealer) open(out, sealed []byte, n int, of *seals, u int) bool {
	known := of.units[u]
	nonce, extra := nonceOf(known.nonce), of.extra(u)
	behind := sealed[n : n+tagSize]
	kept := [tagSize]byte(behind)
	copy(behind, known.tag[:])
	_, err := of.key.aead.Open(out[:0:n], nonce[:], sealed[:n+tagSize], extra[:])
	copy(behind, kept[:])
	return err == nil
}

// writeSealed does a request: it seals the units that the request touches and writes them.
// Of a unit that it has only a part of, the rest is read first. The units are held
// for writing.
func (e *Extents) writeSealed(r request, first, end int) error {
	v, s := e.v, e.seals
	buf := v.sealer.buffers.take()
	defer v.sealer.buffers.put(buf)
	start, _ := e.unitAt(r.piece, first)
	_, stop := e.unitAt(r.piece, end-1)
	region := (*buf)[:stop-start+tagSize]
	made := make([]seal, end-first)
	for u := first; u < end; u++ {
		a, z := e.unitAt(r.piece, u)
		out, n := region[a-start:], z-a
		plain, ok := r.within(a, z)
		if !ok {
			if err := e.changed(r, u, out); err != nil {
				return err
			}
			plain = out[:n]
		}
		made[u-first] = v.sealer.seal(out, plain, s, u)
	}
	if err := transferAll(r.at.file.WriteAt, region[:stop-start], r.fileOffset(start), v.offset); err != nil {
		s.lose(first, end, err)
		return err
	}
	copy(s.units[first:end], made)
	return nil
}

// changed makes out what unit u is with the request's bytes in it.
func (e *Extents) changed(r request, u int, out []byte) error {
	a, z := e.unitAt(r.piece, u)
	written := min(z, e.pieces[r.piece].Off+e.pieces[r.piece].Len) // behind it is the rest of a page
	if e.seals.units[u].nonce == unwritten || r.from <= a && r.from+int64(len(r.p)) >= written {
		clear(out[:z-a])
	} else {
		if err := e.seals.whyLost(u); err != nil {
			return err // and not that it was altered: perhaps the disk is full, and others wrote at the same time
		}
		if err := transferAll(r.at.file.ReadAt, out[:z-a], r.fileOffset(a), e.v.offset); err != nil {
			return e.missing(r, u, err)
		}
		if !e.v.sealer.open(out, out, int(z-a), e.seals, u) {
			return e.altered(r, u, nil)
		}
	}
	if skip := r.from - a; skip >= 0 {
		copy(out[skip:z-a], r.p)
	} else {
		copy(out[:z-a], r.p[-skip:])
	}
	return nil
}

// readSealed does a request: it reads the units that the request touches and opens them.
// Those that were never written are zeros. The units are held for reading.
func (e *Extents) readSealed(r request, first, end int) error {
	v, s := e.v, e.seals
	low, high := end, first // what was written
	for u := first; u < end; u++ {
		if err := s.whyLost(u); err != nil {
			return e.altered(r, u, err)
		}
		if s.units[u].nonce != unwritten {
			low, high = min(low, u), u+1
		}
	}
	if low >= high {
		clear(r.p)
		return nil
	}
	buf := v.sealer.buffers.take()
	defer v.sealer.buffers.put(buf)
	start, _ := e.unitAt(r.piece, low)
	_, stop := e.unitAt(r.piece, high-1)
	region := (*buf)[:stop-start+tagSize]
	if err := transferAll(r.at.file.ReadAt, region[:stop-start], r.fileOffset(start), v.offset); err != nil {
		return e.missing(r, high-1, err)
	}
	for u := first; u < end; u++ {
		a, z := e.unitAt(r.piece, u)
		to, whole := r.within(a, z)
		if s.units[u].nonce == unwritten {
			clear(to)
			continue
		}
		sealed, out := region[a-start:], to
		if !whole {
			out = sealed
		}
		if !v.sealer.open(out, sealed, int(z-a), s, u) {
			return e.altered(r, u, nil)
		}
		if !whole {
			copy(to, sealed[max(0, r.from-a):z-a])
		}
	}
	return nil
}

// altered says that unit u is not what was written.
func (e *Extents) altered(r request, u int, cause error) error {
	a, z := e.unitAt(r.piece, u)
	return &tier.AlteredError{Volume: e.v.cfg.Dir, File: r.at.seg.name, Offset: r.fileOffset(a), Length: z - a, Cause: cause}
}

// missing says of an error of reading units to the last, which was written, if it is that
// somebody made the file shorter.
func (e *Extents) missing(r request, last int, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) { // the latter inside of what direct I/O reads as a whole
		return e.altered(r, last, err)
	}
	return err
}

// within returns the request's memory for [a, z) of the extents, as far as the request
// has it, and whether that is all of it.
func (r request) within(a, z int64) ([]byte, bool) {
	from, to := max(a, r.from), min(z, r.from+int64(len(r.p)))
	return r.p[from-r.from : to-r.from : to-r.from], from == a && to == z
}

// fileOffset is where an offset of the memory, in the request's piece, is in the file.
func (r request) fileOffset(off int64) int64 { return r.off + off - r.from }
