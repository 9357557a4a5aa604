package reservation_test

import (
	"slices"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// pacedPool is a pool that says of its pace what the test wants.
type pacedPool struct {
	heapPool
	pace books.Pace
}

func (p *pacedPool) Pace() books.Pace { return p.pace }
func (p *pacedPool) Promised(int64)   {}

// volumes are three disks with paces, of which the last is far away, beside a GPU.
func volumes(t testing.TB) (*reservation.Manager, []*pacedPool) {
	t.Helper()
	spaces := []*tier.Space{spaceAt(t, "gpu:0", 1000, 1, 0)}
	var pools []*pacedPool
	for i := range 3 {
		p := &pacedPool{heapPool: heapPool{granule: 1}, pace: books.Pace{Bandwidth: 10}}
		pools = append(pools, p)
		s, err := tier.NewSpace(tier.SpaceConfig{
			ID: tier.ID{Kind: tier.Disk, Ordinal: i}, Capacity: 1000, Marks: tier.Marks{}.In(tier.Disk),
			Node: i / 2, Backend: "paced", Pool: p,
		})
		if err != nil {
			t.Fatal(err)
		}
		spaces = append(spaces, s)
	}
	return managerOf(t, reservation.Config{Spaces: spaces}), pools
}

func order(m *reservation.Manager, s reservation.Strategy) (ordinals []int) {
	for _, sp := range s.Candidates(m.Spaces(), nil) {
		ordinals = append(ordinals, sp.ID().Ordinal)
	}
	return ordinals
}

// Volumes that are behind with their share come first, those that fail last. Where that is equal,
// room counts. Distance and a named space count before the pace.
func TestStrategiesGoByPace(t *testing.T) {
	any := reservation.AnyInTier(tier.Disk)
	for _, test := range []struct {
		name     string
		strategy reservation.Strategy
		leads    [3]time.Duration
		ailing   int // which one; -1 for none
		want     []int
	}{
		{"equal", any, [3]time.Duration{}, -1, []int{0, 1, 2}},
		{"who is behind", any, [3]time.Duration{3, 1, 2}, -1, []int{1, 2, 0}},
		{"who fails", any, [3]time.Duration{3, 1, 2}, 1, []int{2, 0, 1}},
		{"preferring", reservation.AnyInTierPreferring(tier.Disk, 0), [3]time.Duration{3, 2, 1}, 0, []int{0, 2, 1}},
		{"specific", reservation.Specific(tier.ID{Kind: tier.Disk}), [3]time.Duration{3, 2, 1}, 0, []int{0}},
		{"any of some tiers", reservation.AnyInTiers(tier.Disk), [3]time.Duration{3, 2, 1}, -1, []int{2, 1, 0}},
		{"down, to the near ones first", reservation.ToDowngrade(gpu0, tier.Disk), [3]time.Duration{3, 2, 1}, -1, []int{1, 0, 2}},
	} {
		m, pools := volumes(t)
		for i, p := range pools {
			p.pace.Lead, p.pace.Ailing = test.leads[i], i == test.ailing
		}
		if got := order(m, test.strategy); !slices.Equal(got, test.want) {
			t.Errorf("%s: the order is %v; want %v", test.name, got, test.want)
		}
	}
}

// What is promised counts, so that many requests before the first write are spread.
func TestPromisesAreSpread(t *testing.T) {
	m, pools := volumes(t)
	pools[0].pace.Bandwidth, pools[1].pace.Bandwidth, pools[2].pace.Bandwidth = 10, 20, 30
	var held [3]int
	for range 60 {
		r := mustTry(t, m, reservation.AnyInTier(tier.Disk), 10, nil)
		defer release(t, r)
		held[r.Space().ID().Ordinal]++
	}
	if held != [3]int{10, 20, 30} {
		t.Errorf("of 60 reservations the volumes have %v", held)
	}
}

// A volume without room is skipped, whatever its pace.
func TestPaceYieldsToRoom(t *testing.T) {
	m, pools := volumes(t)
	pools[0].pace.Lead, pools[1].pace.Lead, pools[2].pace.Lead = 0, 1e18, 2e18
	all := mustTry(t, m, reservation.Specific(tier.ID{Kind: tier.Disk}), 1000, nil)
	r := mustTry(t, m, reservation.AnyInTier(tier.Disk), 10, nil)
	if got := r.Space().ID().Ordinal; got != 1 {
		t.Errorf("it was put in disk:%d", got)
	}
	release(t, r, all)
}

func TestPacedReserveDoesNotAllocate(t *testing.T) {
	if invariants.Enabled {
		t.Skip("needs a build without -tags invariants, whose checks of ranks allocate")
	}
	m, _ := volumes(t)
	dst := make([]*tier.Space, 0, 16)
	any, down := reservation.AnyInTier(tier.Disk), reservation.ToDowngrade(gpu0, tier.Disk)
	if n := testing.AllocsPerRun(100, func() {
		any.Candidates(m.Spaces(), dst[:0])
		down.Candidates(m.Spaces(), dst[:0])
	}); n != 0 {
		t.Errorf("Candidates allocates %v times", n)
	}
}

// BenchmarkReservePaced is BenchmarkReserveRelease where there are three volumes.
func BenchmarkReservePaced(b *testing.B) {
	m, _ := volumes(b)
	any := reservation.AnyInTier(tier.Disk)
	b.ReportAllocs()
	for b.Loop() {
		r, err := m.TryReserve(any, 100, nil)
		if err != nil {
			b.Fatal(err)
		}
		if err := r.Release(); err != nil {
			b.Fatal(err)
		}
	}
}
