package codec

import (
	"math"
	"runtime"
	"time"

	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/thread"
)

// hopeful reports whether a codec could be quick enough, where a byte costs so much without it.
func hopeful(k Codec, cost float64) bool {
	return quick[k]/float64(runtime.GOMAXPROCS(0)) < cost
}

// worth reports whether a codec could be quicker than the disk, and than those that are known.
func (c *Chooser) worth(k Codec, write, read float64, w power) bool {
	best, cost := c.promises(write, read, w)
	return k == Bitpack || k == best || hopeful(k, cost)
}

// Due reports whether a sample may be taken: at first, and then when it is nothing beside what was
// moved. Where no codec is quick enough there is nothing to find out.
func (c *Chooser) Due(g *gauges) bool {
	write, read := g.plain()
	if c.sampling.Load() || write == 0 || !hopeful(Bitpack, write+read) {
		return false
	}
	return c.samples.Load() < firstPieces || c.sampled.Load() <= c.busy.Load()/sampleShare
}

// Sample tries the codecs on pieces of a body, if that is due, which read reads. room is what they
// may work in, of trialRoom bytes.
func (c *Chooser) Sample(k *Coders, g *gauges, body int64, room []byte, read func(off, n int64) ([]byte, error)) error {
	if body < payload.FrameSize || !c.Due(g) || !c.sampling.CompareAndSwap(false, true) {
		return nil
	}
	defer c.sampling.Store(false)
	begin := time.Now()
	defer func() { c.sampled.Add(int64(time.Since(begin))) }()
	for range max(laterPieces, firstPieces-c.samples.Load()) {
		raw, err := read(c.place(body), samplePiece)
		if err != nil {
			return err
		}
		if err := c.try(k, g, raw, room); err != nil {
			return err
		}
	}
	return nil
}

// place says where the next piece of a body is taken from: evenly from everywhere, however
// many pieces there are.
func (c *Chooser) place(body int64) int64 {
	at := math.Mod(float64(c.samples.Add(1))*(math.Sqrt(5)-1)/2, 1)
	return min(int64(at*float64(body)), body-samplePiece) / payload.SumChunk * payload.SumChunk
}

// SampleRun is sample for a body that comes by once, of which there is one run: it takes one
// piece of it.
func (c *Chooser) SampleRun(k *Coders, g *gauges, raw, room []byte) error {
	if len(raw) < samplePiece || !c.Due(g) || !c.sampling.CompareAndSwap(false, true) {
		return nil
	}
	defer c.sampling.Store(false)
	begin := time.Now()
	defer func() { c.sampled.Add(int64(time.Since(begin))) }()
	at := c.place(int64(len(raw)))
	return c.try(k, g, raw[at:at+samplePiece], room)
}

// trialRoom is what a trial takes: a piece, compressed and as it comes back.
const trialRoom = 3 * samplePiece

// try compresses a piece with each codec that could be quicker than the disk, and than those that
// are known, and uncompresses it. What promises most is tried in any case: it may be known from
// other bytes than those of now, and its promise must not keep what is true from being found out.
func (c *Chooser) try(k *Coders, g *gauges, raw, room []byte) error {
	write, read := g.plain()
	out, back := room[:0:2*len(raw)], room[2*len(raw) : trialRoom][:len(raw)]
	part := len(raw) / 8
	for codec := codecs - 1; codec >= S2; codec-- { // the quickest first, because then others may not be hopeful
		if !c.worth(codec, write, read, c.power()) {
			continue
		}
		// The first time is not like the others: tables are made, memory is touched.
		stored, err := k.Encode(codec, out, raw[:part])
		if err == nil {
			err = k.Decode(codec, back[:part], stored)
		}
		if err != nil {
			return err
		}
		watch := thread.Start()
		stored, err = k.Encode(codec, out, raw)
		encode := watch.Stop()
		if err != nil {
			return err
		}
		watch = thread.Start()
		err = k.Decode(codec, back, stored)
		decode := watch.Stop()
		if err != nil {
			return err
		}
		c.learn(codec, rates{
			ratio:  float64(len(stored)) / float64(len(raw)),
			encode: encode.Seconds() / float64(len(raw)),
			decode: decode.Seconds() / float64(len(raw)),
		})
	}
	return nil
}

// learn mixes what a piece showed into what is known.
func (c *Chooser) learn(k Codec, piece rates) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.of[k]
	r.pieces++
	weight := 1 / float64(min(r.pieces, memoryPieces))
	r.ratio += weight * (piece.ratio - r.ratio)
	r.encode += weight * (piece.encode - r.encode)
	r.decode += weight * (piece.decode - r.decode)
}
