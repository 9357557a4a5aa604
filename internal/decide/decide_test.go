package decide

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

var (
	gpu0  = tier.ID{Kind: tier.GPU}
	gpu1  = tier.ID{Kind: tier.GPU, Ordinal: 1}
	host0 = tier.ID{Kind: tier.Host}
	disk0 = tier.ID{Kind: tier.Disk}
	disk1 = tier.ID{Kind: tier.Disk, Ordinal: 1}
)

// shape writes a state in few words. Spaces have a limit of 100, a trigger of 80
// and a stop mark of 60.
type shape struct {
	used, waiting, retired, leaving, foreign int64
	limit, lingering                         int64
	victims                                  []int64 // sizes; the key of the n-th is n, plus first
	first                                    uint64
	underWay                                 []int
	blocked                                  []bool
	refused                                  int64
	withheld                                 int64
}

func build(ids []tier.ID, shapes ...shape) Snapshot {
	var s Snapshot
	next := 0
	for i, sh := range shapes {
		sp := Space{
			ID: ids[i], Limit: 100, Trigger: 80, Stop: 60, Used: sh.used, Waiting: sh.waiting, Retired: sh.retired,
			Leaving: sh.leaving, Foreign: sh.foreign, Refused: sh.refused,
			Withheld: sh.withheld, Late: sh.lingering, Lingering: sh.lingering,
		}
		if sh.limit > 0 {
			sp.Limit = sh.limit
		}
		for j := range ids {
			if ids[j].Kind <= ids[i].Kind {
				continue
			}
			e := Edge{To: j, Free: 2}
			if n := len(sp.Down); n < len(sh.underWay) {
				e.UnderWay, e.Free = sh.underWay[n], 2-sh.underWay[n]
			}
			if n := len(sp.Down); n < len(sh.blocked) {
				e.Blocked = sh.blocked[n]
			}
			sp.Down = append(sp.Down, e)
		}
		for n, bytes := range sh.victims {
			next++
			sp.Victims = append(sp.Victims, Victim{N: next, Bytes: bytes, Key: [4]uint64{sh.first + uint64(n)}})
		}
		s.Spaces = append(s.Spaces, sp)
	}
	return s
}

func (d Decision) text(s Snapshot) string {
	var out []string
	for _, c := range d.Moves {
		out = append(out, fmt.Sprintf("%d:%s>%s %s", c.Victim.N, s.Spaces[c.From].ID, s.Spaces[c.To].ID, c.Reason))
	}
	for _, w := range d.Stuck {
		out = append(out, fmt.Sprintf("stuck %s %d %s", s.Spaces[w.Space].ID, w.Bytes, w.Reason))
	}
	if d.Held {
		out = append(out, "held")
	}
	return strings.Join(out, ", ")
}

func TestStep(t *testing.T) {
	three := []tier.ID{gpu0, host0, disk0}
	ten := []int64{10, 10, 10, 10, 10, 10, 10}
	for _, tt := range []struct {
		name  string
		ids   []tier.ID
		state []shape
		want  string
	}{
		{"under the trigger no byte moves", three, []shape{{used: 79, victims: ten}, {}, {}}, ""},
		{"at the trigger", three, []shape{{used: 80, victims: []int64{10, 10, 10}}, {}, {}}, "1:gpu:0>host:0 trigger"},
		{"as far below the trigger as it is above", three, []shape{{used: 85, victims: []int64{10, 10, 10}}, {}, {}},
			"1:gpu:0>host:0 trigger, 2:gpu:0>host:0 trigger"},
		{"but not below stop", three, []shape{{used: 99, victims: []int64{39, 1, 1}}, {}, {}}, "1:gpu:0>host:0 trigger"},
		{"the edge takes two at once", three, []shape{{used: 100, victims: ten}, {}, {}},
			"1:gpu:0>host:0 trigger, 2:gpu:0>host:0 trigger"},
		{"what others hold is pressure", three, []shape{{used: 30, foreign: 51, victims: []int64{30, 10}}, {}, {}}, "1:gpu:0>host:0 trigger"},
		{"demand for what others hold of a quota", three, []shape{{used: 30, withheld: 60, waiting: 20, victims: []int64{10, 10}}, {}, {}}, "1:gpu:0>host:0 demand"},
		{"demand for what only others hold", three, []shape{{withheld: 90, waiting: 20}, {}, {}}, "stuck gpu:0 10 demand"},
		{"a quota that others have used up below", three, []shape{{used: 100, waiting: 10, victims: []int64{10}}, {withheld: 95}, {}}, "1:gpu:0>disk:0 demand"},
		{"what is under way counts", three, []shape{{used: 95, leaving: 20, victims: ten, underWay: []int{1}}, {}, {}}, "1:gpu:0>host:0 trigger"},
		{"what is retired counts", three, []shape{{used: 85, leaving: 15, retired: 10, victims: ten}, {}, {}}, ""},
		{"demand below the trigger", three, []shape{{used: 70, waiting: 40, victims: ten}, {}, {}}, "1:gpu:0>host:0 demand"},
		{"demand frees its need, not more", three, []shape{{used: 70, waiting: 45, victims: ten}, {}, {}},
			"1:gpu:0>host:0 demand, 2:gpu:0>host:0 demand"},
		{"demand that has its room", three, []shape{{used: 70, waiting: 30, victims: ten}, {}, {}}, ""},
		{"demand with bytes under way", three, []shape{{used: 70, waiting: 45, leaving: 15, victims: ten}, {}, {}}, ""},
		{"more demand than there can be", three, []shape{{used: 20, waiting: 1 << 60, victims: []int64{10, 10}}, {}, {}},
			"1:gpu:0>host:0 demand, 2:gpu:0>host:0 demand"},
		{"more demand than there can be, and no victim", three, []shape{{used: 20, waiting: 1 << 60}, {}, {}}, "stuck gpu:0 20 demand"},
		{"demand first, then the trigger", three, []shape{{used: 95, waiting: 15, victims: ten}, {}, {}},
			"1:gpu:0>host:0 demand, 2:gpu:0>host:0 trigger"},
		{"down to a lowered limit", three, []shape{{used: 65, limit: 50, victims: ten}, {}, {}}, "1:gpu:0>host:0 trigger, 2:gpu:0>host:0 trigger"},
		{"down to a lowered limit, of which some is on its way", three, []shape{{used: 65, limit: 50, leaving: 10, victims: ten, underWay: []int{1}}, {}, {}}, "1:gpu:0>host:0 trigger"},
		{"at a lowered limit", three, []shape{{used: 50, limit: 50, victims: ten}, {}, {}}, ""},
		{"down to a lowered quota", three, []shape{{used: 35, withheld: 75, victims: ten}, {}, {}}, "1:gpu:0>host:0 trigger"},
		{"host down to a lowered limit", three, []shape{{}, {used: 45, limit: 40, victims: ten}, {}}, "1:host:0>disk:0 trigger"},
		{"above a lowered limit with no place to go to", three, []shape{{}, {}, {used: 50, limit: 40}}, ""},
		{"a lowered limit and demand", three, []shape{{used: 70, limit: 50, waiting: 5, victims: []int64{25, 10}}, {}, {}}, "1:gpu:0>host:0 demand"},
		{"host relieves itself", three, []shape{{}, {used: 85, victims: ten}, {}}, "1:host:0>disk:0 trigger, 2:host:0>disk:0 trigger"},
		{"the disk has nowhere to go", three, []shape{{}, {}, {used: 100}}, ""},
		{"demand on the disk is stuck", three, []shape{{}, {}, {used: 100, waiting: 7}}, "stuck disk:0 7 demand"},

		{"a colder batch in host goes first", three, []shape{{used: 100, waiting: 10, victims: []int64{10}, first: 5}, {used: 95, victims: ten}, {}},
			"2:host:0>disk:0 demand, 3:host:0>disk:0 trigger, held"},
		{"the coldest batch passes host by", three, []shape{{used: 100, waiting: 10, victims: []int64{10}}, {used: 95, victims: ten, first: 5}, {}},
			"1:gpu:0>disk:0 demand, 2:host:0>disk:0 trigger, 3:host:0>disk:0 trigger"},
		{"room is on its way in host", three, []shape{{used: 100, waiting: 10, victims: []int64{10}}, {used: 95, leaving: 40, underWay: []int{1}, first: 5}, {}}, "held"},
		{"larger than host can ever take", three, []shape{{used: 100, waiting: 10, victims: []int64{60}, first: 9}, {limit: 50, used: 20, victims: []int64{20}}, {}},
			"1:gpu:0>disk:0 demand"},
		{"host holds nothing that could go", three, []shape{{used: 100, waiting: 10, victims: []int64{10}, first: 9}, {used: 95}, {}},
			"1:gpu:0>disk:0 demand, stuck host:0 16 trigger"},
		{"host cannot make enough room", three, []shape{{used: 100, waiting: 10, victims: []int64{30}, first: 9}, {used: 79, victims: []int64{5}}, {}},
			"1:gpu:0>disk:0 demand"},
		{"room that waiters of host want is not taken", three, []shape{{used: 100, waiting: 10, victims: []int64{10}}, {used: 75, waiting: 20, victims: nil}, {}},
			"1:gpu:0>disk:0 demand"},
		{"disk full, host has room", three, []shape{{used: 100, waiting: 10, victims: []int64{10}}, {used: 40}, {used: 100}}, "1:gpu:0>host:0 demand"},
		{"disk full, host full", three, []shape{{used: 100, waiting: 10, victims: []int64{10}}, {used: 100, victims: []int64{10}}, {used: 100}},
			"stuck gpu:0 10 demand, stuck host:0 21 trigger"},
		{"only a small one fits", three, []shape{{used: 100, waiting: 10, victims: []int64{50, 40, 5}}, {used: 94, limit: 95}, {used: 95}},
			"3:gpu:0>disk:0 demand, stuck host:0 15 trigger"},
		{"a blocked edge is passed by", three, []shape{{used: 100, waiting: 10, victims: []int64{10}, blocked: []bool{true}}, {}, {}}, "1:gpu:0>disk:0 demand"},
		{"all edges blocked", three, []shape{{used: 100, waiting: 10, victims: []int64{10}, blocked: []bool{true, true}}, {}, {}}, "stuck gpu:0 10 demand"},
		{"what was refused is not tried", three, []shape{{used: 100, waiting: 10, victims: []int64{10, 4}}, {refused: 10}, {used: 100}},
			"2:gpu:0>host:0 demand"},
		{"a refusal does not make waiters", three, []shape{{}, {used: 50, waiting: 20, refused: 10, victims: ten}, {}}, ""},
		{"a busy edge is waited for, not gone around", three, []shape{{used: 100, waiting: 30, leaving: 20, victims: ten, underWay: []int{2}}, {used: 20}, {}}, ""},
		{"volumes are used side by side", []tier.ID{host0, disk0, disk1}, []shape{{used: 100, victims: ten}, {}, {}},
			"1:host:0>disk:0 trigger, 2:host:0>disk:1 trigger, 3:host:0>disk:0 trigger, 4:host:0>disk:1 trigger"},
		{"no host at all", []tier.ID{gpu0, disk0}, []shape{{used: 100, waiting: 5, victims: []int64{10}}, {}}, "1:gpu:0>disk:0 demand, stuck"},
		{"no tier below", []tier.ID{gpu0}, []shape{{used: 100, waiting: 5, victims: nil}}, "stuck gpu:0 5 demand"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := build(tt.ids, tt.state...)
			got := Decide(s).text(s)
			want := strings.TrimSuffix(tt.want, ", stuck")
			if got != want {
				t.Errorf("\n got %s\nwant %s", got, want)
			}
		})
	}
}

// randomState makes a state that could be, with room for everything strange.
func randomState(r *rand.Rand) Snapshot {
	all := []tier.ID{gpu0, {Kind: tier.GPU, Ordinal: 1}, host0, {Kind: tier.Host, Ordinal: 1}, disk0, disk1}
	var ids []tier.ID
	for _, id := range all {
		if r.IntN(3) > 0 {
			ids = append(ids, id)
		}
	}
	var shapes []shape
	for range ids {
		sh := shape{limit: 60 + r.Int64N(41), first: r.Uint64N(20)}
		room := r.Int64N(sh.limit + 1)
		for room > 0 && r.IntN(12) > 0 {
			n := 1 + r.Int64N(min(room, 30))
			switch r.IntN(6) {
			case 0:
				sh.leaving += n
			case 1:
				sh.retired += n
			case 2: // promised, or in use
			default:
				sh.victims = append(sh.victims, n)
			}
			sh.used += n
			room -= n
		}
		if r.IntN(2) == 0 {
			sh.waiting = r.Int64N(150)
		}
		if r.IntN(4) == 0 {
			sh.refused = 1 + r.Int64N(30)
		}
		if r.IntN(2) == 0 {
			sh.lingering = r.Int64N(sh.retired + 1)
		}
		if r.IntN(4) == 0 {
			sh.foreign = r.Int64N(30)
		}
		for range ids {
			sh.underWay = append(sh.underWay, r.IntN(3))
			sh.blocked = append(sh.blocked, r.IntN(5) == 0)
		}
		switch r.IntN(8) {
		case 0:
			sh.limit = 1 + r.Int64N(sh.limit) // lowered
		case 1:
			sh.withheld = r.Int64N(sh.limit)
		}
		shapes = append(shapes, sh)
	}
	s := build(ids, shapes...)
	for i := range s.Spaces {
		if r.IntN(3) == 0 {
			s.Spaces[i].Headroom = r.Int64N(40)
		}
		for _, v := range s.Spaces[i].Victims {
			s.Spaces[i].Rest += v.Bytes
		}
		for j := range s.Spaces[i].Victims {
			if r.IntN(8) == 0 {
				s.Spaces[i].Victims[j].Not = Kinds(0).With([]tier.Kind{tier.Host, tier.Disk}[r.IntN(2)])
			}
			if r.IntN(3) == 0 {
				s.Spaces[i].Victims[j].Copied = Places(0).With(r.IntN(len(s.Spaces)))
			}
		}
	}
	for range r.IntN(4) {
		var c []Want
		for i := range s.Spaces {
			if r.IntN(2) == 0 {
				c = append(c, Want{i, 1 + r.Int64N(60)})
			}
		}
		if len(c) > 1 {
			s.Choices = append(s.Choices, c)
		}
	}
	return s
}

func cloneState(s Snapshot) Snapshot {
	s.Spaces = slices.Clone(s.Spaces)
	for i := range s.Spaces {
		s.Spaces[i].Down = slices.Clone(s.Spaces[i].Down)
		s.Spaces[i].Victims = slices.Clone(s.Spaces[i].Victims)
	}
	return s
}

// ownNeed is what a space needs, worked out another way than Step does.
func ownNeed(sp *Space) int64 {
	need := int64(0)
	going := sp.Leaving + sp.Retired
	if limit := sp.Limit - sp.Withheld; sp.Waiting > 0 || sp.Used > limit && len(sp.Down) > 0 {
		need = max(need, min(sp.Waiting, sp.Limit)-(limit-sp.Used+going-sp.Lingering))
	}
	if pressure := sp.Used + sp.Foreign; len(sp.Down) > 0 && pressure >= sp.Trigger {
		goal := min(max(2*(sp.Trigger-1)-pressure, sp.Stop), sp.Trigger-1)
		need = max(need, pressure-going-goal)
	}
	return need
}

func TestStepProperties(t *testing.T) {
	runs, moves, held, stuck := 0, 0, 0, 0
	for seed := range testseed.Each(t, 20000) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := randomState(r)
		before := cloneState(s)
		d := Decide(s)
		if !reflect.DeepEqual(s, before) {
			t.Fatalf("seed %d: the state was changed", seed)
		}
		if again := Decide(s); !reflect.DeepEqual(d, again) {
			t.Fatalf("seed %d: another outcome the second time", seed)
		}
		alone := chosen(s)
		if err := checkDecision(alone, d); err != nil {
			t.Fatalf("seed %d: %v\n%s\n%+v", seed, err, d.text(s), s)
		}
		if other := Decide(alone); !reflect.DeepEqual(d, other) {
			t.Fatalf("seed %d: with the choices made it decides %s, else %s\n%+v", seed, other.text(s), d.text(s), s)
		}
		runs, moves, stuck = runs+1, moves+len(d.Moves), stuck+len(d.Stuck)
		if d.Held {
			held++
		}
	}
	if runs > 1 && (moves < 1000 || held < 100 || stuck < 100) {
		t.Errorf("%d moves, %d held, %d stuck: the states are too tame", moves, held, stuck)
	}
}

func checkDecision(s Snapshot, d Decision) error {
	out, in, last := make([]int64, len(s.Spaces)), make([]int64, len(s.Spaces)), make([]int64, len(s.Spaces))
	keep := make([]int64, len(s.Spaces))
	used := make(map[[2]int]int)
	seen := make(map[int]bool)
	for _, c := range d.Moves {
		from := &s.Spaces[c.From]
		if !slices.Contains(from.Victims, c.Victim) || seen[c.Victim.N] {
			return fmt.Errorf("batch %d is no victim of %s, or twice", c.Victim.N, from.ID)
		}
		seen[c.Victim.N] = true
		at := slices.IndexFunc(from.Down, func(e Edge) bool { return e.To == c.To })
		if at < 0 || from.Down[at].Blocked {
			return fmt.Errorf("there is no way from %s to %d", from.ID, c.To)
		}
		if c.Victim.Not.Has(s.Spaces[c.To].ID.Kind) {
			return fmt.Errorf("batch %d goes to %s, for which it cannot be converted", c.Victim.N, s.Spaces[c.To].ID)
		}
		if used[[2]int{c.From, c.To}]++; used[[2]int{c.From, c.To}] > from.Down[at].Free {
			return fmt.Errorf("too many moves from %s to %s", from.ID, s.Spaces[c.To].ID)
		}
		if r := s.Spaces[c.To].Refused; r > 0 && c.Victim.Bytes >= r {
			return fmt.Errorf("batch %d of %d bytes goes to where %d were refused", c.Victim.N, c.Victim.Bytes, r)
		}
		out[c.From] += c.Victim.Bytes
		last[c.From] = max(last[c.From], c.Victim.Bytes)
		if k := s.Spaces[c.To].Keep(c.Victim.Bytes); in[c.To] == 0 || k < keep[c.To] {
			keep[c.To] = k
		}
		in[c.To] += c.Victim.Bytes
	}
	upstream := int64(0) // what faster spaces could at most ask of this one
	for i := range s.Spaces {
		sp := &s.Spaces[i]
		if in[i] > 0 && sp.Used+in[i]+min(sp.Waiting, sp.Limit)+keep[i] > sp.Limit-sp.Withheld {
			return fmt.Errorf("%s is given %d bytes that it has no room for", sp.ID, in[i])
		}
		need := ownNeed(sp)
		if i == 0 || s.Spaces[i].ID.Kind == s.Spaces[0].ID.Kind { // nothing above asks for room
			if out[i] > 0 && out[i]-last[i] >= need {
				return fmt.Errorf("%s needs %d and gives %d, with a batch of %d", sp.ID, need, out[i], last[i])
			}
		} else if out[i] > 0 && out[i]-last[i] >= max(0, need)+upstream {
			return fmt.Errorf("%s needs %d, faster ones %d, and it gives %d", sp.ID, need, upstream, out[i])
		}
		if need > 0 {
			largest := int64(0)
			for _, v := range sp.Victims {
				largest = max(largest, v.Bytes)
			}
			upstream += need + largest
			// Everything that is needed is done, on its way, waited for, or reported.
			told := slices.ContainsFunc(d.Stuck, func(w Shortage) bool { return w.Space == i })
			idle := out[i] == 0 && sp.Leaving == 0 && sp.Retired == 0
			urgent := sp.Waiting > 0 && need == min(sp.Waiting, sp.Limit)-(sp.Limit-sp.Withheld-sp.Used) || sp.Used+sp.Foreign >= sp.Trigger
			if idle && urgent && !told && !d.Held && !busyBelow(sp) {
				return fmt.Errorf("%s needs %d and nothing is done about it", sp.ID, need)
			}
			if told && !idle {
				return fmt.Errorf("%s is said to be stuck and is not", sp.ID)
			}
		}
	}
	return nil
}

func busyBelow(sp *Space) bool {
	return slices.ContainsFunc(sp.Down, func(e Edge) bool { return e.Free == 0 })
}

// Carrying out the decisions of Step must come to an end, with every need met or reported: each
// move takes a batch further down.
func TestStepEnds(t *testing.T) {
	for seed := range testseed.Each(t, 3000) {
		r := rand.New(rand.NewPCG(seed, 2))
		s := randomState(r)
		for i := range s.Spaces { // a quiet world: nothing under way, nothing broken
			sp := &s.Spaces[i]
			sp.Used -= sp.Leaving + sp.Retired
			sp.Leaving, sp.Retired, sp.Refused = 0, 0, 0
			for j := range sp.Down {
				sp.Down[j] = Edge{To: sp.Down[j].To, Free: 2}
			}
		}
		for step := 0; ; step++ {
			d := Decide(s)
			if len(d.Moves) == 0 {
				if d.Held {
					t.Fatalf("seed %d: something is held back and nothing moves\n%+v", seed, s)
				}
				for i := range s.Spaces {
					sp := &s.Spaces[i]
					told := slices.ContainsFunc(d.Stuck, func(w Shortage) bool { return w.Space == i })
					if need := ownNeed(sp); sp.Waiting > 0 && sp.Used+min(sp.Waiting, sp.Limit) > sp.Limit && !told {
						t.Fatalf("seed %d: %s needs %d in the end and nobody says so\n%+v", seed, sp.ID, need, s)
					}
				}
				break
			}
			if step > 500 {
				t.Fatalf("seed %d: no end", seed)
			}
			for _, c := range d.Moves {
				from, to := &s.Spaces[c.From], &s.Spaces[c.To]
				from.Victims = slices.DeleteFunc(slices.Clone(from.Victims), func(v Victim) bool { return v.N == c.Victim.N })
				from.Used -= c.Victim.Bytes
				to.Used += c.Victim.Bytes
				if len(to.Down) > 0 {
					to.Victims = append(slices.Clone(to.Victims), c.Victim)
					slices.SortFunc(to.Victims, func(a, b Victim) int { return slices.Compare(a.Key[:], b.Key[:]) })
				}
			}
		}
	}
}

func TestFull(t *testing.T) {
	// rest says how much of what is used is at rest; smallest is the smallest victim.
	type space struct {
		used, rest, base, smallest, retired, refused, waiting int64
		moving                                                int
		broken                                                bool
	}
	at := func(n int64) space { return space{used: n, rest: n, smallest: 10} }
	for _, tt := range []struct {
		name  string
		gpu   space
		disk  space
		wantG bool
		wantD bool
	}{
		{"all at rest, no room", at(100), at(100), true, true},
		{"all at rest, too little room below", at(100), at(95), true, true},
		{"room below", at(100), at(90), false, true},
		{"somebody reads below", at(100), space{used: 100, rest: 90}, false, false},
		{"somebody reads here", space{used: 100, rest: 90, smallest: 10}, at(100), false, true},
		{"a promise here", space{used: 100, rest: 99, smallest: 10}, at(100), false, true},
		{"the engine's own", space{used: 100, rest: 90, base: 10, smallest: 10}, at(100), true, true},
		{"nothing but the engine's own", space{used: 10, base: 10}, space{used: 50}, true, false},
		{"something is retired", space{used: 100, rest: 90, retired: 10, smallest: 10}, at(100), false, true},
		{"a move is under way", space{used: 100, rest: 100, moving: 1, smallest: 10}, at(100), false, true},
		{"room below that is refused", at(100), space{used: 50, rest: 50, refused: 10}, true, true},
		{"refused for the sake of waiters", at(100), space{used: 50, rest: 50, refused: 10, waiting: 60}, false, true},
		{"the way down is broken", space{used: 100, rest: 100, smallest: 10, broken: true}, space{used: 10}, true, false},
		{"no batch is larger than nothing", space{used: 100, rest: 100}, at(50), true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var s Snapshot
			for i, sp := range []space{tt.gpu, tt.disk} {
				s.Spaces = append(s.Spaces, Space{
					ID: []tier.ID{gpu0, disk0}[i], Limit: 100, Used: sp.used, Rest: sp.rest, Base: sp.base,
					Retired: sp.retired, Refused: sp.refused, Waiting: sp.waiting, Moving: sp.moving,
				})
			}
			s.Spaces[0].Down = []Edge{{To: 1, Free: 2, Broken: tt.gpu.broken, Smallest: tt.gpu.smallest}}
			if full := FullForGood(s); full[0] != tt.wantG || full[1] != tt.wantD {
				t.Errorf("full is %v, want %v %v", full, tt.wantG, tt.wantD)
			}
		})
	}
}

// TestShortShortlists: a decision that did not ask for longer shortlists is the same with them.
func TestShortShortlists(t *testing.T) {
	cut, short := 0, 0
	for seed := range testseed.Each(t, 5000) {
		r := rand.New(rand.NewPCG(seed, 3))
		s := randomState(r)
		for i := range s.Spaces {
			for j := range s.Spaces[i].Down {
				s.Spaces[i].Down[j].Joint = Load{Batches: r.IntN(4), Bytes: r.Int64N(60)}
			}
		}
		want := Decide(s)
		few := Snapshot{slices.Clone(s.Spaces), s.Choices}
		for i := range few.Spaces {
			if v := few.Spaces[i].Victims; len(v) > 0 && r.IntN(3) > 0 {
				few.Spaces[i].Victims, few.Spaces[i].More = v[:r.IntN(len(v))], true
			}
		}
		got := Decide(few)
		if len(got.Cut) > 0 {
			cut++
			continue
		}
		short++
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("seed %d: %s, with longer shortlists %s\n%+v", seed, got.text(few), want.text(s), s)
		}
	}
	if cut == 0 || short == 0 {
		t.Errorf("%d asked for longer ones, %d did not: the test shows nothing", cut, short)
	}
}

// TestSmallBatchesMoveJointly: executors share small batches evenly, as many as each may have.
func TestSmallBatchesMoveJointly(t *testing.T) {
	s := build([]tier.ID{gpu0, host0}, shape{used: 90, waiting: 80, victims: []int64{10, 10, 10, 10, 10, 10, 10}}, shape{})
	for _, c := range []struct {
		joint Load
		want  []int
	}{{Load{}, []int{0, 1}}, {Load{3, 25}, []int{0, 1, 0, 1}}, {Load{3, 1000}, []int{0, 1, 0, 1, 0, 1}}} {
		s.Spaces[0].Down[0].Joint = c.joint
		var slots []int
		for _, c := range Decide(s).Moves {
			slots = append(slots, c.Slot)
		}
		if !slices.Equal(slots, c.want) {
			t.Errorf("%+v: the executors are %v, want %v", c.joint, slots, c.want)
		}
	}
}

func TestRelief(t *testing.T) {
	two := []tier.ID{gpu0, disk0}
	victims := []int64{10}
	for _, tt := range []struct {
		name string
		sp   Space
		d    Decision
		want []bool
	}{
		{"nothing", Space{}, Decision{}, []bool{false, false}},
		{"a move was chosen", Space{}, Decision{Moves: []Move{{From: 0, To: 1}}}, []bool{true, false}},
		{"a move is under way", Space{Moving: 1}, Decision{}, []bool{true, false}},
		{"a batch is leaving", Space{Leaving: 1}, Decision{}, []bool{true, false}},
		{"the device holds some", Space{Retired: 1}, Decision{}, []bool{true, false}},
		{"a batch was set aside", Space{Aside: 1}, Decision{}, []bool{true, false}},
		{"held back, and nothing moves", Space{}, Decision{Held: true}, []bool{false, false}},
		{"held back until something has moved", Space{}, Decision{Held: true, Moves: []Move{{From: 1}}}, []bool{true, true}},
	} {
		s := build(two, shape{victims: victims}, shape{})
		tt.sp.Victims = s.Spaces[0].Victims
		s.Spaces[0] = tt.sp
		if got := Relief(s, tt.d); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}
