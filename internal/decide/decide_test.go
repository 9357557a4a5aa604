package decide

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

var (
	gpu0  = tier.ID{Kind: tier.GPU}
	host0 = tier.ID{Kind: tier.Host}
	disk0 = tier.ID{Kind: tier.Disk}
	disk1 = tier.ID{Kind: tier.Disk, Ordinal: 1}

	three = []tier.ID{gpu0, host0, disk0}
	four  = []tier.ID{gpu0, host0, {Kind: tier.Host, Ordinal: 1}, disk0}
)

// shape writes a space in few words. A space has a limit of 100 and a trigger of 80.
type shape struct {
	used, limit int64
	waiting     int64
	headroom    int64
	refused     int64
	victims     []int64 // sizes; the key of the n-th is n, plus first
	first       int64
	copied      Places // of all victims
	not         Kinds  // of all victims
	blocked     bool
	more        bool
	pace        books.Pace
}

// build makes a snapshot. Victims are numbered from 1 on.
func build(ids []tier.ID, shapes ...shape) (s Snapshot) {
	next := 0
	for i, sh := range shapes {
		limit := sh.limit
		if limit == 0 {
			limit = 100
		}
		sp := Space{
			ID: ids[i], Place: i, Charge: exact, Room: limit - sh.used - sh.waiting, BelowTrigger: 79 - sh.used,
			Headroom: sh.headroom, Spare: limit,
			Refused: sh.refused, More: sh.more, Pace: sh.pace,
		}
		if sh.blocked {
			sp.Refused = 1
		}
		if i == len(ids)-1 {
			sp.BelowTrigger = math.MaxInt64
		}
		for n, bytes := range sh.victims {
			next++
			sp.Victims = append(sp.Victims, Victim{
				N: next, Bytes: bytes, Key: [4]int64{sh.first + int64(n)}, Copied: sh.copied, Not: sh.not,
			})
		}
		s = append(s, sp)
	}
	return s
}

func exact(n int64) int64 { return n }

func text(s Snapshot, moves []Move, short bool) string {
	var out []string
	for _, m := range moves {
		one := fmt.Sprintf("%d>%s", m.Victim.N, s[m.To].ID)
		if m.Make > 0 {
			one += fmt.Sprintf(" after %d", m.Make)
		}
		out = append(out, one)
	}
	if short {
		out = append(out, "short")
	}
	return strings.Join(out, ", ")
}

func TestExcess(t *testing.T) {
	for _, c := range []struct{ pressure, want int64 }{
		{0, 0}, {79, 0}, {80, 2}, {84, 10}, {85, 12}, {89, 20}, {90, 30 - 8}, {95, 32}, {99, 39}, {100, 40}, {120, 60}, {200, 140},
	} {
		if got := Excess(c.pressure, 80, 60); got != c.want {
			t.Errorf("at %d: %d, want %d", c.pressure, got, c.want)
		}
	}
	if got := Excess(100, 80, 95); got != 21 {
		t.Errorf("with a stop mark above the trigger: %d", got)
	}
}

func TestDecide(t *testing.T) {
	ten := []int64{10, 10, 10, 10, 10, 10, 10}
	for _, tt := range []struct {
		name  string
		ids   []tier.ID
		need  int64
		state []shape
		want  string
	}{
		{"nothing is needed", three, 0, []shape{{victims: ten}, {}, {}}, ""},
		{"one is enough", three, 10, []shape{{victims: ten}, {}, {}}, "1>host:0"},
		{"one byte more", three, 11, []shape{{victims: ten}, {}, {}}, "1>host:0, 2>host:0"},
		{"all that there are", three, 99, []shape{{victims: []int64{10, 10}}, {}, {}}, "1>host:0, 2>host:0"},
		{"more are behind", three, 99, []shape{{victims: []int64{10}, more: true}, {}, {}}, "1>host:0, short"},
		{"no victims", three, 10, []shape{{}, {}, {}}, ""},
		{"no slower tier", []tier.ID{gpu0}, 10, []shape{{victims: ten}}, ""},
		{"no host at all", []tier.ID{gpu0, disk0}, 10, []shape{{victims: ten}, {}}, "1>disk:0"},

		{"a colder batch in host goes first", three, 10, []shape{{victims: []int64{10}, first: 5}, {used: 95, victims: ten}, {}}, "1>host:0 after 10"},
		{"the coldest batch passes host by", three, 10, []shape{{victims: []int64{10}}, {used: 95, victims: ten, first: 5}, {}}, "1>disk:0"},
		{"larger than host can ever take", three, 10, []shape{{victims: []int64{60}, first: 9}, {limit: 50, used: 20, victims: []int64{20}}, {}}, "1>disk:0"},
		{"host holds nothing that could go", three, 10, []shape{{victims: []int64{10}, first: 9}, {used: 95}, {}}, "1>disk:0"},
		{"what host holds can go nowhere", three, 10, []shape{{victims: []int64{10}, first: 9}, {used: 95, victims: ten, not: Kinds(0).With(tier.Disk)}, {}}, "1>disk:0"},
		{"what host holds has room only in another host space", four, 10,
			[]shape{{victims: []int64{30}, first: 9}, {used: 95, victims: ten}, {used: 85}, {used: 100}}, ""},
		{"host cannot make enough room", three, 10, []shape{{victims: []int64{30}, first: 9}, {used: 79, victims: []int64{5}}, {}}, "1>disk:0"},
		{"the disk is full for it, not for host's", three, 10, []shape{{victims: []int64{30}}, {used: 100, victims: ten, first: 5}, {used: 85}}, "1>host:0 after 30"},
		{"room that waiters want is not taken", three, 10, []shape{{victims: []int64{10}}, {used: 75, waiting: 20}, {}}, "1>disk:0"},
		{"disk full, host has room", three, 10, []shape{{victims: []int64{10}}, {used: 40}, {used: 100}}, "1>host:0"},
		{"disk full, host full", three, 10, []shape{{victims: []int64{10}}, {used: 100, victims: []int64{10}}, {used: 100}}, ""},
		{"only a small one fits", three, 5, []shape{{victims: []int64{50, 40, 5}}, {used: 94, limit: 95}, {used: 95}}, "3>disk:0"},
		{"headroom stays free", three, 10, []shape{{victims: []int64{10}}, {used: 85, headroom: 10}, {}}, "1>disk:0"},
		{"beside the headroom", three, 10, []shape{{victims: []int64{10}}, {used: 80, headroom: 10}, {}}, "1>host:0"},
		{"the second makes room for itself alone", three, 20, []shape{{victims: []int64{10, 10}, first: 9}, {used: 85, victims: ten}, {}}, "1>host:0, 2>host:0 after 10"},
		{"short below", three, 10, []shape{{victims: []int64{30}, first: 9}, {used: 100, victims: []int64{10}, more: true}, {}}, "1>disk:0, short"},

		{"a blocked edge is passed by", three, 10, []shape{{victims: []int64{10}}, {blocked: true}, {}}, "1>disk:0"},
		{"all edges blocked", three, 10, []shape{{victims: []int64{10}}, {blocked: true}, {blocked: true}}, ""},
		{"refused sizes are not tried", three, 10, []shape{{victims: []int64{10, 4}}, {refused: 10}, {used: 100}}, "2>host:0"},
		{"a tier that it cannot be converted for", three, 10, []shape{{victims: ten, not: Kinds(0).With(tier.Host)}, {}, {}}, "1>disk:0"},

		{"a clean image moves no bytes", []tier.ID{host0, disk0, disk1}, 10, []shape{{victims: ten, copied: Places(0).With(2)}, {}, {}}, "1>disk:1"},
		{"volumes by pace", []tier.ID{host0, disk0, disk1}, 40,
			[]shape{{victims: ten}, {pace: books.Pace{Bandwidth: 30}}, {pace: books.Pace{Bandwidth: 10}}},
			"1>disk:0, 2>disk:1, 3>disk:0, 4>disk:0"},
		{"volumes without a pace", []tier.ID{host0, disk0, disk1}, 40, []shape{{victims: ten}, {}, {}}, "1>disk:0, 2>disk:1, 3>disk:0, 4>disk:1"},
		{"a volume that is ahead", []tier.ID{host0, disk0, disk1}, 20,
			[]shape{{victims: ten}, {pace: books.Pace{Lead: time.Minute, Bandwidth: 30}},
				{pace: books.Pace{Bandwidth: 10}}}, "1>disk:1, 2>disk:1"},
		{"a volume that fails, and a full one", []tier.ID{host0, disk0, disk1}, 10,
			[]shape{{victims: ten}, {pace: books.Pace{Bandwidth: 30, Ailing: true}},
				{used: 95, pace: books.Pace{Bandwidth: 10}}}, "1>disk:0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := build(tt.ids, tt.state...)
			moves, short := Decide(s, tt.need)
			if got := text(s, moves, short); got != tt.want {
				t.Errorf("\n got %s\nwant %s", got, tt.want)
			}
		})
	}
}

// TestCopyFurtherDown: a batch with a clean image on disk goes there at once if it would be among the
// next to leave host memory, where that is at its trigger.
func TestCopyFurtherDown(t *testing.T) {
	const host, disk = 1, 2
	ten := []int64{10, 10}
	for _, tt := range []struct {
		name   string
		copied Places
		first  int64 // key of the GPU's victim
		host   shape
		disk   shape
		want   string
	}{
		{"host has room", Places(0).With(disk), 1, shape{used: 60, victims: ten, first: 5}, shape{}, "1>host:0"},
		{"host just has room", Places(0).With(disk), 1, shape{used: 69, victims: ten, first: 5}, shape{}, "1>host:0"},
		{"host would be at its trigger", Places(0).With(disk), 1, shape{used: 70, victims: ten, first: 5}, shape{}, "1>disk:0"},
		{"and has what is needed as late", Places(0).With(disk), 5, shape{used: 70, victims: ten, first: 5}, shape{}, "1>disk:0"},
		{"and has nothing that could leave", Places(0).With(disk), 9, shape{used: 70}, shape{}, "1>disk:0"},
		{"and has what is needed later", Places(0).With(disk), 9, shape{used: 70, victims: ten, first: 5}, shape{}, "1>host:0"},
		{"there is a copy in host, too", Places(0).With(host).With(disk), 1, shape{used: 70, victims: ten, first: 5}, shape{}, "1>host:0"},
		{"there is no copy", 0, 1, shape{used: 70, victims: ten, first: 5}, shape{}, "1>host:0"},
		{"host is full", Places(0).With(disk), 1, shape{used: 100, victims: ten, first: 5}, shape{}, "1>disk:0"},
		{"and has what is needed later", Places(0).With(disk), 9, shape{used: 100, victims: ten, first: 5}, shape{}, "1>host:0 after 10"},
		{"no room on disk", Places(0).With(disk), 1, shape{used: 70, victims: ten, first: 5}, shape{used: 95}, "1>host:0"},
		{"the disk has failed", Places(0).With(disk), 1, shape{used: 70, victims: ten, first: 5}, shape{blocked: true}, "1>host:0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := build(three, shape{victims: []int64{10}, first: tt.first, copied: tt.copied}, tt.host, tt.disk)
			moves, short := Decide(s, 10)
			if got := text(s, moves, short); got != tt.want {
				t.Errorf("\n got %s\nwant %s", got, tt.want)
			}
		})
	}
}

// randomState makes a state that could be, with room for everything strange.
func randomState(r *rand.Rand) Snapshot {
	all := []tier.ID{gpu0, host0, {Kind: tier.Host, Ordinal: 1}, disk0, disk1}
	ids := slices.DeleteFunc(all, func(id tier.ID) bool { return id != gpu0 && r.IntN(3) == 0 })
	var shapes []shape
	for range ids {
		sh := shape{
			limit: 60 + r.Int64N(41), first: r.Int64N(20), used: r.Int64N(30),
			blocked: r.IntN(5) == 0, more: r.IntN(3) == 0,
		}
		for sh.used < sh.limit && r.IntN(12) > 0 {
			n := 1 + r.Int64N(min(sh.limit-sh.used, 30))
			sh.victims = append(sh.victims, n)
			sh.used += n
		}
		if r.IntN(3) == 0 {
			sh.waiting = r.Int64N(50)
		}
		if r.IntN(4) == 0 {
			sh.refused = 1 + r.Int64N(30)
		}
		if r.IntN(3) == 0 {
			sh.headroom = r.Int64N(40)
		}
		shapes = append(shapes, sh)
	}
	s := build(ids, shapes...)
	for i := range s {
		for j := range s[i].Victims {
			if r.IntN(8) == 0 {
				s[i].Victims[j].Not = Kinds(0).With([]tier.Kind{tier.Host, tier.Disk}[r.IntN(2)])
			}
			if r.IntN(3) == 0 {
				s[i].Victims[j].Copied = Places(0).With(r.IntN(len(s)))
			}
		}
	}
	return s
}

// TestDecideProperties checks what holds for all decisions.
func TestDecideProperties(t *testing.T) {
	runs, chosen, made, cut := 0, 0, 0, 0
	for seed := range testseed.Each(t, 20000) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := randomState(r)
		need := r.Int64N(120)
		before := make(Snapshot, len(s))
		for i := range s {
			before[i] = s[i]
			before[i].Victims = slices.Clone(s[i].Victims)
		}
		moves, short := Decide(s, need)
		if !same(s, before) {
			t.Fatalf("seed %d: the snapshot was changed", seed)
		}
		if again, also := Decide(s, need); !reflect.DeepEqual(moves, again) || short != also {
			t.Fatalf("seed %d: another outcome the second time", seed)
		}
		if err := check(s, moves, need); err != nil {
			t.Fatalf("seed %d: %v\nneed %d: %s\n%+v", seed, err, need, text(s, moves, short), s)
		}
		runs, chosen = runs+1, chosen+len(moves)
		for _, m := range moves {
			if m.Make > 0 {
				made++
			}
		}
		few := slices.Clone(s)
		for i := range few {
			if v := few[i].Victims; len(v) > 0 && r.IntN(3) > 0 {
				few[i].Victims, few[i].More = v[:r.IntN(len(v))], true
			}
		}
		if got, short := Decide(few, need); short {
			cut++
		} else if !reflect.DeepEqual(got, moves) {
			t.Fatalf("seed %d: with short lists %s, with longer ones %s\n%+v", seed, text(few, got, short), text(s, moves, short), s)
		}
	}
	if runs > 1 && (chosen < 1000 || made < 100 || cut < 100) {
		t.Errorf("%d moves, %d that make room, %d short: the states are too tame", chosen, made, cut)
	}
}

// same reports whether two snapshots are equal. Functions are not compared.
func same(a, b Snapshot) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	for i := range a {
		a[i].Charge, b[i].Charge = nil, nil
	}
	return reflect.DeepEqual(a, b)
}

func check(s Snapshot, moves []Move, need int64) error {
	last, out := int64(0), int64(0)
	room := make([]int64, len(s))
	leaving := make([]int64, len(s))
	for i := range s {
		room[i] = s[i].Room
	}
	place := -1
	for _, m := range moves {
		v, to := m.Victim, &s[m.To]
		at := slices.Index(s[0].Victims, *v)
		if at <= place {
			return fmt.Errorf("batch %d is no victim, or not in its turn", v.N)
		}
		place = at
		if m.To == 0 || to.ID.Kind <= s[0].ID.Kind || v.Not.Has(to.ID.Kind) {
			return fmt.Errorf("batch %d cannot go to %s", v.N, to.ID)
		}
		if to.Refused > 0 && v.Bytes >= to.Refused {
			return fmt.Errorf("batch %d of %d bytes goes to where %d were refused", v.N, v.Bytes, to.Refused)
		}
		leaving[m.To] += m.Make
		room[m.To] += m.Make - v.Bytes
		if keep := max(0, min(to.Headroom, to.Spare-v.Bytes)); room[m.To] < keep {
			return fmt.Errorf("%s has %d bytes of room after batch %d, and %d of headroom", to.ID, room[m.To], v.N, keep)
		}
		out += v.Bytes
		last = v.Bytes
	}
	if len(moves) > 0 && out-last >= need {
		return fmt.Errorf("%d bytes leave for a need of %d, the last batch has %d", out, need, last)
	}
	for i, n := range leaving {
		all := int64(0)
		for _, v := range s[i].Victims {
			all += v.Bytes
		}
		if n > all {
			return fmt.Errorf("%d bytes are to leave %s, which has %d", n, s[i].ID, all)
		}
	}
	return nil
}

// TestFullSpacesCostLittle: where all is full, the victims of a slower space are looked at once, and
// not for each victim of the first.
func TestFullSpacesCostLittle(t *testing.T) {
	const n = 1000
	looks := 0
	s := make(Snapshot, len(three))
	for i, id := range three {
		s[i] = Space{ID: id, Place: i, BelowTrigger: math.MaxInt64, Charge: func(n int64) int64 { looks++; return n }}
		for k := range n {
			s[i].Victims = append(s[i].Victims, Victim{N: k, Bytes: 1})
		}
	}
	s[2].Victims = nil
	if moves, _ := Decide(s, n); len(moves) != 0 || looks > 10*n {
		t.Errorf("%d moves after %d looks at %d victims", len(moves), looks, 2*n)
	}
}
