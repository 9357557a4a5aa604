// Package job does the work of spillbench run: it loads batches through all tiers, works on them and
// verifies them.
//
//	Source ─▶ decode (once) ─▶ digest ─▶ Put                                  load
//	                                       ▼
//	                               repository, partitions
//	                                       │ every batch, each pass
//	                                       ▼
//	               task ─▶ Acquire in the GPU ─▶ digest ─▶ compare           pass-1 … pass-N
//	                                       │
//	                                       ▼
//	               RunTask ─▶ digest ─▶ compare ─▶ drop                      drain
//
// The job computes the expected digest of a batch from the decoded record, which it lays out in memory
// of its own, and never from data that an engine returned.
//
// All goroutines of a job end before Run returns. The locks of the package are leaves.
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

// Source returns record batches, which the caller must release, and io.EOF at the end.
type Source interface {
	Next(ctx context.Context) (arrow.RecordBatch, error)
	Close() error
}

// Divided is a Source of which several goroutines can read parts concurrently.
type Divided interface {
	Source
	// Part returns every of-th batch, beginning with batch number, which counts from 0.
	Part(number, of int64) Source
	// BatchBytes returns the approximate size of a batch in bytes.
	BatchBytes() int64
}

// Input is a source and its name. Run opens one input after the other.
type Input struct {
	Name string
	Open func(ctx context.Context) (Source, error)
}

// Progress shows the progress of the phases. Its methods must be safe for concurrent use.
type Progress interface {
	// Begin starts a phase with a number of steps, -1 if it is not known.
	Begin(phase string, steps int64)
	// Step counts a step of the phase.
	Step()
}

// Config describes a job. All fields but Held, Batches and Failed are required.
type Config struct {
	Engine     *spillway.Engine
	Inputs     []Input
	Repeat     int   // the number of puts of each decoded batch, above 0
	Fits       bool  // put into the fastest tier with room; otherwise wait for the GPU
	Partitions int   // of the repository, above 0
	Passes     int   // how often all batches are worked on, 0 or above; with 0 no tasks are run
	Workers    int   // the number of concurrent tasks, above 0
	Held       int64 // most bytes of decoded batches that wait to be put when the next is decoded; 0: any
	Batches    int64 // the number of puts, for Progress; 0: not known
	Progress   Progress
	Failed     func() // called after an error while the engine has the batches, unless ctx has ended
}

// Result has the findings of a job. After an error it has those up to then.
type Result struct {
	Rows       int64
	Batches    int64
	Bytes      int64 // of the images
	Checked    int64 // digests compared in passes
	Mismatches int64
	Corrupt    int64  // those of Mismatches that the engine itself found
	First      string // a description of the first mismatch; "" without one
	Unread     int64  // bytes that were evicted and dropped without a use, before the drain
	Phases     []page.Phase
}

// item is a batch that was loaded, and its expected digest.
type item struct {
	name      string // of the input
	number    int64  // of the decoded batch in it, from 1
	seq       int64  // the number of the put, over all inputs
	digest    tier.Digest
	repo      *repository.Repository
	partition int
	b         *batch.Batch
	wrong     bool // a mismatch was found; guarded by job.mu
}

// named adds the name of the batch to an error.
func (it *item) named(err error) error {
	return fmt.Errorf("%s, batch %d: %w", it.name, it.number, err)
}

// Run does the job. When it returns, the engine has no batches of the job, unless ctx has ended: then the
// caller must close the engine.
func Run(ctx context.Context, cfg Config) (res Result, err error) {
	plan, err := cfg.Engine.Plan("spillbench")
	if err != nil {
		return res, err
	}
	defer func() {
		if ctx.Err() != nil {
			return // closing the plan would wait for moves; closing the engine cancels them
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

// unread returns the bytes that the engine evicted and that were dropped without a use.
func unread(eng *spillway.Engine) (bytes int64) {
	for _, w := range eng.Mover().Work() {
		bytes += w.Unread
	}
	return bytes
}

// job is the state of Run.
type job struct {
	cfg      Config
	plan     *spillway.Plan
	items    []item // in the order of loading
	consumed int64  // batches that tasks have dropped; guarded by mu

	mu  sync.Mutex // a leaf; it guards res while workers compare batches
	res *Result
}

// phase runs f as a phase with a number of steps, -1 if it is not known.
func (j *job) phase(name string, steps int64, f func() error) error {
	j.cfg.Progress.Begin(name, steps)
	start := time.Now()
	err := f()
	j.res.Phases = append(j.res.Phases, page.Phase{Name: name, Seconds: time.Since(start).Seconds()})
	return err
}
