//go:build linux || darwin

package leases_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

const device = "GPU-1"

// ledgerDir is a directory for a ledger. In the end no lease may be left in it.
func ledgerDir(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "ledger")
	t.Cleanup(func() {
		if left := leaseFiles(t, dir); len(left) > 0 {
			t.Errorf("leases are left: %q", left)
		}
	})
	return dir
}

// leaseFiles returns the names of the files that leases have in the device's directory.
func leaseFiles(t *testing.T, dir string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, device))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "lease-") {
			out = append(out, e.Name())
		}
	}
	return out
}

// wantRefusal checks that err is a refusal with those numbers.
func wantRefusal(t *testing.T, err error, requested, remaining, current, limit int64) *tier.OutOfBudgetError {
	t.Helper()
	var e *tier.OutOfBudgetError
	if !errors.As(err, &e) || !errors.Is(err, tier.ErrOutOfBudget) || !errors.Is(err, tier.ErrNoSpace) {
		t.Fatalf("%v; want a refusal", err)
	}
	if e.Requested != requested || e.Remaining != remaining || e.Current != current || e.Limit != limit {
		t.Fatalf("%+v; want requested %d, remaining %d, current %d, limit %d", *e, requested, remaining, current, limit)
	}
	return e
}

func terms(dir, group string, share, physical int64) leases.Terms {
	return leases.Terms{Dir: dir, Device: device, Group: group, Quota: share, Physical: physical}
}

func join(t *testing.T, terms leases.Terms) *leases.Lease {
	t.Helper()
	l, err := leases.Join(terms)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
	})
	return l
}

func charge(t *testing.T, q tier.Quota, n int64) {
	t.Helper()
	if err := q.Charge(n); err != nil {
		t.Fatal(err)
	}
}

// TestGroupSharesOneQuota: what the leases of a group hold together is within its quota,
// to the byte.
func TestGroupSharesOneQuota(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "etl", 1000, 5000))
	b := join(t, terms(dir, "etl", 1000, 5000))
	charge(t, a, 600)
	e := wantRefusal(t, b.Charge(401), 401, 400, 600, 1000)
	if !strings.Contains(e.Budget, `"etl"`) || !strings.Contains(e.Budget, dir) || !strings.Contains(e.Budget, device) {
		t.Errorf("%q does not say whose quota it is", e.Budget)
	}
	charge(t, b, 400)
	wantRefusal(t, a.Charge(1), 1, 0, 1000, 1000)
	if a.Remaining() != 0 || b.Remaining() != 0 || a.Limit() != 1000 {
		t.Errorf("remaining %d, %d of %d", a.Remaining(), b.Remaining(), a.Limit())
	}
	b.Credit(16) // more than a grain, of 1000/64 bytes: 384 are left, in 26 grains of 390
	charge(t, a, 10)
	wantRefusal(t, a.Charge(1), 1, 0, 1000, 1000)
	charge(t, b, 6)
	wantRefusal(t, b.Charge(1), 1, 0, 1000, 1000)
	if a.Live() != 610 || b.Live() != 390 {
		t.Errorf("live %d and %d", a.Live(), b.Live())
	}
	wantRefusal(t, a.Charge(math.MaxInt64), math.MaxInt64, 0, 1000, 1000)
}

// TestLargestSizes: on the largest GPU that a ledger counts no sum overflows.
func TestLargestSizes(t *testing.T) {
	const most = 1<<50 - 1
	dir := ledgerDir(t)
	if _, err := leases.Join(terms(dir, "g", most, most+2)); err == nil ||
		!strings.Contains(err.Error(), "to 1125899906842624 bytes") {
		t.Errorf("a larger GPU: %v", err)
	}
	a := join(t, terms(dir, "g", most, most))
	b := join(t, terms(dir, "g", most, most))
	charge(t, a, most-1)
	wantRefusal(t, a.Charge(math.MaxInt64), math.MaxInt64, 1, most-1, most)
	wantRefusal(t, a.Charge(2), 2, 1, most-1, most)
	wantRefusal(t, b.Charge(math.MaxInt64), math.MaxInt64, 1, most-1, most)
	wantRefusal(t, b.Charge(2), 2, 1, most-1, most)
	charge(t, b, 1)
	wantRefusal(t, b.Charge(1), 1, 0, most, most)
	if a.Live() != most-1 || b.Live() != 1 {
		t.Errorf("live %d and %d", a.Live(), b.Live())
	}
}

// TestWithoutAGroup: processes that name no group have quotas of their own.
func TestWithoutAGroup(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "", 1000, 5000))
	b := join(t, terms(dir, "", 2000, 5000))
	charge(t, a, 1000)
	charge(t, b, 2000)
	wantRefusal(t, a.Charge(1), 1, 0, 1000, 1000)
	wantRefusal(t, b.Charge(1), 1, 0, 2000, 2000)
}

// TestSumOfQuotas: the quotas of all groups are within what is advertised, each group
// counted once.
func TestSumOfQuotas(t *testing.T) {
	dir := ledgerDir(t)
	at := func(group string, share int64) leases.Terms {
		tm := terms(dir, group, share, 1000)
		tm.Advertised = 1500
		return tm
	}
	join(t, at("a", 1000))
	join(t, at("a", 1000))
	b := join(t, at("b", 400))
	_, err := leases.Join(at("c", 101))
	wantRefusal(t, err, 101, 100, 1400, 1500)
	if len(leaseFiles(t, dir)) != 3 {
		t.Errorf("who was refused left something: %q", leaseFiles(t, dir))
	}
	join(t, at("c", 100))
	if _, err := leases.Join(at("d", 0)); !errors.Is(err, tier.ErrOutOfBudget) {
		t.Errorf("all that is advertised, beside others: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	join(t, at("d", 400))
	if _, err := leases.Join(at("", 1501)); !errors.Is(err, tier.ErrOutOfBudget) {
		t.Errorf("more than is advertised: %v", err)
	}
}

// TestPhysical: whatever the quotas promise, all together hold no more than the GPU has.
func TestPhysical(t *testing.T) {
	dir := ledgerDir(t)
	at := func(group string) leases.Terms {
		tm := terms(dir, group, 800, 1000)
		tm.Advertised = 2000
		return tm
	}
	a, b := join(t, at("a")), join(t, at("b"))
	charge(t, a, 800)
	e := wantRefusal(t, b.Charge(300), 300, 200, 0, 800)
	if !strings.Contains(e.Budget, "other processes have 800 of 1000 bytes") {
		t.Errorf("%q does not have the numbers of the memory", e.Budget)
	}
	charge(t, b, 200)
	wantRefusal(t, b.Charge(1), 1, 0, 200, 800)
}

func TestProcessesMustAgree(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "a", 400, 1000))
	for name, tm := range map[string]leases.Terms{
		"another size of the GPU": terms(dir, "b", 100, 2000),
		"more advertised": {Dir: dir, Device: device, Group: "b", Quota: 100, Physical: 1000,
			Advertised: 1100},
	} {
		if _, err := leases.Join(tm); err == nil || errors.Is(err, tier.ErrOutOfBudget) ||
			!strings.Contains(err.Error(), "all the same") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if l := join(t, terms(dir, "a", 0, 1000)); l.Limit() != 400 {
		t.Errorf("a process of the group that names no quota has %d", l.Limit())
	}
	for _, other := range []int64{300, 500} {
		if l := join(t, terms(dir, "a", other, 1000)); l.Limit() != 400 {
			t.Errorf("a process of the group that names a quota of %d has %d", other, l.Limit())
		}
	}
	charge(t, a, 400)
	for name, tm := range map[string]leases.Terms{
		"no memory":           {Dir: dir, Device: device},
		"negative memory":     {Dir: dir, Device: device, Physical: -1},
		"negative quota":      {Dir: dir, Device: device, Physical: 1, Quota: -1},
		"negative advertised": {Dir: dir, Device: device, Physical: 1, Advertised: -1},
	} {
		if _, err := leases.Join(tm); err == nil {
			t.Errorf("%s: want an error", name)
		}
	}
}

// TestDevicesHaveBooksOfTheirOwn, whatever they are called.
func TestDevicesHaveBooksOfTheirOwn(t *testing.T) {
	dir := ledgerDir(t)
	names := []string{device, "..", ".", "GPU/../1", "MIG-1/2", "%2E", ".hidden", "a b"}
	for i, name := range names {
		l := join(t, leases.Terms{Dir: dir, Device: name, Quota: 100, Physical: 100})
		charge(t, l, int64(i)+1)
	}
	held, err := leases.Holders(dir)
	if err != nil || len(held) != len(names) {
		t.Fatalf("%v, %v", held, err)
	}
	for i, name := range names {
		if strings.HasPrefix(name, "MIG-") {
			name = "GPU-" + name[4:] // CUDA's name of it
		}
		if !slices.ContainsFunc(held, func(h leases.Holder) bool { return h.Device == name && h.Live == int64(i)+1 }) {
			t.Errorf("%s does not hold %d bytes: %+v", name, i+1, held)
		}
	}
	outside, err := os.ReadDir(filepath.Dir(dir))
	if err != nil || len(outside) != 1 {
		t.Errorf("beside the ledger: %v, %v", outside, err)
	}
}

// TestLoweredInOneProcess: the least quota of a group's processes counts, nothing is revoked, and
// each sees its share of the excess.
func TestLoweredInOneProcess(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 1000, 1000))
	b := join(t, terms(dir, "g", 1000, 1000))
	charge(t, a, 600)
	charge(t, b, 200)
	if err := a.SetLimit(400); err != nil {
		t.Fatal(err)
	}
	wantRefusal(t, b.Charge(11), 11, 0, 800, 400)
	wantRefusal(t, b.Charge(1), 1, 0, 800, 400) // though it had a part of a grain left until it looked
	if a.Limit() != 400 || b.Limit() != 400 {
		t.Errorf("limits %d and %d", a.Limit(), b.Limit())
	}
	wantRefusal(t, a.Charge(1), 1, 0, 800, 400)
	if a.Remaining() != -300 || b.Remaining() != -100 {
		t.Errorf("remaining %d and %d", a.Remaining(), b.Remaining())
	}
	if _, err := leases.Join(terms(dir, "other", 600, 1000)); !errors.Is(err, tier.ErrOutOfBudget) {
		t.Errorf("what one of two gave up was promised to another: %v", err)
	}
	if err := b.SetLimit(400); err != nil {
		t.Fatal(err)
	}
	join(t, terms(dir, "other", 600, 1000)) // now it can be
	c := join(t, terms(dir, "g", 1000, 1000))
	if c.Limit() != 400 {
		t.Errorf("who joins later has %d", c.Limit())
	}
	if err := a.SetLimit(401); !errors.Is(err, tier.ErrOutOfBudget) {
		t.Errorf("raised above what is advertised: %v", err)
	}
	for _, n := range []int64{0, -1} {
		if a.SetLimit(n) == nil {
			t.Errorf("SetLimit(%d): want an error", n)
		}
	}
}

// TestClose: what a lease holds is free for others at once, and nothing works after.
func TestClose(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 1000, 1000))
	b := join(t, terms(dir, "g", 1000, 1000))
	charge(t, a, 1000)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	charge(t, b, 1000)
	if err := a.Close(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("a second Close: %v", err)
	}
	if err := a.Charge(1); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("Charge: %v", err)
	}
	if err := a.SetLimit(1); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("SetLimit: %v", err)
	}
	if a.Remaining() != 0 || a.Live() != 0 || a.Limit() != 1000 {
		t.Errorf("remaining %d, live %d, limit %d", a.Remaining(), a.Live(), a.Limit())
	}
	a.Credit(1000) // of the space that is closed after it: nothing
	if b.Live() != 1000 {
		t.Errorf("b holds %d", b.Live())
	}
}

// TestCreditOfWhatWasNotCharged: it is a panic, and changes nothing.
func TestCreditOfWhatWasNotCharged(t *testing.T) {
	l := join(t, terms(ledgerDir(t), "g", 64, 64))
	charge(t, l, 10)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		l.Credit(11)
	}()
	if l.Live() != 10 {
		t.Errorf("%d bytes are held", l.Live())
	}
	l.Credit(10)
}

// TestCloseWhileCharging: a charge that began before Close is returned by it.
func TestCloseWhileCharging(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := ledgerDir(t)
		a := join(t, terms(dir, "g", 64000, 64000))
		unlock := lockDir(t, dir)
		var all sync.WaitGroup
		for _, f := range []func() error{func() error { return a.Charge(5000) }, a.Close} {
			all.Go(func() {
				if err := f(); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait() // the charge waits for the lock, and Close for the charge
		}
		unlock()
		all.Wait()
		if n := a.Live(); n != 0 {
			t.Errorf("%d bytes are held by a closed lease", n)
		}
	})
}

// TestWaiterIsWoken: a waiter for room that another lease holds gets it.
func TestWaiterIsWoken(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 64<<10, 1<<20))
	b := join(t, terms(dir, "g", 64<<10, 1<<20))
	charge(t, a, 60<<10)

	gpu, err := sim.New(sim.Config{Memory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer gpu.Close()
	dev := quota.Under(gpu, b)
	pool, err := devpool.NewMemory(dev)
	if err != nil {
		t.Fatal(err)
	}
	space, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: 1 << 20, Pool: pool,
		Quota: tier.QuotaOf(dev)})
	if err != nil {
		t.Fatal(err)
	}
	defer space.Close()
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{space}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	got := make(chan error, 1)
	go func() {
		r, err := m.Reserve(ctx, reservation.AnyInTier(tier.GPU), 8<<10, nil)
		if err == nil {
			err = r.Release()
		}
		got <- err
	}()
	for len(m.Demand(nil)) == 0 || m.Demand(nil)[0].Waiters == 0 {
		select {
		case err := <-got:
			t.Fatalf("it did not wait: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	a.Credit(2 << 10) // not enough: it is notified, and waits on without asking
	time.Sleep(300 * time.Millisecond)
	a.Credit(2 << 10)
	if err := <-got; err != nil {
		t.Fatal(err)
	}
}

// TestRoomBetweenTwoLooks: after a refusal, a process is notified of room that it finds at its next look
// at the ledger, also if as much was there at the last look before the refusal.
func TestRoomBetweenTwoLooks(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 1000, 1000))
	b := join(t, terms(dir, "g", 1000, 1000))
	told := make(chan struct{}, 1)
	defer b.Subscribe(func() {
		select {
		case told <- struct{}{}:
		default:
		}
	})()
	for i := range 20 {
		charge(t, a, 1000)
		select {
		case <-told:
		default:
		}
		wantRefusal(t, b.Charge(800), 800, 0, 1000, 1000)
		a.Credit(1000)
		select {
		case <-told:
		case <-time.After(10 * time.Second):
			t.Fatalf("round %d: nobody was told", i)
		}
	}
}

// TestIdleLeaseSees: a process that charges nothing, and has subscribers, sees later processes,
// what they hold, that they lower the quota, and that they are gone.
func TestIdleLeaseSees(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 1000, 1000))
	charge(t, a, 600)
	defer a.Subscribe(func() {})()
	until := func(limit, remaining int64) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); a.Limit() != limit ||
			a.Remaining() != remaining; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("limit %d, remaining %d; want %d and %d", a.Limit(), a.Remaining(), limit, remaining)
			}
		}
	}
	until(1000, 400)
	p := start(t, dir, 1000)
	p.must(t, "charge 300")
	until(1000, 100)
	b := join(t, terms(dir, "g", 1000, 1000))
	if err := b.SetLimit(450); err != nil {
		t.Fatal(err)
	}
	until(450, -300)
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	until(1000, 100)
	p.kill(t)
	until(1000, 400)
}

// TestSubscribersAreNotified: subscribers are called at once when their own process returns bytes,
// and when the ledger cannot be used any more, so that a waiter charges again and gets the error.
func TestSubscribersAreNotified(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := ledgerDir(t)
		a := join(t, terms(dir, "g", 64000, 64000))
		charge(t, a, 100)
		var calls atomic.Int64
		defer a.Subscribe(func() { calls.Add(1) })()
		if a.Credit(10); calls.Load() != 1 {
			t.Errorf("after a credit there were %d calls, want 1", calls.Load())
		}
		time.Sleep(time.Second)
		if synctest.Wait(); calls.Load() != 1 {
			t.Errorf("while nothing changed there were %d calls, want 1", calls.Load())
		}
		if err := errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if synctest.Wait(); calls.Load() < 2 {
			t.Error("no call when the ledger cannot be used")
		}
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
	})
}

// TestFileIsOneObject: nothing of a longer content remains in the file of a process.
func TestFileIsOneObject(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 1<<40, 1<<40))
	charge(t, a, 1<<39)
	a.Credit(1<<39 - 1)
	text, err := os.ReadFile(filepath.Join(dir, device, leaseFiles(t, dir)[0]))
	if err != nil {
		t.Fatal(err)
	}
	var h leases.Holder
	if err := json.Unmarshal(text, &h); err != nil || h.Live != 1 {
		t.Errorf("%q: %v", text, err)
	}
}

// lockDir locks the device's directory, as a process does that is stopped while it uses the ledger.
func lockDir(t *testing.T, dir string) (unlock func()) {
	t.Helper()
	d, err := os.Open(filepath.Join(dir, device))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestManyProcessesLookLessOften: an idle process looks every 50 ms beside a few others, and less often beside
// many, so that the looks of all leave the directory unlocked most of the time.
func TestManyProcessesLookLessOften(t *testing.T) {
	for peers, wantLooks := range map[int]int{3: 20, 40: 3} {
		synctest.Test(t, func(t *testing.T) {
			dir := ledgerDir(t)
			a := join(t, terms(dir, "g", 1000, 1000))
			var b *leases.Lease
			for range peers {
				b = join(t, terms(dir, "g", 1000, 1000))
			}
			looks := 0 // each finds another limit
			defer a.Subscribe(func() { looks++ })()
			for i := range int64(140) {
				if err := b.SetLimit(1000 - i); err != nil {
					t.Fatal(err)
				}
				time.Sleep(10 * time.Millisecond)
			}
			if synctest.Wait(); looks < wantLooks || looks > wantLooks*3/2 {
				t.Errorf("beside %d processes it looked %d times in 1.4 s, want %d", peers, looks, wantLooks)
			}
		})
	}
}

// TestStoppedProcess: while a process is stopped with the directory locked, others charge within their
// grains and give bytes back. A charge that needs a grain fails after a while, and so does an observer.
// Nothing is lost once the process goes on.
func TestStoppedProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // so that nobody waits for real
		dir := ledgerDir(t)
		a := join(t, terms(dir, "g", 64000, 64000))
		charge(t, a, 500)
		unlock := lockDir(t, dir)
		charge(t, a, 500)
		if err := a.Charge(1); err == nil || errors.Is(err, tier.ErrNoSpace) ||
			!strings.Contains(err.Error(), "locked for 5s") {
			t.Errorf("a charge that needs a grain: %v", err)
		}
		a.Credit(10)
		charge(t, a, 10)
		if held, err := leases.Holders(dir); err == nil || len(held) != 0 {
			t.Errorf("%v, %v", held, err)
		}
		if _, err := leases.Join(terms(dir, "g", 64000, 64000)); err == nil ||
			!strings.Contains(err.Error(), "locked for 5s") {
			t.Errorf("joining: %v", err)
		}
		unlock()
		charge(t, a, 63000)
		wantRefusal(t, a.Charge(1), 1, 0, 64000, 64000)
	})
}

// TestGoroutinesBesideAStoppedProcess: goroutines whose charges need a grain wait for a stopped process at the
// same time, and one that gives bytes back waits once. The grains are free for others after the next look.
func TestGoroutinesBesideAStoppedProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := ledgerDir(t)
		a := join(t, terms(dir, "g", 64000, 64000))
		b := join(t, terms(dir, "g", 64000, 64000))
		charge(t, a, 60000)
		unlock := lockDir(t, dir)
		begin := time.Now()
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() {
				if err := a.Charge(2000); err == nil || !strings.Contains(err.Error(), "locked for 5s") {
					t.Errorf("a charge that needs a grain: %v", err)
				}
			})
		}
		all.Wait()
		for range 10 {
			a.Credit(4000)
		}
		if took := time.Since(begin); took > 6*time.Second {
			t.Errorf("ten charges and ten credits took %v", took)
		}
		unlock()
		defer a.Subscribe(func() {})()
		time.Sleep(time.Second)
		charge(t, b, 44000)
	})
}

// TestLeasesUnderRaces: many leases in many goroutines, coming and going, never hold more than the
// quota together, and a single one can have all of it.
func TestLeasesUnderRaces(t *testing.T) {
	const share = 1000
	dir := ledgerDir(t)
	last := join(t, terms(dir, "g", share, 10*share))
	var held atomic.Int64 // never more than is charged
	var successes atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 20 {
				l, err := leases.Join(terms(dir, "g", share, 10*share))
				if err != nil {
					t.Error(err)
					return
				}
				for i := range int64(100) {
					n := 200 + i
					if err := l.Charge(n); err == nil {
						successes.Add(1)
						if held.Add(n) > share {
							t.Error("more is held than the quota")
						}
						held.Add(-n)
						l.Credit(n)
					} else if !errors.Is(err, tier.ErrOutOfBudget) {
						t.Error(err)
					}
				}
				if err := l.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if successes.Load() == 0 {
		t.Error("nothing was ever charged")
	}
	charge(t, last, share)
}

func BenchmarkLease(b *testing.B) {
	dir := filepath.Join(b.TempDir(), "ledger")
	for range 4 {
		l, err := leases.Join(terms(dir, "g", 1<<30, 1<<30))
		if err != nil {
			b.Fatal(err)
		}
		defer l.Close()
	}
	l, err := leases.Join(terms(dir, "g", 1<<30, 1<<30))
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	b.ReportAllocs()
	for b.Loop() {
		if err := l.Charge(4096); err != nil {
			b.Fatal(err)
		}
		l.Credit(4096)
	}
}
