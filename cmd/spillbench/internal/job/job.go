// Package job is what spillbench run does: it loads batches through all tiers,
// works on them and checks them.
//
//	Source ─▶ decode (once) ─▶ digest ─▶ Put                                  load
//	                                       ▼
//	                               repository, partitions
//	                                       │ every batch, each pass
//	                                       ▼
//	               task ─▶ Acquire in the GPU ─▶ digest there ─▶ compare     pass-1 … pass-N
//	                                       │
//	                                       ▼
//	               RunTask ─▶ digest ─▶ compare ─▶ drop                      drain
//
// The expected digest of a batch is computed from the decoded record, laid out in memory of its
// own, and never from anything that an engine returned.
//
// A Job runs once and owns its goroutines, which all end before Run returns. The
// package takes no locks of the ranked order; its own are leaves.
package job

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/observe/page"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/tier"
)

// Source gives record batches, which the receiver must release, and io.EOF at
// the end.
type Source interface {
	Next(ctx context.Context) (arrow.RecordBatch, error)
	Close() error
}

// Divided is a Source that several goroutines can read at once, each a part of it.
type Divided interface {
	Source
	// Part returns every of-th batch from number on, which is 0 for the first.
	Part(number, of int64) Source
	// BatchBytes returns about how many bytes a batch takes.
	BatchBytes() int64
}

// Input is one source under a name. Open is called when its turn comes.
type Input struct {
	Name string
	Open func(ctx context.Context) (Source, error)
}

// Progress is called as a phase advances. Several goroutines may call its methods.
type Progress interface {
	// Begin starts a phase of so many steps, -1 if that is not known.
	Begin(phase string, steps int64)
	// Step counts one.
	Step()
}

// Config says what to do. All fields but Held, Batches and Failed are required.
type Config struct {
	Engine     *spillway.Engine
	Inputs     []Input
	Repeat     int   // how often each decoded batch is put, above 0
	Fits       bool  // place where there is room; else wait for the GPU
	Partitions int   // of the repository, above 0
	Passes     int   // how often all batches are worked on, 0 or above; with 0 no tasks are run
	Workers    int   // tasks at once, above 0
	Held       int64 // most bytes of decoded batches that wait to be put when the next is decoded; 0: any
	Batches    int64 // how many there will be, for the progress; 0 if that is not known
	Progress   Progress
	Failed     func() // called after an error while the batches are still there, unless ctx has ended
}

// Result is what came out. On an error it holds what was done so far.
type Result struct {
	Rows       int64
	Batches    int64
	Bytes      int64 // of the images
	Checked    int64 // digests compared in passes
	Mismatches int64
	Corrupt    int64  // of these, batches that the engine refused because it found them corrupt
	OnHost     bool   // the device cannot compute: digests were made of what was copied back
	First      string // the first mismatch, in words; empty if there is none
	Unread     int64  // bytes that had moved down, and were dropped unused, before all was dropped at the end
	Phases     []page.Phase
}

// item is one batch that was loaded, and the digest that it must have.
type item struct {
	name      string // of the input
	number    int64  // of the decoded batch in it, from 1
	seq       int64  // of the put, over all inputs
	digest    tier.Digest
	repo      *repository.Repository
	partition int
	b         *batch.Batch
	wrong     bool // its bytes were found to be others; guarded by job.mu
}

// named adds the batch to an error about it.
func (it *item) named(err error) error {
	return fmt.Errorf("%s, batch %d: %w", it.name, it.number, err)
}

// Run does the job. The engine stays the caller's, and holds no batch of the job's any more
// when Run returns, unless ctx has ended: then the caller is to close the engine.
func Run(ctx context.Context, cfg Config) (res Result, err error) {
	plan, err := cfg.Engine.Plan("spillbench")
	if err != nil {
		return res, err
	}
	defer func() {
		if ctx.Err() != nil {
			return // closing the plan would wait for moves, which closing the engine ends
		}
		if err != nil && cfg.Failed != nil {
			cfg.Failed()
		}
		if _, e := plan.Close(); err == nil {
			err = e
		}
	}()
	j := &job{cfg: cfg, plan: plan, res: &res}
	before := unread(cfg.Engine)
	if err := j.phase("load", cmp.Or(cfg.Batches, -1), func() error { return j.load(ctx) }); err != nil {
		return res, err
	}
	for i := range cfg.Passes {
		if err := j.phase(fmt.Sprintf("pass-%d", i+1), res.Batches, func() error { return j.pass(ctx) }); err != nil {
			return res, err
		}
	}
	res.Unread = unread(cfg.Engine) - before
	err = j.phase("drain", res.Batches, func() error {
		if cfg.Passes > 0 {
			if err := j.runTasks(ctx); err != nil {
				return err
			}
		}
		return j.drop(ctx)
	})
	return res, err
}

// unread returns the bytes that the engine has moved down and that were dropped unused.
func unread(eng *spillway.Engine) (bytes int64) {
	for _, w := range eng.Mover().Work() {
		bytes += w.Unread
	}
	return bytes
}

// job is a run under way.
type job struct {
	cfg      Config
	plan     *spillway.Plan
	items    []item // in the order of loading
	consumed int64  // batches that tasks have dropped; guarded by mu

	mu  sync.Mutex // a leaf; it guards res while batches are compared
	res *Result
}

// phase runs f as a phase of the job. The number of steps is -1 if it is not known.
func (j *job) phase(name string, steps int64, f func() error) error {
	j.cfg.Progress.Begin(name, steps)
	start := time.Now()
	err := f()
	j.res.Phases = append(j.res.Phases, page.Phase{Name: name, Seconds: time.Since(start).Seconds()})
	return err
}
