package books

import (
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/testseed"
)

// buffer is what a test has drawn.
type buffer struct {
	from    *Promise
	n       int64
	retired bool
}

// promise reserves n bytes as a promise, nil if spare more are not free.
func promise(b *Books, n, spare int64, owner any, moves bool) (p *Promise, drop int64) {
	p = &Promise{By: By{Owner: owner, Moves: moves}}
	if ok, drop, _ := b.Reserve(p, n, spare); !ok {
		return nil, drop
	}
	return p, 0
}

// of returns the counts.
func of(b *Books) Usage {
	return b.Now().Usage
}

// sums adds promises up.
func sums(all []PromiseView) map[By]PromiseView {
	m := make(map[By]PromiseView)
	for _, v := range all {
		v.Stack = invariants.Trace{}
		if v.Promised == 0 {
			continue
		}
		sum := m[v.By]
		m[v.By] = PromiseView{By: v.By, Promised: sum.Promised + v.Promised}
	}
	return m
}

// TestRandom does random operations, and checks after each that the accounts add up to what the
// promises and buffers have, and never exceed the capacity.
func TestRandom(t *testing.T) {
	rng := rand.New(rand.NewPCG(testseed.One(t), 0))
	for range testseed.Rounds(200, 50) {
		limit := 1000 - rng.Int64N(200)
		b := New(1000, Marks{Limit: limit, Trigger: 800, Stop: 600})
		var open []*Promise
		var buffers []buffer
		var cached []int64
		dropped := func(drop int64) {
			for drop > 0 && len(cached) > 0 {
				b.Uncache(cached[0])
				drop -= cached[0]
				cached = cached[1:]
			}
			if drop > 0 {
				t.Fatalf("%d bytes too many are to be dropped", drop)
			}
		}
		for range 1000 {
			n := rng.Int64N(120)
			switch rng.IntN(9) {
			case 0:
				owner, moves := []any{nil, nil, "a", "b"}[rng.IntN(4)], rng.IntN(2) == 0
				p, drop := promise(b, n, 0, owner, moves)
				if drop > 0 {
					dropped(drop)
					if p, _ = promise(b, n, 0, owner, moves); p == nil {
						t.Fatal("refused after clean images were dropped")
					}
				}
				if p == nil {
					if now := b.Now(); n <= now.Limit-now.Used() {
						t.Fatalf("refused %d bytes: %+v", n, now)
					}
					break
				}
				if open = append(open, p); rng.IntN(2) == 0 && p.SetOwner("late") != (owner == nil) {
					t.Fatal("want the first owner only")
				}
			case 1, 2:
				if len(open) == 0 {
					break
				}
				p := open[rng.IntN(len(open))]
				before := p.View()
				grow := before.Moves // a reservation has one policy
				out := p.Draw(n, 0, grow)
				extra := out.Short
				if extra > 0 {
					if ok, drop, _ := b.Reserve(nil, extra, 0); !ok && drop == 0 {
						break
					} else if !ok {
						dropped(drop)
						if ok, _, _ := b.Reserve(nil, extra, 0); !ok {
							t.Fatal("refused after clean images were dropped")
						}
					}
					out = p.Draw(n, extra, grow)
				}
				if out != (Outcome{}) {
					t.Fatalf("drawing %d with %d more: %+v", n, extra, out)
				}
				if rng.IntN(4) > 0 {
					buffers = append(buffers, buffer{from: p, n: n})
					break
				}
				grown := extra
				if !grow {
					grown = 0
				}
				b.Retire(n)
				freed := p.Reclaim(n)
				freed += p.Resize(-grown).Freed
				if after := p.View(); after != before || freed != extra {
					t.Fatalf("a draw that was undone freed %d bytes of %d more; %+v, before %+v",
						freed, extra, after, before)
				}
			case 3:
				if len(open) > 0 {
					i := rng.IntN(len(open))
					v := open[i].View()
					if out := open[i].Release(); out.Freed != v.Unused {
						t.Fatalf("released %+v: %+v", v, out)
					}
					p := open[i]
					if !p.Release().Released || !p.Resize(1).Released || !p.Resize(-1).Released ||
						!p.Draw(0, 0, true).Released {
						t.Fatal("a released promise was used")
					}
					open = append(open[:i], open[i+1:]...)
				}
			case 4:
				if len(open) > 0 {
					p := open[rng.IntN(len(open))]
					v := p.View()
					if out := p.Resize(-n); n > v.Unused && out.Short != n-v.Unused || n <= v.Unused && out.Freed != n {
						t.Fatalf("shrinking %+v by %d: %+v", v, n, out)
					}
				}
			case 5:
				if len(open) > 0 {
					if ok, _, _ := b.Reserve(nil, n, 0); ok {
						open[rng.IntN(len(open))].Resize(n)
					}
				}
			case 6, 7:
				if len(buffers) > 0 {
					i := rng.IntN(len(buffers))
					if f := &buffers[i]; !f.retired {
						b.Retire(f.n)
						f.retired = true
						break
					}
					before := of(b).Used()
					freed := buffers[i].from.Reclaim(buffers[i].n)
					if of(b).Used() != before-freed {
						t.Fatalf("%d bytes were freed, and used went from %d to %d", freed, before, of(b).Used())
					}
					buffers = append(buffers[:i], buffers[i+1:]...)
				}
			case 8:
				if len(buffers) > 0 && !buffers[0].retired {
					if !buffers[0].from.View().Open {
						b.Cache(buffers[0].n)
						cached = append(cached, buffers[0].n)
						buffers = buffers[1:]
					}
				}
			}
			var want Usage
			var views []PromiseView
			for _, p := range open {
				v := p.View()
				want.Reserved += v.Unused
				views = append(views, v)
			}
			if got, want := sums(b.Promises()), sums(views); !maps.Equal(got, want) {
				t.Fatalf("the sums of promises are %+v, want %+v", got, want)
			}
			for _, f := range buffers {
				if f.retired {
					want.Retired += f.n
				} else {
					want.Live += f.n
				}
			}
			for _, n := range cached {
				want.Cached += n
			}
			got := of(b)
			want.Peak = got.Peak
			if got != want || got.Used()+got.Cached > limit || got.Peak < got.Used() {
				t.Fatalf("the books have %+v, want %+v", got, want)
			}
		}
	}
}

func TestMisuse(t *testing.T) {
	for name, f := range map[string]func(*Books){
		"unreserve": func(b *Books) { b.Unreserve(11) },
		"cache":     func(b *Books) { b.Cache(1) },
		"retire":    func(b *Books) { b.Retire(1) },
		"reclaim":   func(b *Books) { (&Promise{books: b}).Reclaim(1) },
		"uncache":   func(b *Books) { b.Uncache(1) },
		"negative":  func(b *Books) { b.Unreserve(-1) },
		"reserve":   func(b *Books) { b.Reserve(nil, -1, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			b := New(100, Marks{Limit: 90, Trigger: 80, Stop: 60})
			if ok, _, _ := b.Reserve(nil, 10, 0); !ok {
				t.Fatal("refused")
			}
			before := of(b)
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
				if of(b) != before {
					t.Errorf("the books were changed: %+v", of(b))
				}
			}()
			f(b)
		})
	}
}

// TestSpare: a request that leaves room for others is refused where they would not have it. One with
// a spare below 0 may exceed the limit, and never the capacity.
func TestSpare(t *testing.T) {
	b := New(100, Marks{Limit: 90, Trigger: 80, Stop: 60})
	if ok, drop, _ := b.Reserve(nil, 50, 41); ok || drop != 0 {
		t.Error("41 bytes more do not fit")
	}
	if ok, _, _ := b.Reserve(nil, 50, 40); !ok || of(b).Reserved != 50 {
		t.Error("40 bytes more fit")
	}
	if ok, _, _ := b.Reserve(nil, 46, -5); ok {
		t.Error("5 bytes above the limit are allowed, not 6")
	}
	if ok, _, _ := b.Reserve(nil, 51, -1000); ok {
		t.Error("reserved more than the capacity")
	}
	if ok, _, _ := b.Reserve(nil, 50, -1000); !ok || of(b).Reserved != 100 {
		t.Error("the capacity is not to be had")
	}
}

// TestOpen: it reserves no room that clean images have, and returns the used bytes.
func TestOpen(t *testing.T) {
	b := New(100, Marks{Limit: 90, Trigger: 80, Stop: 60})
	p, _ := promise(b, 40, 0, nil, false)
	p.Draw(40, 0, false)
	p.Release()
	b.Cache(40)
	for _, c := range []struct {
		n    int64
		want bool
		used int64
	}{{51, false, 0}, {30, true, 30}, {21, false, 30}, {20, true, 50}, {1, false, 50}, {0, true, 50}} {
		ok, _, now := b.Reserve(&Promise{By: By{Owner: "me"}}, c.n, 0)
		used, trigger := now.Used(), now.Trigger
		if ok != c.want || used != c.used || trigger != 80 || of(b).Reserved != c.used {
			t.Errorf("%d bytes: %v, %d used, the trigger is %d; want %v and %d", c.n, ok, used, trigger, c.want, c.used)
		}
	}
	if all := sums(b.Promises()); len(all) != 1 || all[By{Owner: "me"}].Promised != 50 {
		t.Errorf("the promises are %+v", all)
	}
}

// TestOwner: the first owner stays, and a released promise gets none.
func TestOwner(t *testing.T) {
	b := New(100, Marks{Limit: 100, Trigger: 80, Stop: 60})
	p, _ := promise(b, 10, 0, nil, false)
	if !p.SetOwner("a") || p.SetOwner("b") {
		t.Error("want the first owner only")
	}
	if v := p.View(); v.Owner != "a" || !v.Open {
		t.Errorf("%+v", v)
	}
	q, _ := promise(b, 10, 0, nil, true)
	q.Release()
	if q.SetOwner("a") {
		t.Error("a released promise has an owner")
	}
	if v := q.View(); v.Promised != 0 || v.Unused != 0 || !v.Moves || v.Open {
		t.Errorf("%+v, open %t", v, v.Open)
	}
	if all := b.Promises(); len(all) != 1 || all[0].Owner != "a" || all[0].Promised != 10 {
		t.Errorf("the promises are %+v", all)
	}
}

// TestReclaimAfterRelease: a promise that is released while its owner allocates has no bytes then.
func TestReclaimAfterRelease(t *testing.T) {
	b := New(100, Marks{Limit: 100, Trigger: 80, Stop: 60})
	p, _ := promise(b, 10, 0, nil, false)
	b.Reserve(nil, 5, 0)
	p.Draw(15, 5, true)
	p.Release()
	b.Retire(15)
	if freed := p.Reclaim(15); freed != 15 || of(b).Used() != 0 || len(b.Promises()) != 0 {
		t.Errorf("%d bytes are free; %+v, promises %+v", freed, of(b), b.Promises())
	}
	if out := p.Resize(-5); !out.Released || out.Freed != 0 {
		t.Errorf("shrinking gives %+v", out)
	}
}

// TestOverdraft: with a soft limit bytes are drawn beyond the promise. Bytes that come back, and
// growth, make up for them first.
func TestOverdraft(t *testing.T) {
	b := New(100, Marks{Limit: 100, Trigger: 80, Stop: 60})
	p, _ := promise(b, 10, 0, nil, false)
	if ok, _, _ := b.Reserve(nil, 25, 0); !ok {
		t.Fatal("no room")
	}
	if out := p.Draw(30, 20, false); out != (Outcome{}) { // 20 bytes more than promised
		t.Fatalf("%+v", out)
	}
	if out := p.Resize(5); out.Freed != 5 { // which the overdraft had reserved
		t.Errorf("grown: %+v", out)
	}
	b.Retire(30)
	if freed := p.Reclaim(10); freed != 10 {
		t.Errorf("%d bytes are free, want all 10", freed)
	}
	if freed := p.Reclaim(20); freed != 5 {
		t.Errorf("%d bytes are free, want 5 of 20", freed)
	}
	if v := p.View(); v.Promised != 15 || v.Unused != 15 || of(b).Used() != 15 {
		t.Errorf("%+v, %+v", v, of(b))
	}
}

// TestProgress: a move that fails is no progress, and all else that may lead to room is.
func TestProgress(t *testing.T) {
	b := New(100, Marks{Limit: 100, Trigger: 80, Stop: 60})
	move := func(well bool) {
		p, _ := promise(b, 10, 0, nil, true)
		if p.Draw(10, 0, false); !well {
			b.Retire(10)
			p.Reclaim(10)
		}
		p.Release()
	}
	before := b.Now().Progress
	if move(false); b.Now().Progress != before {
		t.Error("a move that has failed is progress")
	}
	p, _ := promise(b, 10, 0, nil, false)
	owned, _ := promise(b, 5, 0, nil, false)
	var h Hold
	h.Begin(b, HoldView{})
	for name, f := range map[string]func(){
		"a move": func() { move(true) }, "hold": func() { new(Hold).Begin(b, HoldView{}) },
		"limit": func() { b.SetMarks(Marks{Limit: 90}) }, "release": func() { p.Release() },
		"owner": func() { owned.SetOwner("a") }, "owner of a hold": func() { h.SetOwner("a") }, "end of a hold": h.End,
		"promise": func() { promise(b, 5, 0, nil, false) },
	} {
		before := b.Now().Progress
		if f(); b.Now().Progress <= before {
			t.Errorf("%s is no progress", name)
		}
	}
}

// TestMarks: a limit alone leaves the other marks. After a limit of 0 none changes.
func TestMarks(t *testing.T) {
	b := New(100, Marks{Limit: 100, Trigger: 80, Stop: 60})
	for _, c := range []struct{ set, want Marks }{
		{Marks{Limit: 90}, Marks{Limit: 90, Trigger: 80, Stop: 60}},
		{Marks{Limit: 70, Trigger: 60, Stop: 50}, Marks{Limit: 70, Trigger: 60, Stop: 50}},
		{Marks{}, Marks{Trigger: 60, Stop: 50}},
		{Marks{Limit: 100, Trigger: 80, Stop: 60}, Marks{Trigger: 60, Stop: 50}},
	} {
		b.SetMarks(c.set)
		if got := b.Now().Marks; got != c.want {
			t.Errorf("after %+v: %+v, want %+v", c.set, got, c.want)
		}
	}
}

// TestHolds: a hold is listed from Begin to its first End, the oldest first.
func TestHolds(t *testing.T) {
	b := New(100, Marks{})
	var never Hold
	never.End()
	all := make([]Hold, 20)
	for i := range all {
		all[i].Begin(b, HoldView{Kind: Record, Bytes: int64(i)})
	}
	all[3].SetOwner("me")
	for i := range all {
		if i%3 != 0 {
			all[i].End()
			all[i].End()
		}
	}
	got := b.Holds()
	for i, v := range got {
		if v.Bytes != int64(3*i) || v.Kind != Record || (v.Owner == "me") != (i == 1) {
			t.Errorf("hold %d is %+v", i, v)
		}
	}
	if len(got) != 7 || all[3].Owner() != "me" {
		t.Errorf("%d holds; the owner is %v", len(got), all[3].Owner())
	}
}
