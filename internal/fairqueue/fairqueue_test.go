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
		q := Queue[*int]{Bypass: rng.IntN(4)}
		var m model
		for range 1500 {
			switch rng.IntN(6) {
			case 0, 1:
				need := 1 + rng.IntN(10)
				q.Waiters, m.needs = append(q.Waiters, &need), append(m.needs, need)
			case 2:
				if len(q.Waiters) > 0 {
					i := rng.IntN(len(q.Waiters))
					w := q.Waiters[i]
					q.Remove(w)
					q.Remove(w) // does nothing
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
				w := q.Next(func(need *int) bool { return *need <= room })
				want := m.next(room, q.Bypass)
				if (w == nil) != (want < 0) || w != nil && q.Waiters[want] != w {
					t.Fatalf("of %d with room for %d, after %d bypasses: not waiter %d", m.needs, room, m.bypassed, want)
				}
				if w == nil {
					break
				}
				q.Served(w)
				if want > 0 {
					m.bypassed++
				}
				m.remove(want)
			case 5:
				from := min(len(m.needs), rng.IntN(2)*rng.IntN(3))
				q.Replace(slices.Clone(q.Waiters[from:]))
				if m.needs = m.needs[from:]; from > 0 {
					m.bypassed = 0
				}
			}
			if q.IsClosed() != (len(m.needs) > 0 && m.bypassed >= q.Bypass) {
				t.Fatalf("closed %t; want %d after %d bypasses", q.IsClosed(), len(m.needs), m.bypassed)
			}
			var all []int
			for _, w := range q.Waiters {
				all = append(all, *w)
			}
			if head := q.Head(); !slices.Equal(all, m.needs) || head != nil && *head != all[0] {
				t.Fatalf("%d, want %d", all, m.needs)
			}
		}
	}
}

// Waiters beyond the window are not examined, so that a wake-up costs the same however many wait.
func TestWindow(t *testing.T) {
	q := Queue[*int]{Bypass: 1}
	for range 10_000 {
		q.Waiters = append(q.Waiters, new(2))
	}
	q.Waiters = append(q.Waiters, new(1))
	calls := 0
	if w := q.Next(func(need *int) bool { calls++; return *need <= 1 }); w != nil || calls != window {
		t.Errorf("after %d calls: %v", calls, w)
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
