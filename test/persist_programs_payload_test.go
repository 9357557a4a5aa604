package test

import (
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// panickySpace is a program's own form, whose Space panics once, when it is armed.
type panickySpace struct {
	*asIs
	armed atomic.Bool
}

func (p *panickySpace) Space() *tier.Space {
	if p.armed.CompareAndSwap(true, false) {
		panic("in Space")
	}
	return p.asIs.Space()
}

// TestPayloadPanicsWherePersisted: a panic of a payload's Space ends there. All other batches of an
// engine that records what comes to its disk go on.
func TestPayloadPanicsWherePersisted(t *testing.T) {
	eng := persistentEngine(t, t.TempDir())
	repo := scanOf(t, eng)
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	buf := drawn(t, eng, tier.Host, 4096)
	p := &panickySpace{asIs: &asIs{nil, buf}}
	b, err := eng.NewBatch(p)
	if err != nil {
		t.Fatal(err)
	}
	p.armed.Store(true)
	if err := b.TryCreateTask(); err != nil {
		t.Fatal(err)
	}
	put := make(chan error, 1)
	go func() { put <- repo.Put(t.Context(), 0, rec) }()
	select {
	case err := <-put:
		if err := errors.Join(err, b.Drop(), eng.Close()); err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("Put of another batch hangs")
	}
}

// incomparable is a program's own form, of a type that Go cannot compare.
type incomparable struct {
	*asIs
	parts []int
}

// TestIncomparablePayloadWherePersisted: changes of a batch of that form do not hold up the others.
func TestIncomparablePayloadWherePersisted(t *testing.T) {
	log := new(syncBuffer)
	eng := persistentEngine(t, t.TempDir(), func(c *spillway.Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) })
	r, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.Disk), 4096)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(4096)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	b, err := eng.NewBatch(incomparable{&asIs{nil, buf}, nil})
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan error, 1)
	go func() { over <- errors.Join(b.TryCreateTask(), b.CancelTask(), b.Drop(), eng.Close()) }()
	select {
	case err := <-over:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("a change of the batch hangs")
	}
	if n := strings.Count(log.String(), "would be lost with this process"); n != 1 || strings.Contains(log.String(), "panic") {
		t.Errorf("%d lines that the batch is not recorded, in:\n%s", n, log)
	}
}
