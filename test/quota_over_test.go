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
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/reservation/quota"
)

// TestLimitLoweredByAnother: when another process of the group lowers its limit, batches move down
// soon, though the monitor sleeps. There is one warning and one event, with the numbers and the
// GPU.
func TestLimitLoweredByAnother(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ledger := t.TempDir()
		var log bytes.Buffer
		var exceeded []spillway.Event
		open := func(l *slog.Logger, do func(spillway.Event)) *spillway.Engine {
			eng, err := spillway.Open(t.Context(), spillway.Config{
				GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(60 * mib)}}, HostMemory: spillway.Bytes(64 * mib), Disks: []spillway.DiskConfig{},
				Limits: spillway.Limits{Quota: &quota.Settings{Limit: limitOf(t, "60Mi"), Ledger: ledger, Group: "g"}},
				Logger: l, Events: do,
			})
			if err != nil {
				t.Fatal(err)
			}
			return eng
		}
		warnings := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
		eng := open(warnings, on(events.QuotaExceeded, func(e spillway.Event) { exceeded = append(exceeded, e) }))
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
		gpu := spillway.SpaceID{Kind: spillway.GPU}
		want := spillway.Event{Kind: events.QuotaExceeded, To: gpu, Bytes: 40 * mib, Limit: 10 * mib}
		if len(exceeded) != 1 || exceeded[0].Text == "" || !sameNumbers(exceeded[0], want) {
			t.Errorf("the events are %v", exceeded)
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
