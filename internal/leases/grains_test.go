//go:build linux || darwin

package leases_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// TestChargeWithinGrains: a charge that stays within the grains of a process does not use the ledger: it
// succeeds even if that is gone. The next one that needs a grain notices.
func TestChargeWithinGrains(t *testing.T) {
	dir := ledgerDir(t)
	l := join(t, terms(dir, "g", 64000, 64000))
	charge(t, l, 1)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	for range 999 { // the rest of a grain of 64000/64 bytes
		charge(t, l, 1)
	}
	if l.Lost() != 0 {
		t.Error("it has looked at the ledger")
	}
	if charge(t, l, 1); l.Lost() != 1 {
		t.Error("it has not noticed that its file was removed")
	}
}

// TestOneGrainIsUnused: at any time a process has at most one grain that it does not use, all together have
// no more than the quota, and a charge is refused only if fewer bytes are free.
func TestOneGrainIsUnused(t *testing.T) {
	const (
		share = 10 << 30
		grain = 64 << 20 // which is less than a 64th
	)
	for seed := range testseed.Each(t, 3) {
		rng := rand.New(rand.NewPCG(seed, 1))
		dir := ledgerDir(t)
		type process struct {
			lease *leases.Lease
			held  []int64
		}
		var all []*process
		for range 3 {
			all = append(all, &process{lease: join(t, terms(dir, "g", share, share))})
		}
		for range 300 {
			p := all[rng.IntN(len(all))]
			if len(p.held) > 0 && rng.IntN(3) == 0 {
				p.lease.Credit(p.held[0])
				p.held = p.held[1:]
			} else {
				n := rng.Int64N(share/8) + 1
				before := granted(t, dir)
				err := p.lease.Charge(n)
				if err == nil {
					p.held = append(p.held, n)
				} else if unused := before - live(all[0].lease, all[1].lease, all[2].lease); n <= share-before ||
					!errors.Is(err, tier.ErrOutOfBudget) || unused > 3*grain {
					t.Fatalf("%d bytes are refused while %d of %d are granted, %d unused: %v",
						n, before, int64(share), unused, err)
				}
			}
			if n := granted(t, dir); n > share {
				t.Fatalf("%d bytes are granted, of %d", n, int64(share))
			} else if unused := n - live(all[0].lease, all[1].lease, all[2].lease); unused < 0 || unused > 3*grain {
				t.Fatalf("%d of %d granted bytes are unused", unused, n)
			}
		}
		for _, p := range all {
			for _, n := range p.held {
				p.lease.Credit(n)
			}
			if err := p.lease.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestGoroutinesStayWithinGrains: what a process holds always counts for others, also if one goroutine
// charges within the grains while another one returns them.
func TestGoroutinesStayWithinGrains(t *testing.T) {
	dir := ledgerDir(t)
	l := join(t, terms(dir, "g", 64000, 64000))
	for round := range 2000 {
		charge(t, l, 2000) // two grains
		var all sync.WaitGroup
		all.Go(func() { l.Credit(1999) }) // returns one of them
		for l.Live() != 1 {
			runtime.Gosched()
		}
		for range round % 100 { // so that the charge meets each part of that
			_ = l.Live()
		}
		charge(t, l, 1500)
		all.Wait()
		if n := granted(t, dir); n < l.Live() {
			t.Fatalf("%d bytes count, of %d that are held", n, l.Live())
		}
		l.Credit(l.Live())
	}
}

// TestCreditWhileCharging: bytes that one goroutine returns while another one takes grains leave at most one
// grain unused, too.
func TestCreditWhileCharging(t *testing.T) {
	dir := ledgerDir(t)
	l := join(t, terms(dir, "g", 64000, 64000))
	for round := range 200 {
		charge(t, l, 20000)
		var all sync.WaitGroup
		all.Go(func() {
			if err := l.Charge(20000); err != nil {
				panic(err) // Live would never change
			}
		})
		for l.Live() != 40000 {
			runtime.Gosched()
		}
		l.Credit(20000) // often before the grains are written
		all.Wait()
		if n := granted(t, dir); n > 21000 {
			t.Fatalf("round %d: %d bytes count, of 20000 that are held", round, n)
		}
		l.Credit(20000)
	}
}

func live(all ...*leases.Lease) (sum int64) {
	for _, l := range all {
		sum += l.Live()
	}
	return sum
}

// granted returns how many bytes count against the limits of all processes.
func granted(t *testing.T, dir string) (sum int64) {
	t.Helper()
	held, err := leases.Holders(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range held {
		sum += h.Granted
	}
	return sum
}
