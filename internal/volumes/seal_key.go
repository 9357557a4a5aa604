package volumes

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
	// tagSize is what GCM adds to what it seals.
	tagSize = 16
	// saltSize is the length of what makes a derived key another than all others.
	saltSize = sha256.Size
	// markSize is the length of a keyMark as package encoding/binary writes it.
	markSize = 1 + 2*saltSize
	// madeKey is the length of a random key: AES-256.
	madeKey = 32
)

// keySalt is the salt that a key was derived with from the user's key.
type keySalt = [saltSize]byte

// seal is what is needed to open sealed bytes in addition to the key and the bytes.
type seal struct {
	Nonce uint64
	Tag   [tagSize]byte
}

// keyMark identifies the user's key with which something was sealed. Proof is derived from that key
// and the salt, and reveals nothing of it nor of the keys that seal. So another key is recognized
// before anything is opened with it, or taken for damaged.
type keyMark struct {
	Sealed bool
	Salt   keySalt
	Proof  [saltSize]byte
}

// sealer has the keys of a volume. It is safe for concurrent use, except for keyOf and
// forget.
type sealer struct {
	own    *sealKey
	nonces atomic.Uint64 // used so far with own, from 1 on
	mark   keyMark

	users []byte // while the volume is being opened
	old   map[keySalt]*sealKey
}

// sealKey is what one volume seals with.
type sealKey struct {
	salt  keySalt
	key   []byte
	block cipher.Block
	aead  cipher.AEAD
}

// newSealer derives a key from the user's, or from a random one. The user's may be in use for other
// volumes, whose nonces are counted from 1 as well. So no volume works with it, but each with a
// key of its own, which a random salt makes. users stays the caller's.
func newSealer(users []byte) (*sealer, error) {
	s := &sealer{users: users, old: make(map[keySalt]*sealKey), mark: keyMark{Sealed: true}}
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

func deriveKey(users []byte, salt keySalt) (*sealKey, error) {
	k := &sealKey{salt: salt}
	var err error
	if k.key, err = hkdf.Key(sha256.New, users, salt[:], "spillway spill volume", len(users)); err == nil {
		k.block, err = aes.NewCipher(k.key)
	}
	if err == nil {
		k.aead, err = cipher.NewGCM(k.block)
	}
	return k, err
}

func proofOf(users []byte, salt keySalt) (proof [saltSize]byte, err error) {
	p, err := hkdf.Key(sha256.New, users, salt[:], "spillway spill volume: which key it is", saltSize)
	copy(proof[:], p)
	return proof, err
}

// opens reports whether what has a mark was sealed with this key of the user's, or if s is nil,
// not at all.
func (s *sealer) opens(m keyMark) (bool, error) {
	if s == nil || !m.Sealed {
		return s == nil && !m.Sealed, nil
	}
	proof, err := proofOf(s.users, m.Salt)
	return err == nil && proof == m.Proof, err
}

// keyOf returns the key of an earlier volume.
func (s *sealer) keyOf(salt keySalt) (*sealKey, error) {
	if k := s.old[salt]; k != nil {
		return k, nil
	}
	k, err := deriveKey(s.users, salt)
	if err == nil {
		s.old[salt] = k
	}
	return k, err
}

// forget overwrites the keys and what they were expanded to. Nothing can be sealed or opened
// any more.
func (s *sealer) forget() {
	if s == nil {
		return
	}
	s.users = nil
	s.own.wipe()
	for _, k := range s.old {
		k.wipe()
	}
}

func (k *sealKey) wipe() {
	clear(k.key)
	wipe(k.block)
	wipe(k.aead)
}

func nonceOf(n uint64) (nonce [12]byte) {
	binary.BigEndian.PutUint64(nonce[4:], n)
	return nonce
}

// sealText returns the sealed text, and its seal. extra is authenticated with it.
func (s *sealer) sealText(text, extra []byte) ([]byte, seal) {
	made := seal{Nonce: s.nonces.Add(1)}
	nonce := nonceOf(made.Nonce)
	p := s.own.aead.Seal(nil, nonce[:], text, extra)
	made.Tag = [tagSize]byte(p[len(text):])
	return p[:len(text)], made
}

// openText returns what sealText of a volume, with the key of a salt, has sealed.
func (s *sealer) openText(sealed, extra []byte, salt keySalt, known seal) ([]byte, error) {
	k, err := s.keyOf(salt)
	if err != nil {
		return nil, err
	}
	nonce := nonceOf(known.Nonce)
	text := slices.Concat(sealed, known.Tag[:])
	return k.aead.Open(text[:0], nonce[:], text, extra)
}
