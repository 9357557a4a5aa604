package volumes_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// persistChild is the process that TestKilledProcessIsTakenOver kills: it keeps and frees, and says
// what it has kept, and what it is about to free.
func persistChild() {
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	v, err := volumes.Open(volumes.Config{Dir: os.Args[1], Capacity: 16 * mib, Persist: true, Encrypt: true, Key: usersKey})
	fail(err)
	var held []tier.Memory
	var seeds []uint64
	for seed := uint64(1); ; seed++ {
		n := sizeOf(seed)
		m, err := v.Alloc(n, nil)
		fail(err)
		fail(m.(tier.FileMemory).WriteAt(context.Background(), random(n, seed), 0))
		_, err = v.Persist(metaOf(seed), placeOf(seed), anyRoom, m)
		fail(err)
		fmt.Println("+", seed)
		held, seeds = append(held, m), append(seeds, seed)
		if len(held) > 5 {
			fmt.Println("-", seeds[0])
			v.Free(held[0], func() {})
			held, seeds = held[1:], seeds[1:]
		}
	}
}

// sizeOf is how much a child keeps.
func sizeOf(seed uint64) int64 { return 1 + int64(seed*seed*7919%(unit*5)) }

// TestKilledProcessIsTakenOver kills a process that keeps, with kill -9 and at some moment; the
// next volume with the same key has all that was kept, whole, and what was freed is not there.
func TestKilledProcessIsTakenOver(t *testing.T) {
	onLinux(t)
	exe, err := os.Executable()
	if err != nil {
		t.Skip("needs to start a process: ", err)
	}
	dir := t.TempDir()
	r := rand.New(rand.NewPCG(8, 9))
	found := 0
	for round := range testseed.Rounds(36, 12) {
		child := exec.Command(exe, dir)
		child.Env = append(os.Environ(), childEnv+"=keep")
		var failed bytes.Buffer
		child.Stderr = &failed
		stdout, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		sure, maybe, last := make(map[uint64]bool), make(map[uint64]bool), uint64(0)
		in, lines := bufio.NewScanner(stdout), r.IntN(120)
		for i := 0; in.Scan(); i++ {
			if i == lines {
				_ = child.Process.Kill()
			}
			var sign string
			var seed uint64
			if _, err := fmt.Sscan(in.Text(), &sign, &seed); err != nil {
				t.Fatalf("the child says %q", in.Text())
			}
			if sign == "+" {
				sure[seed], last = true, seed
			} else {
				delete(sure, seed)
				maybe[seed] = true
			}
		}
		_ = child.Wait()
		if failed.Len() > 0 {
			t.Fatal(failed.String())
		}
		v := openPersistent(t, dir, sealed)
		for _, k := range v.Persisted() {
			var seed uint64
			if _, err := fmt.Sscanf(string(k.Meta), "meta %d", &seed); err != nil || !sure[seed] && !maybe[seed] && seed != last+1 {
				t.Fatalf("round %d: %q is kept", round, k.Meta)
			}
			free(v, wantPersisted(t, v, k, seed, sizeOf(seed)))
			delete(sure, seed)
			found++
		}
		if len(sure) > 0 {
			t.Errorf("round %d: %v are lost: %q", round, sure, v.Stats().Warnings)
		}
		closeVolume(t, v)
		wantEmpty(t, dir)
	}
	if found < 12 {
		t.Errorf("only %d were found", found)
	}
}
