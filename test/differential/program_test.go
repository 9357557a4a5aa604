//go:build !invariants

package differential

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/arrowgen"
)

// The profiles of programs. The seed chooses one.
const (
	// roomy: all batches fit into each memory, so that they are where the program put them. Faults
	// of writes and of GPUs are in these programs alone: which batch meets one is certain.
	roomy = iota
	// tight: the memories hold a few batches each; the engine evicts all the time.
	tight
	// lasting: the disk persists, and the process is killed twice.
	lasting
	profiles
)

const (
	partitions = 2
	operations = 110
	patience   = 30 * time.Second // for what a working engine does at once
)

// errProgram is the error of a task that fails as the program wants.
var errProgram = errors.New("the program's error")

// entry is a batch that should exist.
type entry struct {
	number   int
	b        item
	digest   string // of its rows, when they were put
	columns  int
	rows     int64
	operator string // of the repository that holds it; "" if none does
}

// program runs the operations of one seed on one engine.
type program struct {
	ctx     context.Context
	seed    uint64
	profile int
	set     settings
	rng     *rand.Rand
	e       *engine
	out     io.Writer
	tables  []table
	live    []*entry
	puts    int
	ops     int
	// uncounted are bytes moved by operations in which they vary.
	uncounted map[string]int64
}

// settingsOf returns what kind of program a seed is, and its engine's settings.
func settingsOf(seed uint64) (profile int, s settings) {
	policies := []string{"lru", "plan-order", "largest-first", "cost-aware"}
	codecs := []string{"none", "s2", "zstd", "bitpack"}
	round := int(seed) / profiles
	profile = int(seed) % profiles
	s = settings{gpus: 2, gpuBytes: 6 << 20, hostBytes: 12 << 20, diskBytes: 64 << 20,
		policy: policies[round%len(policies)], codec: codecs[(round+profile)%len(codecs)], encrypt: round%2 == 1}
	switch profile {
	case tight:
		s.gpuBytes, s.hostBytes = 256<<10, 512<<10
	case lasting:
		s.gpus, s.persist = 1, true
	}
	return profile, s
}

// phases is how many engines a program opens one after the other. All but the last are killed.
func phases(profile int) int {
	if profile == lasting {
		return 3
	}
	return 1
}

// run runs one phase of the program. It returns true if the process is to be killed now.
func run(ctx context.Context, seed uint64, phase int, dir string, out io.Writer) (kill bool, err error) {
	profile, set := settingsOf(seed)
	p := &program{ctx: ctx, seed: seed, profile: profile, set: set, rng: rand.New(rand.NewPCG(seed, uint64(phase))), out: out,
		uncounted: make(map[string]int64)}
	p.tables = tables(seed, 4, 4)
	if profile == lasting {
		for i, t := range p.tables {
			p.tables[i].types = slices.DeleteFunc(slices.Clone(t.types), func(dt arrow.DataType) bool { return !persistable(dt) })
		}
	}
	p.tables[1] = p.tables[0] // so that records can be put into both
	if p.e, err = open(ctx, dir, seed, set); err != nil {
		return false, err
	}
	fmt.Fprintf(out, "# phase %d: %s, codec %s, encrypted %t\n", phase, set.policy, set.codec, set.encrypt)
	if set.persist {
		p.adoptAll()
	}
	for op := range p.tables { // which gives each repository its schema
		p.putInto(op, "")
	}
	steps := p.steps()
	count := operations
	if profile == lasting {
		count /= 3
	}
	for range count {
		s := steps[p.rng.IntN(len(steps))]
		s(p)
		p.quiet()
	}
	if phase < phases(profile)-1 {
		for _, x := range p.live {
			if p.rng.IntN(4) > 0 {
				p.line("move %d to disk: %s", x.number, class(p.e.move(ctx, x.b, "disk:0")))
			}
		}
		p.quiet()
		return true, nil
	}
	p.finish()
	return false, nil
}

// steps lists the operations of the program's profile, each as often as its weight.
func (p *program) steps() (all []func(*program)) {
	add := func(weight int, steps ...func(*program)) {
		for range weight {
			all = append(all, steps...)
		}
	}
	add(6, (*program).put, (*program).read)
	add(2, (*program).putAt, (*program).loose, (*program).move, (*program).columns, (*program).drop)
	add(1, (*program).wrongPut, (*program).store, (*program).clone, (*program).fingerprint, (*program).consume,
		(*program).lifecycle, (*program).take, (*program).corrupt, (*program).failingRead)
	if p.profile == lasting {
		add(3, (*program).toDisk)
		return all
	}
	add(1, (*program).fanOut, (*program).claims, (*program).marks, (*program).limits, (*program).trim,
		(*program).pressure, (*program).subscribed, (*program).reserveAll, (*program).wakeReserve, (*program).wakeLimit,
		(*program).wakeTake, (*program).cancelled)
	add(2, (*program).task, (*program).drain)
	if p.profile == roomy {
		add(1, (*program).failingWrite, (*program).shortTransfers, (*program).failingGPU, (*program).noPermit, (*program).hinted)
	}
	if p.seed%2 == 0 {
		add(1, (*program).stalled)
	}
	return all
}

// line prints one line of the result.
func (p *program) line(format string, args ...any) {
	p.ops++
	fmt.Fprintf(p.out, "%d "+format+"\n", append([]any{p.ops}, args...)...)
}

// same returns the digest that a read found, or the class of its error; a digest that differs from
// the one of what was put is marked.
func (x *entry) same(digest string, err error) string {
	switch {
	case err != nil:
		return class(err)
	case digest != x.digest:
		return digest + " WRONG ROWS"
	}
	return digest
}

// pick returns a batch, or nil if there is none.
func (p *program) pick() *entry {
	if len(p.live) == 0 {
		return nil
	}
	return p.live[p.rng.IntN(len(p.live))]
}

func (p *program) forget(x *entry) {
	p.live = slices.DeleteFunc(p.live, func(y *entry) bool { return x == y })
}

func (p *program) find(b item) *entry {
	i := slices.IndexFunc(p.live, func(x *entry) bool { return x.b == b })
	if i < 0 {
		return &entry{number: -1}
	}
	return p.live[i]
}

func (p *program) add(b item, rec arrow.RecordBatch, digest, operator string) *entry {
	p.puts++
	x := &entry{number: p.puts, b: b, digest: digest, operator: operator, columns: int(rec.NumCols()), rows: rec.NumRows()}
	p.live = append(p.live, x)
	return x
}

func (p *program) rows() int {
	switch p.rng.IntN(12) {
	case 0:
		return 0
	case 1:
		return 400
	}
	if p.profile == tight {
		return 1 + p.rng.IntN(300)
	}
	return 1 + p.rng.IntN(120)
}

func operator(i int) string { return fmt.Sprintf("op%d", i) }

// space returns a space of the engine.
func (p *program) space() string {
	names := []string{"gpu:0", "host:0", "disk:0", "gpu:1"}
	return names[p.rng.IntN(2+p.set.gpus)]
}

func (p *program) put()   { p.putTo("") }
func (p *program) putAt() { p.putTo(p.space()) }

func (p *program) putTo(where string) { p.putInto(p.rng.IntN(len(p.tables)), where) }

func (p *program) putInto(op int, where string) {
	rec := p.tables[op].record(p.rng, p.rows())
	defer rec.Release()
	d, part := digest(rec), p.rng.IntN(partitions)
	b, err := p.e.put(p.ctx, operator(op), part, rec, where)
	if err != nil {
		p.line("put %s/%d %q: %s", operator(op), part, where, class(err))
		return
	}
	x := p.add(b, rec, d, operator(op))
	p.line("put %d %s/%d %q: %s", x.number, operator(op), part, where, d)
}

// loose makes a batch of random types in no repository.
func (p *program) loose() {
	rec := arrowgen.New(p.rng.Uint64()).RandomRecord(5, 100, 3)
	if p.profile == lasting {
		rec.Release()
		rec = p.tables[2].record(p.rng, p.rows())
	}
	defer rec.Release()
	where, d := p.space(), digest(rec)
	b, err := p.e.loose(p.ctx, rec, where)
	if err != nil {
		p.line("make in %s: %s", where, class(err))
		return
	}
	x := p.add(b, rec, d, "")
	p.line("make %d in %s: %s", x.number, where, d)
}

func (p *program) wrongPut() {
	rec := arrowgen.Ints(1, 3, 1)
	defer rec.Release()
	_, err := p.e.put(p.ctx, operator(0), 0, rec, "")
	good := p.tables[0].record(p.rng, 3)
	defer good.Release()
	_, outside := p.e.put(p.ctx, operator(0), -1, good, "")
	p.line("put of another schema: %s; of partition -1: %s", class(err), class(outside))
}

func (p *program) store() {
	x := p.pick()
	if x == nil {
		return
	}
	err := p.e.store("loose", 0, x.b)
	p.line("store %d: %s", x.number, class(err))
	if err == nil {
		p.line("take it: %s", class(p.e.takeThis(p.ctx, "loose", x.b)))
	}
}

func (p *program) clone() {
	x := p.pick()
	if x == nil {
		return
	}
	b, err := p.e.clone(p.ctx, x.b)
	if err != nil {
		p.line("clone %d: %s", x.number, class(err))
		return
	}
	y := *x
	p.puts++
	y.number, y.b, y.operator = p.puts, b, ""
	p.live = append(p.live, &y)
	p.line("clone %d as %d: in the same tier %t", x.number, y.number, tierOf(b) == tierOf(x.b))
}

func (p *program) fanOut() {
	rec := p.tables[0].record(p.rng, p.rows())
	defer rec.Release()
	d := digest(rec)
	err := p.e.fanOut(p.ctx, rec, 1, operator(0), operator(1))
	p.line("fan out: %s", class(err))
	if err != nil {
		return
	}
	for _, op := range []string{operator(0), operator(1)} {
		all := p.e.list(op, 1)
		p.add(all[len(all)-1], rec, d, op)
	}
}

func (p *program) move() {
	x, where := p.pick(), p.space()
	if x == nil {
		return
	}
	p.line("move %d to %s: %s", x.number, where, class(p.e.move(p.ctx, x.b, where)))
}

func (p *program) toDisk() {
	x := p.pick()
	if x == nil {
		return
	}
	p.line("move %d to disk: %s", x.number, class(p.e.move(p.ctx, x.b, "disk:0")))
}

func (p *program) read() {
	x, where := p.pick(), p.space()
	if x == nil {
		return
	}
	p.line("read %d in %s: %s", x.number, where, x.same(p.e.record(p.ctx, x.b, where, false)))
}

func (p *program) consume() {
	i := slices.IndexFunc(p.live, func(x *entry) bool { return x.operator == "" })
	if i < 0 {
		return
	}
	x, where := p.live[i], p.space()
	p.line("consume %d in %s: %s", x.number, where, x.same(p.e.record(p.ctx, x.b, where, true)))
	p.line("read it again: %s", class(second(p.e.record(p.ctx, x.b, where, false))))
	p.forget(x)
}

func second(_ string, err error) error { return err }

func (p *program) columns() {
	x := p.pick()
	if x == nil {
		return
	}
	var fields []int
	for range 1 + p.rng.IntN(3) {
		fields = append(fields, p.rng.IntN(max(1, x.columns)))
	}
	slices.Sort(fields)
	fields = slices.Compact(fields)
	from, to := int64(0), int64(0)
	if x.rows > 1 {
		from = p.rng.Int64N(x.rows)
		to = from + p.rng.Int64N(x.rows-from+1)
	}
	if p.rng.IntN(8) == 0 {
		to = x.rows + 1 // which the batch does not have
	}
	d, err := p.e.columns(p.ctx, x.b, fields, from, to)
	if err != nil {
		d = class(err)
	}
	p.line("columns %v rows %d to %d of %d: %s", fields, from, to, x.number, d)
}

// fingerprint compares the engine's digests of a batch's bytes in all tiers.
func (p *program) fingerprint() {
	x := p.pick()
	if x == nil {
		return
	}
	var all []string
	for _, where := range []string{"disk:0", "host:0", "gpu:0"} {
		if err := p.e.move(p.ctx, x.b, where); err != nil {
			p.line("move %d to %s: %s", x.number, where, class(err))
			continue
		}
		d, err := p.e.fingerprint(p.ctx, x.b)
		if err != nil {
			d = class(err)
		}
		all = append(all, d)
	}
	p.line("fingerprints of %d are the same: %t", x.number, len(slices.Compact(all)) == 1)
}

func (p *program) drop() {
	x := p.pick()
	if x == nil {
		return
	}
	err := x.b.Drop()
	p.line("drop %d: %s, again %s, read %s", x.number, class(err), class(x.b.Drop()), class(second(p.e.record(p.ctx, x.b, "host", false))))
	p.forget(x)
}

// take takes the oldest batch of a partition and reads it.
func (p *program) take() {
	op, part := operator(p.rng.IntN(len(p.tables))), p.rng.IntN(partitions)
	if len(p.e.list(op, part)) == 0 {
		return
	}
	b, err := p.e.take(p.ctx, op, part)
	if err != nil {
		p.line("take from %s/%d: %s", op, part, class(err))
		return
	}
	x := p.find(b)
	x.operator = ""
	p.line("take %d from %s/%d: %s", x.number, op, part, x.same(p.e.record(p.ctx, b, "host", false)))
}

// lifecycle goes through the states of a batch, and tries what each forbids.
func (p *program) lifecycle() {
	x := p.pick()
	if x == nil {
		return
	}
	p.line("move %d to host:0: %s", x.number, class(p.e.move(p.ctx, x.b, "host:0")))
	_, untasked := lockIn(p.ctx, x.b, "host:0")
	p.line("lock without a task: %s", class(untasked))
	p.line("create a task: %s, cancel it: %s, cancel another: %s", class(x.b.CreateTask(p.ctx)), class(x.b.CancelTask()), class(x.b.CancelTask()))
	p.line("create a task: %s", class(x.b.CreateTask(p.ctx)))
	_, elsewhere := lockIn(p.ctx, x.b, "disk:0")
	h, err := lockIn(p.ctx, x.b, "host:0")
	p.line("lock in another space: %s, in its own: %s", class(elsewhere), class(err))
	if err != nil {
		p.line("cancel the task: %s", class(x.b.CancelTask()))
		return
	}
	p.line("move it with an open handle: %s", class(p.e.move(p.ctx, x.b, "disk:0")))
	if p.rng.IntN(3) == 0 {
		p.line("drop it with an open handle: %s", class(x.b.Drop()))
		d, err := p.e.digest(p.ctx, h)
		p.line("rows of the handle: %s, close it again: %s", x.same(d, err), class(h.Close()))
		p.forget(x)
		return
	}
	p.line("close: %s, again: %s", class(h.Close()), class(h.Close()))
}

func (p *program) claims() {
	op, part := operator(p.rng.IntN(len(p.tables))), p.rng.IntN(partitions)
	n := len(p.e.list(op, part))
	if n == 0 {
		_, err := p.e.claimAll(p.ctx, op, part)
		p.line("claim of an empty partition: %s", class(err))
		return
	}
	c, err := p.e.claim(p.ctx, op, part, 1+p.rng.IntN(2))
	if err != nil {
		p.line("claim from %s/%d: %s", op, part, class(err))
		return
	}
	_, all := p.e.claimAll(p.ctx, op, part)
	p.line("claim %v from %s/%d: ok, all others: %s", p.numbers(c.Batches()), op, part, class(all))
	if p.rng.IntN(2) == 0 {
		p.line("restore: %s, consume: %s, oldest %v", class(c.Restore()), class(c.Consume()), p.numbers(p.e.list(op, part)[:1]))
		return
	}
	batches := c.Batches()
	p.line("consume: %s, restore: %s", class(c.Consume()), class(c.Restore()))
	for _, b := range batches {
		p.forget(p.find(b))
	}
}

func (p *program) numbers(batches []item) (numbers []int) {
	for _, b := range batches {
		numbers = append(numbers, p.find(b).number)
	}
	return numbers
}

// task runs a task on some batches of a partition, on a GPU; it may fail.
func (p *program) task() {
	op, part := operator(p.rng.IntN(len(p.tables))), p.rng.IntN(partitions)
	if len(p.e.list(op, part)) == 0 {
		return
	}
	c, err := p.e.claim(p.ctx, op, part, 1+p.rng.IntN(3))
	if err != nil {
		p.line("claim from %s/%d: %s", op, part, class(err))
		return
	}
	batches := c.Batches()
	var fail error
	if p.rng.IntN(3) == 0 {
		fail = errProgram
	}
	var lines []string
	err = p.e.task(p.ctx, c, fail, func(d string, err error) {
		i := len(lines)
		lines = append(lines, p.find(batches[i]).same(d, err))
	})
	p.line("task on %v: %s, %s, left %d", p.numbers(batches), strings.Join(lines, " "), class(err), len(p.e.list(op, part)))
	if err == nil {
		for _, b := range batches {
			p.forget(p.find(b))
		}
	}
}

func (p *program) drain() {
	op, part := operator(p.rng.IntN(len(p.tables))), p.rng.IntN(partitions)
	where := []string{"gpu", "host"}[p.rng.IntN(2)]
	batches := p.e.list(op, part)
	n := min(len(batches), 1+p.rng.IntN(5))
	i := 0
	p.e.drain(p.ctx, op, part, n, where, func(d string, err error) {
		x := p.find(batches[i])
		i++
		p.line("drain %d to %s: %s", x.number, where, x.same(d, err))
		if err == nil {
			p.forget(x)
		}
	})
}

// changed runs f with another setting of a space, and sets the old one again.
func (p *program) marks() {
	name := []string{"gpu:0", "host:0"}[p.rng.IntN(2)]
	p.line("marks in the wrong order: %s", class(p.e.setMarks(name, 0.5, 0.6, 0.7)))
	stop := 0.2 + 0.3*p.rng.Float64()
	p.line("lower marks of %s: %s", name, class(p.e.setMarks(name, stop+0.2, stop+0.1, stop)))
	p.quiet()
	p.put()
	p.quiet()
	p.line("default marks: %s", class(p.e.setMarks(name, 0, 0, 0)))
}

func (p *program) limits() {
	name := []string{"gpu:0", "host:0"}[p.rng.IntN(2)]
	u := p.usageOf(name)
	p.line("limit 0: %s, above the capacity: %s", class(p.e.setLimit(name, 0)), class(p.e.setLimit(name, u.capacity+1)))
	p.line("half the limit of %s: %s", name, class(p.e.setLimit(name, u.limit/2)))
	_, err := p.e.reserve(p.ctx, name, u.limit/2+8192)
	p.line("reserve more: %s", class(err))
	p.put()
	p.quiet()
	p.line("the whole limit: %s", class(p.e.setLimit(name, u.limit)))
}

func (p *program) trim() { p.line("trim: %s", class(p.e.trim(p.ctx))) }

// pressure fills a space beyond its trigger, and waits until the monitor has moved batches out.
func (p *program) pressure() { p.fill([]string{"gpu:0", "gpu:1", "host:0"}[p.rng.IntN(3)]) }

func (p *program) fill(name string) {
	p.quiet()
	u := p.usageOf(name)
	size := u.capacity / 24
	before, values := p.e.moved(), p.rng.Uint64()
	var made []item
	for sum := u.used(); sum < u.trigger; {
		rec := arrowgen.Ints(values, int(size/32), 4)
		b, err := p.e.loose(p.ctx, rec, name)
		rec.Release()
		if err != nil {
			p.line("fill %s: %s", name, class(err))
			break
		}
		_, n := at(b)
		sum += n
		made = append(made, b)
	}
	below := wait(func() bool { u := p.usageOf(name); return u.used() < u.trigger })
	p.line("fill %s: below the trigger %t", name, below)
	p.quiet()
	for _, b := range made {
		var err error // the monitor may be moving b: a slow move looks quiet
		wait(func() bool { err = b.Drop(); return class(err) != "invalid-state" })
		if err != nil {
			p.line("drop: %s", class(err))
		}
	}
	for edge, n := range p.e.moved() { // how much moves depends on when the monitor looks
		p.uncounted[edge] += n - before[edge]
	}
}

// subscribed checks that a batch with a subscriber stays under pressure.
func (p *program) subscribed() {
	x := p.pick()
	if x == nil {
		return
	}
	p.line("move %d to gpu:0: %s", x.number, class(p.e.move(p.ctx, x.b, "gpu:0")))
	cancel := x.b.Subscribe()
	p.fill("gpu:0")
	p.line("it is still in %s", tierOf(x.b))
	cancel()
}

// hinted checks that a batch which is to stay does so under pressure, with the policy that heeds
// hints.
func (p *program) hinted() {
	x := p.pick()
	if x == nil || p.set.policy != "cost-aware" {
		return
	}
	p.line("move %d to gpu:0: %s", x.number, class(p.e.move(p.ctx, x.b, "gpu:0")))
	x.b.Hint(stay)
	p.fill("gpu:0")
	p.line("it is still in %s", tierOf(x.b))
	x.b.Hint(0)
}

// room returns the limit of gpu:0, in whole pages that two can share.
func (p *program) room() int64 { return p.usageOf("gpu:0").limit &^ (2*4096 - 1) }

// reserveAll takes all of a GPU, from which batches have to leave, and tries to get more.
func (p *program) reserveAll() {
	limit := p.room()
	r, err := p.e.reserve(p.ctx, "gpu:0", limit)
	if err != nil {
		p.line("reserve gpu:0: %s", class(err))
		return
	}
	more, again := p.e.tryReserve("gpu:0", 4*4096)
	if again == nil {
		again = more.Release()
	}
	_, over := p.e.reserve(p.ctx, "gpu:0", limit+2*4096)
	p.line("reserve gpu:0: ok, some more at once: %s, more than there is: %s", class(again), class(over))
	p.line("wait for more: %s", class(p.untilWaiting(func(ctx context.Context) error {
		r, err := p.e.reserve(ctx, "gpu:0", 4*4096)
		return errors.Join(err, r.Release())
	})))
	if x := p.pick(); x != nil {
		p.line("move %d there: %s", x.number, class(p.untilWaiting(func(ctx context.Context) error { return p.e.move(ctx, x.b, "gpu:0") })))
	}
	buf, err := r.Alloc(limit / 2)
	_, much := r.Alloc(limit)
	p.line("allocate half: %s, then all: %s, shrink too far: %s", class(err), class(much), class(r.Shrink(limit)))
	p.line("release: %s, again: %s", class(r.Release()), class(r.Release()))
	p.line("in use with the buffer %t", p.usageOf("gpu:0").used() >= limit/2)
	p.line("release the buffer: %s, again: %s", class(buf.Release()), class(buf.Release()))
}

// stalled waits for memory that an open handle keeps, whose holder does nothing.
func (p *program) stalled() {
	rec := arrowgen.Ints(p.rng.Uint64(), 2000, 4)
	defer rec.Release()
	held, err := p.e.loose(p.ctx, rec, "gpu:0")
	if err != nil {
		p.line("make in gpu:0: %s", class(err))
		return
	}
	other, err := p.e.loose(p.ctx, rec, "host:0")
	p.line("make in host:0: %s, create a task: %s", class(err), class(held.CreateTask(p.ctx)))
	h, err := lockIn(p.ctx, held, "gpu:0")
	if err != nil {
		p.line("lock: %s", class(err))
		return
	}
	limit := p.usageOf("gpu:0").limit
	_, n := at(held)
	p.line("a limit of one batch: %s", class(p.e.setLimit("gpu:0", n)))
	_, err = p.e.record(p.ctx, other, "gpu:0", false)
	p.line("read another beside an open handle: %s", class(err))
	p.line("close: %s", class(h.Close()))
	d, err := p.e.record(p.ctx, other, "gpu:0", false)
	p.line("read it then: %s %s", d, class(err))
	p.line("the whole limit: %s, drop: %s %s", class(p.e.setLimit("gpu:0", limit)), class(held.Drop()), class(other.Drop()))
}

// wakeReserve releases what a waiter needs.
func (p *program) wakeReserve() {
	r, err := p.e.reserve(p.ctx, "gpu:0", p.room())
	if err != nil {
		p.line("reserve gpu:0: %s", class(err))
		return
	}
	p.line("a waiter is served after a release: %s", class(p.afterWaiting(func(ctx context.Context) error {
		r, err := p.e.reserve(ctx, "gpu:0", 64<<10)
		return errors.Join(err, r.Release())
	}, func() { p.line("release: %s", class(r.Release())) })))
}

// wakeLimit raises the limit that a waiter is held back by.
func (p *program) wakeLimit() {
	limit := p.room()
	p.line("half the limit: %s", class(p.e.setLimit("gpu:0", limit/2)))
	r, err := p.e.reserve(p.ctx, "gpu:0", limit/2)
	if err != nil {
		p.line("reserve gpu:0: %s", class(err))
	} else {
		p.line("a waiter is served after the limit is raised: %s", class(p.afterWaiting(func(ctx context.Context) error {
			r, err := p.e.reserve(ctx, "gpu:0", 64<<10)
			return errors.Join(err, r.Release())
		}, func() { p.line("the whole limit: %s", class(p.e.setLimit("gpu:0", limit))) })))
		p.line("release: %s", class(r.Release()))
	}
	p.line("the whole limit: %s", class(p.e.setLimit("gpu:0", limit)))
}

// wakeTake puts what a taker waits for.
func (p *program) wakeTake() {
	rec := p.tables[3].record(p.rng, p.rows())
	defer rec.Release()
	var taken item
	err := p.afterWaiting(func(ctx context.Context) (err error) {
		taken, err = p.e.take(ctx, operator(3), partitions) // a partition that nothing else uses
		return err
	}, func() {
		_, err := p.e.put(p.ctx, operator(3), partitions, rec, "host:0")
		p.line("put: %s", class(err))
	})
	p.line("a taker is served after the put: %s", class(err))
	if err == nil {
		x := p.add(taken, rec, digest(rec), "")
		p.line("batch %d: %s", x.number, x.same(p.e.record(p.ctx, taken, "host", false)))
	}
}

// cancelled makes calls whose context has ended, or ends while they wait.
func (p *program) cancelled() {
	ended, cancel := context.WithCancel(p.ctx)
	cancel()
	rec := p.tables[2].record(p.rng, 10)
	defer rec.Release()
	_, put := p.e.put(ended, operator(2), 0, rec, "")
	_, reserve := p.e.reserve(ended, "gpu:0", 1)
	p.line("with an ended context: put %s, reserve %s", class(put), class(reserve))
	p.line("take from an empty partition: %s", class(p.untilWaiting(func(ctx context.Context) error {
		_, err := p.e.take(ctx, operator(2), partitions)
		return err
	})))
	if x := p.pick(); x != nil {
		where := tierOf(x.b)
		other := "host:0"
		if where == "host" {
			other = "disk:0"
		}
		p.line("move %d: %s", x.number, class(p.e.move(ended, x.b, other)))
		p.line("read %d: %s", x.number, x.same(p.e.record(p.ctx, x.b, "host", false)))
	}
}

// noPermit moves batches to and from the disk while the program has all permits.
func (p *program) noPermit() {
	x := p.pick()
	if x == nil {
		return
	}
	p.line("move %d to host:0: %s", x.number, class(p.e.move(p.ctx, x.b, "host:0")))
	fresh, err := p.e.clone(p.ctx, x.b) // which has no image on the disk
	if err != nil {
		p.line("clone: %s", class(err))
		return
	}
	release := p.e.allPermits()
	p.line("move a clone to disk without a permit: %s", class(p.untilWaiting(func(ctx context.Context) error { return p.e.move(ctx, fresh, "disk:0") })))
	p.line("release the permits: %s", class(release()))
	p.line("move it to disk: %s, drop: %s", class(p.e.move(p.ctx, fresh, "disk:0")), class(fresh.Drop()))
}

// onDisk picks a batch and moves it to the disk.
func (p *program) onDisk() *entry {
	x := p.pick()
	if x == nil {
		return nil
	}
	if err := p.e.move(p.ctx, x.b, "disk:0"); err != nil {
		p.line("move %d to disk: %s", x.number, class(err))
		return nil
	}
	return x
}

func (p *program) failingRead() {
	x := p.onDisk()
	if x == nil {
		return
	}
	end := p.e.diskFault("read", "io")
	got := class(second(p.e.record(p.ctx, x.b, "host", false)))
	end()
	p.line("read %d from a failing disk: %s, then: %s", x.number, got, x.same(p.again(x, "host")))
}

func (p *program) corrupt() {
	x := p.onDisk()
	if x == nil {
		return
	}
	end := p.e.diskFault("read", "flip")
	var all []int
	for i := range x.columns {
		all = append(all, i)
	}
	columns := class(second(p.e.columns(p.ctx, x.b, all, 0, x.rows)))
	got := class(second(p.e.record(p.ctx, x.b, "host", false)))
	end()
	p.line("columns of %d with flipped bits: %s, all of it: %s, then: %s",
		x.number, columns, got, x.same(p.again(x, "host")))
}

func (p *program) shortTransfers() {
	x := p.onDisk()
	if x == nil {
		return
	}
	read, write := p.e.diskFault("read", "short"), p.e.diskFault("write", "short")
	defer read()
	defer write()
	p.line("read %d in halves: %s", x.number, x.same(p.e.record(p.ctx, x.b, "host", false)))
	p.putTo("disk:0")
}

func (p *program) failingWrite() {
	x := p.pick()
	if x == nil {
		return
	}
	p.line("move %d to host:0: %s", x.number, class(p.e.move(p.ctx, x.b, "host:0")))
	b, err := p.e.clone(p.ctx, x.b)
	if err != nil {
		p.line("clone: %s", class(err))
		return
	}
	what := []string{"io", "full"}[p.rng.IntN(2)]
	end := p.e.diskFault("write", what)
	endSpace := p.e.diskFault("allocate", what)
	got := class(p.e.move(p.ctx, b, "disk:0"))
	y := &entry{b: b, digest: x.digest}
	p.line("move a clone of %d to a disk that fails (%s): %s, in %s, %s", x.number, what, got, tierOf(b), y.same(p.e.record(p.ctx, b, "host", false)))
	end()
	endSpace()
	ok := wait(func() bool { return p.e.move(p.ctx, b, "disk:0") == nil })
	p.line("then: %t, %s, drop %s", ok, y.same(p.e.record(p.ctx, b, "host", false)), class(b.Drop()))
}

func (p *program) failingGPU() {
	x := p.pick()
	if x == nil {
		return
	}
	p.line("move %d to host:0: %s", x.number, class(p.e.move(p.ctx, x.b, "host:0")))
	fault := [][2]string{{"copy-to-device", "call"}, {"copy-to-device", "work"}, {"alloc", "memory"}}[p.rng.IntN(3)]
	end := p.e.gpuFault(0, fault[0], fault[1])
	got := class(p.e.move(p.ctx, x.b, "gpu:0"))
	end()
	p.line("move %d to a GPU whose %s fails (%s): %s, in %s, %s", x.number, fault[0], fault[1], got, tierOf(x.b), x.same(p.e.record(p.ctx, x.b, "host", false)))
	p.line("then: %s", class(p.e.move(p.ctx, x.b, "gpu:0")))
	end = p.e.gpuFault(0, "copy-to-host", "work")
	got = class(p.e.move(p.ctx, x.b, "host:0"))
	end()
	p.line("move it back while that fails: %s, in %s, %s", got, tierOf(x.b), x.same(p.e.record(p.ctx, x.b, "host", false)))
}

// again reads a batch until that succeeds: after a fault the engine may leave a disk alone for a
// while.
func (p *program) again(x *entry, where string) (d string, err error) {
	wait(func() bool {
		d, err = p.e.record(p.ctx, x.b, where, false)
		return err == nil
	})
	return d, err
}

// adoptAll takes back what the killed engine left.
func (p *program) adoptAll() {
	var lines []string
	for i, left := range p.e.persisted() {
		if left.Rows%7 == 6 {
			lines = append(lines, fmt.Sprintf("forget %s: %s, again %s", left.describes, class(p.e.forget(left)), class(p.e.forget(left))))
			continue
		}
		if i == 0 && left.Rows > 0 || left.Rows%3 == 1 { // shared dictionaries are verified only once
			end := p.e.diskFault("read", "flip")
			_, err := p.e.adopt(p.ctx, left)
			end()
			lines = append(lines, "adopt with flipped bits: "+class(err))
		}
		b, err := p.e.adopt(p.ctx, left)
		if err != nil {
			lines = append(lines, fmt.Sprintf("adopt %s: %s", left.describes, class(err)))
			continue
		}
		_, again := p.e.adopt(p.ctx, left)
		x := &entry{b: b, columns: left.Schema.NumFields(), rows: left.Rows}
		if x.digest, err = p.e.record(p.ctx, b, "host", false); err != nil {
			x.digest = class(err)
		}
		lines = append(lines, fmt.Sprintf("adopt %s: %s, again %s", left.describes, x.digest, class(again)))
		p.live = append(p.live, x)
	}
	slices.Sort(lines)
	for _, l := range lines {
		p.line("%s", l)
	}
	slices.SortStableFunc(p.live, func(a, b *entry) int { return strings.Compare(a.digest, b.digest) })
	for _, x := range p.live {
		p.puts++
		x.number = p.puts
	}
	p.quiet()
}

// finish reads all that is left, drops it, and prints the final books.
func (p *program) finish() {
	for i := range p.tables {
		op := operator(i)
		p.e.closeInput(op)
		for part := range partitions {
			batches := p.e.list(op, part)
			if len(batches) == 0 {
				continue
			}
			n := 0
			p.e.read(p.ctx, op, part, func(d string, err error) {
				if n == len(batches) {
					p.line("%s/%d: one more: %s %s", op, part, d, class(err))
					return
				}
				x := p.find(batches[n])
				n++
				p.line("rest of %s/%d: %d %s", op, part, x.number, x.same(d, err))
				p.forget(x)
			})
			if n < len(batches) {
				p.line("%s/%d: %d batches are missing", op, part, len(batches)-n)
			}
		}
	}
	for _, x := range p.live {
		p.line("rest: %d %s, drop %s", x.number, x.same(p.e.record(p.ctx, x.b, "host", false)), class(x.b.Drop()))
	}
	p.live = nil
	p.quiet()
	for _, u := range p.e.usage() {
		p.line("books of %s: live %d, freed %d, reserved %d", u.name, u.live, u.pending, u.reserved)
	}
	moved := p.e.moved()
	p.line("close: %s", class(p.e.close()))
	for _, u := range p.e.usage() {
		if u.used()+u.cached != 0 {
			p.line("books of %s at the end: live %d, freed %d, reserved %d, cached %d", u.name, u.live, u.pending, u.reserved, u.cached)
		}
	}
	for _, edge := range slices.Sorted(maps.Keys(moved)) {
		fmt.Fprintf(p.out, "%s %s: %d\n", movedPrefix, edge, moved[edge]-p.uncounted[edge])
	}
}

// movedPrefix begins the lines with bytes moved, which need not be the same.
const movedPrefix = "moved"

func (p *program) usageOf(name string) usage {
	for _, u := range p.e.usage() {
		if u.name == name {
			return u
		}
	}
	panic("no space " + name)
}

// quiet waits until the engine has nothing to do: nothing moves, nobody waits, and each memory is
// below its trigger. It checks that no space has promised more than it has.
func (p *program) quiet() {
	var before string
	calm := 0
	above := ""
	ok := wait(func() bool {
		above = ""
		all := p.e.usage()
		for _, u := range all {
			if u.used()+u.cached > u.capacity {
				p.line("%s has promised more than it has", u.name)
			}
			if u.demand > 0 || u.reserved > 0 || !u.last && u.used() > u.trigger {
				above = u.name
			}
		}
		now := fmt.Sprint(p.e.moved(), all)
		if now != before || above != "" {
			before, calm = now, 0
			return false
		}
		calm++
		return calm == 4
	})
	if !ok {
		p.line("%s is not quiet", above)
	}
}

// wait calls f until it returns true, and reports whether it did.
func wait(f func() bool) bool {
	for end := time.Now().Add(patience / 3); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if f() {
			return true
		}
	}
	return false
}

// untilWaiting calls f, and ends its context when it waits.
func (p *program) untilWaiting(f func(context.Context) error) error {
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	return p.afterWaiting(func(context.Context) error { return f(ctx) }, cancel)
}

// afterWaiting calls f, and then calls then, when f waits.
func (p *program) afterWaiting(f func(context.Context) error, then func()) error {
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	for end := time.Now().Add(50 * time.Millisecond); time.Now().Before(end) && len(done) == 0; time.Sleep(time.Millisecond) {
		if slices.ContainsFunc(p.e.usage(), func(u usage) bool { return u.demand > 0 }) {
			break
		}
	}
	then()
	return <-done
}
