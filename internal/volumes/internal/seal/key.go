// Package seal encrypts and authenticates the bytes that a spill volume writes (AES-GCM).
//
//	Sealer      of a volume: its key, its nonces, the keys of earlier volumes
//	└─ Extent   of a memory: its blocks, each with a tag and a nonce in memory
//
// Each write is sealed in blocks of up to 64 KiB with nonces of their own. So a file returns the
// bytes that were written last there, or an error: another block's bytes, older ones and changed
// ones do not fit the tag.
//
// The key of an earlier volume is derived again from the user's key and a salt, to read its files.
// Nothing is sealed with it again, because the nonces that the volume has used are unknown.
//
// The package addresses files by offsets, and does not import volumes. Its mutexes have rank Device.
package seal

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"sync/atomic"
)

const (
	// TagSize is what GCM adds to what it seals.
	TagSize = 16
	// SaltSize is the length of what makes a derived key another than all others.
	SaltSize = sha256.Size
	// MarkSize is the length of a Mark as package encoding/binary writes it.
	MarkSize = 1 + 2*SaltSize
	// madeKey is the length of a random key: AES-256.
	madeKey = 32
)

// Salt is the salt that a key was derived with from the user's key.
type Salt = [SaltSize]byte

// Seal is what is needed to open sealed bytes in addition to the key and the bytes.
type Seal struct {
	Nonce uint64
	Tag   [TagSize]byte
}

// Mark identifies the user's key with which something was sealed. Proof is derived from that key
// and the salt, and reveals nothing of it nor of the keys that seal. So another key is recognized
// before anything is opened with it, or taken for damaged.
type Mark struct {
	Sealed bool
	Salt   Salt
	Proof  [SaltSize]byte
}

// Sealer has the keys of a volume. It is safe for concurrent use, except for KeyOf, Opened and
// Forget.
type Sealer struct {
	own    *Key
	nonces atomic.Uint64 // used so far with own, from 1 on
	mark   Mark

	// While the volume is being opened.
	users []byte
	old   map[Salt]*Key
}

// Key is what one volume seals with.
type Key struct {
	salt  Salt
	key   []byte
	block cipher.Block
	aead  cipher.AEAD
}

// NewSealer derives a key from the user's, or from a random one. The user's may be in use for other
// volumes, whose nonces are counted from 1 as well. So no volume works with it, but each with a
// key of its own, which a random salt makes. users stays the caller's; see Opened.
func NewSealer(users []byte) (*Sealer, error) {
	s := &Sealer{users: users, old: make(map[Salt]*Key), mark: Mark{Sealed: true}}
	if len(users) == 0 {
		users = make([]byte, madeKey)
		rand.Read(users) // never fails
		defer clear(users)
	}
	rand.Read(s.mark.Salt[:])
	var err error
	if s.mark.Proof, err = proofOf(users, s.mark.Salt); err != nil {
		return nil, err
	}
	s.own, err = deriveKey(users, s.mark.Salt)
	return s, err
}

func deriveKey(users []byte, salt Salt) (*Key, error) {
	k := &Key{salt: salt}
	var err error
	if k.key, err = hkdf.Key(sha256.New, users, salt[:], "spillway spill volume", len(users)); err == nil {
		k.block, err = aes.NewCipher(k.key)
	}
	if err == nil {
		k.aead, err = cipher.NewGCM(k.block)
	}
	return k, err
}

func proofOf(users []byte, salt Salt) (proof [SaltSize]byte, err error) {
	p, err := hkdf.Key(sha256.New, users, salt[:], "spillway spill volume: which key it is", SaltSize)
	copy(proof[:], p)
	return proof, err
}

// Mark identifies the user's key. No sealer is the mark of what is not sealed.
func (s *Sealer) Mark() Mark {
	if s == nil {
		return Mark{}
	}
	return s.mark
}

// Opens reports whether what has a mark was sealed with this key of the user's, or if s is nil,
// not at all.
func (s *Sealer) Opens(m Mark) (bool, error) {
	if s == nil || !m.Sealed {
		return s == nil && !m.Sealed, nil
	}
	proof, err := proofOf(s.users, m.Salt)
	return err == nil && proof == m.Proof, err
}

// KeyOf returns the key of an earlier volume.
func (s *Sealer) KeyOf(salt Salt) (*Key, error) {
	if k := s.old[salt]; k != nil {
		return k, nil
	}
	k, err := deriveKey(s.users, salt)
	if err == nil {
		s.old[salt] = k
	}
	return k, err
}

// Opened ends the use of the user's key: the volume has found all that earlier ones have left.
func (s *Sealer) Opened() {
	if s != nil {
		s.users = nil
	}
}

// Forget overwrites the keys and what they were expanded to. Nothing can be sealed or opened
// any more.
func (s *Sealer) Forget() {
	if s == nil {
		return
	}
	s.users = nil
	s.own.wipe()
	for _, k := range s.old {
		k.wipe()
	}
}

func (k *Key) wipe() {
	clear(k.key)
	wipe(k.block)
	wipe(k.aead)
}

func nonceOf(n uint64) (nonce [12]byte) {
	binary.BigEndian.PutUint64(nonce[4:], n)
	return nonce
}

// SealText returns the sealed text, and its seal. extra is authenticated with it.
func (s *Sealer) SealText(text, extra []byte) ([]byte, Seal) {
	made := Seal{Nonce: s.nonces.Add(1)}
	nonce := nonceOf(made.Nonce)
	p := s.own.aead.Seal(nil, nonce[:], text, extra)
	made.Tag = [TagSize]byte(p[len(text):])
	return p[:len(text)], made
}

// OpenText returns what SealText of a volume, with the key of a salt, has sealed.
func (s *Sealer) OpenText(sealed, extra []byte, salt Salt, known Seal) ([]byte, error) {
	k, err := s.KeyOf(salt)
	if err != nil {
		return nil, err
	}
	nonce := nonceOf(known.Nonce)
	text := slices.Concat(sealed, known.Tag[:])
	return k.aead.Open(text[:0], nonce[:], text, extra)
}
