package convert

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/bitpack"
)

// Codec says how what is written to disk is compressed. The zero value is CodecAuto.
type Codec uint8

// The codecs. A batch that is not compressed is written as it is, straight from where it
// lies; one that is compressed is batch.Packed.
const (
	CodecAuto Codec = iota // whichever moves most, as measured; see chooser
	CodecNone
	CodecS2      // github.com/klauspost/compress/s2, a faster Snappy
	CodecZstd    // Zstandard, at its fastest
	CodecBitpack // numbers in as few bits as they need; see internal/bitpack
	codecs
)

var codecNames = [codecs]string{"auto", "none", "s2", "zstd", "bitpack"}

func (c Codec) String() string {
	if c < codecs {
		return codecNames[c]
	}
	return fmt.Sprintf("Codec(%d)", uint8(c))
}

// ParseCodec reads what String writes.
func ParseCodec(s string) (Codec, error) {
	for i, name := range codecNames {
		if s == name {
			return Codec(i), nil
		}
	}
	return 0, fmt.Errorf("convert: codec %q is none of %s", s, strings.Join(codecNames[:], ", "))
}

// Validate says whether c is a codec.
func (c Codec) Validate() error {
	if c >= codecs {
		return fmt.Errorf("convert: %v is not a codec", c)
	}
	return nil
}

// coders holds the coders of Zstandard that are idle, for the garbage collector to take; those of
// S2 and bitpack have none. There are never more of them at work than lanes have scratch. The zero
// value is ready, and safe for concurrent use.
type coders struct{ encoders, decoders sync.Pool }

// encoder returns an encoder for frames, which is given back to k.encoders. It has a table of
// 256 KiB, and as many bytes as its window is long and a block (128 KiB). A frame is no longer than
// the window, which with 4 MiB, as it is otherwise, would find no more.
func (k *coders) encoder() (*zstd.Encoder, error) {
	if e, ok := k.encoders.Get().(*zstd.Encoder); ok {
		return e, nil
	}
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false), zstd.WithWindowSize(batch.FrameSize),
		zstd.WithSingleSegment(true), zstd.WithLowerEncoderMem(true), zstd.WithEncoderConcurrency(1))
}

// decoder returns a decoder, which is given back to k.decoders.
func (k *coders) decoder() (*zstd.Decoder, error) {
	if d, ok := k.decoders.Get().(*zstd.Decoder); ok {
		return d, nil
	}
	return zstd.NewReader(nil, zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderLowmem(true), zstd.WithDecoderConcurrency(1))
}

// gain is the least that a frame must become shorter, as a share: below it is not worth the
// time to read it.
const gain = 32

// encode appends src to dst, compressed, or as it is if that is hardly longer. dst has
// room for twice of src.
func (k *coders) encode(c Codec, dst, src []byte) (out []byte, err error) {
	at := len(dst)
	switch c {
	case CodecS2:
		n := len(s2.Encode(dst[at:cap(dst)], src))
		out = dst[:at+n]
	case CodecZstd:
		e, err := k.encoder()
		if err != nil {
			return nil, err
		}
		out = dst[:at+copy(dst[at:cap(dst)], e.EncodeAll(src, dst)[at:])] // where it is, if the room was enough
		k.encoders.Put(e)
	case CodecBitpack:
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

// decode fills dst with what src was made of.
func (k *coders) decode(c Codec, dst, src []byte) error {
	if len(src) == len(dst) {
		copy(dst, src)
		return nil
	}
	var out []byte
	var err error
	switch c {
	case CodecS2:
		n, e := s2.DecodedLen(src)
		if e != nil || n != len(dst) {
			return errors.Join(e, errLength)
		}
		out, err = s2.Decode(dst, src)
	case CodecZstd:
		d, e := k.decoder()
		if e != nil {
			return e
		}
		out, err = d.DecodeAll(src, dst[:0:len(dst)])
		k.decoders.Put(d)
	case CodecBitpack:
		return bitpack.Decode(dst, src)
	default:
		return errLength
	}
	if err == nil && len(out) != len(dst) {
		err = errLength
	}
	return err
}
