//go:build linux || darwin

package leases_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// stormEnv, set to anything, makes TestStorm as long as its acceptance needs.
const stormEnv = "SPILLWAY_QUOTA_STORM"

const (
	stormProcesses = 5
	stormQuota     = 1 << 20 // in grains of 16 KiB
)

// stormWords is the memory that the processes of a storm share, to check the ledger against.
type stormWords struct {
	held  [stormProcesses]atomic.Int64 // what each process has charged, and not begun to credit
	dying [stormProcesses]atomic.Bool  // the process is about to be killed: held counts no more
	taken atomic.Int64                 // charges that took a grain
	over  atomic.Int64                 // the largest sum of held that was above the quota
}

func (w *stormWords) sum() (sum int64) {
	for i := range w.held {
		n := w.held[i].Load()
		if !w.dying[i].Load() {
			sum += n
		}
	}
	return sum
}

// storm charges and credits at random until the process is killed. Each charge is larger than the grain
// that may be unused, so that it takes one.
func storm(l *leases.Lease, word string, seed uint64) error {
	place, err := strconv.Atoi(os.Getenv("SPILLWAY_QUOTA_TEST_PLACE"))
	if err != nil {
		return err
	}
	w, done, err := mapWords(word)
	if err != nil {
		return err
	}
	defer done()
	rng := rand.New(rand.NewPCG(seed, uint64(place)))
	const grain = stormQuota / 64
	var held []int64
	for {
		n := grain + 1 + rng.Int64N(stormQuota/3)
		switch err := l.Charge(n); {
		case err == nil:
			w.taken.Add(1)
			held = append(held, n)
			w.held[place].Add(n)
			if sum := w.sum(); sum > stormQuota {
				w.over.Store(sum)
			}
		case !errors.Is(err, tier.ErrOutOfBudget):
			return err
		}
		for len(held) > 0 && (err != nil || rng.IntN(2) == 0) {
			w.held[place].Add(-held[0])
			l.Credit(held[0])
			held = held[1:]
		}
	}
}

// TestStorm: five processes that charge and credit never hold more than their quota together, though they
// are killed at random moments. Whenever all are dead, everything is free at the next charge.
func TestStorm(t *testing.T) {
	seed := testseed.One(t)
	rounds, charges := 2, int64(1000)
	if os.Getenv(stormEnv) != "" {
		rounds, charges = 12, 4500
	}
	dir := ledgerDir(t)
	me := join(t, terms(dir, "g", stormQuota, stormQuota))
	path := filepath.Join(t.TempDir(), "words")
	w, done, err := createWords(path)
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	rng := rand.New(rand.NewPCG(seed, 1))
	kills := 0
	deadline := time.Now().Add(4 * time.Minute) // only a hang takes so long
	for round := range rounds {
		var all []*child
		for i := range stormProcesses {
			w.held[i].Store(0)
			w.dying[i].Store(false)
			all = append(all, start(t, dir, stormQuota, "SPILLWAY_QUOTA_TEST_WORD="+path,
				fmt.Sprintf("SPILLWAY_QUOTA_TEST_PLACE=%d", i)))
		}
		for _, c := range all {
			c.send(t, fmt.Sprintf("storm %d", rng.Int64()))
		}
		// The processes die one after the other, while those that are left go on.
		order := rng.Perm(stormProcesses)
		for k, i := range order {
			want := int64(round)*charges + charges*int64(k+1)/stormProcesses - rng.Int64N(20)
			for w.taken.Load() < want {
				if time.Now().After(deadline) {
					t.Fatalf("%d charges took a grain, want %d", w.taken.Load(), want)
				}
				time.Sleep(100 * time.Microsecond)
			}
			w.dying[i].Store(true)
			all[i].kill(t)
			kills++
		}
		charge(t, me, stormQuota)
		me.Credit(stormQuota)
	}
	if over := w.over.Load(); over != 0 {
		t.Errorf("%d bytes were held, of %d", over, stormQuota)
	}
	if left := leaseFiles(t, dir); len(left) != 1 {
		t.Errorf("leases: %q", left)
	}
	t.Logf("%d charges took a grain, %d processes were killed", w.taken.Load(), kills)
}
