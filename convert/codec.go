package convert

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"

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

// coders holds the coders of Zstandard, which have tables of some 100 KiB for each that is
// at work, and are made when they are needed first; those of S2 have none. The zero
// value is ready, and safe for concurrent use.
type coders struct {
	once    sync.Once
	encoder *zstd.Encoder
	decoder *zstd.Decoder
	err     error
}

func (k *coders) zstd() (*zstd.Encoder, *zstd.Decoder, error) {
	k.once.Do(func() {
		var err error
		k.encoder, k.err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false),
			zstd.WithSingleSegment(true), zstd.WithLowerEncoderMem(true), zstd.WithEncoderConcurrency(runtime.GOMAXPROCS(0)))
		k.decoder, err = zstd.NewReader(nil, zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderLowmem(true), zstd.WithDecoderConcurrency(0))
		k.err = errors.Join(k.err, err)
	})
	return k.encoder, k.decoder, k.err
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
		e, _, err := k.zstd()
		if err != nil {
			return nil, err
		}
		out = dst[:at+copy(dst[at:cap(dst)], e.EncodeAll(src, dst)[at:])] // where it is, if the room was enough
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
		_, d, e := k.zstd()
		if e != nil {
			return e
		}
		out, err = d.DecodeAll(src, dst[:0:len(dst)])
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
