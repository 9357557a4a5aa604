// Command duckdb stores a Parquet file's rows in Spillway and in DuckDB, with as much memory, and
// reads all of them twice. The sides work in turns, and the medians are printed.
//
//	cd scripts/duckdb && go run -tags duckdb_arrow . --parquet FILE
//
// It is a module of its own, because it downloads and links DuckDB. Both sides get the same Arrow
// records, which are decoded before, and two threads. Spillway hashes every byte that it reads
// again. DuckDB computes the largest value of each column, which is less: it needs no rows in Arrow.
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
	"strings"
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
	repeat := flag.Int("repeat", 8, "how often its rows are stored")
	rounds := flag.Int("rounds", 5, "how often each side works")
	gpu := flag.Int64("gpu", 0, "megabytes of simulated GPU memory, of ours")
	host := flag.Int64("host", 300, "megabytes of host memory, of ours; DuckDB gets both together")
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
	sides := []struct {
		name string
		run  func(dir string) ([]float64, error)
		took [3][]float64
	}{
		{name: "spillway", run: func(dir string) ([]float64, error) { return ours(ctx, records, gpu, host, dir) }},
		{name: "duckdb", run: func(dir string) ([]float64, error) { return duck(ctx, records, gpu+host, dir) }},
	}
	for i := range rounds * 2 {
		s := &sides[(i+i/2)%2] // who is first changes
		dir, err := os.MkdirTemp("", "spill-")
		if err != nil {
			return err
		}
		took, err := s.run(dir)
		if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		for k, t := range took {
			s.took[k] = append(s.took[k], t)
		}
	}
	fmt.Println("seconds, medians of", rounds)
	for k, what := range []string{"store", "scan", "scan again"} {
		a, b := median(sides[0].took[k]), median(sides[1].took[k])
		fmt.Printf("%-10s  spillway %6.3f  duckdb %6.3f  %.2f times as fast\n", what, a, b, b/a)
	}
	return nil
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// load decodes the file once, and returns its records repeat times.
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

// ours stores the records and reads them twice. It returns the seconds of each.
func ours(ctx context.Context, records []arrow.RecordBatch, gpu, host int64, dir string) (took []float64, err error) {
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
	for _, work := range []func(thread int) error{
		func(thread int) error {
			for i := thread; i < len(records); i += threads {
				if err := repo.Put(ctx, thread, records[i]); err != nil {
					return err
				}
			}
			return nil
		},
		func(thread int) error { return scan(ctx, eng, repo, thread) },
		func(thread int) error { return scan(ctx, eng, repo, thread) },
	} {
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

// duck does the same with DuckDB.
func duck(ctx context.Context, records []arrow.RecordBatch, bytes int64, dir string) (took []float64, err error) {
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
	for _, set := range []string{
		fmt.Sprintf("memory_limit = '%dB'", bytes), fmt.Sprintf("threads = %d", threads),
		fmt.Sprintf("temp_directory = '%s'", dir), "preserve_insertion_order = false",
	} {
		if _, err := conn.(driver.ExecerContext).ExecContext(ctx, "SET "+set, nil); err != nil {
			return nil, err
		}
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
	_, err = conn.(driver.ExecerContext).ExecContext(ctx, "CREATE TABLE stored AS SELECT * FROM records", nil)
	took = append(took, time.Since(start).Seconds())
	release()
	if err != nil {
		return nil, err
	}
	var columns []string
	for _, f := range records[0].Schema().Fields() {
		columns = append(columns, fmt.Sprintf("max(%q)", f.Name))
	}
	for range 2 {
		start := time.Now()
		out, err := a.QueryContext(ctx, "SELECT "+strings.Join(columns, ", ")+" FROM stored")
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
