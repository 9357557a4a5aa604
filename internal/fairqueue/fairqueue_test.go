package fairqueue

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
)

// model is a queue as a slice.
type model struct {
	needs    []int
	bypassed int
}

func (m *model) next(room, bypass int) int {
	if len(m.needs) == 0 || m.needs[0] <= room {
		return min(0, len(m.needs)-1)
	}
	if m.bypassed >= bypass {
		return -1
	}
	return slices.IndexFunc(m.needs[:min(window, len(m.needs))], func(n int) bool { return n <= room })
}

func (m *model) remove(i int) {
	if i == 0 {
		m.bypassed = 0
	}
	m.needs = slices.Delete(m.needs, i, i+1)
}

func TestQueueModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(testseed.One(t), 0))
	for range testseed.Rounds(200, 50) {
		q := Queue[int]{Bypass: rng.IntN(4)}
		var m model
		var entries []*Entry[int]
		for range 1500 {
			switch rng.IntN(5) {
			case 0, 1:
				need := 1 + rng.IntN(10)
				entries, m.needs = append(entries, q.Push(need)), append(m.needs, need)
			case 2:
				if len(entries) > 0 {
					i := rng.IntN(len(entries))
					entries[i].Remove()
					if entries[i].Waits() {
						t.Fatal("a removed entry waits")
					}
					entries[i].Remove() // does nothing
					entries = slices.Delete(entries, i, i+1)
					m.remove(i)
				}
			case 3:
				if !q.IsClosed() {
					q.Served(nil)
					if len(m.needs) > 0 {
						m.bypassed++
					}
				}
			case 4:
				room := rng.IntN(8)
				e := q.Next(func(need int) bool { return need <= room })
				want := m.next(room, q.Bypass)
				if (e == nil) != (want < 0) || e != nil && entries[want] != e {
					t.Fatalf("of %d with room for %d, after %d bypasses: not entry %d", m.needs, room, m.bypassed, want)
				}
				if e == nil {
					break
				}
				q.Served(e)
				if want > 0 {
					m.bypassed++
				}
				entries = slices.Delete(entries, want, want+1)
				m.remove(want)
			}
			if q.Len() != len(m.needs) || q.IsClosed() != (len(m.needs) > 0 && m.bypassed >= q.Bypass) {
				t.Fatalf(
					"%d wait, closed %t; want %d after %d bypasses",
					q.Len(),
					q.IsClosed(),
					len(m.needs),
					m.bypassed,
				)
			}
			var all []int
			for e := range q.All() {
				all = append(all, e.Value)
			}
			if !slices.Equal(all, m.needs) {
				t.Fatalf("%d, want %d", all, m.needs)
			}
		}
	}
}

func TestRemoveWhileIterating(t *testing.T) {
	var q Queue[int]
	for i := range 5 {
		q.Push(i)
	}
	for e := range q.All() {
		if e.Value%2 == 0 {
			e.Remove()
		}
	}
	if q.Len() != 2 || q.Head().Value != 1 {
		t.Errorf("%d entries, the first is %d", q.Len(), q.Head().Value)
	}
}

// Waiters beyond the window are not examined, so that a wake-up costs the same however many wait.
func TestWindow(t *testing.T) {
	q := Queue[int]{Bypass: 1}
	for range 10_000 {
		q.Push(2)
	}
	q.Push(1)
	calls := 0
	if e := q.Next(func(need int) bool { calls++; return need <= 1 }); e != nil || calls != window {
		t.Errorf("after %d calls: %v", calls, e)
	}
}

func TestEnded(t *testing.T) {
	cause := errors.New("a cause")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	err := Ended(ctx, "waiting")
	if !errors.Is(err, cause) || !errors.Is(err, context.Canceled) || err.Error() != "waiting: a cause" {
		t.Error(err)
	}
}
