package cuda_test

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// An interpreter of PTX, for as much of it as the example's kernel uses. It is meaner than a device is: which
// of the threads of a warp that have parted goes on is drawn by lot, and so is the order of warps
// and blocks; registers and shared memory hold nothing before they are written; each access is held
// to its alignment and must be inside of the memory that there is.
//
//	parsePTX ─▶ ptxKernel ─ launch ─▶ ptxBlock ─▶ ptxThread
//	                                  ptxMemory: what the addresses mean

// ptxMemory is a device's memory. Only the parts that may be written are.
type ptxMemory []ptxPart

type ptxPart struct {
	base  uint64
	bytes []byte
	write bool
}

func (m ptxMemory) at(addr uint64, n int, write bool) []byte {
	for _, p := range m {
		if off := addr - p.base; addr >= p.base && off <= uint64(len(p.bytes)) && uint64(n) <= uint64(len(p.bytes))-off && (p.write || !write) {
			return p.bytes[off:][:n]
		}
	}
	panic(fmt.Sprintf("%d bytes at %#x", n, addr))
}

type ptxKernel struct {
	name, version, target string
	params                map[string]int // their offsets
	maxThreads            int
	shared                map[string]uint64
	sharedSize            uint64
	regs                  map[string]ptxReg
	labels                map[string]int
	code                  []ptxInstr
}

type ptxReg struct {
	index int
	width byte // P, W or L: 1, 32, 64 bits
}

type ptxInstr struct {
	line   int
	text   string
	guard  int  // the predicate under which it is executed, -1 for none
	negate bool // of that
	op     string
	args   []string
	run    func(t *ptxThread)
	target int // of a branch
}

const (
	ptxWarp = 32
	ptxDone = -1
)

// ptxPure are the instructions that compute their first argument from the others, with the widths
// of all.
var ptxPure = map[string]struct {
	widths string
	f      func(a, b, c uint64) uint64
}{
	"add.u64":            {"LLL", func(a, b, _ uint64) uint64 { return a + b }},
	"add.u32":            {"WWW", func(a, b, _ uint64) uint64 { return uint64(uint32(a + b)) }},
	"sub.u64":            {"LLL", func(a, b, _ uint64) uint64 { return a - b }},
	"mul.lo.u64":         {"LLL", func(a, b, _ uint64) uint64 { return a * b }},
	"mul.wide.u32":       {"LWW", func(a, b, _ uint64) uint64 { return a * b }},
	"mad.lo.u64":         {"LLLL", func(a, b, c uint64) uint64 { return a*b + c }},
	"min.u64":            {"LLL", func(a, b, _ uint64) uint64 { return min(a, b) }},
	"and.b64":            {"LLL", func(a, b, _ uint64) uint64 { return a & b }},
	"and.b32":            {"WWW", func(a, b, _ uint64) uint64 { return a & b }},
	"or.b64":             {"LLL", func(a, b, _ uint64) uint64 { return a | b }},
	"xor.b64":            {"LLL", func(a, b, _ uint64) uint64 { return a ^ b }},
	"shl.b64":            {"LLW", func(a, b, _ uint64) uint64 { return a << b }},
	"shr.u64":            {"LLW", func(a, b, _ uint64) uint64 { return a >> b }},
	"shr.u32":            {"WWW", func(a, b, _ uint64) uint64 { return a >> b }},
	"shf.l.wrap.b32":     {"WWWW", func(a, b, c uint64) uint64 { return (b<<32 | a) << (c & 31) >> 32 }},
	"mov.u64":            {"LL", func(a, _, _ uint64) uint64 { return a }},
	"mov.u32":            {"WW", func(a, _, _ uint64) uint64 { return a }},
	"cvt.u64.u32":        {"LW", func(a, _, _ uint64) uint64 { return a }},
	"cvta.to.global.u64": {"LL", func(a, _, _ uint64) uint64 { return a }},
	"selp.u64":           {"LLLP", func(a, b, c uint64) uint64 { return a*c + b*(1-c) }},
	"setp.eq.u64":        {"PLL", func(a, b, _ uint64) uint64 { return ptxBool(a == b) }},
	"setp.ne.u64":        {"PLL", func(a, b, _ uint64) uint64 { return ptxBool(a != b) }},
	"setp.ge.u64":        {"PLL", func(a, b, _ uint64) uint64 { return ptxBool(a >= b) }},
	"setp.gt.u64":        {"PLL", func(a, b, _ uint64) uint64 { return ptxBool(a > b) }},
	"setp.ne.u32":        {"PWW", func(a, b, _ uint64) uint64 { return ptxBool(a != b) }},
	"setp.lt.u32":        {"PWW", func(a, b, _ uint64) uint64 { return ptxBool(a < b) }},
}

func ptxBool(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// ptxAccess is an instruction that moves words, or a byte, between registers and memory.
var ptxAccess = regexp.MustCompile(`^(ld|st|red)\.(global|shared)(?:\.add)?(\.v2)?\.u(8|64)$`)

var ptxArgument = regexp.MustCompile(`\{[^}]*\}|\[[^\]]*\]|[^,\s]+`)

var ptxModule = regexp.MustCompile(`(?s)^\s*\.version (\d+\.\d+)\s+\.target (\w+)\s+\.address_size 64\s+` +
	`\.visible \.entry (\w+)\(([^)]*)\)\s*\.maxntid (\d+), 1, 1\s+\.minnctapersm \d+\s+\{(.*)\}\s*$`)

// parsePTX reads text with one kernel.
func parsePTX(text string) (k *ptxKernel, err error) {
	line := 0
	defer func() {
		if f := recover(); f != nil {
			err = fmt.Errorf("line %d: %v", line, f)
		}
	}()
	text = regexp.MustCompile(`//[^\n]*`).ReplaceAllString(text, "")
	m := ptxModule.FindStringSubmatchIndex(text)
	if m == nil {
		panic("this is not a module with one kernel")
	}
	part := func(i int) string { return text[m[2*i]:m[2*i+1]] }
	k = &ptxKernel{version: part(1), target: part(2), name: part(3), params: make(map[string]int),
		shared: make(map[string]uint64), regs: make(map[string]ptxReg), labels: make(map[string]int)}
	for i, p := range strings.Split(part(4), ",") {
		name, found := strings.CutPrefix(strings.TrimSpace(p), ".param .u64 ")
		require(found, "the parameter "+p)
		k.params[name] = 8 * i
	}
	k.maxThreads, _ = strconv.Atoi(part(5))
	line = strings.Count(text[:m[12]], "\n")
	for _, s := range strings.Split(part(6), "\n") {
		line++
		k.statement(line, strings.TrimSpace(s))
	}
	for i := range k.code {
		line = k.code[i].line
		k.compile(&k.code[i])
	}
	return k, nil
}

func require(ok bool, what string) {
	if !ok {
		panic("not understood: " + what)
	}
}

// statement takes one line of the body: nothing, a label, a declaration or an instruction.
func (k *ptxKernel) statement(line int, s string) {
	if label, found := strings.CutSuffix(s, ":"); found {
		k.labels[label] = len(k.code)
		return
	}
	if s == "" {
		return
	}
	s, found := strings.CutSuffix(s, ";")
	require(found && !strings.Contains(s, ";"), "a line without one end of a statement")
	switch word, rest, _ := strings.Cut(s, " "); word {
	case ".shared":
		var align, size uint64
		var name string
		_, err := fmt.Sscanf(strings.NewReplacer("[", " ", "]", "").Replace(rest), ".align %d .b8 %s %d", &align, &name, &size)
		require(err == nil && align == 16 && k.sharedSize == 0, s)
		k.shared[name], k.sharedSize = 0, size
	case ".reg":
		kind, names, _ := strings.Cut(rest, " ")
		width := map[string]byte{".pred": 'P', ".u32": 'W', ".b32": 'W', ".u64": 'L', ".b64": 'L'}[kind]
		require(width != 0, s)
		for _, name := range strings.Split(names, ",") {
			name = strings.TrimSpace(name)
			k.regs[name] = ptxReg{len(k.regs), width}
		}
	default:
		in := ptxInstr{line: line, text: s, guard: -1}
		if guard, found := strings.CutPrefix(word, "@"); found {
			guard, in.negate = strings.CutPrefix(guard, "!")
			in.guard, s = k.reg(guard, 'P'), rest
		}
		op, args, _ := strings.Cut(s, " ")
		in.op, in.args = op, ptxArgument.FindAllString(args, -1)
		k.code = append(k.code, in)
	}
}

// reg returns a register that must be as wide.
func (k *ptxKernel) reg(name string, width byte) int {
	r, found := k.regs[name]
	require(found && r.width == width, fmt.Sprintf("%s as a register of kind %c", name, width))
	return r.index
}

// value returns how a thread reads an argument.
func (k *ptxKernel) value(arg string, width byte) func(t *ptxThread) uint64 {
	switch n, err := strconv.ParseUint(arg, 0, 64); {
	case err == nil:
		require(width == 'L' || width == 'W' && n>>32 == 0, arg+" as an immediate value")
		return func(*ptxThread) uint64 { return n }
	case strings.HasPrefix(arg, "%"):
		require(width == 'W', arg+" in 64 bits")
		i := slices.Index([]string{"%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x"}, arg)
		require(i >= 0, arg)
		return func(t *ptxThread) uint64 { return t.special[i] }
	}
	if at, found := k.shared[arg]; found {
		require(width == 'W', "an address of shared memory in 64 bits")
		return func(*ptxThread) uint64 { return at }
	}
	i := k.reg(arg, width)
	return func(t *ptxThread) uint64 { return t.get(i) }
}

// list returns the names in {a, b}, or the single one.
func list(arg string) []string {
	return strings.FieldsFunc(arg, func(r rune) bool { return strings.ContainsRune("{, }", r) })
}

func zero(*ptxThread) uint64 { return 0 }

func (k *ptxKernel) compile(in *ptxInstr) {
	if p, found := ptxPure[in.op]; found {
		require(len(in.args) == len(p.widths), in.text)
		var from [3]func(*ptxThread) uint64
		for i := range from {
			if from[i] = zero; i+1 < len(p.widths) {
				from[i] = k.value(in.args[i+1], p.widths[i+1])
			}
		}
		to := k.reg(in.args[0], p.widths[0])
		in.run = func(t *ptxThread) { t.set(to, p.f(from[0](t), from[1](t), from[2](t))) }
		return
	}
	if m := ptxAccess.FindStringSubmatch(in.op); m != nil {
		k.compileAccess(in, m)
		return
	}
	switch in.op {
	case "ld.param.u64":
		to := k.reg(in.args[0], 'L')
		at, found := k.params[strings.Trim(in.args[1], "[]")]
		require(found, in.text)
		in.run = func(t *ptxThread) { t.set(to, binary.LittleEndian.Uint64(t.block.params[at:])) }
	case "mov.b64":
		k.compilePacking(in)
	case "bra":
		var found bool
		in.target, found = k.labels[in.args[0]]
		require(found, in.text)
	case "bar.sync":
		require(in.args[0] == "0" && in.guard < 0, in.text)
	case "shfl.sync.bfly.b32":
		require(in.args[3] == "31" && in.args[4] == "0xffffffff" && in.guard < 0, in.text)
		k.reg(in.args[0], 'W')
		k.reg(in.args[1], 'W')
	case "ret":
	default:
		require(false, in.text)
	}
}

// compilePacking is for 64 bits that are taken apart or put together.
func (k *ptxKernel) compilePacking(in *ptxInstr) {
	if halves := list(in.args[0]); len(halves) == 2 {
		low, high, whole := k.reg(halves[0], 'W'), k.reg(halves[1], 'W'), k.value(in.args[1], 'L')
		in.run = func(t *ptxThread) {
			v := whole(t)
			t.set(low, uint64(uint32(v)))
			t.set(high, v>>32)
		}
		return
	}
	halves := list(in.args[1])
	require(len(halves) == 2, in.text)
	low, high, whole := k.value(halves[0], 'W'), k.value(halves[1], 'W'), k.reg(in.args[0], 'L')
	in.run = func(t *ptxThread) { t.set(whole, low(t)|high(t)<<32) }
}

func (k *ptxKernel) compileAccess(in *ptxInstr, m []string) {
	kind, shared := m[1], m[2] == "shared"
	memory, value, width := in.args[0], in.args[1], byte('L')
	if kind == "ld" {
		memory, value = value, memory
	}
	if shared {
		width = 'W'
	}
	name, offset, _ := strings.Cut(strings.Trim(memory, "[]"), "+")
	base := k.value(name, width)
	off, _ := strconv.ParseUint(offset, 0, 64)
	var regs []int
	for _, r := range list(value) {
		regs = append(regs, k.reg(r, 'L'))
	}
	bits, _ := strconv.Atoi(m[4])
	size, n := bits/8, bits/8*len(regs)
	require((len(regs) == 2) == (m[3] != ""), in.text)
	in.run = func(t *ptxThread) {
		addr, memory := base(t)+off, t.block.memory
		if addr%uint64(n) != 0 {
			panic(fmt.Sprintf("%d bytes at %#x, which is crooked", n, addr))
		}
		if shared {
			memory = t.block.shared(addr, n, kind == "st")
		}
		b := memory.at(addr, n, kind != "ld")
		for i, r := range regs {
			t.access(kind, r, b[i*size:][:size])
		}
	}
}

type ptxThread struct {
	block   *ptxBlock
	special [4]uint64 // %tid.x, %ntid.x, %ctaid.x, %nctaid.x
	regs    []uint64
	written []bool
	pc      int
}

func (t *ptxThread) get(i int) uint64 {
	if !t.written[i] {
		panic("a register is read that was not written")
	}
	return t.regs[i]
}

func (t *ptxThread) set(i int, v uint64) { t.regs[i], t.written[i] = v, true }

func (t *ptxThread) access(kind string, r int, b []byte) {
	switch {
	case kind == "st":
		binary.LittleEndian.PutUint64(b, t.get(r))
	case kind == "red":
		binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)+t.get(r))
	case len(b) == 1:
		t.set(r, uint64(b[0]))
	default:
		t.set(r, binary.LittleEndian.Uint64(b))
	}
}

type ptxBlock struct {
	kernel  *ptxKernel
	params  []byte
	memory  ptxMemory
	own     ptxMemory // shared among its threads
	written []bool    // each byte of that
	threads []ptxThread
	lots    *rand.Rand
}

// shared returns the shared memory, if what is read of it was written.
func (b *ptxBlock) shared(addr uint64, n int, write bool) ptxMemory {
	b.own.at(addr, n, write)
	written := b.written[addr:][:n]
	for i := range written {
		if written[i] = written[i] || write; !written[i] {
			panic("shared memory is read that was not written")
		}
	}
	return b.own
}

// launch runs the kernel.
func (k *ptxKernel) launch(blocks, threads int, memory ptxMemory, lots *rand.Rand, params ...uint64) error {
	if blocks < 1 || threads < 1 || threads > k.maxThreads || len(params) != len(k.params) {
		return fmt.Errorf("a launch of %d × %d threads with %d parameters", blocks, threads, len(params))
	}
	b := ptxBlock{kernel: k, memory: memory, lots: lots, threads: make([]ptxThread, threads)}
	for _, p := range params {
		b.params = binary.LittleEndian.AppendUint64(b.params, p)
	}
	b.own, b.written = ptxMemory{{bytes: make([]byte, k.sharedSize), write: true}}, make([]bool, k.sharedSize)
	for i := range b.threads {
		b.threads[i] = ptxThread{block: &b, regs: make([]uint64, len(k.regs)), written: make([]bool, len(k.regs))}
	}
	for _, id := range lots.Perm(blocks) {
		clear(b.written)
		for i := range b.threads {
			t := &b.threads[i]
			clear(t.written)
			t.pc, t.special = 0, [4]uint64{uint64(i), uint64(threads), uint64(id), uint64(blocks)}
		}
		if err := b.run(); err != nil {
			return fmt.Errorf("block %d: %w", id, err)
		}
	}
	return nil
}

// run runs one warp after the other as far as each gets, and then lets them pass the barrier, until
// all threads are done.
func (b *ptxBlock) run() (err error) {
	var at *ptxInstr
	defer func() {
		if f := recover(); f != nil {
			err = fmt.Errorf("line %d, %q: %v", at.line, at.text, f)
		}
	}()
	warps := slices.Collect(slices.Chunk(b.threads, ptxWarp))
	for {
		for _, i := range b.lots.Perm(len(warps)) {
			for b.step(warps[i], &at) {
			}
		}
		for i := range b.threads {
			if t := &b.threads[i]; t.pc != b.threads[0].pc {
				panic(fmt.Sprintf("threads 0 and %d wait for each other in different places", i))
			}
		}
		if b.threads[0].pc == ptxDone {
			return nil
		}
		at = &b.kernel.code[b.threads[0].pc]
		require(at.op == "bar.sync", "a warp that is not whole stops at "+at.text)
		for i := range b.threads {
			b.threads[i].pc++
		}
	}
}

// step executes one instruction for all threads of a warp that are there; false if none can go on.
func (b *ptxBlock) step(warp []ptxThread, at **ptxInstr) bool {
	var places []int // where execution can go on
	for i := range warp {
		pc := warp[i].pc
		if pc != ptxDone && !slices.Contains(places, pc) && (!waits(b.kernel.code[pc].op) || b.meet(warp, pc)) {
			places = append(places, pc)
		}
	}
	if len(places) == 0 {
		return false
	}
	pc := places[b.lots.IntN(len(places))]
	in := &b.kernel.code[pc]
	*at = in
	if in.op == "shfl.sync.bfly.b32" {
		b.shuffle(warp, in)
		return true
	}
	for i := range warp {
		if t := &warp[i]; t.pc == pc {
			t.pc++
			switch {
			case in.guard >= 0 && (t.get(in.guard) == 0) != in.negate:
			case in.op == "bra":
				t.pc = in.target
			case in.op == "ret":
				t.pc = ptxDone
			default:
				in.run(t)
			}
		}
	}
	return true
}

// waits says whether threads wait for others there.
func waits(op string) bool { return op == "bar.sync" || strings.HasPrefix(op, "shfl.sync") }

// meet says whether all of a warp are where they exchange something.
func (b *ptxBlock) meet(warp []ptxThread, pc int) bool {
	return len(warp) == ptxWarp && b.kernel.code[pc].op != "bar.sync" &&
		!slices.ContainsFunc(warp, func(t ptxThread) bool { return t.pc != pc })
}

// shuffle gives each thread what the one has whose number differs by the given bits.
func (b *ptxBlock) shuffle(warp []ptxThread, in *ptxInstr) {
	to, from, lane := b.kernel.reg(in.args[0], 'W'), b.kernel.reg(in.args[1], 'W'), b.kernel.value(in.args[2], 'W')
	var values [ptxWarp]uint64
	for i := range warp {
		other := i ^ int(lane(&warp[i]))
		if bits.Len(uint(other)) > 5 {
			panic("a shuffle with a thread of no warp")
		}
		values[i] = warp[other].get(from)
	}
	for i := range warp {
		warp[i].set(to, values[i])
		warp[i].pc++
	}
}
