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

// TestHoldingsCountMemoryOnce: a buffer of a batch is no buffer of a program.
func TestHoldingsCountMemoryOnce(t *testing.T) {
	t.Parallel()
	s := copySpace(t, 2, nil)
	var bufs [2]*Buffer
	for i := range bufs {
		if err := s.Inside().Reserve(Page); err != nil {
			t.Fatal(err)
		}
		var err error
		if bufs[i], err = s.Inside().Draw(Page, nil, new(asked)); err != nil {
			t.Fatal(err)
		}
	}
	all := s.Inside().Holdings(nil, func(add func(Holder, any, int64)) {
		add(Holder{What: "batch", Batch: 1}, bufs[0], Page)
	})
	if len(all.Holders) != 1 || all.Holders[0].Count != 1 || all.Holders[0].Bytes != Page {
		t.Errorf("the holders are %+v", all.Holders)
	}
	if len(all.Batches) != 1 || all.Batches[0].Count != 1 || all.Batches[0].Bytes != Page {
		t.Errorf("the batches are %+v", all.Batches)
	}
	for _, b := range bufs {
		if err := b.Release(); err != nil {
			t.Error(err)
		}
	}
}
