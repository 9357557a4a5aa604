package leases_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation/quota"
)

// TestOverBySomebodyElse: a process gets one event when another one lowers the quota of their group below
// what the group holds, and the next one only after the group was within the quota again.
func TestOverBySomebodyElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := ledgerDir(t)
		var told []quota.Over
		mine := terms(dir, "g", 1000, 5000)
		mine.OnOver = func(o quota.Over) { told = append(told, o) }
		a := join(t, mine)
		b := join(t, terms(dir, "g", 1000, 5000))
		defer a.Subscribe(func() {})()
		charge(t, a, 300)
		charge(t, b, 100)
		lower := func(limit int64, want int) {
			t.Helper()
			if err := b.SetLimit(limit); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			synctest.Wait()
			if len(told) != want {
				t.Fatalf("with a limit of %d the events are %+v, want %d", limit, told, want)
			}
		}
		lower(400, 0) // equal is fine
		lower(150, 1)
		if o := told[0]; o.Used != 400 || o.Limit != 150 || o.Quota == "" {
			t.Errorf("the event is %+v", o)
		}
		lower(99, 1)
		a.Credit(300)
		lower(90, 1) // 100 are held by b: never within the quota
		b.Credit(100)
		lower(80, 1)
		charge(t, a, 80)
		lower(70, 2)
		a.Credit(80)
	})
}

// TestOverAgain: a process gets another event if use was within the limit for a moment, also if it did not
// look at the ledger then.
func TestOverAgain(t *testing.T) {
	events := 0
	mine := terms(ledgerDir(t), "g", 1000, 1000)
	mine.OnOver = func(quota.Over) { events++ }
	a := join(t, mine)
	charge(t, a, 100)
	for i, limit := range []int64{99, 98, 97} {
		if err := a.SetLimit(limit); err != nil {
			t.Fatal(err)
		}
		if events != i+1 {
			t.Errorf("%d of %d bytes are held, and there were %d events, want %d", a.Live(), limit, events, i+1)
		}
		a.Credit(1) // a grain, which is not returned
	}
}
