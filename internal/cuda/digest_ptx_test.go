package cuda_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// digestCase is a launch of the kernel.
type digestCase struct {
	blocks, threads int
	size            int
	crooked         bool // src is no multiple of 16
	first           uint64
}

// check compares what the kernel adds with what tier defines.
func (c digestCase) check(k *ptxKernel, lots *rand.Rand) error {
	const src, out = 0x7f52_3460_0000, 0x7f52_0000_0008
	at := uint64(src)
	if c.crooked {
		at += 8
	}
	data, sums := make([]byte, c.size), make([]byte, 16)
	for i := range data {
		data[i] = byte(lots.Uint32())
	}
	was := [2]uint64{lots.Uint64(), lots.Uint64()}
	binary.LittleEndian.PutUint64(sums, was[0])
	binary.LittleEndian.PutUint64(sums[8:], was[1])
	memory := ptxMemory{{at, data, false}, {out, sums, true}}
	if err := k.launch(c.blocks, c.threads, memory, lots, at, uint64(c.size), c.first, out); err != nil {
		return fmt.Errorf("%+v: %w", c, err)
	}
	want := tier.DigestBytes(data, int64(c.first))
	got := tier.Digest{Hash: binary.LittleEndian.Uint64(sums) - was[0], Sum: binary.LittleEndian.Uint64(sums[8:]) - was[1]}
	if got != want {
		return fmt.Errorf("%+v: added were %x, want %x", c, got, want)
	}
	return nil
}

// digestCases are all remainders of a size, both alignments, positions that are at and beyond each
// end of their range, and enough for some turns of the kernel's loops; random ones besides.
func digestCases(lots *rand.Rand, random int) (all []digestCase) {
	firsts := []uint64{0, 1, 1<<63 - 1, 1 << 63, 1<<64 - 1, 1<<64 - 100}
	for size := range 64 {
		for i, base := range []int{0, 2048, 4096} {
			all = append(all, digestCase{1, 32, base + size, i == 1, firsts[size%len(firsts)]})
			all = append(all, digestCase{1, 32, base + size, i != 1, lots.Uint64()})
		}
		all = append(all, digestCase{3, 256, size, size%2 == 0, lots.Uint64()})
	}
	for i := range random {
		shape := [][2]int{{1, 32}, {1, 64}, {2, 96}, {3, 256}}[i%4]
		all = append(all, digestCase{shape[0], shape[1], lots.IntN(20_001), i%8 < 4, lots.Uint64()})
	}
	return all
}

func parsed(t testing.TB) *ptxKernel {
	t.Helper()
	k, err := parsePTX(cuda.DigestPTX())
	ok(t, err)
	return k
}

// The kernel's text computes what tier defines.
func TestKernelComputesTheDigest(t *testing.T) {
	k, lots := parsed(t), rand.New(rand.NewPCG(1, 2))
	cases := append(digestCases(lots, 80),
		digestCase{3, 256, 3*256*64*2 + 48_000 + 3, true, 17}, // more than one turn of the loops, with many warps
		digestCase{132, 256, 20_000, true, 1 << 40},
		digestCase{132, 256, 132*256*64 + 9, false, 1<<64 - 5})
	if testing.Short() {
		cases = cases[:len(cases)-2]
	}
	first, step := testseed.Share(t, 5) // which has no factor in common with the turns of the cases
	for i := first; i < len(cases); i += step {
		if err := cases[i].check(k, lots); err != nil {
			t.Fatal(err)
		}
	}
}

// Mistakes in the text are found, so the test above can fail.
func TestMistakesInTheKernelAreFound(t *testing.T) {
	text, tried := cuda.DigestPTX(), 0
	for name, c := range map[string]struct{ old, new string }{
		"another rotation":                   {"turned_low, high, low, 31", "turned_low, high, low, 30"},
		"halves exchanged":                   {"{low, high}, h", "{high, low}, h"},
		"another multiplier":                 {"0xbf58476d1ce4e5b9", "0xbf58476d1ce4e5b7"},
		"the salt of the other word":         {"xor.b64 h, d1, t", "xor.b64 h, d1, salt"},
		"no salt for the next pair":          {"add.u64 salt, salt, salt_stride;", ""},
		"a load that is too wide at the end": {"ld.global.u8", "ld.global.u64"},
		"bytes in the wrong order":           {"shl.b64 a0, a0, 8", "shl.b64 a0, a0, 4"},
		"no word before the pairs":           {"and.b64 head, head, 1;", "and.b64 head, head, 0;"},
		"a word before the pairs in nothing": {"min.u64 head, head, words;", ""},
		"an odd word too many":               {"and.b64 odd, pairs, 1;", "mov.u64 odd, 1;"},
		"positions from nowhere":             {"add.u64 t, t, first;", ""},
		"a piece's position":                 {"selp.u64 nth, 0, nth, q;", ""},
		"the last four beyond the end":       {"setp.ge.u64 p, last, end", "setp.gt.u64 p, last, end"},
		"the last pair beyond the end":       {"setp.ge.u64 p, at, end", "setp.gt.u64 p, at, end"},
		"pairs twice":                        {"ld.global.v2.u64 {c0, c1}, [at];\n\tadd.u64 at, at, stride;", "ld.global.v2.u64 {c0, c1}, [at];"},
		"half of a warp":                     {"mov.u32 delta, 16;", "mov.u32 delta, 8;"},
		"threads that do not exchange":       {"@p bra PAIRS;", "@p bra DONE;"},
		"no barrier":                         {"bar.sync 0;", ""},
		"a warp too few":                     {"shr.u32 slots, ntid, 1;", "shr.u32 slots, ntid, 2;"},
		"a warp too many":                    {"setp.lt.u32 p, slot, slots;\n\t@p bra WARP", "setp.lt.u32 p, slots, slot;\n\t@!p bra WARP"},
		"one word for both":                  {"[out+8]", "[out]"},
		"every thread adds":                  {"@p bra DONE;", ""},
		"a register of no value":             {"mov.u64 sum, 0;", ""},
		"words of the wrong width":           {"add.u64 end, at, t", "add.u64 end, at, tid"},
	} {
		if tried++; testing.Short() && tried > 6 {
			break // others in the next run: a map has no order
		}
		broken := strings.ReplaceAll(text, c.old, c.new)
		if broken == text {
			t.Errorf("%s: %q is not in the text", name, c.old)
			continue
		}
		if err := tryDigest(broken); err == nil {
			t.Errorf("%s: nobody noticed", name)
		} else {
			t.Logf("%s: %v", name, err)
		}
	}
	ok(t, tryDigest(text))
}

func tryDigest(text string) error {
	k, err := parsePTX(text)
	if err != nil {
		return err
	}
	lots := rand.New(rand.NewPCG(3, 4))
	for _, c := range digestCases(lots, 20) {
		if err := c.check(k, lots); err != nil {
			return err
		}
	}
	return nil
}

// The text is what LoadModule and Launch take it for, and not newer than the oldest driver that is
// bound.
func TestKernelText(t *testing.T) {
	k := parsed(t)
	if k.name != "spillway_digest" || len(k.params) != 4 || k.target != "sm_50" {
		t.Errorf("the text has a kernel %s of %d parameters for %s", k.name, len(k.params), k.target)
	}
	if v, err := strconv.ParseFloat(k.version, 64); err != nil || v > 7.0 { // what CUDA 11.0 came with
		t.Errorf("the text is PTX %s", k.version)
	}
	for i, name := range []string{"src", "size", "first", "out"} { // in this order, 64 bits each
		if at, found := k.params["param_"+name]; !found || at != 8*i {
			t.Errorf("the parameter %s is at %d", name, at)
		}
	}
	if g := cuda.DigestGrid(1, 1); int(g.Threads) != k.maxThreads || g.Threads%ptxWarp != 0 {
		t.Errorf("blocks have %d threads, of %d at most", g.Threads, k.maxThreads)
	}
	if strings.ContainsFunc(cuda.DigestPTX(), func(r rune) bool { return r == 0 || r > 126 }) {
		t.Error("the text has characters that the driver does not expect")
	}
}

func TestDigestGrid(t *testing.T) {
	for _, c := range []struct {
		size            int64
		multiprocessors int
		want            uint32
	}{
		{1, 132, 1}, {4096, 132, 1}, {4097, 132, 2}, {1 << 20, 132, 256}, {528 * 4096, 132, 528}, {528*4096 + 1, 132, 528},
		{1<<63 - 1, 132, 528}, {1 << 40, 1, 4}, {1 << 40, 0, 4}, {1, 0, 1},
	} {
		if g := cuda.DigestGrid(c.size, c.multiprocessors); g.Blocks != c.want || g.Threads != 256 {
			t.Errorf("%d bytes on %d multiprocessors: %+v, want %d blocks", c.size, c.multiprocessors, g, c.want)
		}
	}
}

// findPTXAS looks where NVIDIA's assembler may be.
func findPTXAS() (string, error) {
	for _, name := range []string{os.Getenv("PTXAS"), "ptxas", filepath.Join(os.Getenv("CUDA_HOME"), "bin", "ptxas")} {
		if path, err := exec.LookPath(name); err == nil && name != "" {
			return path, nil
		}
	}
	return "", errors.New("no ptxas in $PTXAS, the path or $CUDA_HOME/bin: the texts are not compiled")
}

// NVIDIA's assembler accepts both texts for each kind of device, and needs no more registers than
// the launch of the digest counts with.
func TestAssembler(t *testing.T) {
	ptxas, err := findPTXAS()
	if err != nil {
		t.Skip("needs NVIDIA's assembler: ", err)
	}
	for name, text := range map[string]string{"digest": cuda.DigestPTX(), "example": examplePTX(t)} {
		t.Run(name, func(t *testing.T) { assemble(t, ptxas, text) })
	}
}

func assemble(t *testing.T, ptxas, ptx string) {
	dir := t.TempDir()
	text := filepath.Join(dir, "kernel.ptx")
	ok(t, os.WriteFile(text, []byte(ptx), 0o600))
	used := regexp.MustCompile(`Used (\d+) registers`)
	compiled := 0
	for _, arch := range []string{"sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_90", "sm_100", "sm_120"} {
		out, err := exec.Command(ptxas, "-v", "-arch", arch, "-o", filepath.Join(dir, arch), text).CombinedOutput()
		if err != nil && strings.Contains(string(out), "is not defined for option 'gpu-name'") {
			t.Logf("this ptxas does not know %s", arch)
			continue
		}
		m := used.FindSubmatch(out)
		if err != nil || m == nil || !strings.Contains(string(out), " 0 bytes spill stores, 0 bytes spill loads") ||
			strings.Contains(string(out), "warning") {
			t.Errorf("%s: %v\n%s", arch, err, out)
			continue
		}
		if n, _ := strconv.Atoi(string(m[1])); n > 64 {
			t.Errorf("%s: %d registers: four blocks do not fit", arch, n)
		}
		t.Logf("%s: %s registers", arch, m[1])
		compiled++
	}
	if compiled == 0 {
		t.Errorf("%s knows none of the devices", ptxas)
	}
}
