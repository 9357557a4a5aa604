package test

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/reservation/quota"
)

// TestLimitLoweredByAnother: when another process of the group lowers its limit, batches move
// down soon, though the monitor sleeps, and one warning says by how much the limit is exceeded.
func TestLimitLoweredByAnother(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ledger := t.TempDir()
		var log bytes.Buffer
		var told []quota.Over
		open := func(l *slog.Logger, over func(quota.Over)) *spillway.Engine {
			eng, err := spillway.Open(t.Context(), spillway.Config{
				GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(60 * mib)}}, HostMemory: spillway.Bytes(64 * mib), Disks: []spillway.DiskConfig{},
				Limits: spillway.Limits{Quota: &quota.Settings{Limit: limitOf(t, "60Mi"), Ledger: ledger, Group: "g"}, QuotaOver: over}, Logger: l,
			})
			if err != nil {
				t.Fatal(err)
			}
			return eng
		}
		eng := open(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn})), func(o quota.Over) { told = append(told, o) })
		other := open(slog.New(slog.DiscardHandler), nil)
		all := onGPU(t, eng, 40)
		time.Sleep(time.Second)
		synctest.Wait()
		looks := eng.Stats().Monitor.Looks
		time.Sleep(time.Minute)
		if n := eng.Stats().Monitor.Looks - looks; n > 61 {
			t.Errorf("%d looks in a minute, in which nothing was needed", n)
		}
		if err := other.Leases()[0].SetLimit(10 * mib); err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * time.Millisecond) // the ledger is looked at each 100
		synctest.Wait()
		if n := eng.Leases()[0].Live(); n > 10*mib {
			t.Errorf("%d bytes are held", n)
		}
		if len(told) != 1 || told[0].Used != 40*mib || told[0].Limit != 10*mib {
			t.Errorf("the events are %+v", told)
		}
		dropAll(t, all)
		closeClean(t, eng)
		closeClean(t, other)
		if s := log.String(); strings.Count(s, "than its quota allows") != 1 || !strings.Contains(s, "used=41943040") || !strings.Contains(s, "limit=10485760") {
			t.Errorf("the log:\n%s", s)
		}
	})
}

// TestRemovedLedgerIsLogged: the removal of a ledger's files is logged while the engine works, and
// not only when it is closed. The line names the space.
func TestRemovedLedgerIsLogged(t *testing.T) {
	if runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		t.Skip("needs Linux or darwin, for files that are locked and shared in memory")
	}
	synctest.Test(t, func(t *testing.T) {
		ledger := t.TempDir()
		var log syncBuffer
		eng, err := spillway.Open(t.Context(), spillway.Config{
			GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}, {Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}}, HostMemory: spillway.Bytes(1 << 20),
			Disks: []spillway.DiskConfig{}, Limits: spillway.Limits{Quota: &quota.Settings{Ledger: ledger}}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join(ledger, "sim-1")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if eng.Leases()[1].Lost() != 1 || log.count("were removed while processes use it") != 1 || log.count("space=gpu:1") != 1 {
			t.Errorf("before it is closed the log has:\n%s", log.String())
		}
		closeClean(t, eng)
	})
}
