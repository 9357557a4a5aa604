package reservation

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
)

// The index gives what a walk along the list would.
func TestQueueAgainstAList(t *testing.T) {
	for seed := range testseed.Each(t, 20) {
		rng := rand.New(rand.NewPCG(seed, 7))
		var q queue
		var list []*slot
		most := 1 + rng.IntN(300)
		for range 3000 {
			if len(list) < most && rng.IntN(2) == 0 {
				s := &slot{need: rng.Int64N(1000)}
				q.push(s)
				list = append(list, s)
			} else if len(list) > 0 {
				i := rng.IntN(len(list))
				if rng.IntN(2) == 0 {
					i = 0
				}
				q.remove(list[i])
				if list[i].pos != -1 {
					t.Fatal("who left has a place still")
				}
				list = slices.Delete(list, i, i+1)
			}
			if rng.IntN(200) == 0 {
				q.clear()
				for _, s := range list {
					if s.pos != -1 {
						t.Fatal("after clear somebody has a place still")
					}
					q.push(s)
				}
			}
			checkQueue(t, &q, list, rng.Int64N(1100)-50)
		}
		if q.size > 4*most+16 {
			t.Errorf("%d places for at most %d", q.size, most)
		}
	}
}

func checkQueue(t *testing.T, q *queue, list []*slot, room int64) {
	t.Helper()
	var head, oldest *slot
	least, sum := int64(nothing), int64(0)
	for i := len(list) - 1; i >= 0; i-- {
		s := list[i]
		head, least, sum = s, min(least, s.need), sum+s.need
		if s.need <= room {
			oldest = s
		}
	}
	switch {
	case q.live != len(list):
		t.Fatalf("%d are in it; want %d", q.live, len(list))
	case q.head() != head:
		t.Fatalf("the head is %v; want %v", q.head(), head)
	case q.oldest(room) != oldest:
		t.Fatalf("the oldest that fits %d is %v; want %v", room, q.oldest(room), oldest)
	case q.least() != least:
		t.Fatalf("the least need is %d; want %d", q.least(), least)
	case q.sum.bytes() != sum:
		t.Fatalf("the sum is %d; want %d", q.sum.bytes(), sum)
	}
}

// A crowd leaves no memory behind.
func TestQueueForgetsACrowd(t *testing.T) {
	var q queue
	var crowd []*slot
	for range 100_000 {
		s := &slot{need: 1}
		q.push(s)
		crowd = append(crowd, s)
	}
	for _, s := range crowd {
		if q.head() != s {
			t.Fatal("not in order")
		}
		q.remove(s)
	}
	if q.size != 0 || q.need != nil {
		t.Errorf("%d places are left", q.size)
	}
}

func TestTotalDoesNotOverflow(t *testing.T) {
	var sum total
	for range 5 {
		sum.add(math.MaxInt64 - 1)
	}
	for range 4 {
		if sum.bytes() != math.MaxInt64 {
			t.Errorf("%d", sum.bytes())
		}
		sum.sub(math.MaxInt64 - 1)
	}
	if sum.bytes() != math.MaxInt64-1 {
		t.Errorf("%d", sum.bytes())
	}
	sum.sub(math.MaxInt64 - 1)
	if sum != (total{}) {
		t.Errorf("%+v", sum)
	}
}
