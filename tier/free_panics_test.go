package tier

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

// panickyPool panics in Free, once.
type panickyPool struct {
	adoptPool
	panicked bool
}

func (p *panickyPool) Free(mem Memory, reclaimed func()) {
	if !p.panicked {
		p.panicked = true
		panic("in Free")
	}
	p.adoptPool.Free(mem, reclaimed)
}

// TestFreePanics: a release whose pool panics returns, and the panic is logged. Nobody knows
// whether the bytes can be used, so they stay retired; those of other buffers come back.
func TestFreePanics(t *testing.T) {
	var log bytes.Buffer
	s, err := NewSpace(SpaceConfig{ID: ID{Kind: GPU}, Capacity: 4 * Page, Pool: new(panickyPool), Backend: "test", Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Inside().Occupy(3 * Page); err != nil {
		t.Fatal(err)
	}
	first, second := s.Inside().Adopt(adoptMemory(2*Page), nil), s.Inside().Adopt(adoptMemory(Page), nil)
	for _, b := range []*Buffer{first, second} {
		if err := b.Release(); err != nil {
			t.Error(err)
		}
	}
	if u := s.Usage(); u.Live != 0 || u.Retired != 2*Page {
		t.Errorf("the books say %+v", u)
	}
	if !strings.Contains(log.String(), `function=Pool.Free panic="in Free"`) {
		t.Errorf("the log has %q", &log)
	}
}
