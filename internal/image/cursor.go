package image

import (
	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
)

// Cursor reads the nodes and spans of a descriptor in step with a walk of its types: depth first,
// the children of an array after its own buffers, and its dictionary last. That is the order in
// which the planner adds them, so the caller only has to visit the types in that order:
//
//	a := Next(type)          its node and its spans
//	for each child of a.Shape: Next(its type), and so on below it
//	if a.Values is not nil: Outside, or else Next(a.Values)
//	at the end of the schema: End
//
// The Cursor checks that the parts are there and that nodes have plausible numbers. It does not
// check where spans are: that depends on what is in memory.
type Cursor struct {
	Path  Path
	nodes []payload.Node // not yet taken
	spans []payload.Span
	desc  *batch.Descriptor
}

// Array is what a descriptor has of one array: its shape, its node and its spans, without those of
// its children.
type Array struct {
	shape.Shape
	payload.Node
	Spans []payload.Span // those of Shape.Buffers, and after them the data buffers of views
	First int            // the number of Spans[0] among Descriptor.Buffers
}

// NewCursor returns a cursor at the first array of d.
func NewCursor(d *batch.Descriptor) Cursor {
	return Cursor{desc: d, nodes: d.Nodes, spans: d.Buffers}
}

// Next takes the next array, which must be of type dt. An *InvalidError means that the descriptor
// ends early or has impossible numbers.
func (c *Cursor) Next(dt arrow.DataType) (a Array, err error) {
	var ok bool
	if a.Shape, ok = shape.Of(dt); !ok {
		return a, c.Path.Invalid("no image of the type %s", dt)
	}
	if len(c.nodes) == 0 {
		return a, c.Path.Invalid("the descriptor has no node for it")
	}
	a.Node, c.nodes = c.nodes[0], c.nodes[1:]
	if a.Length < 0 || a.Nulls < 0 || a.Nulls > a.Length || a.Length > MaxRows {
		return a, c.Path.Invalid("a node of %d rows, %d nulls", a.Length, a.Nulls)
	}
	// Spans are taken only if they are all there: a damaged descriptor may promise more.
	n := len(a.Buffers)
	// Views have a second node with the number of their data buffers, which only the array knows.
	if a.Views && len(c.nodes) > 0 && n <= len(c.spans) {
		data := c.nodes[0]
		c.nodes = c.nodes[1:]
		if data.Nulls != 0 || data.Length < 0 || data.Length > int64(len(c.spans)-n) {
			return a, c.Path.Invalid("%d data buffers of which the descriptor has %d", data.Length, len(c.spans)-n)
		}
		n += int(data.Length)
	} else if a.Views || n > len(c.spans) {
		return a, c.Path.Invalid("the descriptor has no buffers for it")
	}
	a.First = len(c.desc.Buffers) - len(c.spans)
	a.Spans, c.spans = c.spans[:n:n], c.spans[n:]
	return a, nil
}

// Peek returns the node that is taken next, without taking it; the zero value if there is none.
func (c *Cursor) Peek() (n payload.Node) {
	if len(c.nodes) > 0 {
		n = c.nodes[0]
	}
	return n
}

// Outside takes the next node if it stands for a dictionary that is an image of its own, and
// returns its index in Descriptor.Dictionaries. If outside is false, it takes nothing, and the
// dictionary is in the body. It may only be called where a dictionary comes next: elsewhere a node
// has no such meaning.
func (c *Cursor) Outside() (i int, outside bool, err error) {
	node := c.Peek()
	if node.Nulls != payload.Outside {
		return 0, false, nil
	}
	n := node.Length
	c.nodes = c.nodes[1:]
	if n < 0 || n >= int64(len(c.desc.Dictionaries)) {
		return 0, true, c.Path.Invalid("dictionary %d of %d", n, len(c.desc.Dictionaries))
	}
	return int(n), true, nil
}

// End returns an error if nodes or spans are left after the walk of the whole schema.
func (c *Cursor) End() error {
	if len(c.nodes) > 0 || len(c.spans) > 0 {
		return c.Path.Invalid("%d nodes and %d buffers more than the schema has", len(c.nodes), len(c.spans))
	}
	return nil
}
