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
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/persist"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// keepChildEnv makes a test process one that fills a directory until it is killed: it is the
// directory, and the others say how what goes there is written.
const (
	keepChildEnv = "SPILLWAY_TEST_KEEP_DIR"
	keepCodecEnv = "SPILLWAY_TEST_KEEP_CODEC"
	keepSealEnv  = "SPILLWAY_TEST_KEEP_SEAL" // "true": it is encrypted
)

// persistentEngine is an engine with one disk that keeps.
func persistentEngine(t testing.TB, dir string, change ...func(*spillway.Config)) *spillway.Engine {
	t.Helper()
	eng, err := openPersistent(t, dir, change...)
	if err != nil {
		t.Fatal(err)
	}
	return eng
}

func openPersistent(t testing.TB, dir string, change ...func(*spillway.Config)) (*spillway.Engine, error) {
	cfg := spillway.Config{
		GPUs:       []spillway.GPUConfig{},
		HostMemory: spillway.Bytes(4 << 20),
		Disks:      []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(16 << 20), Persist: true}},
		Codec:      convert.CodecNone,
		Topology:   thisMachine(),
		Logger:     slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	if onEncryptedDisks(t) {
		sealed(&cfg)
	}
	for _, c := range change {
		c(&cfg)
	}
	return spillway.Open(t.Context(), cfg)
}

// persistTypes are the types of the records that are kept: all whose schema Arrow IPC can say.
var persistTypes = sync.OnceValue(func() (types []arrow.DataType) {
	for _, dt := range arrowgen.Types() {
		if _, err := persist.EncodeSchema(arrowgen.Schema(dt)); err == nil {
			types = append(types, dt)
		}
	}
	return types
})

// commonWords is a dictionary that many records share.
var commonWords = sync.OnceValue(func() arrow.Array { return wordList(1, 1500) })

// persistedRecord makes the n-th record: its number is in the first column, a column of some type,
// and in most a dictionary that is an image of its own: shared or not, or longer than one before.
func persistedRecord(n int64) arrow.RecordBatch {
	g := arrowgen.New(uint64(n))
	rows := 50 + int(n%7)*10
	if n%5 == 0 {
		rows = 3000
	}
	var words arrow.Array
	switch n % 3 {
	case 0:
		words = commonWords()
	case 1:
		words = wordList(uint64(n), 900)
	case 2:
		if n%2 == 0 { // each begins with the values of the one before
			words = wordList(2, 900+50*int(n))
		}
	}
	return withWords(n, g.Array(persistTypes()[int(n)%len(persistTypes())], rows), words)
}

// withWords makes a record of rows that number from n on, of col, and of words.
func withWords(n int64, col, words arrow.Array) arrow.RecordBatch {
	rows := col.Len()
	numbers := array.NewInt64Builder(memory.DefaultAllocator)
	for i := range int64(rows) {
		numbers.Append(n + i)
	}
	meta := arrow.NewMetadata([]string{"made"}, []string{"for the test"})
	fields := []arrow.Field{
		{Name: "n", Type: arrow.PrimitiveTypes.Int64},
		{Name: "c", Type: col.DataType(), Nullable: true, Metadata: meta},
	}
	cols := []arrow.Array{numbers.NewArray(), col}
	if words != nil {
		dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: words.DataType()}
		indices := array.NewInt32Builder(memory.DefaultAllocator)
		for i := range rows {
			indices.Append(int32((int64(i)*7 + n) % int64(words.Len())))
		}
		fields = append(fields, arrow.Field{Name: "w", Type: dt})
		cols = append(cols, array.NewDictionaryArray(dt, indices.NewArray(), words))
	}
	return array.NewRecordBatchWithMetadata(
		arrow.NewSchema(fields, &meta),
		cols,
		int64(rows),
		arrow.NewMetadata([]string{"n"}, []string{strconv.FormatInt(n, 10)}),
	)
}

// TestPersistChild is no test but the process that TestKilledProcessIsAdopted kills. It says
// "+ n" when record n is on disk, and "- n" before it drops it. Every other one leaves a copy on
// disk then, and every fourth has only one there that was written ahead.
func TestPersistChild(t *testing.T) {
	dir := os.Getenv(keepChildEnv)
	if dir == "" {
		t.Skip("needs the directory that TestKilledProcessIsAdopted, which runs it as a process of its own, gives it")
	}
	codec, err := convert.ParseCodec(os.Getenv(keepCodecEnv))
	if err != nil {
		t.Fatal(err)
	}
	eng := persistentEngine(t, dir, func(c *spillway.Config) {
		c.Codec, c.WriteAhead = codec, mib // to disks where batches persist, too
		if os.Getenv(keepSealEnv) == "true" {
			sealed(c)
		}
	})
	plan, err := eng.Plan("query")
	if err != nil {
		t.Fatal(err)
	}
	var there []*batch.Batch
	var numbers []int64
	for n := int64(1); ; n++ {
		repo := joinOf(t, plan, int(n))
		var b *batch.Batch
		if n%4 == 1 {
			b = putAhead(t, eng, repo, n)
		} else {
			b = putPersisted(t, eng, repo, n, n%4 != 0)
		}
		fmt.Println("+", n)
		if n%2 == 0 {
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Host)); err != nil {
				t.Fatal(err)
			}
		}
		there, numbers = append(there, b), append(numbers, n)
		if len(there) > 12 {
			fmt.Println("-", numbers[0])
			if err := there[0].Drop(); err != nil {
				t.Fatal(err)
			}
			there, numbers = there[1:], numbers[1:]
		}
	}
}

// joinOf makes a repository. Those with odd ports have batches that are read by rows.
func joinOf(t testing.TB, plan *spillway.Plan, port int) *repository.Repository {
	t.Helper()
	key := repository.Key{Operator: "join", Port: port}
	repo, err := plan.Manager().Create(key, repository.Options{ByRows: port%2 == 1})
	if err != nil {
		t.Fatal(err)
	}
	return repo
}

// putPersisted puts record n into a repository, on disk, through host memory or at once.
func putPersisted(
	t testing.TB,
	eng *spillway.Engine,
	repo *repository.Repository,
	n int64,
	throughHost bool,
) *batch.Batch {
	t.Helper()
	first := tier.Disk
	if throughHost {
		first = tier.Host
	}
	b := putNumbered(t, repo, n, first)
	if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
		t.Fatal(err)
	}
	return b
}

// putAhead puts record n into host memory, with a copy on disk.
func putAhead(t testing.TB, eng *spillway.Engine, repo *repository.Repository, n int64) *batch.Batch {
	t.Helper()
	b := putNumbered(t, repo, n, tier.Host)
	for len(b.Copies()) == 0 { // the monitor may be copying another
		_, err := eng.Mover().WriteAhead(t.Context(), b, 0)
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	return b
}

// putNumbered puts record n into a tier.
func putNumbered(t testing.TB, repo *repository.Repository, n int64, k tier.Kind) *batch.Batch {
	t.Helper()
	before := slices.Collect(repo.Batches(int(n % 3)))
	if err := repo.Put(t.Context(), int(n%3), persistedRecord(n), in(k)); err != nil {
		t.Fatal(err)
	}
	for b := range repo.Batches(int(n % 3)) {
		if !slices.Contains(before, b) {
			return b
		}
	}
	t.Fatal("what was put is not there")
	return nil
}

// killed runs a child until it has said so many lines, kills it, and returns what is on
// disk for sure, and what may be.
func killed(t *testing.T, dir string, codec convert.Codec, lines int) (sure, maybe map[int64]bool) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command(exe, "-test.run=^TestPersistChild$")
	child.Env = append(
		os.Environ(),
		keepChildEnv+"="+dir,
		keepCodecEnv+"="+codec.String(),
		keepSealEnv+"="+strconv.FormatBool(onEncryptedDisks(t)),
	)
	var failed bytes.Buffer
	child.Stderr = &failed
	stdout, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	sure, maybe = make(map[int64]bool), make(map[int64]bool)
	in := bufio.NewScanner(stdout)
	for i := 0; in.Scan(); i++ { // to the end: it may have said more before it died
		if i == lines {
			_ = child.Process.Kill()
		}
		sign, number, _ := strings.Cut(in.Text(), " ")
		n, err := strconv.ParseInt(number, 10, 64)
		switch {
		case err != nil || sign != "+" && sign != "-":
			_ = child.Process.Kill()
			t.Fatalf("the child says %q: %s", in.Text(), failed.String())
		case sign == "+":
			sure[n] = true
		default:
			delete(sure, n)
			maybe[n] = true
		}
	}
	_ = child.Wait()
	if failed.Len() > 0 {
		t.Fatalf("the child: %s", failed.String())
	}
	return sure, maybe
}

// checkAdopted adopts a kept batch, compares it with what was put, and drops it. It returns
// its number.
func checkAdopted(t testing.TB, eng *spillway.Engine, k spillway.Persisted) int64 {
	t.Helper()
	n, _ := checkForm(t, eng, k)
	return n
}

// checkForm is checkAdopted, and returns the form, too.
func checkForm(t testing.TB, eng *spillway.Engine, k spillway.Persisted) (int64, string) {
	t.Helper()
	if k.Err != nil {
		t.Fatalf("batch %d: %v", k.ID, k.Err)
	}
	b, err := eng.Adopt(t.Context(), k)
	if err != nil {
		t.Fatal(err)
	}
	header := k.Bytes - b.Info().Bytes
	if info := b.Info(); info.State != batch.Idle || info.Space != k.Space || header <= 0 || header%tier.Page != 0 ||
		info.Rows != k.Rows {
		t.Errorf("adopted: %+v of %+v", info, k)
	}
	form := string(b.Info().Payload.Type())
	if len(b.Info().Descriptor.Dictionaries) > 0 {
		form += ", dictionaries"
	}
	rec := recordOf(t, eng, b)
	n := rec.Column(0).(*array.Int64).Value(0)
	if err := convert.Equal(persistedRecord(n), rec); err != nil {
		t.Errorf("record %d: %v", n, err)
	}
	rec.Release()
	if !k.Schema.Equal(persistedRecord(n).Schema()) || k.Plan != "query" || k.Operator != "join" || k.Port != int(n) ||
		k.Partition != int(n%3) {
		t.Errorf("record %d was kept as %+v", n, k)
	}
	if err := b.Drop(); err != nil {
		t.Error(err)
	}
	return n, form
}

// recordOf opens a batch in host memory.
func recordOf(t testing.TB, eng *spillway.Engine, b *batch.Batch) arrow.RecordBatch {
	t.Helper()
	h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	rec, err := eng.Mover().Record(t.Context(), h)
	if err := errors.Join(err, h.Close()); err != nil {
		t.Fatal(err)
	}
	return rec
}

// closePersistent closes an engine, whose books must be at zero then.
func closePersistent(t testing.TB, eng *spillway.Engine) {
	t.Helper()
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

// onDisk is what the engine's disk is charged.
func onDisk(eng *spillway.Engine) int64 {
	for _, s := range eng.Stats().Spaces {
		if s.ID.Kind == tier.Disk {
			return s.Used()
		}
	}
	return -1
}

func wantNothingIn(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		t.Errorf("%s is left", e.Name())
	}
}

func persistNeedsLinux(t testing.TB) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux, for locks that end with their process")
	}
}

// TestKilledProcessIsAdopted kills a process that spills, at random moments. The next engine
// has all that were on disk, whole and nothing else; in the end nothing is left.
func TestKilledProcessIsAdopted(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	lives := testseed.Rounds(30, 4)
	rng := rand.New(rand.NewPCG(7, 7))
	dir := t.TempDir()
	found, forms := 0, make(map[string]int)
	for round := range lives {
		codec := []convert.Codec{convert.CodecNone, convert.CodecS2, convert.CodecZstd}[round%3]
		sure, maybe := killed(t, dir, codec, rng.IntN(40))
		eng := persistentEngine(t, dir)
		kept := eng.Persisted()
		if round%4 == 0 { // it stays for the next
			held := onDisk(eng)
			closePersistent(t, eng)
			eng = persistentEngine(t, dir)
			if again := eng.Persisted(); len(again) != len(kept) || onDisk(eng) != held {
				t.Fatalf(
					"round %d: %d batches and %d bytes became %d and %d",
					round,
					len(kept),
					held,
					len(again),
					onDisk(eng),
				)
			}
			kept = eng.Persisted()
		}
		last := int64(0)
		for n := range sure {
			last = max(last, n)
		}
		for i, k := range kept {
			n, form := checkForm(t, eng, k)
			forms[form]++
			if !sure[n] && !maybe[n] && n != last+1 {
				t.Errorf("round %d: record %d was kept, which was not put", round, n)
			}
			delete(sure, n)
			if _, err := eng.Adopt(t.Context(), k); !errors.Is(err, tier.ErrReleased) {
				t.Errorf("adopted twice: %v", err)
			}
			if i == len(kept)-1 && onDisk(eng) != 0 {
				t.Errorf("round %d: all were dropped, and the disk holds %d bytes", round, onDisk(eng))
			}
		}
		if len(sure) > 0 {
			t.Errorf("round %d: records %v are lost", round, sure)
		}
		found += len(kept)
		closePersistent(t, eng)
		wantNothingIn(t, dir)
	}
	for _, form := range []batch.PayloadType{batch.PlainImage, batch.CompressedImage} {
		if forms[string(form)] == 0 || forms[string(form)+", dictionaries"] == 0 {
			t.Errorf("of the forms there were only %v, of %d batches in %d rounds", forms, found, lives)
		}
	}
	t.Logf("%d batches: %v", found, forms)
}

// crashed makes a directory as an engine leaves it that was killed with records 1 to n on
// disk.
func crashed(t testing.TB, n int64, change ...func(*spillway.Config)) string {
	t.Helper()
	dir, copied := t.TempDir(), t.TempDir()
	eng := persistentEngine(t, dir, change...)
	plan, err := eng.Plan("query")
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		repo := joinOf(t, plan, int(i+1))
		putPersisted(t, eng, repo, i+1, i%2 == 0)
	}
	testfs.CopyTree(t, copied, dir)
	closePersistent(t, eng)
	wantNothingIn(t, dir)
	return copied
}

// TestPersistedBatchesStayUntilAdopted: what is neither adopted nor forgotten is there again, and
// an adopted batch that is put somewhere is kept under its new place.
func TestPersistedBatchesStayUntilAdopted(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := crashed(t, 6)
	eng := persistentEngine(t, dir)
	all := eng.Persisted()
	if len(all) != 6 {
		t.Fatalf("%d are kept", len(all))
	}
	held := onDisk(eng)
	// Records 3 and 6 share a dictionary; so it stays when one of them goes.
	if err := eng.ForgetPersisted(all[2]); err != nil {
		t.Fatal(err)
	}
	if err := eng.ForgetPersisted(all[2]); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("forgotten twice: %v", err)
	}
	if now := onDisk(eng); now != held-all[2].Bytes {
		t.Errorf("%d bytes of %d are held without one of %d", now, held, all[2].Bytes)
	}
	if n := checkAdopted(t, eng, all[0]); n != 1 {
		t.Errorf("record %d", n)
	}
	b, err := eng.Adopt(t.Context(), all[1])
	if err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("another")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("sort", 4)
	if err != nil {
		t.Fatal(err)
	}
	if err := repo.PutBatch(9, b); err != nil {
		t.Fatal(err)
	}
	copied := t.TempDir()
	testfs.CopyTree(t, copied, dir)
	closePersistent(t, eng)

	eng = persistentEngine(t, copied) // as after another crash
	kept := eng.Persisted()
	if len(kept) != 4 {
		t.Fatalf("%d are kept: %+v", len(kept), kept)
	}
	moved := slices.IndexFunc(kept, func(k spillway.Persisted) bool { return k.Plan == "another" })
	if moved < 0 || kept[moved].Operator != "sort" || kept[moved].Port != 4 || kept[moved].Partition != 9 ||
		kept[moved].ID != b.ID() {
		t.Errorf("kept: %+v", kept)
	}
	closePersistent(t, eng)

	eng = persistentEngine(t, dir) // as it was closed
	kept = eng.Persisted()
	var numbers []int64
	for _, k := range kept {
		numbers = append(numbers, checkAdopted(t, eng, k))
	}
	if !slices.Equal(numbers, []int64{4, 5, 6}) {
		t.Errorf("records %v were kept", numbers)
	}
	closePersistent(t, eng)
	wantNothingIn(t, dir)
}

// TestBatchWithoutBytesHasOneRecord: no memory of such a batch ends its record, so that the engine
// does, when the batch gets another place and when it is dropped. A place that changes while the
// record is written is written, too.
func TestBatchWithoutBytesHasOneRecord(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := t.TempDir()
	files := faultfs.New(disk.OS(), 1)
	eng := persistentEngine(t, dir, func(c *spillway.Config) { c.Disks[0].FS = files })
	plan, err := eng.Plan("query")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("join", 1)
	if err != nil {
		t.Fatal(err)
	}
	want := func(partitions ...int) {
		t.Helper()
		copied := t.TempDir()
		testfs.CopyTree(t, copied, dir)
		next := persistentEngine(t, copied)
		var got []int
		for _, k := range next.Persisted() {
			got = append(got, k.Partition)
			if err := next.ForgetPersisted(k); err != nil {
				t.Error(err)
			}
		}
		if !slices.Equal(got, partitions) {
			t.Errorf("kept in partitions %v, want %v", got, partitions)
		}
		closePersistent(t, next)
	}
	rec := persistedRecord(1).NewSlice(0, 0)
	if err := repo.Put(t.Context(), 2, rec, repository.WithPlacement(reservation.AnyInTier(tier.Disk))); err != nil {
		t.Fatal(err)
	}
	want(2)
	b, err := repo.Take(t.Context(), 2, batch.Idle, repository.NoWait())
	if err != nil || b == nil || b.Info().Bytes != 0 {
		t.Fatalf("took %+v, %v", b, err)
	}
	place := b.Info().Place
	place.Partition = 3
	b.SetPlace(place)
	want(3)
	meddle := files.Add(
		faultfs.Rule{Ops: []string{"write"}, Path: "[0-9a-f]*", Times: 1, Effect: faultfs.Do(func(string, string) {
			place := b.Info().Place
			place.Partition = 5
			b.SetPlace(place)
		})},
	)
	place.Partition = 4
	b.SetPlace(place)
	meddle()
	want(5)
	if err := b.Drop(); err != nil {
		t.Error(err)
	}
	want()
	closePersistent(t, eng)
	wantNothingIn(t, dir)
}

// mute is a log's handler that panics.
type mute struct{ lines *atomic.Int64 }

func (mute) Enabled(context.Context, slog.Level) bool { return true }
func (h mute) Handle(context.Context, slog.Record) error {
	h.lines.Add(1)
	panic("no")
}
func (h mute) WithAttrs([]slog.Attr) slog.Handler { return h }
func (h mute) WithGroup(string) slog.Handler      { return h }

// TestRecordThatCannotBeWritten: the batch keeps the record of its old place, and is recorded
// with the next. That the log's handler panics at the warning changes nothing.
func TestRecordThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := t.TempDir()
	files := faultfs.New(disk.OS(), 1)
	var lines atomic.Int64
	eng := persistentEngine(
		t,
		dir,
		func(c *spillway.Config) { c.Disks[0].FS, c.Logger = files, slog.New(mute{&lines}) },
	)
	plan, err := eng.Plan("query")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("join", 1)
	if err != nil {
		t.Fatal(err)
	}
	b := putPersisted(t, eng, repo, 1, false)
	take := func(partition int) batch.Place {
		t.Helper()
		if got, err := repo.Take(t.Context(), partition, batch.Idle, repository.NoWait()); err != nil || got != b {
			t.Fatalf("took %+v, %v", got, err)
		}
		return b.Info().Place
	}
	place := take(1)
	want := func(partition int) {
		t.Helper()
		copied := t.TempDir()
		testfs.CopyTree(t, copied, dir)
		next := persistentEngine(t, copied)
		if all := next.Persisted(); len(all) != 1 || all[0].Err != nil || all[0].Partition != partition {
			t.Errorf("kept: %+v, want the batch in partition %d", all, partition)
		}
		closePersistent(t, next)
	}
	files.Add(faultfs.Rule{Ops: []string{"write"}, Path: "[0-9a-f]*", Times: 1, Effect: faultfs.Fail(errors.New("no"))})
	was := lines.Load()
	place.Partition = 2
	b.SetPlace(place)
	if lines.Load() == was {
		t.Error("there was no warning")
	}
	want(1)
	place.Partition = 3
	b.SetPlace(place)
	want(3)
	if err := b.Drop(); err != nil {
		t.Error(err)
	}
	closePersistent(t, eng)
	wantNothingIn(t, dir)
}

// TestFailedOpenLeavesWhatPersists: an engine that finds kept batches and then cannot be opened
// returns the reason, and reports no leaked buffers; the next engine finds them.
func TestFailedOpenLeavesWhatPersists(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := crashed(t, 3)
	_, err := openPersistent(t, dir, func(c *spillway.Config) { // no room for the chunks that transfers go through
		c.HostMemory, c.HostMarks = spillway.Bytes(
			64*tier.Page,
		), tier.Marks{
			Limit:   0.01,
			Trigger: 0.008,
			Stop:    0.005,
		}
	})
	var leak *spillway.LeakError
	if err == nil || errors.As(err, &leak) {
		t.Errorf("opened without host memory: %v", err)
	}
	eng := persistentEngine(t, dir)
	if n := len(eng.Persisted()); n != 3 {
		t.Errorf("%d are kept, want 3", n)
	}
	for _, k := range eng.Persisted() {
		checkAdopted(t, eng, k)
	}
	closePersistent(t, eng)
	wantNothingIn(t, dir)
}

// TestPersistedOfAnotherEngine: an engine neither adopts nor forgets what another one has listed, while
// that is open and afterwards.
func TestPersistedOfAnotherEngine(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := crashed(t, 3)
	first, other := persistentEngine(t, dir), persistentEngine(t, crashed(t, 1))
	listed := append(first.Persisted(), spillway.Persisted{})
	refused := func() {
		t.Helper()
		for _, k := range listed {
			if err := other.ForgetPersisted(k); !errors.Is(err, tier.ErrReleased) {
				t.Errorf("batch %d forgotten: %v", k.ID, err)
			}
			if _, err := other.Adopt(t.Context(), k); !errors.Is(err, tier.ErrReleased) {
				t.Errorf("batch %d adopted: %v", k.ID, err)
			}
		}
	}
	refused()
	if n := len(first.Persisted()); n != 3 {
		t.Errorf("%d of 3 are left", n)
	}
	closePersistent(t, first)
	refused()
	closePersistent(t, other)
}
