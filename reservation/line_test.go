package reservation

import (
	"errors"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// noMemory is a pool that nothing is allocated from.
type noMemory struct{ tier.Pool }

func (noMemory) Charge(n int64) int64 { return n }

// lineOf is a manager of one space of 100 bytes, and its line.
func lineOf(t *testing.T, bypass int) (*Manager, *line) {
	t.Helper()
	s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: 100, Pool: noMemory{}, Fractions: tier.Fractions{Limit: 1}})
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewManager(Config{Spaces: []*tier.Space{s}, Bypass: bypass})
	if err != nil {
		t.Fatal(err)
	}
	return m, m.lines[0]
}

// inLine puts a request in line.
func inLine(t *testing.T, m *Manager, l *line, need int64) *waiter {
	t.Helper()
	w := newWaiter([]slot{{line: l, need: need, asked: need}}, need, need)
	w.bell = make(chan struct{}, 1)
	if err := m.enqueue(w); err != nil {
		t.Fatal(err)
	}
	return w
}

// TestRefusalSaysWhatIsKept: a refusal while there is room names the older request that has it, if
// that may not be passed any more. A refusal for want of room does not.
func TestRefusalSaysWhatIsKept(t *testing.T) {
	m, l := lineOf(t, 2)
	if err := l.space.Inside().Reserve(60); err != nil {
		t.Fatal(err)
	}
	w := inLine(t, m, l, 50)
	try := func(n int64) error {
		r, err := m.TryReserve(Specific(l.space.ID()), n)
		if err == nil {
			err = r.Release()
		}
		return err
	}
	kept := func(err error) bool { return errors.Is(err, errKept) }
	if err := try(41); !errors.Is(err, tier.ErrNoSpace) || kept(err) {
		t.Errorf("more than there is, while others may pass: %v", err)
	}
	if err := l.ask(40).full(); kept(err) {
		t.Errorf("refused for another reason, while others may pass: %v", err)
	}
	for range 2 {
		if err := try(40); err != nil {
			t.Errorf("passing: %v", err)
		}
	}
	if err := try(40); !kept(err) || !strings.Contains(err.Error(), errKept.Error()) {
		t.Errorf("all that there is: %v", err)
	}
	if err := try(41); !errors.Is(err, tier.ErrNoSpace) || kept(err) {
		t.Errorf("more than there is: %v", err)
	}
	m.withdraw(w, errKept)
	l.space.Inside().Unreserve(60)
}

// TestWithdrawnBeforeItWaits: such a request never joins the line, and does not affect it.
func TestWithdrawnBeforeItWaits(t *testing.T) {
	m, l := lineOf(t, 0)
	if err := l.space.Inside().Reserve(60); err != nil {
		t.Fatal(err)
	}
	stays := inLine(t, m, l, 50)
	why := errors.New("not any more")
	w := newWaiter([]slot{{line: l, need: 50, asked: 50}}, 50, 50)
	if !m.withdraw(w, why) || m.withdraw(w, errKept) {
		t.Error("want it withdrawn once")
	}
	if m.mu.ring.next != stays || m.mu.ring.prev != stays {
		t.Error("who waits is forgotten")
	}
	if err := m.enqueue(w); err != why || w.seq != 0 || m.mu.ring.prev != stays {
		t.Errorf("entering says %v", err)
	}
	m.withdraw(stays, why)
	l.space.Inside().Unreserve(60)
}

// TestEntersNoLine: of a manager that is closed, or of a space that has become too small.
func TestEntersNoLine(t *testing.T) {
	m, l := lineOf(t, 0)
	entering := func() error {
		return m.enqueue(newWaiter([]slot{{line: l, need: 90, asked: 90}}, 90, 90))
	}
	if err := l.space.SetLimit(80); err != nil {
		t.Fatal(err)
	}
	var large *ExceededError
	if err := entering(); !errors.As(err, &large) || m.mu.ring.next != &m.mu.ring {
		t.Errorf("a space that has become too small: %v", err)
	}
	if err := l.space.SetLimit(100); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := entering(); !errors.Is(err, tier.ErrClosed) || m.mu.ring.next != &m.mu.ring {
		t.Errorf("a manager that is closed: %v", err)
	}
}
