package image

import (
	"slices"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
)

// A dictionary whose first values are those of an earlier one extends it: its image has only the
// bytes that the earlier one, its base, does not have. A stream's dictionary often grows from batch
// to batch; without extensions each batch's would be stored in full. See payload.Descriptor.From.
//
//	buffers of the whole array    offsets ------------+-------   data ---------+--------
//	what the base has             0 … From[1]         |          0 … From[2]   |
//	what this image has           Buffers[1] ---------+-------   Buffers[2] ---+--------
//
// A base may extend another one itself. Together they are a chain, whose first dictionary is whole.
// Which dictionaries extend which is decided in package internal/transfer, which compares the
// bytes.
//
// Only arrays without children and views can extend others: those of numbers, booleans, times,
// strings and binaries. Their buffers grow at the end, and the beginning stays as it is.

// Growing is a buffer of a dictionary that can extend another one. Its bytes are the record's.
type Growing struct {
	Bytes []byte // nil: the array does not have the buffer
	Bits  bool   // one for each value
}

// Growing returns the buffers of the dictionary that l has planned, in the order of its spans. It
// returns nil if the dictionary can extend no other one: because of its type, because the array is
// a slice, or because a buffer changes when it is laid out, so that comparing the record's bytes
// would not compare those of the image.
func (l *Layout) Growing() []Growing {
	sh, ok := shape.Of(l.ValueType)
	if !ok || sh.NumChildren > 0 || sh.Views || sh.Values != nil || len(sh.Buffers) == 0 || l.Source.Offset() != 0 {
		return nil
	}
	// A buffer with from is made while it is written, such as lowered offsets.
	if slices.ContainsFunc(l.pieces, func(p piece) bool { return p.from != nil }) {
		return nil
	}
	all := make([]Growing, len(sh.Buffers))
	for i, b := range sh.Buffers {
		all[i].Bits = b.Role == shape.Validity || b.Role == shape.Bits
		if s := l.Desc.Buffers[i]; s.Length > 0 {
			all[i].Bytes = l.Source.Buffers()[i].Bytes()[:s.Length]
		} else if s != payload.Absent {
			all[i].Bytes = []byte{}
		}
	}
	return all
}

// Extension plans the image of the dictionary as an extension of base. The caller must have
// compared that base's values are the first of l's. The result has only what a plan needs: rows,
// nodes, spans, From and the length of the body.
func (l *Layout) Extension(base *batch.Descriptor) *batch.Descriptor {
	plan := &batch.Descriptor{Rows: l.Desc.Rows, Nodes: l.Desc.Nodes, Buffers: slices.Clone(l.Desc.Buffers)}
	plan.From = make([]int64, len(plan.Buffers))
	for i, g := range l.Growing() {
		if g.Bytes == nil {
			continue
		}
		// A digest of a batch hashes words of 8 bytes. With From a multiple of 8 no word is in two
		// images, so the digest does not depend on how the dictionary is divided.
		plan.From[i] = Kept(base, i, g.Bits) &^ 7
		plan.Buffers[i].Length -= plan.From[i]
	}
	s := l.segment(plan, nil)
	plan.Buffers, plan.Body = s.Desc.Buffers, s.Desc.Body
	return plan
}

// Chain returns layouts for a chain of dictionaries, of which l has the values of the longest: one
// for each of plans, the base of all first. Each but the first extends the one before it. They read
// l's record and do not retain it: l must stay open until they were written, and they need no
// Close.
func (l *Layout) Chain(plans []*batch.Descriptor) (chain []*Layout) {
	var base *Layout
	for _, plan := range plans {
		base = l.segment(plan, base)
		chain = append(chain, base)
	}
	// The last layout has all of l's values, so its descriptor is l's too: see Is.
	base.whole = l
	return chain
}

// segment returns the layout of the first plan.Rows values of l, less the bytes that base has. plan
// needs only Rows, Nodes, Buffers and From.
func (l *Layout) segment(plan *batch.Descriptor, base *Layout) *Layout {
	p := planner{nodes: plan.Nodes}
	for i, g := range l.Growing() {
		from := int64(0)
		if plan.From != nil {
			from = plan.From[i]
		}
		switch {
		case g.Bytes == nil:
			p.spans = append(p.spans, payload.Absent)
		case g.Bits:
			// from counts bytes of the bitmap, each of 8 rows.
			n := plan.Rows - 8*from
			var tail *payload.Adjustment
			if n%8 != 0 { // the bits after the end have no meaning
				tail = &payload.Adjustment{How: payload.Bits, Count: n}
			}
			p.put((n+7)/8, buffer{bytes: g.Bytes[from:]}, tail, nil)
		default:
			n := plan.Buffers[i].Length
			p.put(n, buffer{bytes: g.Bytes[from:][:n]}, nil, nil)
		}
	}
	s := p.layout(l.Desc.Schema, plan.Rows)
	// Write needs rec to be set; it is l's reference.
	s.rec, s.Desc.From = l.rec, plan.From
	if base != nil {
		s.Uses = []*Layout{base}
	}
	return s
}

// Kept returns how many of the first bytes of buffer i of d are also the first bytes of any longer
// array that begins with d's values. Those are all of them, except in a bitmap (bits), whose last
// byte also has the bits of values that follow.
func Kept(d *batch.Descriptor, i int, bits bool) int64 {
	n := total(d, i)
	if bits {
		n = min(n, d.Rows/8)
	}
	return n
}

// total returns the length of buffer i of the whole dictionary: what d's own image has, and what
// the images have that it extends.
func total(d *batch.Descriptor, i int) int64 {
	n := d.Buffers[i].Length
	if i < len(d.From) {
		n += d.From[i]
	}
	return n
}

// Whole describes the image that a dictionary would have if it extended no other one, without
// checksums. It returns d itself if that is so.
func Whole(d *batch.Descriptor) *batch.Descriptor {
	if d.From == nil {
		return d
	}
	var p planner
	for i, s := range d.Buffers {
		if s == payload.Absent {
			p.spans = append(p.spans, payload.Absent)
		} else {
			p.put(total(d, i), buffer{}, nil, nil)
		}
	}
	return &batch.Descriptor{
		Schema:  d.Schema,
		Rows:    d.Rows,
		Nodes:   d.Nodes,
		Buffers: p.spans,
		Body:    extent.RoundUp(p.at, alignLarge),
	}
}

// ChainPart is one piece of a dictionary's whole image, and where it is in the bodies of its chain:
// N bytes at From of the body of Of belong at To.
type ChainPart struct {
	Of          *batch.Descriptor // the dictionary, or one that it extends
	From, To, N int64
}

// ChainParts returns the pieces of which Whole(d) consists. It checks that each dictionary of the
// chain fits the one that it extends, as the descriptors may come from a file, and returns an
// *InvalidError otherwise. All but the last piece of each buffer are whole words.
func ChainParts(d, whole *batch.Descriptor) (parts []ChainPart, err error) {
	until := make([]int64, len(d.Buffers)) // of each buffer: where the parts begin that are known
	for i := range until {
		until[i] = total(d, i)
	}
	// From the longest down to the first of the chain: each provides the bytes from its From up to
	// where those of the next longer one begin.
	for of := d; ; of = of.Dictionaries[0] {
		if len(of.Buffers) != len(d.Buffers) ||
			of.From != nil && (len(of.From) != len(of.Buffers) || len(of.Dictionaries) != 1) {
			return nil, Path{"dictionary"}.Invalid("%d buffers of one that has %d", len(of.Buffers), len(d.Buffers))
		}
		for i, s := range of.Buffers {
			from, end := int64(0), until[i]
			if of.From != nil {
				from = of.From[i]
			}
			// Each dictionary has the same buffers, begins at a word, and has at least the bytes
			// that the next one leaves to it.
			if (s == payload.Absent) != (d.Buffers[i] == payload.Absent) || from < 0 || from%8 != 0 || from > end ||
				end > total(of, i) {
				return nil, Path{"dictionary"}.Invalid(
					"buffer %d ends at %d, and begins at %d with %d bytes", i, end, from, s.Length)
			}
			if end > from {
				parts = append(
					parts,
					ChainPart{Of: of, From: s.Offset, To: whole.Buffers[i].Offset + from, N: end - from},
				)
			}
			// The base holds the values before from.
			until[i] = from
		}
		if of.From == nil {
			return parts, nil
		}
	}
}

// Assemble copies the pieces of a dictionary's whole image to dst, which has zeros otherwise.
// bodies has the extents of each dictionary of the chain.
func Assemble(dst []byte, parts []ChainPart, bodies map[*batch.Descriptor][][]byte) error {
	for _, p := range parts {
		to := dst[p.To:]
		err := Across(bodies[p.Of], p.From, p.N, func(b []byte) error {
			to = to[copy(to, b):]
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// InOnePiece returns the whole image of a dictionary and its description: its own body, or a copy
// on the Go heap if it extends another one. The copy is not charged to any space.
func InOnePiece(d *batch.Descriptor, bodies map[*batch.Descriptor][][]byte) (*batch.Descriptor, [][]byte, error) {
	if d.From == nil {
		return d, bodies[d], nil
	}
	whole := Whole(d)
	parts, err := ChainParts(d, whole)
	if err != nil {
		return nil, nil, err
	}
	body := make([]byte, whole.Body)
	return whole, [][]byte{body}, Assemble(body, parts, bodies)
}

// First describes the dictionary d in the assembled image whole of a longer one of the same chain:
// the same buffers, shorter. So one assembled body serves every dictionary of the chain.
func First(d, whole *batch.Descriptor) *batch.Descriptor {
	first := *whole
	first.Rows, first.Nodes, first.Buffers = d.Rows, d.Nodes, slices.Clone(whole.Buffers)
	for i := range first.Buffers {
		if first.Buffers[i] != payload.Absent {
			first.Buffers[i].Length = total(d, i)
		}
	}
	return &first
}
