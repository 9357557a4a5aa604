package repository

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// TestFewOfMany: of many batches most are taken, in any order. The others keep their places, also
// those that are claimed or in transit meanwhile.
func TestFewOfMany(t *testing.T) {
	const n, partitions = 3000, 3
	for seed := range testseed.Each(t, 3) {
		r := rand.New(rand.NewPCG(seed, 9))
		m := newMover(t, 10, 10, 10)
		plan := newPlan(t, m)
		repo := ensure(t, plan, "join")
		var all, left [partitions][]*batch.Batch
		for id := range batch.ID(n) {
			p := r.IntN(partitions)
			b := newBatch(t, id+1, m.space(tier.GPU))
			check(t, repo.PutBatch(p, b))
			all[p] = append(all[p], b)
		}
		claim, err := repo.Claim(background, 0, 100)
		check(t, err)
		claimed := claim.Batches()
		var transits []*batch.Transit
		for p := range partitions {
			for _, b := range all[p] {
				if p == 0 && slices.Contains(claimed, b) || r.IntN(40) == 0 {
					left[p] = append(left[p], b)
				}
			}
			transit, err := left[p][len(left[p])-1].TryTransit()
			check(t, err)
			transits = append(transits, transit)
		}
		for _, i := range r.Perm(n) {
			id := batch.ID(i + 1)
			p := slices.IndexFunc(left[:], func(of []*batch.Batch) bool {
				return slices.ContainsFunc(of, func(b *batch.Batch) bool { return b.ID() == id })
			})
			if p >= 0 {
				continue
			}
			b, err := repo.TakeByID(background, id, batch.Idle)
			check(t, err)
			if b.ID() != id {
				t.Fatalf("batch %d was taken for %d", b.ID(), id)
			}
			check(t, b.Drop())
		}
		total := 0
		for p := range partitions {
			if got := slices.Collect(repo.Batches(p)); !slices.Equal(got, left[p]) || repo.Len(p) != len(got) {
				t.Errorf("partition %d has %d batches, Len says %d, want %d", p, len(got), repo.Len(p), len(left[p]))
			}
			total += len(left[p])
		}
		if repo.Total() != total || repo.Bytes(tier.GPU) != int64(10*total) {
			t.Errorf("%d batches of %d bytes, want %d", repo.Total(), repo.Bytes(tier.GPU), total)
		}
		wantError(t, repo.PutBatch(1, newBatch(t, left[0][0].ID(), m.space(tier.GPU))), ErrDuplicate)
		wantError(t, repo.PutBatch(1, left[0][0]), batch.ErrStored)
		check(t, claim.Restore())
		for p, transit := range transits {
			check(t, transit.Abort())
			for _, want := range left[p][:len(left[p])/2] {
				b, err := repo.Take(background, p, batch.Idle)
				check(t, err)
				if b != want {
					t.Errorf("partition %d gives batch %d, want %d", p, b.ID(), want.ID())
				}
				check(t, repo.PutBatch(p, b)) // behind the others
			}
		}
		report, err := plan.Clear(background)
		check(t, err)
		if len(report) != 1 || report[0].Batches != total || report[0].Bytes != int64(10*total) || repo.Total() != 0 {
			t.Errorf("%+v of %d, %d left", report, total, repo.Total())
		}
	}
}
