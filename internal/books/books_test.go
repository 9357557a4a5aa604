package books

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
)

// buffer is what a test has drawn.
type buffer struct {
	from    *Promise
	n       int64
	retired bool
}

// TestRandom does random operations, and checks after each that the accounts add up to what the
// promises and buffers have, and never exceed the capacity.
func TestRandom(t *testing.T) {
	rng := rand.New(rand.NewPCG(testseed.One(t), 0))
	for range testseed.Rounds(200, 50) {
		const capacity = 1000
		b := New(capacity, Marks{Limit: capacity - rng.Int64N(200), Trigger: 800, Stop: 600})
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
				p, drop := b.Promise(n, 0, nil, false)
				if drop > 0 {
					dropped(drop)
					if p, _ = b.Promise(n, 0, nil, false); p == nil {
						t.Fatal("refused after clean images were dropped")
					}
				}
				if p != nil {
					open = append(open, p)
				} else if n <= b.Marks().Limit-b.Usage().Used() {
					t.Fatalf("refused %d bytes: %+v", n, b.Usage())
				}
			case 1, 2:
				if len(open) == 0 {
					break
				}
				p, grow := open[rng.IntN(len(open))], rng.IntN(2) == 0
				before, _ := p.View()
				out := p.Draw(n, 0, grow)
				extra := out.Short
				if extra > 0 {
					if ok, drop := b.Reserve(extra, 0); !ok && drop == 0 {
						break
					} else if !ok {
						dropped(drop)
						if ok, _ := b.Reserve(extra, 0); !ok {
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
				out = p.Undraw(n, grown)
				if after, _ := p.View(); after != before || out.Freed != extra {
					t.Fatalf("a draw that was undone: %+v, with %d more; %+v, before %+v", out, extra, after, before)
				}
			case 3:
				if len(open) > 0 {
					i := rng.IntN(len(open))
					v, _ := open[i].View()
					if out := open[i].Release(); out.Freed != v.Unused {
						t.Fatalf("released %+v: %+v", v, out)
					}
					p := open[i]
					if !p.Release().Released || !p.Grow(1).Released || !p.Shrink(0).Released ||
						!p.Draw(0, 0, true).Released {
						t.Fatal("a released promise was used")
					}
					open = append(open[:i], open[i+1:]...)
				}
			case 4:
				if len(open) > 0 {
					p := open[rng.IntN(len(open))]
					v, _ := p.View()
					if out := p.Shrink(n); n > v.Unused && out.Short != n-v.Unused || n <= v.Unused && out.Freed != n {
						t.Fatalf("shrinking %+v by %d: %+v", v, n, out)
					}
				}
			case 5:
				if len(open) > 0 {
					if ok, _ := b.Reserve(n, 0); ok {
						open[rng.IntN(len(open))].Grow(n)
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
					before := b.Usage().Used()
					freed := b.Reclaim(buffers[i].from, buffers[i].n)
					if b.Usage().Used() != before-freed {
						t.Fatalf("%d bytes were freed, and used went from %d to %d", freed, before, b.Usage().Used())
					}
					buffers = append(buffers[:i], buffers[i+1:]...)
				}
			case 8:
				if len(buffers) > 0 && !buffers[0].retired {
					if _, open := buffers[0].from.View(); !open {
						b.Cache(buffers[0].n)
						cached = append(cached, buffers[0].n)
						buffers = buffers[1:]
					}
				}
			}
			var want Usage
			for _, v := range b.Promises() {
				want.Reserved += v.Unused
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
			got := b.Usage()
			want.Peak = got.Peak
			if got != want || got.Used()+got.Cached > capacity || got.Peak < got.Used() {
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
		"reclaim":   func(b *Books) { b.Reclaim(nil, 1) },
		"uncache":   func(b *Books) { b.Uncache(1) },
		"negative":  func(b *Books) { b.Unreserve(-1) },
	} {
		t.Run(name, func(t *testing.T) {
			b := New(100, Marks{Limit: 90, Trigger: 80, Stop: 60})
			if ok, _ := b.Reserve(10, 0); !ok {
				t.Fatal("refused")
			}
			before := b.Usage()
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
				if b.Usage() != before {
					t.Errorf("the books were changed: %+v", b.Usage())
				}
			}()
			f(b)
		})
	}
}

// TestSpare: a request that leaves room for others is refused where they would not have it.
func TestSpare(t *testing.T) {
	b := New(100, Marks{Limit: 90, Trigger: 80, Stop: 60})
	if ok, drop := b.Reserve(50, 41); ok || drop != 0 {
		t.Error("41 bytes more do not fit")
	}
	if p, _ := b.Promise(50, 41, nil, false); p != nil {
		t.Error("41 bytes more do not fit")
	}
	if ok, _ := b.Reserve(50, 40); !ok || b.Usage().Reserved != 50 {
		t.Error("40 bytes more fit")
	}
}

// TestOwner: the first owner stays, and a released promise gets none.
func TestOwner(t *testing.T) {
	b := New(100, Marks{Limit: 100, Trigger: 80, Stop: 60})
	p, _ := b.Promise(10, 0, nil, false)
	if !p.SetOwner("a") || p.SetOwner("b") {
		t.Error("want the first owner only")
	}
	if v, open := p.View(); v.Owner != "a" || !open || p.Books() != b {
		t.Errorf("%+v, open %t", v, open)
	}
	q, _ := b.Promise(10, 0, nil, true)
	q.Release()
	if q.SetOwner("a") {
		t.Error("a released promise has an owner")
	}
	if v, open := q.View(); v.Promised != 0 || v.Unused != 0 || !v.Moves || open {
		t.Errorf("%+v, open %t", v, open)
	}
}

// TestOverdraft: with a soft limit bytes are drawn beyond the promise. Bytes that come back, and
// growth, make up for them first.
func TestOverdraft(t *testing.T) {
	b := New(100, Marks{Limit: 100, Trigger: 80, Stop: 60})
	p, _ := b.Promise(10, 0, nil, false)
	if ok, _ := b.Reserve(25, 0); !ok {
		t.Fatal("no room")
	}
	if out := p.Draw(30, 20, false); out != (Outcome{}) { // 20 bytes more than promised
		t.Fatalf("%+v", out)
	}
	if out := p.Grow(5); out.Freed != 5 { // which the overdraft had reserved
		t.Errorf("grown: %+v", out)
	}
	b.Retire(30)
	if freed := b.Reclaim(p, 10); freed != 10 {
		t.Errorf("%d bytes are free, want all 10", freed)
	}
	if freed := b.Reclaim(p, 20); freed != 5 {
		t.Errorf("%d bytes are free, want 5 of 20", freed)
	}
	if v, _ := p.View(); v.Promised != 15 || v.Unused != 15 || b.Usage().Used() != 15 {
		t.Errorf("%+v, %+v", v, b.Usage())
	}
}

// TestChanges: the number grows with each change, so that a waiter sees that there was none.
func TestChanges(t *testing.T) {
	b := New(100, Marks{Limit: 100, Trigger: 80, Stop: 60})
	p, _ := b.Promise(50, 0, nil, false)
	b.Reserve(1, 0) // for a promise to open
	for name, f := range map[string]func(){
		"reserve": func() { b.Reserve(1, 0) }, "draw": func() { p.Draw(10, 0, false) }, "limit": func() { b.SetLimit(90) },
		"marks": func() { b.SetMarks(Marks{Limit: 91, Trigger: 80, Stop: 60}) }, "owner": func() { p.SetOwner("a") },
		"open": func() { b.Open(new(Promise), 1, nil, false) },
	} {
		before := b.Changes()
		if f(); b.Changes() <= before {
			t.Errorf("%s is no change", name)
		}
	}
	before := b.Changes()
	if b.Reserve(1000, 0); b.Changes() != before {
		t.Error("a refusal is a change")
	}
}

// TestLeft: above a limit that was lowered, the holders' shares of the excess add up to all of it.
func TestLeft(t *testing.T) {
	for _, c := range []struct{ limit, used, mine, want int64 }{
		{100, 60, 10, 40}, {100, 100, 100, 0}, {100, 0, 0, 100}, {100, 150, 0, 0},
		{100, 150, 150, -50}, {100, 150, 100, -34}, {100, 150, 50, -17}, {100, 101, 1, -1}, {100, 101, 100, -1},
		{1, math.MaxInt64, math.MaxInt64, -(math.MaxInt64 - 1)}, {1, math.MaxInt64, 1, -1},
	} {
		if got := Left(c.limit, c.used, c.mine); got != c.want {
			t.Errorf("Left(%d, %d, %d) = %d, want %d", c.limit, c.used, c.mine, got, c.want)
		}
	}
}
