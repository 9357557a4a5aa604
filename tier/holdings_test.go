package tier

import "testing"

// asked is an account that calls a function when it is asked for an owner the first time.
type asked struct{ first func() }

func (*asked) Credit(uint64, int64) bool { return false }

func (a *asked) OwnerOf(uint64) (owner string, moves bool) {
	if f := a.first; f != nil {
		a.first = nil
		f()
	}
	return "me", false
}

// TestHoldersAreLookedUpInSteps: others free buffers between two steps, and buffers that get other
// numbers then count once.
func TestHoldersAreLookedUpInSteps(t *testing.T) {
	t.Parallel()
	const n = 3 * walkStep
	s := copySpace(t, n, nil)
	a := new(asked)
	bufs := make([]*Buffer, n)
	for i := range bufs {
		in := s.Inside()
		if err := in.Reserve(Page); err != nil {
			t.Fatal(err)
		}
		var err error
		if bufs[i], err = in.Draw(Page, nil, a); err != nil {
			t.Fatal(err)
		}
	}
	free := func(some []*Buffer, from, to int) { // those places of each 128
		for i, b := range some {
			if i%128 >= from && i%128 < to {
				if err := b.Release(); err != nil {
					t.Error(err)
				}
			}
		}
	}
	a.first = func() {
		free(bufs[walkStep:2*walkStep], 64, 128) // so that there is room in the second step
		free(bufs[:walkStep], 8, 128)            // what is left of the first step moves there
		free(bufs[2*walkStep:], 0, 128)
	}
	all := s.Inside().Holdings(nil, nil)
	if len(all.Holders) != 1 || all.Holders[0].Count != walkStep+walkStep/2 || all.Holders[0].Bytes != int64(all.Holders[0].Count)*Page {
		t.Errorf("of %d buffers: %+v", n, all.Holders)
	}
	free(bufs[:walkStep], 0, 8)
	if all = s.Inside().Holdings(nil, nil); all.Used != walkStep/2*Page || all.Holders[0].Bytes != all.Used || all.Others != 0 {
		t.Errorf("then %+v", all)
	}
}
