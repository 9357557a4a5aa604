package transfer

import (
	"errors"
	"math/rand/v2"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// A dictionary that begins with the values of an earlier one extends it, as the deltas of an Arrow
// stream do: its image has only the values that its base lacks, see image.Chain. So a space stores
// the common values once. Each copy has a reference to the copy of its base in the same space.
//
//	values of D3   │ a b c d e f │ g h │ i │
//	images         │ D1          │ D2  │ D3│      D3 extends D2, which extends D1
//
// Chains stay short: while the new values fit in a page, a dictionary replaces the last image of
// the chain in place of extending it, and maxRun images of one level are merged into one of the
// next. A value is then stored once for each level, of which a chain of n pages has
// log(n)/log(maxRun).
//
// Records in host memory need an array in one piece. It is assembled from the longest chain that is
// there, and shorter ones are slices of it.
//
// Bases are looked for in a family only, and only the longest dictionary of each family is
// compared. If a stream's dictionaries grow, that is the one of the batch before.

// maxRun is how many images of one level there may be in a chain.
const maxRun = 16

// family is where extensions of a dictionary are looked for: dictionaries at the same place in a
// record, with the same type and the same first bytes. It keeps streams apart without comparing
// values.
type family struct {
	// number is that of the dictionary in its record, plus 1, so that the zero family is none.
	number int
	head   xxh3.Uint128
}

// headSize is how many bytes of a dictionary's last buffer are the head of its family.
const headSize = 64

// chain returns d after those that it extends.
func (d *Dictionary) chain() (all []*Dictionary) {
	for ; d != nil; d = d.base {
		all = append(all, d)
	}
	slices.Reverse(all)
	return all
}

// extends makes d an extension of base, which somebody holds.
func (s *Dictionaries) extends(d, base *Dictionary) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	d.base = base
	base.Held++
}

// extend makes d, which l has planned, an extension of an earlier dictionary if it begins with that
// one's values. Values are compared by 128-bit sums with a secret seed, because the earlier array
// may be gone. It reads all of d's values, without the lock. A dictionary of a type that cannot
// grow is left as it is.
func (s *Dictionaries) extend(d *Dictionary, l *image.Layout) {
	bufs := l.Growing()
	if bufs == nil {
		return
	}
	s.Mu.Lock()
	if s.Mu.seed == 0 {
		s.Mu.seed = rand.Uint64() | 1
	}
	// The last buffer has the values, or the bytes of strings.
	head := xxh3.NewSeed(s.Mu.seed)
	tail := bufs[len(bufs)-1].Bytes
	_, _ = head.WriteString(d.valueType.Fingerprint())
	_, _ = head.Write(tail[:min(len(tail), headSize)])
	d.family = family{l.Number + 1, head.Sum128()}
	last := s.Mu.Last[d.family]
	if last != nil {
		last.Held++
	}
	s.Mu.Unlock()
	// last is held, so its chain stays.
	chain := last.chain()
	n := d.match(bufs, chain)
	if n > 0 {
		d.choose(l, chain[:n])
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if last != nil {
		last.Held--
		s.forgetLocked(last)
	}
	// Another caller may have entered a longer one meanwhile. d joins the line of last only if it
	// begins with all of that one's values, and nobody has come between.
	longest := s.Mu.Last[d.family]
	if s.newLineLocked(d); longest != nil && longest == last && n == len(chain) {
		d.line = last.line
	}
	if longest == nil || n == 0 || longest.plan.Rows < d.plan.Rows {
		if s.Mu.Last == nil {
			s.Mu.Last = make(map[family]*Dictionary)
		}
		s.Mu.Last[d.family] = d
	}
}

// newLineLocked makes d the first of a new line. A line is a sequence of dictionaries of which each
// begins with the values of all shorter ones. The last of a family is the longest of its line, so a
// dictionary that begins with its values begins with those of the whole line.
func (s *Dictionaries) newLineLocked(d *Dictionary) {
	s.Mu.lines++
	d.line = s.Mu.lines
}

// beginsLocked reports whether d is known to begin with the values of o.
func (d *Dictionary) beginsLocked(o *Dictionary) bool {
	return d.line != 0 && d.line == o.line && d.plan.Rows >= o.plan.Rows || slices.Contains(d.chain(), o)
}

// match computes d.sums and returns how many dictionaries at the beginning of chain d begins with:
// those that have fewer values, and the same ones. It passes over each buffer once, and takes the
// sum wherever one of the chain ends.
func (d *Dictionary) match(bufs []image.Growing, chain []*Dictionary) int {
	n := 0
	for n < len(chain) && chain[n].plan.Rows < d.plan.Rows {
		n++
	}
	for i := range bufs {
		b := &bufs[i]
		hash := xxh3.NewSeed(d.Store.Mu.seed)
		at := int64(0)
		for k, c := range chain[:n] {
			end := image.Kept(c.plan, i, b.Bits)
			if (c.plan.Buffers[i] == payload.Absent) != (b.Bytes == nil) || end > int64(len(b.Bytes)) {
				n = k
				break
			}
			_, _ = hash.Write(b.Bytes[at:end])
			if at = end; sumOf(hash, b, c.plan.Rows) != c.sums[i] {
				n = k
				break
			}
		}
		_, _ = hash.Write(b.Bytes[at:image.Kept(d.plan, i, b.Bits)])
		d.sums = append(d.sums, sumOf(hash, b, d.plan.Rows))
	}
	return n
}

// sumOf returns the sum of the values of the first rows rows of a buffer. hash has seen the bytes
// that belong to them alone. In a bitmap, that leaves the bits in the last byte, which has those of
// later rows too: these bits are added to the sum.
func sumOf(hash *xxh3.Hasher, b *image.Growing, rows int64) xxh3.Uint128 {
	sum := hash.Sum128()
	if b.Bits && rows/8 < int64(len(b.Bytes)) {
		sum.Lo ^= uint64(b.Bytes[rows/8]) & (1<<(rows%8) - 1)
	}
	return sum
}

// choose makes d an extension of the last of chain, or of an earlier one, so that chains stay
// short.
func (d *Dictionary) choose(l *image.Layout, chain []*Dictionary) {
	n := len(chain)
	// If the new values and the last image's together fit in a page, extend the one before: another
	// image would take a page for a few bytes.
	for n > 1 && l.Extension(chain[n-2].plan).Body <= tier.Page {
		n--
	}
	// If there are maxRun images of one level at the end, replace all of them by this one, on the
	// next level.
	for {
		run := 0
		for run < n-1 && chain[n-1-run].level == d.level {
			run++
		}
		if run < maxRun {
			break
		}
		n, d.level = n-run, d.level+1
	}
	d.Store.extends(d, chain[n-1])
	d.plan = l.Extension(d.base.plan)
	d.Body = d.plan.Body
}

// assembled is the array of an extension in one piece in host memory. The root of the chain's
// copies there has at most one, the longest. It goes with the copy that it was assembled for.
type assembled struct {
	dict *Dictionary
	desc *batch.Descriptor // of body
	body []byte
	// buf is the memory of body, or what body is charged by; nil if the space could not be charged.
	buf *tier.Buffer
}

func (a *assembled) release() error {
	if a == nil {
		return nil
	}
	return a.buf.Release()
}

// root returns the copy of the first dictionary of the chain.
func (c *DictCopy) root() *DictCopy {
	for c.base != nil {
		c = c.base
	}
	return c
}

// inPlace returns the memory of a copy's array in one piece, its descriptor there, and a function
// that ends a lease on it. The caller must have a reference to the copy. An extension is the
// beginning of an array that is assembled already, or else of that of the longest copy of its line
// in the space, which inPlace then assembles.
func (c *DictCopy) inPlace() (*batch.Descriptor, [][]byte, func(), error) {
	s, root := c.Dict.Store, c.root()
	if root == c {
		extents, release, err := InPlace(c.buf)
		return c.Dict.desc, extents, release, err
	}
	s.Mu.Lock()
	if whole := root.whole; whole != nil && whole.dict.beginsLocked(c.Dict) {
		end := whole.buf.Lease()
		s.Mu.Unlock()
		return image.First(c.Dict.desc, whole.desc), [][]byte{whole.body}, end, nil
	}
	// Assembling the longest costs little more, and the next dictionaries of the stream find it.
	// The loop passes over all known dictionaries, of which almost all are in other lines.
	from := c
	for _, d := range s.Mu.Made {
		if d.line == 0 || d.line != c.Dict.line || d.plan.Rows <= from.Dict.plan.Rows {
			continue
		}
		if longer := d.copyLocked(c.space); longer != nil && longer.buf != nil {
			from = longer
		}
	}
	from.Refs++
	s.Mu.Unlock()
	whole, err := from.assemble()
	if err != nil {
		return nil, nil, nil, errors.Join(err, from.Release())
	}
	// Keep the longest of this array and the one that is there. The lease keeps ours in any case.
	end, old := whole.buf.Lease(), whole
	s.Mu.Lock()
	if root.whole == nil || root.whole.desc.Rows < whole.desc.Rows {
		old, root.whole = root.whole, whole
		s.Mu.bytes[c.space.ID()] += whole.charge() - old.charge()
	}
	s.Mu.Unlock()
	if err := errors.Join(old.release(), from.Release()); err != nil {
		end()
		return nil, nil, nil, err
	}
	return image.First(c.Dict.desc, whole.desc), [][]byte{whole.body}, end, nil
}

func (a *assembled) charge() int64 {
	if a == nil {
		return 0
	}
	return a.buf.Charge()
}

// assemble copies the array of an extension to memory of its space. If there is no room for it, the
// memory is Go's, and the space is charged for it beyond its limit: the monitor then evicts others.
// assemble does not wait for room. Beyond the capacity no space can be charged, as for scratch
// memory. The caller must have a reference to c, which holds the rest of the chain.
func (c *DictCopy) assemble() (*assembled, error) {
	a := &assembled{dict: c.Dict, desc: image.Whole(c.Dict.desc)}
	parts, err := image.ChainParts(c.Dict.desc, a.desc)
	if err != nil {
		return nil, err
	}
	a.buf, err = c.space.DrawNew(a.desc.Body)
	switch {
	case err == nil:
		a.body = a.buf.Memory().(tier.HostMemory).Extents()[0]
	case errors.Is(err, tier.ErrNoSpace):
		a.body = make([]byte, a.desc.Body)
		p, full := c.space.Occupy(c.space.Charge(a.desc.Body))
		if full != nil {
			break
		}
		a.buf = c.space.Adopt(p, heapMemory(a.body))
		if err := c.space.Release(p); err != nil {
			return nil, errors.Join(err, a.buf.Release())
		}
	default:
		return nil, err
	}
	bodies := make(map[*batch.Descriptor][][]byte)
	for ; c != nil; c = c.base {
		bodies[c.Dict.desc] = c.buf.Memory().(tier.HostMemory).Extents()
	}
	if err := image.Assemble(a.body, parts, bodies); err != nil {
		return nil, errors.Join(err, a.buf.Release())
	}
	return a, nil
}

// heapMemory is memory of Go's that a space is charged for. When it is freed, the garbage collector
// has it.
type heapMemory []byte

func (m heapMemory) Size() int64               { return int64(len(m)) }
func (m heapMemory) Extents() [][]byte         { return [][]byte{m} }
func (m heapMemory) GiveBack(reclaimed func()) { reclaimed() }
