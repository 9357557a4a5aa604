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

// TestHoldersWhileBuffersAreFreed: other code frees buffers while Holdings counts.
func TestHoldersWhileBuffersAreFreed(t *testing.T) {
	t.Parallel()
	const n = 3000
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
	free := func(rest int) { // each third buffer
		for i := rest; i < n; i += 3 {
			if err := bufs[i].Release(); err != nil {
				t.Error(err)
			}
		}
	}
	a.first = func() { free(0); free(1) }
	all := s.Inside().Holdings(nil, nil)
	if len(all.Holders) != 1 {
		t.Fatalf("%+v", all.Holders)
	}
	// The buffer that was being counted may be one of those that were freed.
	h := all.Holders[0]
	if h.Count != n/3 && h.Count != n/3+1 || h.Bytes != int64(h.Count)*Page {
		t.Errorf("of %d buffers that are left: %+v", n/3, h)
	}
	all = s.Inside().Holdings(nil, nil)
	if all.Used != n/3*Page || all.Holders[0].Bytes != all.Used || all.Others != 0 {
		t.Errorf("then %+v", all)
	}
	free(2)
	if all = s.Inside().Holdings(nil, nil); all.Used != 0 || len(all.Holders) != 0 {
		t.Errorf("at the end %+v", all)
	}
}
