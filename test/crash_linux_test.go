package test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/tiertest"
	"github.com/spillway-db/spillway/topology"
)

// childEnv makes the test binary a process that spills until it is killed.
const childEnv = "SPILLWAY_TEST_CHILD"

func TestMain(m *testing.M) {
	debug.SetGCPercent(400) // the heap is small: to collect it at each doubling was a tenth of the time
	if job := os.Getenv(childEnv); job != "" {
		os.Exit(childMain(job, os.Args[1:]))
	}
	if testseed.Raced { // arenas are of Go's heap then, which would otherwise grow to twice the largest ones
		debug.SetMemoryLimit(1 << 30)
	}
	os.Exit(m.Run())
}

// noAnonymous is a file system without anonymous files, so that spill files have names.
var noAnonymous = faultfs.Rule{Ops: []string{"open-anonymous"}, Effect: faultfs.Fail(syscall.EOPNOTSUPP)}

// childMain does one of the jobs that tests start processes for. It fails with a line on
// standard error. A process whose parent is gone ends.
func childMain(job string, args []string) int {
	go func() {
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(3)
	}()
	err := fmt.Errorf("there is no job %q", job)
	switch job {
	case "spill":
		err = childSpills(args[0], args[1] == "named", args[2])
	case "namespace":
		err = namespaceJobs[args[1]](args[0])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// childSpills opens engines in dir, spills and closes them again, and says so with a byte
// for each operation of the file system. It ends when it is killed: by its parent if
// index is "-", else by itself, right before the operation of that index.
func childSpills(dir string, named bool, index string) error {
	rules := []faultfs.Rule{{Effect: faultfs.Do(func(string, string) { _, _ = os.Stdout.Write([]byte{'.'}) })}}
	if index != "-" {
		n, err := strconv.Atoi(index)
		if err != nil {
			return err
		}
		die := faultfs.Do(func(string, string) { _ = syscall.Kill(os.Getpid(), syscall.SIGKILL) })
		rules = append([]faultfs.Rule{{Skip: n, Times: 1, Effect: die}}, rules...)
	}
	files := disk.OS()
	if named {
		files = faultfs.New(files, 1, noAnonymous)
	}
	top, err := topology.Discover(context.Background(), topology.Options{})
	if err != nil {
		return err
	}
	for seed := uint64(os.Getpid()); ; seed++ {
		if err := spillOnce(context.Background(), dir, faultfs.New(files, 1, rules...), top, seed, 2); err != nil {
			return err
		}
	}
}

// spillConfig is a small engine whose disk is in dir.
func spillConfig(dir string, files disk.FS, top *topology.Topology) spillway.Config {
	return spillway.Config{
		GPUs: []spillway.GPUConfig{
			{Backend: spillway.Sim, Memory: spillway.Bytes(256 << 10)},
		},
		HostMemory:    spillway.Bytes(512 << 10),
		Disks:         []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(4 << 20), FS: files}},
		Topology:      top,
		MonitorPeriod: time.Millisecond,
		StallTimeout:  300 * time.Millisecond,
		Logger:        slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
}

// spillOnce opens an engine, puts several times what its memories hold, and in each round
// moves every batch to disk and back and looks whether it is what was put.
func spillOnce(
	ctx context.Context,
	dir string,
	files disk.FS,
	top *topology.Topology,
	seed uint64,
	rounds int,
) (err error) {
	eng, err := spillway.Open(ctx, spillConfig(dir, files, top))
	if err != nil {
		return fmt.Errorf("opening: %w", err)
	}
	defer func() {
		if e := eng.Close(); e != nil {
			err = errors.Join(err, fmt.Errorf("closing: %w", e))
		}
	}()
	plan, err := eng.Plan("spill")
	if err != nil {
		return err
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		return err
	}
	var records []arrow.RecordBatch
	for i := range 12 {
		rec := numberedRecord(int64(seed<<8)+int64(i), 1000+97*i, wordList(1, 20))
		if err := repo.Put(ctx, i, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
			return fmt.Errorf("putting: %w", err)
		}
		records = append(records, rec)
	}
	for range rounds {
		for i, rec := range records {
			b, ok := repo.Peek(i)
			if !ok {
				return fmt.Errorf("batch %d is lost", i)
			}
			if err := thereAndBack(ctx, eng, b, rec); err != nil {
				return fmt.Errorf("batch %d: %w", i, err)
			}
		}
	}
	return nil
}

// thereAndBack moves a batch to disk and to the GPU, where it must be what was put.
func thereAndBack(ctx context.Context, eng *spillway.Engine, b *batch.Batch, want arrow.RecordBatch) (err error) {
	err = eng.Mover().Move(ctx, b, reservation.AnyInTier(tier.Disk))
	if err != nil {
		return fmt.Errorf("to disk: %w", err)
	}
	h, err := eng.Mover().Acquire(ctx, b, reservation.AnyInTier(tier.GPU))
	if err != nil {
		return fmt.Errorf("from disk: %w", err)
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	got, err := eng.Mover().Record(ctx, h)
	if err != nil {
		return err
	}
	defer got.Release()
	return convert.Equal(want, got)
}

// child is a process that childMain runs in.
type child struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdin  io.Closer
	stdout *bufio.Reader
	stderr bytes.Buffer
}

// startChild starts a process for a job. setup, if it is not nil, changes how.
func startChild(t *testing.T, job string, setup func(*exec.Cmd), args ...string) (*child, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{t: t, cmd: exec.Command(exe, args...)}
	c.cmd.Env = append(os.Environ(), childEnv+"="+job)
	c.cmd.Stderr = &c.stderr
	stdin, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.stdin, c.stdout = stdin, bufio.NewReader(stdout)
	if setup != nil {
		setup(c.cmd)
	}
	return c, c.cmd.Start()
}

// operations reads until n operations of the child are done, or the child is.
func (c *child) operations(n int) {
	for range n {
		if _, err := c.stdout.ReadByte(); err != nil {
			return
		}
	}
}

// killed waits until the child is dead, and checks that it died of being killed.
func (c *child) killed() {
	_, _ = io.Copy(io.Discard, c.stdout)
	err := c.cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		c.t.Errorf("the process was not killed but ended with %v: %s", err, c.stderr.String())
	}
}

// spillAndDie runs a process that spills in dir, and kills it: right before the operation
// of an index, or, if that is negative, some time after -index operations.
func spillAndDie(t *testing.T, dir string, named bool, index int) {
	mode, at := "anonymous", "-"
	if named {
		mode = "named"
	}
	if index >= 0 {
		at = strconv.Itoa(index)
	}
	c, err := startChild(t, "spill", nil, dir, mode, at)
	if err != nil {
		t.Error(err)
		return
	}
	if index < 0 {
		c.operations(-index)
		if err := c.cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
	}
	c.killed()
}

// foreign fills a directory with files that are not ours, some of them similar: they must not be
// touched. It returns what is there.
func foreign(t *testing.T, dir string) map[string]string {
	t.Helper()
	outside := t.TempDir() // what links lead to
	for path, content := range map[string]string{
		"data.parquet": "rows", "segment-0000": "not in a directory of ours", "lock": "",
		"spillway-123/segment-0000": "no number behind it", "spillway-123/lock": "",
		"spillway-1-0123456789abcdef/segment-0000": "without a lock",
		"spillway-2-0123456789abcdef":              "a file",
		"spillway-3-0123456789abcdeg/lock":         "", "spillway-3-0123456789abcdeg/segment-0000": "g is no digit",
		"spillway--0123456789abcdef/segment-0000": "no process", "Spillway-4-0123456789abcdef/lock": "",
		"spillway-5-0123456789abcdef.bak/segment-0000": "a copy", "spillway-5-0123456789abcdef.bak/lock": "",
		"spillway-6-0123456789abcdef/lock/segment-0000": "the lock is a directory",
		outside + "/dead/lock":                          "", outside + "/dead/segment-0000": "behind a link",
		outside + "/key": "a lock behind a link",
	} {
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		if err := errors.Join(
			os.MkdirAll(filepath.Dir(path), 0o700),
			os.WriteFile(path, []byte(content), 0o640),
		); err != nil {
			t.Fatal(err)
		}
	}
	err := errors.Join(
		os.Symlink(filepath.Join(outside, "dead"), filepath.Join(dir, "spillway-7-0123456789abcdef")),
		os.Symlink("nowhere", filepath.Join(dir, "spillway-8-0123456789abcdef")),
		os.Mkdir(filepath.Join(dir, "spillway-9-0123456789abcdef"), 0o700),
		os.Symlink(filepath.Join(outside, "key"), filepath.Join(dir, "spillway-9-0123456789abcdef", "lock")),
		os.WriteFile(
			filepath.Join(dir, "spillway-9-0123456789abcdef", "segment-0000"),
			[]byte("its lock is a link"),
			0o600,
		),
		os.Mkdir(filepath.Join(dir, "spillway-10"), 0o700),
	)
	if err != nil {
		t.Fatal(err)
	}
	return snapshot(t, dir, outside)
}

// snapshot describes all that lies below directories: kinds, modes, numbers, content.
func snapshot(t *testing.T, dirs ...string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
			if err != nil || path == dir {
				return err
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			var content []byte
			switch {
			case info.Mode().IsRegular():
				content, err = os.ReadFile(path)
			case info.Mode()&os.ModeSymlink != 0:
				var to string
				to, err = os.Readlink(path)
				content = []byte(to)
			}
			all[path] = fmt.Sprintf("%v, number %d: %q", info.Mode(), info.Sys().(*syscall.Stat_t).Ino, content)
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	all[""] = strings.Join(dirs, "\n") // for unchanged
	return all
}

// unchanged checks that what was in directories is there, and nothing else.
func unchanged(t *testing.T, was map[string]string) {
	t.Helper()
	is := snapshot(t, strings.Split(was[""], "\n")...)
	for path, want := range was {
		if is[path] != want {
			t.Errorf("%s was %s, and is %s", path, want, is[path])
		}
	}
	for path, got := range is {
		if _, ok := was[path]; !ok {
			t.Errorf("%s is left behind: %s", path, got)
		}
	}
}

// openAndClose opens the next engine in a directory, with files of the kind that it has
// there.
func openAndClose(t *testing.T, dir string, top *topology.Topology) {
	t.Helper()
	cfg := spillConfig(dir, nil, top)
	cfg.GPUs = []spillway.GPUConfig{}
	eng, err := spillway.Open(t.Context(), cfg)
	if err == nil {
		err = eng.Close()
	}
	if err != nil {
		t.Error(err)
	}
}

// discover returns the machine's topology: once for many engines.
func discover(t *testing.T) *topology.Topology {
	t.Helper()
	top, err := topology.Discover(t.Context(), topology.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return top
}

// killsAtOnce is how many processes are under way at a time.
const killsAtOnce = 4

// TestKilledEngines: engines are killed 120 times, at every moment of their lives: of the
// first operations right before each, the first of which open the volume, and else at
// random. The next engine removes what they left, and nothing else.
func TestKilledEngines(t *testing.T) {
	tiertest.NoLeaks(t)
	top := discover(t)
	_, lock := lifeOfVolume(t)
	kills := testseed.Rounds(120, 40)
	for _, named := range []bool{false, true} {
		t.Run(map[bool]string{false: "anonymous", true: "named"}[named], func(t *testing.T) {
			t.Parallel() // processes wait for the disk
			var lanes sync.WaitGroup
			var random, met atomic.Int32 // kills at random, and how many of them left something
			for lane := range killsAtOnce {
				dir := t.TempDir()
				if lane%2 == 1 { // on the disk they wait for it more than they work
					dir = testfs.MemoryDir(t)
				}
				was := foreign(t, dir)
				rng := rand.New(rand.NewPCG(uint64(lane), 5))
				lanes.Go(func() {
					for n := lane; n < kills/2; n += killsAtOnce {
						index := n
						if n >= kills/3 {
							index = -1 - rng.IntN(400)
						}
						spillAndDie(t, dir, named, index)
						entries, _ := os.ReadDir(dir)
						switch left := len(entries) > topLevel(was, dir); {
						case !named:
							unchanged(t, was)
						case index >= 0 && left != (index >= lock):
							t.Errorf("it left something: %v, and its lock is made by operation %d", left, lock)
						case index < 0:
							random.Add(1)
							if left {
								met.Add(1)
							}
						}
						openAndClose(t, dir, top)
						unchanged(t, was)
						if t.Failed() {
							t.Errorf("killed at %d", index)
							return
						}
					}
				})
			}
			lanes.Wait()
			if !named {
				return
			}
			t.Logf("of %d processes that were killed at random %d left something", random.Load(), met.Load())
			if met.Load() < random.Load()/4 { // some die between two lives
				t.Error("too few of them met files")
			}
		})
	}
}

// topLevel counts the entries of a directory in a snapshot.
func topLevel(was map[string]string, dir string) (n int) {
	for path := range was {
		if filepath.Dir(path) == dir {
			n++
		}
	}
	return n
}

// lifeOfVolume returns the operations of a volume that is opened beside foreign files and closed,
// and the index of the one that makes its lock: the first with a directory of the volume's.
func lifeOfVolume(t *testing.T) (ops []string, lock int) {
	t.Helper()
	files := faultfs.New(faultfs.New(disk.OS(), 1, noAnonymous), 1,
		faultfs.Rule{Effect: faultfs.Do(func(op string, _ string) { ops = append(ops, op) })})
	dir := t.TempDir() // what is there is looked at, too
	was := foreign(t, dir)
	v, err := volumes.Open(volumes.Config{Dir: dir, Capacity: 4 << 20, FS: files})
	if err != nil {
		t.Fatal(err)
	}
	opening := len(ops)
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
	unchanged(t, was)
	lock = slices.Index(ops, "mkdir") + 1
	if lock < 1 || ops[lock] != "lock" || opening < lock+3 {
		t.Fatalf("to open a volume is %v", ops[:opening])
	}
	return ops, lock
}

// TestKilledWhileOpening: a process that dies between the making of its directory and of
// its lock leaves one that the next engine knows for what it is; so does one that
// dies before any other operation of opening and closing.
func TestKilledWhileOpening(t *testing.T) {
	t.Parallel()
	top := discover(t)
	ops, lock := lifeOfVolume(t)
	for _, c := range []struct {
		at   int
		left []string // in the directory of named files; nil: there is none
	}{
		{lock - 1, nil},
		{lock, []string{}},
		{lock + 1, []string{"lock"}},
		{lock + 2, []string{"lock", "segment-0000"}},
	} {
		dir := t.TempDir()
		was := foreign(t, dir)
		spillAndDie(t, dir, true, c.at)
		var left []string
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if _, known := was[filepath.Join(dir, e.Name())]; known {
				continue
			}
			left = []string{}
			inside, err := os.ReadDir(filepath.Join(dir, e.Name()))
			if err != nil {
				t.Error(err)
			}
			for _, e := range inside {
				left = append(left, e.Name())
			}
		}
		if !slices.Equal(left, c.left) || (left == nil) != (c.left == nil) {
			t.Errorf("killed before %s a process leaves %q, want %q", ops[c.at], left, c.left)
		}
		openAndClose(t, dir, top)
		unchanged(t, was)
	}
}

// TestEnginesInOneDirectory: two engines of this process and two of others open, spill
// and close in one directory, while more are killed there. Each finds its own data all
// the time, and in the end there is nothing.
func TestEnginesInOneDirectory(t *testing.T) {
	seed := testseed.One(t)
	tiertest.NoLeaks(t)
	top := discover(t)
	lives, kills := testseed.Rounds(12, 2), testseed.Rounds(12, 3)
	for _, kinds := range [][2]bool{{true, true}, {false, true}} { // of files: named or not
		t.Run(fmt.Sprintf("named=%v,%v", kinds[0], kinds[1]), func(t *testing.T) {
			t.Parallel() // engines wait for the disk
			dir := t.TempDir()
			if !kinds[0] { // the other two were on the disk
				dir = testfs.MemoryDir(t)
			}
			was := foreign(t, dir)
			var beside, engines sync.WaitGroup
			for i, named := range kinds {
				engines.Go(func() { // of this process
					files := disk.OS()
					if named {
						files = faultfs.New(files, 1, noAnonymous)
					}
					for n := range lives {
						if err := spillOnce(t.Context(), dir, files, top, uint64(i*100+n), 1); err != nil {
							t.Errorf("engine %d of this process, life %d: %v", i, n, err)
							return
						}
					}
				})
			}
			var others []*child // are killed in the end
			for _, named := range kinds {
				mode := map[bool]string{false: "anonymous", true: "named"}[named]
				c, err := startChild(t, "spill", nil, dir, mode, "-")
				if err != nil {
					t.Fatal(err)
				}
				others = append(others, c)
				beside.Go(c.killed)
			}
			for i := range 2 { // killed
				rng := rand.New(rand.NewPCG(seed, uint64(i)))
				engines.Go(func() {
					for range kills {
						spillAndDie(t, dir, kinds[i], -1-rng.IntN(300))
					}
				})
			}
			engines.Wait()
			for _, c := range others {
				if err := c.cmd.Process.Kill(); err != nil { // one that found something wrong has ended
					t.Error(err)
				}
			}
			beside.Wait()
			openAndClose(t, dir, top)
			unchanged(t, was)
		})
	}
}
