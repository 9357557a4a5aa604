package volumes

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

const (
	// blockSize is the maximum length of a block. It divides the chunks that images have checksums
	// for, so that a read of a chunk reads no other bytes. Shorter blocks would need more tags.
	blockSize = 64 << 10

	// lostNonce is the nonce of a block whose write failed.
	lostNonce = math.MaxUint64
)

// sealedBlock is a range of a memory that was sealed at once. Its offset and length are multiples of a
// page, and it contains no multiple of blockSize except as its offset.
type sealedBlock struct {
	Off, Len int64
	Seal     seal
}

func (b *sealedBlock) end() int64 { return b.Off + b.Len }

// sealedExtent opens the sealed bytes of one memory. Each write is sealed as it comes, in blocks of its
// own, so no write reads. A read opens the blocks that it touches. Therefore a write may replace
// blocks, and cannot change a part of one.
//
// No two blocks have the same nonce, so a seal opens only the bytes that were written with it: not another
// block's, another memory's, or older ones.
//
// A sealedExtent is safe for concurrent use. Overlapping reads and writes at the same time are errors of
// the caller: a read may find that bytes and seal do not belong together.
type sealedExtent struct {
	sealer *sealer
	key    *sealKey
	block  int64 // the maximum length of a block: blockSize, or a part of it; see extents.SealBy

	mu struct {
		lockrank.Mutex[lockrank.Device]
		blocks []sealedBlock // ascending, and disjoint
		lost   error         // why a write failed first
	}
}

// blocksIn returns the blocks that overlap [off, end). If one of them is lost, it is the last one
// returned, with the error of its write.
func (x *sealedExtent) blocksIn(off, end int64) ([]sealedBlock, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	first, last := x.findLocked(off, end)
	blocks := slices.Clone(x.mu.blocks[first:last])
	if i := slices.IndexFunc(blocks, func(b sealedBlock) bool { return b.Seal.Nonce == lostNonce }); i >= 0 {
		return blocks[:i+1], fmt.Errorf("writing it failed before: %w", x.mu.lost)
	}
	return blocks, nil
}

// findLocked returns which blocks overlap [off, end).
func (x *sealedExtent) findLocked(off, end int64) (first, last int) {
	from := func(b sealedBlock, off int64) int {
		if b.end() <= off {
			return -1
		}
		return 1
	}
	first, _ = slices.BinarySearchFunc(x.mu.blocks, off, from)
	last = first
	for last < len(x.mu.blocks) && x.mu.blocks[last].Off < end {
		last++
	}
	return first, last
}

// cut forgets the blocks of a memory that is to have size bytes from now on. It returns how many it
// must have: more if a block would lie on both sides.
func (x *sealedExtent) cut(size int64) int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	_, n := x.findLocked(0, size)
	x.mu.blocks = x.mu.blocks[:n]
	if n > 0 {
		size = max(size, x.mu.blocks[n-1].end())
	}
	return size
}

// checkWrite returns an error that matches tier.ErrNotSupported if n bytes at off, a multiple of a page,
// cannot be written: they are a part of a block, or an earlier volume has sealed them.
func (x *sealedExtent) checkWrite(off, n int64) error {
	end := extent.RoundUp(off+n, tier.Page)
	if x.key != x.sealer.own {
		return fmt.Errorf("an earlier volume has sealed this memory: %w", tier.ErrNotSupported)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	first, last := x.findLocked(off, end)
	if first < last && (x.mu.blocks[first].Off < off || x.mu.blocks[last-1].end() > end) {
		return fmt.Errorf("%d bytes at %d are a part of what was sealed at once: %w", n, off, tier.ErrNotSupported)
	}
	return nil
}

// Write seals p, which is at off of the memory, and writes it to the file at the offset at, with
// zeros to the end of its last page. buf has room for that and for a tag. p ends at a multiple of
// blockSize, unless checkWrite allowed its end.
func (x *sealedExtent) Write(f io.WriterAt, at int64, p []byte, off int64, buf []byte) error {
	end := extent.RoundUp(off+int64(len(p)), tier.Page)
	var made []sealedBlock
	for a := off; a < end; {
		b := sealedBlock{Off: a, Len: min(end, (a/x.block+1)*x.block) - a}
		out := buf[a-off:][:b.Len+tagSize] // the next block overwrites this one's tag
		plain := p[a-off : min(int64(len(p)), b.end()-off)]
		if int64(len(plain)) < b.Len {
			n := copy(out, plain)
			clear(out[n:b.Len])
			plain = out[:b.Len]
		}
		b.Seal.Nonce = x.sealer.nonces.Add(1)
		nonce := nonceOf(b.Seal.Nonce)
		x.key.aead.Seal(out[:0], nonce[:], plain, nil)
		b.Seal.Tag = [tagSize]byte(out[b.Len:])
		made = append(made, b)
		a = b.end()
	}
	_, err := f.WriteAt(buf[:end-off], at)
	x.mu.Lock()
	defer x.mu.Unlock()
	if err != nil {
		for i := range made {
			made[i].Seal = seal{Nonce: lostNonce}
		}
		if x.mu.lost == nil {
			x.mu.lost = err
		}
	}
	first, last := x.findLocked(off, end)
	x.mu.blocks = slices.Replace(x.mu.blocks, first, last, made...)
	return err
}

// Read fills p, which is at off of the memory, from the file at the offset at. buf has room for p,
// for the rest of its first and last block, and for a tag. Bytes that are not what was written are a
// *tier.AlteredError without the file's name, and p contains none of them.
func (x *sealedExtent) Read(f io.ReaderAt, at int64, p []byte, off int64, buf []byte) error {
	end := off + int64(len(p))
	blocks, err := x.blocksIn(off, end)
	altered := func(b sealedBlock, cause error) error {
		return &tier.AlteredError{Offset: at + b.Off - off, Length: b.Len, Cause: cause}
	}
	if err != nil {
		return altered(blocks[len(blocks)-1], err)
	}
	written := int64(0)
	for _, b := range blocks {
		written += min(end, b.end()) - max(off, b.Off)
	}
	if written < end-off {
		clear(p)
	}
	if len(blocks) == 0 {
		return nil
	}
	start, last := blocks[0].Off, blocks[len(blocks)-1]
	if _, err := f.ReadAt(buf[:last.end()-start], at+start-off); err != nil {
		// The file may have been truncated. Inside of a page of direct I/O that is io.EOF.
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return altered(last, err)
		}
		return err
	}
	for _, b := range slices.Backward(blocks) { // a block's tag overwrites the next block, which is open
		sealed := buf[b.Off-start:][:b.Len+tagSize]
		copy(sealed[b.Len:], b.Seal.Tag[:])
		whole, out := b.Off >= off && b.end() <= end, sealed[:0]
		if whole {
			out = p[b.Off-off:][:0:b.Len]
		}
		nonce := nonceOf(b.Seal.Nonce)
		text, err := x.key.aead.Open(out, nonce[:], sealed, nil)
		if err != nil {
			return altered(b, nil)
		}
		if !whole {
			copy(p[max(0, b.Off-off):], text[max(0, off-b.Off):])
		}
	}
	return nil
}
