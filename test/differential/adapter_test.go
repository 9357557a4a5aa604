//go:build !invariants

package differential

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// settings are those of an engine that a program uses.
type settings struct {
	gpus      int
	gpuBytes  int64
	hostBytes int64
	diskBytes int64
	policy    string
	codec     string
	encrypt   bool
	persist   bool
}

// engine is one engine with a plan. The programs reach Spillway through its methods alone.
type engine struct {
	eng   *spillway.Engine
	plan  *spillway.Plan
	files *faultfs.FS
	gpus  []*faultdev.Device
}

// item is one batch.
type item = *batch.Batch

// key encrypts what persists; an engine that is opened later needs the same.
var key = []byte("0123456789abcdef0123456789abcdef")

// stallTimeout is how long the engine lets a wait go on in which nothing changes.
const stallTimeout = time.Second

func open(ctx context.Context, dir string, seed uint64, s settings) (*engine, error) {
	policy, err := monitor.ByName(s.policy)
	if err != nil {
		return nil, err
	}
	codec, err := convert.ParseCodec(s.codec)
	if err != nil {
		return nil, err
	}
	e := &engine{files: faultfs.New(disk.OS(), seed)}
	d := spillway.DiskConfig{Dir: dir, Capacity: spillway.Bytes(s.diskBytes), FS: e.files, Encrypt: s.encrypt, Persist: s.persist}
	if s.encrypt {
		d.Key = key
	}
	cfg := spillway.Config{
		GPUs:          []spillway.GPUConfig{},
		Hosts:         []spillway.HostConfig{{Memory: spillway.Bytes(s.hostBytes), Node: -1}},
		Disks:         []spillway.DiskConfig{d},
		Policy:        policy,
		Codec:         codec,
		MonitorPeriod: monitor.MinPeriod,
		WriteAhead:    -1,
		StallTimeout:  stallTimeout,
		Logger:        slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	for range s.gpus {
		cfg.GPUs = append(cfg.GPUs, spillway.GPUConfig{Backend: spillway.Sim, Memory: spillway.Bytes(s.gpuBytes),
			Wrap: func(dev tier.Device) (tier.Device, error) {
				e.gpus = append(e.gpus, faultdev.New(dev, seed))
				return e.gpus[len(e.gpus)-1], nil
			}})
	}
	if e.eng, err = spillway.Open(ctx, cfg); err != nil {
		return nil, err
	}
	e.plan, err = e.eng.Plan("q")
	return e, err
}

func (e *engine) close() error {
	_, err := e.plan.Close()
	return errors.Join(err, e.eng.Close())
}

// space returns the id of a space: "gpu:0". Programs name spaces so, and tiers "gpu".
func space(name string) (id tier.ID) {
	if err := id.UnmarshalText([]byte(name)); err != nil {
		panic(err)
	}
	return id
}

// strategy returns the strategy for a space or a tier; nil for "".
func strategy(where string) reservation.Strategy {
	switch {
	case where == "":
		return nil
	case strings.Contains(where, ":"):
		return reservation.Specific(space(where))
	}
	k, err := tier.ParseKind(where)
	if err != nil {
		panic(err)
	}
	return reservation.AnyInTier(k)
}

func (e *engine) repository(operator string) *repository.Repository {
	r, err := e.plan.Repository(operator, 0)
	if err != nil {
		panic(err)
	}
	return r
}

// put puts a record into a space or tier, or, if where is "", where the engine wants it.
func (e *engine) put(ctx context.Context, operator string, partition int, rec arrow.RecordBatch, where string) (item, error) {
	var opts []repository.PutOption
	if s := strategy(where); s != nil {
		opts = append(opts, repository.WithPlacement(s))
	}
	r := e.repository(operator)
	if err := r.Put(ctx, partition, rec, opts...); err != nil {
		return nil, err
	}
	var last item
	for b := range r.Batches(partition) {
		last = b
	}
	return last, nil
}

// loose makes a batch that is in no repository.
func (e *engine) loose(ctx context.Context, rec arrow.RecordBatch, where string) (item, error) {
	p, err := e.eng.Mover().Ingest(ctx, rec, strategy(where))
	if err != nil {
		return nil, err
	}
	b, err := e.eng.NewBatch(p)
	if err != nil {
		return nil, errors.Join(err, p.Release())
	}
	return b, nil
}

func (e *engine) store(operator string, partition int, b item) error {
	return e.repository(operator).PutBatch(partition, b)
}

func (e *engine) fanOut(ctx context.Context, rec arrow.RecordBatch, partition int, operators ...string) error {
	var keys []repository.Key
	for _, op := range operators {
		keys = append(keys, e.repository(op).Key())
	}
	return e.plan.Manager().FanOut(ctx, rec, partition, keys...)
}

func (e *engine) clone(ctx context.Context, b item) (item, error) {
	return e.eng.Mover().Clone(ctx, b, nil)
}

func (e *engine) list(operator string, partition int) []item {
	return slices.Collect(e.repository(operator).Batches(partition))
}

// take takes the oldest batch of a partition, idle.
func (e *engine) take(ctx context.Context, operator string, partition int) (item, error) {
	return e.repository(operator).Take(ctx, partition, batch.Idle)
}

func (e *engine) takeThis(ctx context.Context, operator string, b item) error {
	_, err := e.repository(operator).TakeByID(ctx, b.ID(), batch.Idle)
	return err
}

func (e *engine) move(ctx context.Context, b item, where string) error {
	return e.eng.Mover().Move(ctx, b, strategy(where))
}

// record brings a batch to a space or tier and digests its rows; last drops the batch with that.
func (e *engine) record(ctx context.Context, b item, where string, last bool) (string, error) {
	acquire := e.eng.Mover().Acquire
	if last {
		acquire = e.eng.Mover().Consume
	}
	h, err := acquire(ctx, b, strategy(where))
	if err != nil {
		return "", err
	}
	return e.digest(ctx, h)
}

// digest digests the rows that a handle has, and closes it.
func (e *engine) digest(ctx context.Context, h *batch.Handle) (string, error) {
	rec, err := e.eng.Mover().Record(ctx, h)
	if err := errors.Join(err, h.Close()); err != nil {
		return "", err
	}
	defer rec.Release() // after the handle is closed: the rows stay until then
	return digest(rec), nil
}

// fingerprint returns the engine's own digest of a batch's bytes where they are.
func (e *engine) fingerprint(ctx context.Context, b item) (string, error) {
	if err := b.CreateTask(ctx); err != nil {
		return "", err
	}
	h, err := b.Lock(ctx, b.Info().Space)
	if err != nil {
		return "", err
	}
	d, err := e.eng.Mover().Digest(ctx, h)
	if err := errors.Join(err, h.Close()); err != nil {
		return "", err
	}
	return fmt.Sprint(d), nil
}

// columns digests some columns and rows of a batch, which stays where it is.
func (e *engine) columns(ctx context.Context, b item, fields []int, from, to int64) (string, error) {
	if err := b.CreateTask(ctx); err != nil {
		return "", err
	}
	h, err := b.Lock(ctx, b.Info().Space)
	if err != nil {
		return "", err
	}
	rec, err := e.eng.Mover().Columns(ctx, h, convert.Selection{Fields: fields, From: from, To: to})
	if err := errors.Join(err, h.Close()); err != nil {
		return "", err
	}
	defer rec.Release()
	return digest(rec), nil
}

// drain takes up to n batches of a partition, and calls f with the digest of each or an error.
func (e *engine) drain(ctx context.Context, operator string, partition, n int, where string, f func(string, error)) {
	if n == 0 {
		return
	}
	k, err := tier.ParseKind(where)
	if err != nil {
		panic(err)
	}
	for h, err := range e.repository(operator).Drain(ctx, partition, k) {
		if err != nil {
			f("", err)
			return
		}
		f(e.digest(ctx, h))
		if n--; n == 0 {
			return
		}
	}
}

// read reads the rest of a partition, whose input must be closed, as a stream.
func (e *engine) read(ctx context.Context, operator string, partition int, f func(string, error)) {
	r, err := e.repository(operator).Reader(ctx, partition)
	if err != nil {
		f("", err)
		return
	}
	defer r.Release()
	for r.Next() {
		f(digest(r.RecordBatch()), nil)
	}
	if err := r.Err(); err != nil {
		f("", err)
	}
}

func (e *engine) closeInput(operator string) { e.repository(operator).CloseInput() }

type claim = *repository.Claim

func (e *engine) claim(ctx context.Context, operator string, partition, n int) (claim, error) {
	return e.repository(operator).Claim(ctx, partition, n)
}

func (e *engine) claimAll(ctx context.Context, operator string, partition int) (claim, error) {
	return e.repository(operator).ClaimAll(ctx, partition)
}

// task runs a task on claimed batches, which returns an error if fail is set.
func (e *engine) task(ctx context.Context, c claim, fail error, f func(string, error)) error {
	return e.eng.RunTask(ctx, spillway.Task{Operator: "task", Inputs: []claim{c}, Output: 4096, ReadAhead: -1},
		func(ctx context.Context, g *spillway.Grant, handles []*spillway.Handle) error {
			for _, h := range handles {
				rec, err := e.eng.Mover().Record(ctx, h)
				if err != nil {
					f("", err)
					continue
				}
				f(digest(rec), nil)
				rec.Release()
			}
			return fail
		})
}

// reservation is a promise of bytes.
type promise = *reservation.Reservation

func (e *engine) reserve(ctx context.Context, where string, n int64) (promise, error) {
	return e.eng.Reserve(ctx, strategy(where), n)
}

func (e *engine) tryReserve(where string, n int64) (promise, error) {
	return e.eng.Reservations().TryReserve(strategy(where), n, nil)
}

// at returns the space that a batch is in, "" if it is gone, and how many bytes it takes there.
func at(b item) (string, int64) {
	info := b.Info()
	if info.Form == "" {
		return "", 0
	}
	return info.Space.String(), info.Bytes
}

func tierOf(b item) string {
	where, _ := at(b)
	kind, _, _ := strings.Cut(where, ":")
	return kind
}

const stay = batch.Stay

func lockIn(ctx context.Context, b item, where string) (*batch.Handle, error) {
	return b.Lock(ctx, space(where))
}

// usage is what a space has in use, and its marks.
type usage struct {
	name                                    string
	capacity, limit, trigger, stop          int64
	live, pending, reserved, cached, demand int64
	last                                    bool // of the slowest tier
}

func (u usage) used() int64 { return u.live + u.pending + u.reserved }

func (e *engine) usage() (all []usage) {
	waiting := make(map[tier.ID]int64)
	for _, d := range e.eng.Reservations().Demand(nil) {
		waiting[d.Space] = d.Bytes
	}
	for _, s := range e.eng.Stats().Spaces {
		if s.Disk != nil { // the headers of files that persist: how many pages they take is the format's
			s.Reserved -= s.Disk.Used - s.Live - s.Cached
		}
		all = append(all, usage{name: s.ID.String(), capacity: s.Capacity, limit: s.Limit, trigger: s.Trigger, stop: s.Stop,
			live: s.Live, pending: s.Retired, reserved: s.Reserved, cached: s.Cached, demand: waiting[s.ID], last: s.ID.Kind == tier.Disk})
	}
	return all
}

// moved returns the bytes that moved so far between tiers.
func (e *engine) moved() map[string]int64 {
	m := make(map[string]int64)
	for _, edge := range e.eng.Stats().Edges {
		m[edge.From.Kind.String()+" to "+edge.To.Kind.String()] += edge.Bytes
	}
	return m
}

func (e *engine) spaceOf(name string) *tier.Space {
	s, ok := e.eng.Reservations().Spaces().ByID(space(name))
	if !ok {
		panic("no space " + name)
	}
	return s
}

func (e *engine) setLimit(name string, n int64) error { return e.spaceOf(name).SetLimit(n) }

func (e *engine) setMarks(name string, limit, trigger, stop float64) error {
	return e.spaceOf(name).SetMarks(tier.Marks{Limit: limit, Trigger: trigger, Stop: stop})
}

func (e *engine) trim(ctx context.Context) error {
	_, err := e.eng.Trim(ctx)
	return err
}

// allPermits takes all permits to write to disks, and returns what gives them back.
func (e *engine) allPermits() (release func() error) {
	var held []*permit.Permit
	for {
		p, err := e.eng.Permits().TryAcquire(permit.Request{Spill: true})
		if err != nil {
			break
		}
		held = append(held, p)
	}
	return func() (err error) {
		for _, p := range held {
			err = errors.Join(err, p.Release())
		}
		return err
	}
}

// The faults. Each lasts until the returned function is called.

func (e *engine) diskFault(op, what string) (end func()) {
	effects := map[string]faultfs.Effect{
		"io": faultfs.Fail(syscall.EIO), "full": faultfs.Fail(syscall.ENOSPC), "flip": faultfs.BitFlip(), "short": faultfs.Short(),
	}
	return e.files.Add(faultfs.Rule{Ops: []string{op}, Effect: effects[what]})
}

var errDevice = errors.New("the device fails")

func (e *engine) gpuFault(gpu int, op, what string) (end func()) {
	effects := map[string]faultdev.Effect{
		"call": faultdev.Fail(errDevice), "work": faultdev.FailWork(errDevice), "memory": faultdev.OutOfMemory(),
	}
	return e.gpus[gpu].Add(faultdev.Rule{Ops: []string{op}, Effect: effects[what]})
}

// persisted is a batch that an earlier engine left.
type persisted struct {
	spillway.Persisted
	describes string
}

// persisted lists what earlier engines left, in an order that does not depend on the engine.
func (e *engine) persisted() (all []persisted) {
	for _, p := range e.eng.Persisted() {
		all = append(all, persisted{p, fmt.Sprintf("%s:%d/%d rows=%d columns=%d", p.Operator, p.Port, p.Partition, p.Rows, p.Schema.NumFields())})
	}
	slices.SortStableFunc(all, func(a, b persisted) int { return cmp.Compare(a.describes, b.describes) })
	return all
}

func (e *engine) adopt(ctx context.Context, p persisted) (item, error) {
	return e.eng.Adopt(ctx, p.Persisted)
}

func (e *engine) forget(p persisted) error { return e.eng.ForgetPersisted(p.Persisted) }

// class names an error without its words: "ok" for nil.
func class(err error) string {
	if err == nil {
		return "ok"
	}
	var state *batch.StateError
	var names []string
	if errors.As(err, &state) {
		names = append(names, state.Status.String())
	}
	for _, c := range []struct {
		err  error
		name string
	}{
		{tier.ErrReleased, "released"}, {tier.ErrClosed, "closed"}, {tier.ErrNoSpace, "no-space"}, {tier.ErrNotSupported, "not-supported"},
		{tier.ErrLost, "lost"}, {reservation.ErrExceeded, "exceeded"}, {reservation.ErrDeadlock, "deadlock"},
		{reservation.ErrNoCandidate, "no-candidate"}, {convert.ErrCorrupt, "corrupt"}, {convert.ErrSelection, "selection"},
		{convert.ErrInvalid, "invalid"}, {repository.ErrUnknown, "unknown"}, {repository.ErrPartition, "partition"},
		{repository.ErrClaimed, "claimed"}, {repository.ErrSchema, "schema"}, {repository.ErrNoSchema, "no-schema"},
		{repository.ErrDuplicate, "duplicate"}, {batch.ErrStored, "stored"},
		{context.Canceled, "canceled"}, {context.DeadlineExceeded, "deadline"}, {io.EOF, "eof"}, {syscall.EIO, "io"},
		{errDevice, "device"}, {errProgram, "program"},
	} {
		if errors.Is(err, c.err) {
			names = append(names, c.name)
		}
	}
	if names == nil {
		return "error"
	}
	return strings.Join(names, "+")
}
