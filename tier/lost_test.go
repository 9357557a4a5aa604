package tier_test

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
	"github.com/spillway-db/spillway/tier/sim"
)

var errGone = errors.New("gone")

// losable returns a space on a device that can be lost.
func losable(t *testing.T, capacity int64) (*tier.Space, *faultdev.Device) {
	t.Helper()
	dev := faultdev.New(openDevice(t, sim.Config{Memory: capacity}), 1)
	pool, err := devpool.NewMemory(dev)
	ok(t, err)
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.GPU}, Capacity: capacity, Pool: pool, Marks: tier.Marks{Limit: 1},
	})
	ok(t, err)
	return s, dev
}

// TestSpaceIsLost: nothing is promised or drawn any more, with the reason; what was promised and
// drawn goes back.
func TestSpaceIsLost(t *testing.T) {
	s, dev := losable(t, 1<<20)
	ok(t, s.Lost())
	r := promise(t, s, 3000)
	b, err := drawFrom(s, r, 1024)
	ok(t, err)
	heard := 0
	defer s.Subscribe(func(aboveTrigger bool) {
		if heard++; aboveTrigger || s.State().Limit != 0 || s.Lost() == nil {
			t.Errorf("the listeners hear of pressure (%v) with a limit of %d, lost: %v", aboveTrigger,
				s.State().Limit, s.Lost())
		}
	})()
	dev.Lose(errGone)
	dev.Lose(errors.New("once more"))
	if heard != 1 {
		t.Errorf("the listeners were told %d times", heard)
	}
	isLost := func(what string, err error) {
		t.Helper()
		var lost *tier.LostError
		if !errors.As(err, &lost) || !errors.Is(err, tier.ErrLost) || !errors.Is(err, errGone) ||
			errors.Is(err, tier.ErrNoSpace) || lost.Space != s.ID() || lost.Bytes != 3000 {
			t.Errorf("%s: %v", what, err)
		}
	}
	isLost("the space", s.Lost())
	_, err = s.Promise(1)
	isLost("reserving", err)
	_, err = s.Occupy(1)
	isLost("occupying", err)
	isLost("a limit", s.SetLimit(1<<20))
	isLost("marks", s.SetMarks(tier.Marks{}))
	_, err = drawFrom(s, r, 256)
	isLost("drawing", err)
	taken, _, _ := s.Books.Reserve(nil, 1, 0)
	if taken || s.State().Limit != 0 || s.State().Room != 0 || s.State().Available != 0 || s.State().Ceiling != 0 {
		t.Error("there is room in a lost space")
	}
	ok(t, b.Release())
	ok(t, s.Release(r))
	ok(t, s.Close())
	if u := s.State().Usage; u.Used() != 0 {
		t.Errorf("the space ends with %+v", u)
	}
}

// TestDrawThatFindsTheLoss: the pool's error, whatever it is, is that of the lost device.
func TestDrawThatFindsTheLoss(t *testing.T) {
	for name, err := range map[string]error{"an error": errors.New("failed"), "no space": &tier.NoSpaceError{}} {
		pool := &losingPool{}
		s := newSpace(t, 1000, pool)
		pool.alloc = func(int64) (tier.Memory, error) {
			pool.lose(errGone)
			return nil, err
		}
		if b, err := s.DrawNew(10); b != nil || !errors.Is(err, errGone) || !errors.Is(err, tier.ErrLost) {
			t.Errorf("%s: %v", name, err)
		}
		usage(t, s, "in the end", 0, 0, 0)
	}
}

// losingPool is a pool whose device may be lost.
type losingPool struct {
	fakePool
	lose func(why error)
}

func (p *losingPool) OnLost(f func(why error)) (cancel func()) {
	p.lose = f
	return func() {}
}

// A device may be lost before there is a space.
func TestSpaceOfALostDevice(t *testing.T) {
	dev := faultdev.New(openDevice(t, sim.Config{Memory: 1 << 20}), 1)
	pool, err := devpool.NewMemory(dev)
	ok(t, err)
	dev.Lose(errGone)
	s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: 1 << 20, Pool: pool})
	ok(t, err)
	if !errors.Is(s.Lost(), errGone) {
		t.Errorf("a space on a device that is lost says %v", s.Lost())
	}
	ok(t, s.Close())
}
