package test

import (
	"context"
	"strings"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/convert/cdevice"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestNilArguments: a nil batch, handle, payload, record or claim is an error that names it. The
// call does not panic, and the engine still works.
func TestNilArguments(t *testing.T) {
	eng, err := callbackEngine(t, func(*spillway.Config) {})
	if err != nil {
		t.Fatal(err)
	}
	ctx, m, host := t.Context(), eng.Mover(), reservation.AnyInTier(tier.Host)
	plan, err := eng.Plan("p")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	if err := repo.Put(ctx, 0, rec); err != nil {
		t.Fatal(err)
	}
	room, err := eng.Reserve(ctx, host, 4096)
	if err != nil {
		t.Fatal(err)
	}
	claim := func() *repository.Claim {
		c, err := repo.Claim(ctx, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	task := func(ctx context.Context, _ *spillway.Grant, in []*spillway.Handle) error {
		t.Errorf("the task runs with %d inputs", len(in))
		return nil
	}
	for name, c := range map[string]struct {
		call func() error
		want string
	}{
		"RunTask": {func() error {
			return eng.RunTask(ctx, spillway.Task{Operator: "o", Inputs: []*repository.Claim{nil}}, task)
		}, "input 0 is nil"},
		"RunTask, the second": {func() error {
			return eng.RunTask(ctx, spillway.Task{Operator: "o", Inputs: []*repository.Claim{claim(), nil}}, task)
		}, "input 1 is nil"},
		"NewBatch":                 {func() error { _, err := eng.NewBatch(nil); return err }, "payload is nil"},
		"batch.New":                {func() error { _, err := batch.New(batch.Options{ID: 1}); return err }, "payload is nil"},
		"Put":                      {func() error { return repo.Put(ctx, 0, nil) }, "record is nil"},
		"Put to a space":           {func() error { return repo.Put(ctx, 0, nil, repository.WithPlacement(host)) }, "record is nil"},
		"PutBatch":                 {func() error { return repo.PutBatch(0, nil) }, "batch is nil"},
		"FanOut":                   {func() error { return plan.Manager().FanOut(ctx, nil, 0, repo.Key()) }, "record is nil"},
		"Ingest":                   {func() error { _, err := m.Ingest(ctx, nil, host); return err }, "record is nil"},
		"TryIngest":                {func() error { _, err := m.TryIngest(ctx, nil, host); return err }, "record is nil"},
		"Measure":                  {func() error { _, err := m.Measure(ctx, nil, 1); return err }, "record is nil"},
		"Move":                     {func() error { return m.Move(ctx, nil, host) }, "batch is nil"},
		"MoveAs":                   {func() error { return m.MoveAs(ctx, nil, host, batch.PlainImage) }, "batch is nil"},
		"Acquire":                  {func() error { _, err := m.Acquire(ctx, nil, host); return err }, "batch is nil"},
		"AcquireIn":                {func() error { _, err := m.AcquireIn(ctx, nil, room); return err }, "batch is nil"},
		"Consume":                  {func() error { _, err := m.Consume(ctx, nil, host); return err }, "batch is nil"},
		"Clone":                    {func() error { _, err := m.Clone(ctx, nil, nil); return err }, "batch is nil"},
		"Record":                   {func() error { _, err := m.Record(ctx, nil); return err }, "handle is nil"},
		"Columns":                  {func() error { _, err := m.Columns(ctx, nil, convert.Selection{}); return err }, "handle is nil"},
		"Digest":                   {func() error { _, err := m.Digest(ctx, nil); return err }, "handle is nil"},
		"Verify":                   {func() error { return m.Verify(ctx, nil) }, "payload is nil"},
		"Share":                    {func() error { _, err := m.Share(ctx, nil, room); return err }, "image is nil"},
		"convert.NewLayout":        {func() error { _, err := convert.NewLayout(nil); return err }, "record is nil"},
		"convert.Equal":            {func() error { return convert.Equal(rec, nil) }, "record is nil"},
		"convert.Equal, the first": {func() error { return convert.Equal(nil, rec) }, "record is nil"},
		"convert.Open":             {func() error { _, err := convert.Open(nil, nil, func() {}); return err }, "descriptor is nil"},
		"convert.Verify":           {func() error { return convert.Verify(nil, 0, nil) }, "descriptor is nil"},
		"cdevice.Export": {func() error {
			return cdevice.Export(nil, new(cdevice.DeviceArray), new(cdevice.Schema), cdevice.Config{})
		}, "handle"},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if p := recover(); p != nil {
					t.Errorf("it panics: %v", p)
				}
			}()
			if err := c.call(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, and does not have %q", err, c.want)
			}
		})
	}
	if n := convert.LogicalBytes(nil); n != 0 {
		t.Errorf("no record has %d bytes", n)
	}
	if err := claim().Consume(); err != nil { // a task restored it
		t.Error(err)
	}
	if err := room.Release(); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}
