package test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestLongWaitIsLogged: the warning about a wait names the holders of the room.
func TestLongWaitIsLogged(t *testing.T) { synctest.Test(t, testLongWaitIsLogged) }

func testLongWaitIsLogged(t *testing.T) {
	var out syncBuffer
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}}, HostMemory: spillway.Bytes(1 << 20),
		Logger: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer closeEngine(t, eng)
	plan, err := eng.Plan("query-17")
	if err != nil {
		t.Fatal(err)
	}
	if plan.Owner().Name() != "query-17" {
		t.Errorf("the plan's owner is %q", plan.Owner().Name())
	}
	repo, err := plan.Repository("hash-join", 0)
	if err != nil {
		t.Fatal(err)
	}
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
		t.Fatal(err)
	}
	for h, err := range repo.Drain(plan.Owner().Context(t.Context()), 0, tier.GPU) {
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
	}
	gpu := tier.ID{Kind: tier.GPU}
	account, ok := eng.Holders(gpu)
	if !ok || len(account.Holders) != 1 || account.Holders[0].Plan != "query-17" || account.Holders[0].Owner != "query-17" || account.Holders[0].Count != 1 {
		t.Errorf("the account is %+v", account)
	}
	if _, ok := eng.Holders(tier.ID{Kind: tier.GPU, Ordinal: 7}); ok {
		t.Error("there is an account of a space that there is not")
	}
	ctx, cancel := context.WithCancel(t.Context())
	whole := account.Limit / 4096 * 4096
	ended := make(chan error)
	go func() {
		r, err := eng.Reserve(ctx, reservation.Specific(gpu), whole) // for which the handle must go
		ended <- errors.Join(err, r.Release())
	}()
	synctest.Wait()
	before := out.String()
	time.Sleep(5 * time.Second)
	synctest.Wait()
	said := strings.TrimPrefix(out.String(), before)
	for _, want := range []string{"level=WARN", fmt.Sprintf("wait.requested=%d", whole), "wait.waited=5s", "wait.waiters=1", `1 handle of plan \"query-17\", operator hash-join:0, owner \"query-17\" (batch 1): 8192 bytes`} {
		if !strings.Contains(said, want) {
			t.Errorf("%q does not say %q", said, want)
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
