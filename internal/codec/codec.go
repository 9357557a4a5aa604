// Package codec compresses what goes to disk, and chooses with what: by the measured speed of the
// disk, and by samples of what is written.
//
// It measures alone, and moves nothing: package transfer runs its transfers through Chooser.Timed.
package codec

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"

	"github.com/spillway-db/spillway/internal/bitpack"
	"github.com/spillway-db/spillway/internal/payload"
)

// Codec says how what is written to disk is compressed. The zero value is Auto.
type Codec uint8

// The codecs. Their numbers are stored with batches on disk: a new one is appended. Samples try the
// last one first, so that the quickest is the last. A batch that is not compressed is written as it
// is, straight from where it lies; one that is compressed has the type payload.CompressedImage.
const (
	Auto Codec = iota // whichever moves most, as measured; see Chooser
	None
	S2      // github.com/klauspost/compress/s2, a faster Snappy
	Zstd    // Zstandard, at its fastest
	Bitpack // numbers in as few bits as they need; see internal/bitpack
	codecs
)

var codecNames = [codecs]string{"auto", "none", "s2", "zstd", "bitpack"}

func (c Codec) String() string {
	if c < codecs {
		return codecNames[c]
	}
	return fmt.Sprintf("Codec(%d)", uint8(c))
}

// Parse reads what String writes.
func Parse(s string) (Codec, error) {
	for i, name := range codecNames {
		if s == name {
			return Codec(i), nil
		}
	}
	return 0, fmt.Errorf("convert: codec %q is none of %s", s, strings.Join(codecNames[:], ", "))
}

// Validate reports whether c is a codec.
func (c Codec) Validate() error {
	if c >= codecs {
		return fmt.Errorf("convert: %v is not a codec", c)
	}
	return nil
}

// Coders holds the coders of Zstandard that are idle, for the garbage collector to take; those of
// S2 and bitpack have none. There are never more of them at work than lanes have scratch. The zero
// value is ready, and safe for concurrent use.
type Coders struct{ encoders, decoders sync.Pool }

// encoder returns an encoder for frames, which is given back to k.encoders. It has a table of
// 256 KiB, and as many bytes as its window is long and a block (128 KiB). A frame is no longer than
// the window, which with 4 MiB, as it is otherwise, would find no more.
func (k *Coders) encoder() (*zstd.Encoder, error) {
	if e, ok := k.encoders.Get().(*zstd.Encoder); ok {
		return e, nil
	}
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false),
		zstd.WithWindowSize(payload.FrameSize), zstd.WithSingleSegment(true), zstd.WithLowerEncoderMem(true),
		zstd.WithEncoderConcurrency(1))
}

// decoder returns a decoder, which is given back to k.decoders.
func (k *Coders) decoder() (*zstd.Decoder, error) {
	if d, ok := k.decoders.Get().(*zstd.Decoder); ok {
		return d, nil
	}
	return zstd.NewReader(nil, zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderConcurrency(1))
}

// gain is the least that a frame must become shorter, as a share: below it is not worth the
// time to read it.
const gain = 32

// Encode appends src to dst, compressed, or as it is if that is hardly longer. dst has
// room for twice of src.
func (k *Coders) Encode(c Codec, dst, src []byte) (out []byte, err error) {
	at := len(dst)
	switch c {
	case S2:
		n := len(s2.Encode(dst[at:cap(dst)], src))
		out = dst[:at+n]
	case Zstd:
		e, err := k.encoder()
		if err != nil {
			return nil, err
		}
		out = dst[:at+copy(dst[at:cap(dst)], e.EncodeAll(src, dst)[at:])] // where it is, if the room was enough
		k.encoders.Put(e)
	case Bitpack:
		out = bitpack.Encode(dst, src)
	default:
		return append(dst, src...), nil
	}
	if len(out)-at > len(src)-len(src)/gain {
		return append(dst, src...), nil
	}
	return out, nil
}

var errLength = errors.New("another length than what was compressed")

// Decode fills dst with what src was made of.
func (k *Coders) Decode(c Codec, dst, src []byte) error {
	if len(src) == len(dst) {
		copy(dst, src)
		return nil
	}
	var out []byte
	var err error
	switch c {
	case S2:
		n, e := s2.DecodedLen(src)
		if e != nil || n != len(dst) {
			return errors.Join(e, errLength)
		}
		out, err = s2.Decode(dst, src)
	case Zstd:
		d, e := k.decoder()
		if e != nil {
			return e
		}
		out, err = d.DecodeAll(src, dst[:0:len(dst)])
		k.decoders.Put(d)
	case Bitpack:
		return bitpack.Decode(dst, src)
	default:
		return errLength
	}
	if err == nil && len(out) != len(dst) {
		err = errLength
	}
	return err
}
