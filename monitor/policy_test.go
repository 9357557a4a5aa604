package monitor

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
)

func TestPolicyOrder(t *testing.T) {
	place := func(plan uint64, rank int, last bool, seq uint64) batch.Info {
		return batch.Info{Place: batch.Place{Plan: plan, Rank: rank, Last: last, Seq: seq}}
	}
	queued := func(task uint64, i batch.Info) batch.Info {
		i.State, i.Pending, i.Task = batch.TaskCreated, 1, task
		return i
	}
	used := func(at int64) batch.Info { return batch.Info{LastUse: at} }
	sized := func(n int64) batch.Info { return batch.Info{Bytes: n} }
	for _, tt := range []struct {
		name   string
		policy Policy
		want   []batch.Info // in the order in which they should go
	}{
		{"from the output towards the scans", PlanOrder(), []batch.Info{place(1, 5, false, 1), place(1, 3, false, 9), place(1, 0, false, 20)}},
		{"newest first within one repository", PlanOrder(), []batch.Info{place(1, 2, false, 9), place(1, 2, false, 8), place(1, 2, false, 3)}},
		{"the output's own repository last", PlanOrder(), []batch.Info{place(1, 3, false, 1), place(1, 0, false, 0), place(1, 4, true, 9), place(1, 4, true, 2)}},
		{"then the inputs of queued tasks, from the back", PlanOrder(), []batch.Info{
			place(1, 0, false, 50), place(1, 9, true, 51), queued(3, place(1, 1, false, 2)), queued(2, place(1, 7, false, 30)), queued(1, place(2, 1, false, 40)),
		}},
		{"the youngest plan gives first", PlanOrder(), []batch.Info{place(2, 0, false, 1), place(1, 9, false, 9), place(3, 9, true, 1)}},
		{"ranks below zero", PlanOrder(), []batch.Info{place(1, 0, false, 0), place(1, -1, false, 5)}},
		{"least recently used", LRU(), []batch.Info{used(-5), used(0), used(7), used(1 << 60)}},
		{"largest", LargestFirst(), []batch.Info{sized(1 << 40), sized(4096), sized(1), sized(0)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for i, a := range tt.want {
				for j, b := range tt.want {
					if got, want := sign(
						compareKeys(tt.policy.Key(a), tt.policy.Key(b)),
					), cmp.Compare(
						i,
						j,
					); got != want {
						t.Errorf("%d against %d: %d, want %d", i, j, got, want)
					}
				}
			}
		})
	}
}

func sign(n int) int { return cmp.Compare(n, 0) }

func TestByName(t *testing.T) {
	for _, name := range Names() {
		p, err := ByName(name)
		if err != nil || p.Name() != name {
			t.Errorf("ByName(%q) is %v, %v", name, p, err)
		}
	}
	if p, err := ByName(""); err != nil || p.Name() != "cost-aware" {
		t.Errorf("the default is %v, %v", p, err)
	}
	if _, err := ByName("random"); err == nil {
		t.Error("an unknown name is no error")
	}
	if !slices.Contains(Names(), "lru") || !slices.Contains(Names(), "largest-first") {
		t.Errorf("names are %v", Names())
	}
}

// TestCostAwareOrder: what costs least for the most bytes and the longest rest goes first.
func TestCostAwareOrder(t *testing.T) {
	const now = 1000
	type info = batch.Info
	at := func(last, next int64) info { return info{LastUse: last, NextUse: next} }
	one := func(i info) Victim { return Victim{Key: CostAware().Key(i), Bytes: 8, Down: 4, Up: 4} }
	copied := func(v Victim) Victim { v.Down = 0; return v }
	slow := func(v Victim) Victim { v.Up *= 10; return v }
	plan := func(seq uint64) info { return info{Place: batch.Place{Plan: 1, Seq: seq}} }
	output := func(seq uint64) info { return info{Place: batch.Place{Plan: 1, Seq: seq, Last: true}} }
	queued := func(task uint64) info { return info{Pending: 1, Task: task, LastUse: 900, NextUse: 1500} }
	for _, c := range []struct {
		name string
		want []Victim
	}{
		{"by what is known", []Victim{
			one(at(10, batch.Never)), one(plan(9)), one(plan(2)), one(output(3)), one(output(1)),
			one(at(900, 1500)), one(at(990, 1010)), one(queued(2)), one(queued(1)), one(at(990, batch.Stay)),
		}},
		{"late is late for as long again", []Victim{one(at(500, 1300)), one(at(600, 800)), one(at(700, 1100))}},
		{"unused for much longer than between its uses", []Victim{one(at(100, 200)), one(plan(1)), one(at(999, 9000)), one(at(990, 1000))}},
		{"a copy makes it half as dear", []Victim{copied(one(at(900, 1300))), one(at(900, 1500)), one(at(900, 1200))}},
		{"from where it comes back slowly", []Victim{one(at(900, 1200)), slow(one(at(900, 1900)))}},
	} {
		for i := range c.want {
			c.want[i].ID = batch.ID(i + 1)
		}
		got := slices.Clone(c.want)
		slices.Reverse(got)
		slices.SortStableFunc(got, func(a, b Victim) int { return compareKeys(a.Key, b.Key) })
		CostAware().Order(now, got)
		for i, v := range got {
			if v.ID != c.want[i].ID {
				t.Errorf("%s: number %d goes in the place of %d", c.name, v.ID, i+1)
			}
		}
	}
}

// TestCostAwareOrderOfLongRests: a batch that is not expected before all others were used may be
// dropped before that. So the way back counts less the longer it is.
func TestCostAwareOrderOfLongRests(t *testing.T) {
	const now, gap = 1000, 10
	p := CostAware().(costAware)
	h := decide.Habits{Gap: gap, Count: [3]int{0, 0, 10}} // each is used once in 100
	expected := func(id batch.ID, after int64, up time.Duration) Victim {
		key := p.Key(batch.Info{Uses: 2, LastUse: now - 1, NextUse: now + after})
		return Victim{ID: id, Key: key, Bytes: 8, Down: 1, Up: up}
	}
	list := []Victim{expected(1, 100, 10), expected(2, 1000, 1000)}
	p.OrderBy(now, list, &h)
	if list[0].ID != 2 {
		t.Error("a batch that may not come back stays for the time that it would take to come back")
	}
	p.OrderBy(now, list, &decide.Habits{})
	if list[0].ID != 1 {
		t.Error("without a habit the whole way back must count")
	}
}

// TestHabits: what was used never or once is expected as those like it are.
func TestHabits(t *testing.T) {
	const gap = 10
	type uses = []uint8 // how often each batch had been used that was used now
	many := func(u uint8, n int) (all uses) { return slices.Repeat(uses{u}, n) }
	for _, c := range []struct {
		name  string
		uses  uses
		count [3]int
		want  string // in which order go one never used, one used once, and one that is expected in 100 gaps
	}{
		{"each is used once", many(0, 100), [3]int{50, 50, 1}, "once used never"},
		{"each is used again", slices.Concat(many(0, 100), many(1, 10)), [3]int{0, 50, 1}, "used once"},
		{"some are used again and again", slices.Concat(many(0, 10), many(1, 10), many(2, 500)), [3]int{50, 50, 1}, "once never used"},
		{"half of the uses are second ones", slices.Repeat(uses{0, 1}, 200), [3]int{10, 60, 1}, "once used never"},
	} {
		h := decide.Habits{Count: c.count}
		now := int64(0)
		for _, u := range c.uses {
			now += gap
			h.Use(u, now)
		}
		p := CostAware().(costAware)
		list := []Victim{
			{ID: 1, Key: p.Key(batch.Info{})},
			{ID: 2, Key: p.Key(batch.Info{Uses: 1, LastUse: now})},
			{ID: 3, Key: p.Key(batch.Info{Uses: 2, LastUse: now, NextUse: now + 100*gap})},
		}
		list = slices.DeleteFunc(list, func(v Victim) bool { return v.ID == 1 && c.count[0] == 0 })
		for i := range list {
			list[i].Bytes, list[i].Down, list[i].Up = 8, 1, 1
		}
		p.OrderBy(now, list, &h)
		var got []string
		for i, v := range list {
			got = append(got, [...]string{"never", "once", "used"}[v.ID-1])
			if i > 0 && compareKeys(list[i-1].rank, v.rank) > 0 {
				t.Errorf("%s: number %d goes before number %d in another space", c.name, v.ID, list[i-1].ID)
			}
		}
		if got := strings.Join(got, " "); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// TestHabitsForget: a pause, a clock that goes back or an end of all batches leave estimates finite.
func TestHabitsForget(t *testing.T) {
	h := decide.Habits{Count: [3]int{3, 0, 0}}
	for _, at := range []int64{math.MaxInt64, 5, 0, -7, math.MinInt64, math.MaxInt64} {
		h.Use(0, at)
		for u := range 2 {
			if r := h.Rest(u, 5); !(r >= 1 && r <= decide.LongestRest) {
				t.Errorf("after a use at %d a batch is expected in %v ns", at, r)
			}
		}
		if r := h.Round(); !(r >= 1 && r < math.MaxInt64*1e3) {
			t.Errorf("after a use at %d all are used within %v ns", at, r)
		}
	}
}

// TestHabitsOfTasks: tasks that use many batches at once are as far apart as they are.
func TestHabitsOfTasks(t *testing.T) {
	for _, inputs := range []int{1, 10, 20, 64, 200} {
		const gap = 1e7
		h := decide.Habits{Count: [3]int{100, 0, 100}}
		now := int64(0)
		for range 5000 / inputs {
			now += int64(inputs) * gap
			for range inputs {
				h.Use(0, now)
			}
		}
		if h.Gap < gap/3 || h.Gap > 3*gap {
			t.Errorf("tasks of %d inputs: %v ns between uses, want about %v", inputs, h.Gap, gap)
		}
		before := h.Gap
		if h.Use(0, now+1e15); h.Gap > 6*before {
			t.Errorf("tasks of %d inputs: %v ns between uses after a pause, %v before", inputs, h.Gap, before)
		}
	}
}

// TestHabitsBegin: however few uses there were, what a hint says is used soon goes last.
func TestHabitsBegin(t *testing.T) {
	for seen := range 4 {
		h := decide.Habits{Count: [3]int{10, 0, 0}}
		now := int64(0)
		for range seen {
			now += 1e6
			h.Use(0, now)
		}
		p := CostAware().(costAware)
		list := []Victim{
			{ID: 1, Key: p.Key(batch.Info{}), Bytes: 8, Down: 1, Up: 1},
			{ID: 2, Key: p.Key(batch.Info{NextUse: now + 10}), Bytes: 8, Down: 1, Up: 1},
		}
		if p.OrderBy(now, list, &h); list[0].ID != 1 {
			t.Errorf("after %d uses what is used in 10 ns goes first", seen)
		}
	}
}

// TestStaleVictims: what a space has not used for long is in its shortlist, though much more is
// expected later.
func TestStaleVictims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(
			t,
			sizes{gpu0: 4000 * kib, host0: 100 * kib},
			func(c *Config, _ *world) { c.Policy = CostAware() },
		)
		all := w.fillSpace(gpu0, 2000, kib)
		time.Sleep(time.Second)
		stale := all[:10]
		for range 2 {
			for _, b := range stale {
				w.use(b)
			}
			time.Sleep(time.Second)
		}
		time.Sleep(time.Minute)
		for _, b := range all[10:] {
			w.use(b)
		}
		list, _ := w.mon.victims(nil, 0, byKind{}, 50)
		for i, v := range list {
			if is := slices.Contains(stale, v.Batch); is != (i < len(stale)) {
				t.Errorf("number %d of %d is stale: %v", i, len(list), is)
			}
		}
		if len(list) != 60 {
			t.Errorf("%d victims, want 50 and the stale ones", len(list))
		}
		w.end(all...)
	})
}

// TestStaleVictimsOnce: a stale batch is in the shortlist once, also where that ends with a batch
// that goes after all that were used.
func TestStaleVictimsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(
			t,
			sizes{gpu0: 4000 * kib, host0: 100 * kib},
			func(c *Config, _ *world) { c.Policy = CostAware() },
		)
		all := w.fillSpace(gpu0, 6, kib)
		time.Sleep(time.Second)
		for range 3 {
			for _, b := range all[:5] {
				w.use(b)
			}
			time.Sleep(time.Second)
		}
		all[5].Hint(batch.Stay)
		time.Sleep(time.Hour)
		list, _ := w.mon.victims(nil, 0, byKind{}, 50)
		seen := map[batch.ID]int{}
		for _, v := range list {
			if seen[v.ID]++; seen[v.ID] > 1 {
				t.Errorf("batch %d is listed twice", v.ID)
			}
		}
		if len(list) != len(all) {
			t.Errorf("%d victims of %d", len(list), len(all))
		}
		w.end(all...)
	})
}

// TestStaleBehindALateOne: one batch that is a little late does not hide those that are not used
// any more.
func TestStaleBehindALateOne(t *testing.T) {
	for _, shield := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(
				t,
				sizes{gpu0: 4000 * kib, host0: 100 * kib},
				func(c *Config, _ *world) { c.Policy = CostAware() },
			)
			all := w.fillSpace(gpu0, 2000, kib)
			late := all[1999]
			time.Sleep(8 * time.Second)
			if shield {
				w.use(late) // again in eight seconds, as far as can be told
			}
			time.Sleep(7 * time.Second)
			stale := all[:10]
			for range 200 {
				for _, b := range stale {
					w.use(b)
				}
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(20 * time.Second)
			for _, b := range all[10:1999] {
				w.use(b) // again in some forty seconds
			}
			list, _ := w.mon.victims(nil, 0, [4]int64{}, 50)
			n := 0
			for _, v := range list {
				if slices.Contains(stale, v.Batch) {
					n++
				}
			}
			if n != len(stale) {
				t.Errorf("with a late one %v: %d of %d stale batches are in the shortlist", shield, n, len(stale))
			}
			w.end(all...)
		})
	}
}

// TestStaleBelowMakesRoom: a batch of the host's that is not used any more makes room for one of
// the GPU's that is.
func TestStaleBelowMakesRoom(t *testing.T) {
	for name, p := range map[string]Policy{"lru": LRU(), "cost-aware": CostAware()} {
		bubble(t, name, func(t *testing.T) {
			w := newWorld(
				t,
				sizes{gpu0: 100 * kib, host0: 100 * kib, disk0: 1000 * kib},
				func(c *Config, _ *world) { c.Policy = p },
			)
			hot, cold := w.fillSpace(gpu0, 2, 35*kib), w.fillSpace(host0, 7, 10*kib)
			time.Sleep(time.Second)
			for range 50 { // not used for long after this
				for _, b := range cold {
					w.use(b)
				}
				time.Sleep(100 * time.Millisecond)
			}
			for range 60 {
				time.Sleep(time.Minute)
				for _, b := range hot {
					w.use(b)
				}
			}
			w.start()
			settle(time.Second)
			r, err := w.res.Reserve(t.Context(), specific(gpu0), 40*kib)
			if err != nil {
				t.Fatal(err)
			}
			settle(time.Second)
			for _, b := range hot {
				if b.Info().Space == disk0 {
					t.Errorf(
						"what is used each minute went to the disk; in host memory lies what was not used for an hour",
					)
				}
			}
			if err := r.Release(); err != nil {
				t.Error(err)
			}
			w.end(append(hot, cold...)...)
		})
	}
}

func compareKeys(a, b Key) int { return slices.Compare(a[:], b[:]) }
