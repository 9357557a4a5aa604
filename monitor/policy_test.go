package monitor

import (
	"cmp"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
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
		{"from the output towards the scans", PlanOrder(), []batch.Info{
			place(1, 5, false, 1), place(1, 3, false, 9), place(1, 0, false, 20),
		}},
		{"newest first within one repository", PlanOrder(), []batch.Info{
			place(1, 2, false, 9), place(1, 2, false, 8), place(1, 2, false, 3),
		}},
		{"the output's own repository last", PlanOrder(), []batch.Info{
			place(1, 3, false, 1), place(1, 0, false, 0), place(1, 4, true, 9), place(1, 4, true, 2),
		}},
		{"then the inputs of queued tasks, from the back", PlanOrder(), []batch.Info{
			place(1, 0, false, 50), place(1, 9, true, 51), queued(3, place(1, 1, false, 2)),
			queued(2, place(1, 7, false, 30)), queued(1, place(2, 1, false, 40)),
		}},
		{"the youngest plan gives first", PlanOrder(), []batch.Info{
			place(2, 0, false, 1), place(1, 9, false, 9), place(3, 9, true, 1),
		}},
		{"numbers of 64 bits", PlanOrder(), []batch.Info{
			place(1<<63+1, 0, false, 1), place(1<<63, 0, false, 1<<63), place(1<<63, 0, false, 7),
			place(7, 0, false, 1),
			place(0, 0, false, 1), queued(1<<63, place(0, 0, false, 1)), queued(7, place(0, 0, false, 1)),
		}},
		{"ranks below zero", PlanOrder(), []batch.Info{place(1, 0, false, 0), place(1, -1, false, 5)}},
		{"from the scans towards the output", PlanOrderFromScans(), []batch.Info{
			place(1, -1, false, 5), place(1, 0, false, 20), place(1, 0, false, 3), place(1, 3, false, 9),
			place(1, 0, true, 30), queued(2, place(1, 0, false, 7)),
		}},
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
	const now, second = 1000, int64(time.Second)
	type info = batch.Info
	at := func(last, next int64) info { return info{LastUse: last, NextUse: next} }
	one := func(i info) Victim { return Victim{Key: CostAware().Key(i), Bytes: 8, Down: 4, Up: 4} }
	copied := func(v Victim) Victim { v.Down = 0; return v }
	slow := func(v Victim) Victim { v.Up *= 10; return v }
	once := func(last int64) info { return info{Uses: 1, LastUse: last} }
	plan := func(seq uint64) info { return info{Place: batch.Place{Plan: 1, Operator: "scan", Seq: seq}} }
	output := func(seq uint64) info { return info{Place: batch.Place{Plan: 1, Operator: "out", Seq: seq, Last: true}} }
	queued := func(task uint64) info { return info{Pending: 1, Task: task, LastUse: 900, NextUse: 1500} }
	for _, c := range []struct {
		name string
		want []Victim
	}{
		{"by what is known", []Victim{
			one(at(10, batch.Never)), one(info{}), one(once(800)), one(once(700)), one(plan(9)),
			one(plan(2)), one(output(3)), one(output(1)),
			one(at(900, 1500)), one(at(990, 1010)), one(queued(2)), one(queued(1)), one(at(990, batch.Stay)),
		}},
		{"late is late for as long again", []Victim{one(at(500, 1300)), one(at(600, 800)), one(at(700, 1100))}},
		{"unused for much longer than between its uses", []Victim{
			one(at(100-90*second, 100-80*second)), one(plan(1)), one(at(100-90*second, 100-70*second)),
			one(at(100-50*second, 100-49*second)), one(at(999, 9000)), one(at(990, 1000)),
		}},
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
		list := w.firstVictims(50)
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
		list := w.firstVictims(50)
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
			time.Sleep(20 * time.Second)
			if shield {
				w.use(late) // its next use is expected in twenty seconds
			}
			time.Sleep(7 * time.Second)
			stale := all[:10]
			for range 200 {
				for _, b := range stale {
					w.use(b)
				}
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(70 * time.Second)
			for _, b := range all[10:1999] {
				w.use(b) // again in some hundred seconds
			}
			list := w.firstVictims(50)
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
			r, err := w.res.Reserve(t.Context(), specific(gpu0), 40*kib, nil)
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
