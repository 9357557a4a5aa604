// Command duckdb stores a Parquet file's rows in Spillway and in DuckDB, each with the same amount
// of memory, and reads all of them twice. The two take turns, and the command prints the medians.
//
//	cd scripts/duckdb && go run -tags duckdb_arrow . --parquet FILE
//
// It is a module of its own because it downloads and links DuckDB. Both get the same Arrow records,
// decoded in advance, and use two threads. Spillway hashes every byte that it reads. DuckDB
// computes the maximum of each column, which is less work: it does not convert rows to Arrow.
package main

import (
	"context"
	"database/sql/driver"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"
	"github.com/duckdb/duckdb-go/v2"
	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/tier"
)

const threads = 2

func main() {
	log.SetFlags(0)
	path := flag.String("parquet", "", "the `FILE` to read")
	repeat := flag.Int("repeat", 8, "how many times to store its rows")
	rounds := flag.Int("rounds", 5, "how many times each of the two runs")
	gpu := flag.Int64("gpu", 0, "megabytes of simulated GPU memory for Spillway")
	host := flag.Int64("host", 300, "megabytes of host memory for Spillway; DuckDB gets the sum of both")
	flag.Parse()
	if err := run(context.Background(), *path, *repeat, *rounds, *gpu*1e6, *host*1e6); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, path string, repeat, rounds int, gpu, host int64) error {
	records, err := load(ctx, path, repeat)
	if err != nil {
		return err
	}
	names := [2]string{"spillway", "duckdb"}
	var took [2][3][]float64 // seconds of both, by phase and round
	for i := range rounds * 2 {
		side := (i + i/2) % 2 // each is first in every other round
		dir, err := os.MkdirTemp("", "spill-")
		if err != nil {
			return err
		}
		run := runSpillway
		if side == 1 {
			run = runDuckDB
		}
		seconds, err := run(ctx, records, gpu, host, dir)
		if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
			return fmt.Errorf("%s: %w", names[side], err)
		}
		for k, t := range seconds {
			took[side][k] = append(took[side][k], t)
		}
	}
	fmt.Println("seconds, medians of", rounds)
	for k, phase := range []string{"store", "scan", "scan again"} {
		a, b := median(took[0][k]), median(took[1][k])
		fmt.Printf("%-10s  spillway %6.3f  duckdb %6.3f  %.2f times as fast\n", phase, a, b, b/a)
	}
	return nil
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// load decodes the file once and returns its records repeat times.
func load(ctx context.Context, path string, repeat int) (all []arrow.RecordBatch, err error) {
	f, err := file.OpenParquetFile(path, false)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := pqarrow.NewFileReader(f, pqarrow.ArrowReadProperties{BatchSize: 122_880}, memory.DefaultAllocator)
	if err != nil {
		return nil, err
	}
	records, err := r.GetRecordReader(ctx, nil, nil)
	if err != nil {
		return nil, err
	}
	defer records.Release()
	for records.Next() {
		rec := records.RecordBatch()
		rec.Retain()
		all = append(all, rec)
	}
	if len(all) == 0 {
		return nil, errors.Join(errors.New("no rows"), records.Err())
	}
	return slices.Repeat(all, repeat), records.Err()
}

// runSpillway stores the records and reads them twice. It returns the seconds of each.
func runSpillway(
	ctx context.Context, records []arrow.RecordBatch, gpu, host int64, dir string,
) (took []float64, err error) {
	cfg := spillway.Config{
		GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(host),
		Disks: []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(8 << 30)}},
	}
	if gpu > 0 {
		cfg.GPUs = []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(gpu)}}
	}
	eng, err := spillway.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, eng.Close()) }()
	plan, err := eng.Plan("compare")
	if err != nil {
		return nil, err
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		return nil, err
	}
	store := func(thread int) error {
		for i := thread; i < len(records); i += threads {
			if err := repo.Put(ctx, thread, records[i]); err != nil {
				return err
			}
		}
		return nil
	}
	read := func(thread int) error { return scan(ctx, eng, repo, thread) }
	for _, work := range []func(thread int) error{store, read, read} {
		start := time.Now()
		errs := make([]error, threads)
		var wg sync.WaitGroup
		for i := range threads {
			wg.Go(func() { errs[i] = work(i) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return nil, err
		}
		took = append(took, time.Since(start).Seconds())
	}
	_, err = plan.Close()
	return took, err
}

// scan hashes every byte of a partition's batches.
func scan(ctx context.Context, eng *spillway.Engine, repo *repository.Repository, partition int) error {
	h := xxh3.New()
	for b := range repo.Batches(partition) {
		handle, err := eng.Mover().Acquire(ctx, b, spillway.AnyInTier(tier.Host))
		if err != nil {
			return err
		}
		rec, err := eng.Mover().Record(ctx, handle)
		if err != nil {
			return errors.Join(err, handle.Close())
		}
		for _, c := range rec.Columns() {
			for _, buf := range c.Data().Buffers() {
				if buf != nil {
					_, _ = h.Write(buf.Bytes())
				}
			}
		}
		rec.Release()
		if err := handle.Close(); err != nil {
			return err
		}
	}
	return nil
}

// runDuckDB does the same with DuckDB.
func runDuckDB(
	ctx context.Context, records []arrow.RecordBatch, gpu, host int64, dir string,
) (took []float64, err error) {
	connector, err := duckdb.NewConnector("", nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, connector.Close()) }()
	conn, err := connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	exec := func(statement string) error {
		_, err := conn.(driver.ExecerContext).ExecContext(ctx, statement, nil)
		return err
	}
	if err := exec(fmt.Sprintf("SET memory_limit = '%dB'; SET threads = %d; SET temp_directory = '%s'; "+
		"SET preserve_insertion_order = false", gpu+host, threads, dir)); err != nil {
		return nil, err
	}
	a, err := duckdb.NewArrowFromConn(conn)
	if err != nil {
		return nil, err
	}
	reader, err := array.NewRecordReader(records[0].Schema(), records)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	release, err := a.RegisterView(reader, "records")
	if err != nil {
		return nil, err
	}
	err = exec("CREATE TABLE stored AS SELECT * FROM records")
	took = append(took, time.Since(start).Seconds())
	release()
	if err != nil {
		return nil, err
	}
	for range 2 {
		start := time.Now()
		out, err := a.QueryContext(ctx, "SELECT max(COLUMNS(*)) FROM stored")
		if err != nil {
			return nil, err
		}
		for out.Next() {
		}
		err = out.Err()
		out.Release()
		if err != nil {
			return nil, err
		}
		took = append(took, time.Since(start).Seconds())
	}
	return took, nil
}
