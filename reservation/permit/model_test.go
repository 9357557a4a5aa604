package permit_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

// model is a pool of three budgets and slots without any goroutine. Its resources are the budgets
// and then the slots.
type model struct {
	bypass    int
	total     [4]int64
	unlimited bool // slots
	used      [4]int64
	queue     []*entry
}

// entry is a request in the model, and the call that makes it at the pool.
type entry struct {
	needs  [4]int64
	capped bool
	passed int    // how many have bypassed it while it headed a line
	state  string // "waits", "held", "exceeds", "canceled"
	call   *call
	cancel context.CancelFunc
}

// before returns the oldest that waits for a resource, which e needs, too; nil if that is e, or nobody waits.
func (m *model) before(e *entry, r int) *entry {
	i := slices.IndexFunc(m.queue, func(o *entry) bool { return o.needs[r] > 0 })
	if i < 0 || m.queue[i] == e || e.needs[r] == 0 {
		return nil
	}
	return m.queue[i]
}

func (m *model) fits(e *entry) bool {
	for r := range 4 {
		if e.needs[r] == 0 || r == 3 && m.unlimited {
			continue
		}
		if head := m.before(e, r); head != nil && head.passed >= m.bypass || e.needs[r] > m.total[r]-m.used[r] {
			return false
		}
	}
	return true
}

// exceeds reports whether e needs more than there is. A capped request is made smaller instead.
func (m *model) exceeds(e *entry) bool {
	for r := range 3 {
		if e.needs[r] > m.total[r] && !e.capped {
			return true
		}
		e.needs[r] = min(e.needs[r], m.total[r])
	}
	return false
}

func (m *model) grant(e *entry) {
	e.state = "held"
	passed := make(map[*entry]bool)
	for r := range 4 {
		m.used[r] += e.needs[r]
		if head := m.before(e, r); head != nil {
			passed[head] = true
		}
	}
	for head := range passed {
		head.passed++
	}
}

func (m *model) leave(e *entry) {
	if i := slices.Index(m.queue, e); i >= 0 {
		m.queue = slices.Delete(m.queue, i, i+1)
	}
}

func (m *model) serve() {
	for {
		i := slices.IndexFunc(m.queue, m.fits)
		if i < 0 {
			return
		}
		e := m.queue[i]
		m.grant(e)
		m.leave(e)
	}
}

func (m *model) request(e *entry, wait bool) {
	switch {
	case m.exceeds(e):
		e.state = "exceeds"
	case m.fits(e):
		m.grant(e)
	case wait:
		e.state = "waits"
		m.queue = append(m.queue, e)
	default:
		e.state = "refused"
	}
}

// TestPoolModel makes the same random calls of a pool and of the model, and compares them after
// each.
func TestPoolModel(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(20, 8)) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			m := &model{bypass: rng.IntN(4), total: [4]int64{100, 100, 100, 2}}
			cfg := abc(2)
			if cfg.Bypass = m.bypass; m.bypass == 0 {
				cfg.Bypass = -1
			}
			p := newPool(t, cfg)
			var live []*entry
			for step := range 1500 {
				var what string
				switch op := rng.IntN(10); {
				case op < 5:
					e := randomEntry(rng)
					wait, request := op < 4, e.request(t)
					m.request(e, wait)
					what = fmt.Sprintf("request %+v, wait %t", request, wait)
					var ctx context.Context
					ctx, e.cancel = context.WithCancel(t.Context())
					if wait {
						e.call = start(ctx, p, request)
					} else {
						e.call = new(call)
						e.call.got, e.call.err = p.TryAcquire(request)
						e.call.over.Store(true)
					}
					live = append(live, e)
				case op < 8 && len(live) > 0:
					e := live[rng.IntN(len(live))]
					what = "end " + e.state
					switch e.state {
					case "held":
						for r := range e.needs {
							m.used[r] -= e.needs[r]
						}
						m.serve()
						release(t, e.call.got)
						live = slices.DeleteFunc(live, func(o *entry) bool { return o == e })
					case "waits":
						e.state = "canceled"
						m.leave(e)
						m.serve()
						e.cancel()
					}
				case op == 8:
					r, n := rng.IntN(3), int64(20+rng.IntN(120))
					what = fmt.Sprintf("set total %d to %d", r, n)
					m.total[r] = n
					for _, e := range slices.Clone(m.queue) {
						if m.exceeds(e) {
							e.state = "exceeds"
							m.leave(e)
						}
					}
					m.serve()
					if err := p.SetTotal(string(rune('a'+r)), n); err != nil {
						t.Fatal(err)
					}
				case op == 9:
					n := rng.IntN(4)
					what = fmt.Sprintf("set slots to %d", n)
					m.total[3], m.unlimited = int64(n), n == 0
					m.serve()
					if n == 0 {
						n = permit.Unlimited
					}
					if err := p.SetSlots(n); err != nil {
						t.Fatal(err)
					}
				}
				synctest.Wait()
				live = slices.DeleteFunc(live, func(e *entry) bool {
					if problem := e.compare(); problem != "" {
						t.Fatalf("step %d, %s: %s", step, what, problem)
					}
					return e.state != "held" && e.state != "waits"
				})
				s := p.Stats()
				used := [4]int64{s.Budgets[0].Held, s.Budgets[1].Held, s.Budgets[2].Held, int64(s.HeldSlots)}
				waiting := 0
				for _, e := range live {
					if e.state == "waits" {
						waiting++
					}
				}
				if used != m.used || s.Waiting != waiting {
					t.Fatalf("step %d, %s: %+v; want %d used and %d waiting", step, what, s, m.used, waiting)
				}
			}
			for _, e := range live {
				e.cancel()
				synctest.Wait()
				if e.call.err == nil {
					release(t, e.call.got)
				}
			}
		})
	}
}

func randomEntry(rng *rand.Rand) *entry {
	e := &entry{capped: rng.IntN(4) == 0}
	for r := range 3 {
		if rng.IntN(2) == 0 {
			e.needs[r] = int64(1 + rng.IntN([]int{10, 60, 120}[rng.IntN(3)]))
		}
	}
	e.needs[3] = int64(rng.IntN(2))
	return e
}

func (e *entry) request(t *testing.T) permit.Request {
	r := of(t, "a", int(e.needs[0]), "b", int(e.needs[1]), "c", int(e.needs[2]))
	r.Spill, r.Capped = e.needs[3] > 0, e.capped
	return r
}

// compare returns how the call differs from the model.
func (e *entry) compare() string {
	if e.state == "waits" {
		if e.call.over.Load() {
			return fmt.Sprintf("a request of %d does not wait: %v", e.needs, e.call.err)
		}
		return ""
	}
	if !e.call.over.Load() {
		return fmt.Sprintf("a request of %d waits; want it %s", e.needs, e.state)
	}
	want := map[string]error{
		"held": nil, "exceeds": reservation.ErrExceeded, "refused": tier.ErrOutOfBudget, "canceled": context.Canceled,
	}[e.state]
	if !errors.Is(e.call.err, want) {
		return fmt.Sprintf("a request of %d: %v; want it %s", e.needs, e.call.err, e.state)
	}
	if e.state != "held" {
		return ""
	}
	got := e.call.got
	has := [4]int64{got.Bytes("a"), got.Bytes("b"), got.Bytes("c")}
	if got.CanSpill() {
		has[3] = 1
	}
	if has != e.needs {
		return fmt.Sprintf("a permit has %d; want %d", has, e.needs)
	}
	return ""
}
