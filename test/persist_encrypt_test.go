package test

import (
	"bytes"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// onEncryptedDisks reports whether t runs for TestPersistingOnEncryptedDisks.
func onEncryptedDisks(t testing.TB) bool {
	return strings.HasPrefix(t.Name(), "TestPersistingOnEncryptedDisks/")
}

// persistKey is the key of disks that encrypt and keep.
var persistKey = []byte("a key of 32 bytes, for the tests")

// sealed makes the first disk one that encrypts.
func sealed(c *spillway.Config) { c.Disks[0].Encrypt, c.Disks[0].Key = true, persistKey }

// persistSuite is what holds for every disk that keeps.
var persistSuite = map[string]func(*testing.T){
	"TestDictionaryThatNoBatchListsIsRemoved": TestDictionaryThatNoBatchListsIsRemoved,
	"TestKilledProcessIsAdopted":              TestKilledProcessIsAdopted,
	"TestPersistedBatchesStayUntilAdopted":    TestPersistedBatchesStayUntilAdopted,
	"TestPersistedOfAnotherEngine":            TestPersistedOfAnotherEngine,
	"TestFailedOpenLeavesWhatPersists":        TestFailedOpenLeavesWhatPersists,
	"TestAdoptedBatchKeepsItsRecord":          TestAdoptedBatchKeepsItsRecord,
	"TestAdoptedBytesAreTheBatchs":            TestAdoptedBytesAreTheBatchs,
	"TestBatchesOfAProgramPersist":            TestBatchesOfAProgramPersist,
	"TestBatchWithoutBytesHasOneRecord":       TestBatchWithoutBytesHasOneRecord,
	"TestRecordThatCannotBeWritten":           TestRecordThatCannotBeWritten,
	"TestDamagedBytesAreNotAdopted":           TestDamagedBytesAreNotAdopted,
	"TestMutatedFilesAreRefusedOrRight":       TestMutatedFilesAreRefusedOrRight,
	"TestTwoEnginesPersistApart":              TestTwoEnginesPersistApart,
	"TestPersistingIsOffByDefault":            TestPersistingIsOffByDefault,
	"TestAdoptBesideEachOther":                TestAdoptBesideEachOther,
	"TestAdoptingSurvivesEveryFault":          TestAdoptingSurvivesEveryFault,
}

// TestPersistingOnEncryptedDisks runs the tests of kept batches once more. No test of those files
// may be forgotten here.
func TestPersistingOnEncryptedDisks(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"persist_test.go", "adopt_test.go"} {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			d, ok := d.(*ast.FuncDecl)
			if ok && strings.HasPrefix(d.Name.Name, "Test") && persistSuite[d.Name.Name] == nil && d.Name.Name != "TestPersistChild" {
				t.Errorf("%s of %s is not in the list", d.Name.Name, file)
			}
		}
	}
	left := testseed.Rounds(len(persistSuite), 4) // in each run it may be others
	for name, test := range persistSuite {
		if left--; left >= 0 {
			t.Run(name, test)
		}
	}
}

// filesIn returns all files in a directory.
func filesIn(t testing.TB, dir string) map[string][]byte {
	t.Helper()
	all := make(map[string][]byte)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		all[path], err = os.ReadFile(path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestPersistedNeedsItsKey: an engine with another key, or none, is not opened and says why; a disk
// beside keeps what it has, and the key adopts all.
func TestPersistedNeedsItsKey(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	for name, c := range map[string]struct {
		kept, opened func(*spillway.Config)
	}{
		"another key":        {sealed, func(c *spillway.Config) { c.Disks[0].Encrypt, c.Disks[0].Key = true, make([]byte, 32) }},
		"without encryption": {sealed, func(*spillway.Config) {}},
		"with encryption":    {func(*spillway.Config) {}, sealed},
	} {
		t.Run(name, func(t *testing.T) {
			dir, beside := crashed(t, 4, c.kept), crashed(t, 2)
			before := filesIn(t, dir)
			_, err := openPersistent(t, dir, c.opened, func(cfg *spillway.Config) {
				cfg.Disks = []spillway.DiskConfig{{Dir: beside, Capacity: spillway.Bytes(64 << 20), Persist: true}, cfg.Disks[0]}
			})
			var e *disk.KeyError
			if !errors.Is(err, disk.ErrKey) || !errors.As(err, &e) || !strings.Contains(err.Error(), dir) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("opened: %v", err)
			}
			after := filesIn(t, dir)
			for path, p := range before {
				if !bytes.Equal(after[path], p) {
					t.Errorf("%s was changed", path)
				}
			}
			for dir, n := range map[string]int{dir: 4, beside: 2} {
				change := c.kept
				if dir == beside {
					change = func(*spillway.Config) {}
				}
				eng := persistentEngine(t, dir, change)
				if got := len(eng.Persisted()); got != n {
					t.Errorf("%d are kept, want %d", got, n)
				}
				for _, k := range eng.Persisted() {
					checkAdopted(t, eng, k)
				}
				closePersistent(t, eng)
				wantNothingIn(t, dir)
			}
		})
	}
}

// TestNothingPlainPersists: of the rows, of words in a dictionary, and of the names of columns,
// plans and operators nothing is in any file, compressed or not; and adopted batches have them.
// Without encryption they are found.
func TestNothingPlainPersists(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	secrets := []string{"the salary of nobody else", "a word of a dictionary", "salaries", "quarterly-plan", "sum-of-salaries"}
	for name, c := range map[string]struct {
		codec convert.Codec
		plain bool
	}{"encrypted": {convert.CodecNone, false}, "encrypted and packed": {convert.CodecS2, false}, "plain": {convert.CodecNone, true}} {
		t.Run(name, func(t *testing.T) {
			change := func(cfg *spillway.Config) {
				if cfg.Codec = c.codec; !c.plain {
					sealed(cfg)
				}
			}
			rec := secretRecord(secrets[0], secrets[1], secrets[2])
			dir, copied := t.TempDir(), t.TempDir()
			eng := persistentEngine(t, dir, change)
			plan, err := eng.Plan(secrets[3])
			if err != nil {
				t.Fatal(err)
			}
			repo, err := plan.Repository(secrets[4], 1)
			if err != nil {
				t.Fatal(err)
			}
			if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Disk))); err != nil {
				t.Fatal(err)
			}
			testfs.CopyTree(t, copied, dir)
			closePersistent(t, eng)
			found := make(map[string]bool)
			look := func() {
				t.Helper()
				for path, p := range filesIn(t, copied) {
					if bytes.Contains(p, persistKey) {
						t.Errorf("the key is in %s", path)
					}
					for _, s := range secrets {
						if bytes.Contains(p, []byte(s)) {
							found[s] = true
							if !c.plain {
								t.Errorf("%q is in %s", s, path)
							}
						}
					}
				}
			}
			look()
			eng = persistentEngine(t, copied, change)
			look()
			kept := eng.Persisted()
			if len(kept) != 1 || kept[0].Plan != secrets[3] || kept[0].Operator != secrets[4] {
				t.Fatalf("kept: %+v", kept)
			}
			b, err := eng.Adopt(t.Context(), kept[0])
			if err != nil {
				t.Fatal(err)
			}
			if n := len(b.Info().Descriptor.Dictionaries); n != 1 {
				t.Errorf("%d dictionaries", n)
			}
			back := recordOf(t, eng, b)
			if err := convert.Equal(rec, back); err != nil {
				t.Error(err)
			}
			back.Release()
			if err := b.Drop(); err != nil {
				t.Error(err)
			}
			closePersistent(t, eng)
			wantNothingIn(t, copied)
			if c.plain && len(found) != len(secrets) {
				t.Errorf("without encryption only %v were found: it is looked in the wrong place", found)
			}
		})
	}
}

// secretRecord makes a record of a text, with a large dictionary of words.
func secretRecord(text, word, column string) arrow.RecordBatch {
	words := array.NewStringBuilder(memory.DefaultAllocator)
	for _, w := range slices.Repeat([]string{word}, 1000) {
		words.Append(w + strings.Repeat("!", words.Len()%50))
	}
	rows := array.NewStringBuilder(memory.DefaultAllocator)
	for range 5000 {
		rows.Append(text)
	}
	rec := withWords(1, rows.NewArray(), words.NewArray())
	fields := slices.Clone(rec.Schema().Fields())
	for i := range fields {
		fields[i].Name = column
	}
	return array.NewRecordBatch(arrow.NewSchema(fields, nil), rec.Columns(), rec.NumRows())
}
