package batch

import (
	"errors"
	"slices"
	"testing"
)

// registrar refuses the batches whose ids it has.
type registrar struct {
	recorder
	taken []ID
	asked []ID
	err   error
}

func (r *registrar) Register(b *Batch, _ Info) error {
	r.asked = append(r.asked, b.ID())
	if slices.Contains(r.taken, b.ID()) {
		return r.err
	}
	return nil
}

func (r *registrar) Knows(*Batch) bool { return true }

// TestNewRegisters: once, in place of the first change. Of the ids that it draws, New takes the
// first that nobody has; one that it is given it keeps to.
func TestNewRegisters(t *testing.T) {
	r := &registrar{taken: []ID{1, 2, 4}, err: ErrDuplicateID}
	p := &form{space: newSpace(t, "gpu:0")}
	var ids IDs
	b, err := New(Options{IDs: &ids, Payload: p, Observer: r})
	if err != nil || b.ID() != 3 || !slices.Equal(r.asked, []ID{1, 2, 3}) {
		t.Errorf("the batch is %v, %v; asked for %v", b, err, r.asked)
	}
	if told := r.take(); len(told) != 0 {
		t.Errorf("told of %+v beside", told)
	}
	if b, err := New(Options{ID: 4, IDs: &ids, Payload: p, Observer: r}); !errors.Is(err, ErrDuplicateID) {
		t.Errorf("an id that is taken: %v, %v", b, err)
	}
	if b, err := New(Options{ID: 9, IDs: &ids, Payload: p, Observer: r}); err != nil || b.ID() != 9 || ids.Next() != 4 {
		t.Errorf("an id that is free: %v, %v", b, err)
	}
	r.err = errors.New("closed")
	r.taken = append(r.taken, 5)
	if b, err := New(Options{IDs: &ids, Payload: p, Observer: r}); !errors.Is(err, r.err) {
		t.Errorf("refused for another reason: %v, %v", b, err)
	}
	if b, err := New(Options{Payload: p}); err == nil {
		t.Errorf("neither an id nor ids: %v", b)
	}
}
