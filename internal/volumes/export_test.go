package volumes

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/zeebo/xxh3"
)

// UnderWay returns how many bytes of reads and writes are in progress.
func (v *Volume) UnderWay() int64 {
	v.speed.mu.Lock()
	defer v.speed.mu.Unlock()
	return v.speed.mu.running
}

// Mapped returns how many bytes of memory a volume has mapped for requests, and no request uses.
func (v *Volume) Mapped() int64 {
	v.buffers.mu.Lock()
	defer v.buffers.mu.Unlock()
	n := 0
	for _, p := range v.buffers.mu.free {
		n += len(p.mapping)
	}
	return int64(n)
}

// TailSize is the length of a file's tail.
const TailSize = tailSize

// Nonce is a nonce that was used, with the salt of its key.
type Nonce struct {
	Salt  keySalt
	Nonce uint64
}

// NoncesIn returns all nonces in the header of a file, each with what it is for.
func NoncesIn(path string, users []byte) (map[Nonce]string, error) {
	p, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	key, err := strconv.ParseUint(filepath.Base(path), 16, 64)
	if err != nil {
		return nil, err
	}
	s, err := newSealer(users)
	if err != nil {
		return nil, err
	}
	found, err := readEnd(bytes.NewReader(p), key, int64(len(p)), s)
	if err != nil {
		return nil, err
	}
	out := make(map[Nonce]string)
	add := func(n Nonce, what string) {
		if was, ok := out[n]; ok && was != what {
			err = fmt.Errorf("nonce %d is used twice in a file: %s, %s", n.Nonce, was, what)
		}
		out[n] = what
	}
	t := found.tail
	add(Nonce{t.Mark.Salt, t.HeaderSeal.Nonce}, fmt.Sprintf("header %x", t.HeaderSeal.Tag))
	add(Nonce{t.PlaceSalt, t.PlaceSeal.Nonce}, fmt.Sprintf("place %x", t.PlaceSeal.Tag))
	for _, b := range found.blocks {
		add(Nonce{found.key.salt, b.Seal.Nonce}, fmt.Sprintf("block %d, tag %x", b.Off, b.Seal.Tag))
	}
	return out, err
}

// Forge changes a file as an attacker would: it XORs a byte of the header or of the tail, and corrects
// the checksums and the name. It returns the new path.
func Forge(path string, at int64, bit byte) (string, error) {
	p, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	tail := p[len(p)-tailSize:]
	var t persistedTail
	if _, err := binary.Decode(tail, binary.LittleEndian, &t); err != nil {
		return "", err
	}
	p[at] ^= bit
	key := xxh3.Hash(p[t.Body : t.Body+t.Length])
	binary.LittleEndian.PutUint64(tail[32:], key)
	binary.LittleEndian.PutUint64(tail[tailSize-8:], xxh3.Hash(tail[:tailSize-8]))
	to := filepath.Join(filepath.Dir(path), persistedName(key, ""))
	if err := os.Remove(path); err != nil {
		return "", err
	}
	return to, os.WriteFile(to, p, 0o600)
}
