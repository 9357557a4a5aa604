//go:build linux || darwin

package leases_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
	"golang.org/x/sys/unix"
)

// childMain is a process with a lease in the ledger os.Args[1], of the group "g" with a
// quota and a GPU of os.Args[2] bytes. It answers each line of its input with a line;
// the end of its input ends it.
//
//	charge N   "ok", or why not
//	credit N   "ok"
//	churn      charges and credits, joins and leaves, for ever
//	storm N    charges and credits at random, for ever: see TestStorm
//	full N     tries to charge N bytes while its files cannot grow or change: see TestUnwritten
func childMain(mode string) int {
	share, err := strconv.ParseInt(os.Args[2], 10, 64)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	t := terms(os.Args[1], "g", share, share)
	if mode == "look" {
		return look(os.Args[1])
	}
	l, err := leases.Join(t)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer l.Close()
	fmt.Println("joined")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		verb, number, _ := strings.Cut(in.Text(), " ")
		n, _ := strconv.ParseInt(number, 10, 64)
		var err error
		switch verb {
		case "charge":
			err = l.Charge(n)
		case "credit":
			l.Credit(n)
		case "compete":
			err = compete(l, share, n)
		case "storm":
			err = storm(l, os.Getenv("SPILLWAY_QUOTA_TEST_WORD"), uint64(n))
		case "full":
			err = chargeUnwritten(l, n)
		case "churn":
			fmt.Println("ok")
			churn(l, t)
		}
		if err != nil {
			fmt.Println(err)
		} else {
			fmt.Println("ok")
		}
	}
	return 0
}

// chargeUnwritten charges n bytes while the system refuses each write to a file of this process, as on a
// full disk.
func chargeUnwritten(l *leases.Lease, n int64) error {
	signal.Ignore(unix.SIGXFSZ)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 0, Max: limit.Max}); err != nil {
		return err
	}
	err := l.Charge(n)
	return errors.Join(unix.Setrlimit(unix.RLIMIT_FSIZE, &limit), err)
}

func look(dir string) int {
	held, err := leases.Holders(dir)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(held)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// compete charges and credits n times, or until it could charge once, and counts in a page that all share
// what is held: after it is charged, and until before it is credited.
func compete(l *leases.Lease, share, n int64) error {
	total, done, err := sharedWord(os.Getenv("SPILLWAY_QUOTA_TEST_WORD"))
	if err != nil {
		return err
	}
	defer done()
	rng := rand.New(rand.NewPCG(uint64(os.Getpid()), 3))
	var held []int64
	got := 0
	for i := int64(0); i < n || got == 0; i++ { // others may have everything for long: locks are not fair
		if k := rng.Int64N(share/2) + 1; rng.IntN(2) == 0 {
			err := l.Charge(k)
			if err == nil {
				got++
				held = append(held, k)
				if sum := total.Add(k); sum > share {
					return fmt.Errorf("%d bytes are held, of %d", sum, share)
				}
			} else if !errors.Is(err, tier.ErrOutOfBudget) {
				return err
			}
		} else if len(held) > 0 {
			total.Add(-held[0])
			l.Credit(held[0])
			held = held[1:]
		}
	}
	for _, k := range held {
		total.Add(-k)
		l.Credit(k)
	}
	return nil
}

// churn does whatever a process may be killed in.
func churn(l *leases.Lease, t leases.Terms) {
	for i := int64(0); ; i++ {
		if n := t.Quota / (1 + i%3); l.Charge(n) == nil && i%2 == 0 {
			l.Credit(n)
		}
		if i%7 == 0 {
			_ = l.Close()
			for {
				next, err := leases.Join(t)
				if err == nil {
					l = next
					break
				}
			}
		}
	}
}

// child is such a process.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func start(t *testing.T, dir string, share int64, env ...string) *child {
	t.Helper()
	c := launch(t, nil, dir, share, env...)
	if got := c.read(t); got != "joined" {
		t.Fatalf("the process says %q", got)
	}
	return c
}

// launch starts a process, which says first whether it has joined, as some user.
func launch(t *testing.T, user *syscall.Credential, dir string, share int64, env ...string) *child {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // it ends by itself, whatever happens here
	cmd := exec.CommandContext(ctx, os.Args[0], dir, strconv.FormatInt(share, 10))
	if user != nil { // who may not reach the folder of the program by its name
		cmd.Path, cmd.SysProcAttr = "/proc/self/exe", &syscall.SysProcAttr{Credential: user}
	}
	cmd.Env = append(append(os.Environ(), childEnv+"=lease"), env...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: cmd, in: in, out: bufio.NewScanner(out)}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
		cancel()
	})
	return c
}

func (c *child) read(t *testing.T) string {
	t.Helper()
	if !c.out.Scan() {
		t.Fatalf("the process is silent: %v", c.out.Err())
	}
	return c.out.Text()
}

func (c *child) send(t *testing.T, line string) {
	t.Helper()
	if _, err := fmt.Fprintln(c.in, line); err != nil {
		t.Fatal(err)
	}
}

func (c *child) ask(t *testing.T, line string) string {
	t.Helper()
	c.send(t, line)
	return c.read(t)
}

func (c *child) must(t *testing.T, line string) {
	t.Helper()
	if got := c.ask(t, line); got != "ok" {
		t.Fatalf("%s: %s", line, got)
	}
}

// kill ends the process as kill -9 does, and waits until it is gone.
func (c *child) kill(t *testing.T) {
	t.Helper()
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.cmd.Wait()
}

// TestProcessesShareAQuota: two processes with one quota never hold more than it
// together, whatever they do at the same time.
func TestProcessesShareAQuota(t *testing.T) {
	dir := ledgerDir(t)
	const share = 1 << 20
	word := "SPILLWAY_QUOTA_TEST_WORD=" + newSharedWord(t)
	a, b, c := start(t, dir, share, word), start(t, dir, share, word), start(t, dir, share, word)
	n := 20000
	if testing.Short() {
		n = 2000
	}
	for _, p := range []*child{a, b, c} {
		p.send(t, fmt.Sprintf("compete %d", n))
	}
	for _, p := range []*child{a, b, c} {
		if got := p.read(t); got != "ok" {
			t.Error(got)
		}
	}
	a.must(t, fmt.Sprintf("charge %d", share-2*share/64)) // nothing was lost, except a grain of each of the others
	if got := b.ask(t, fmt.Sprintf("charge %d", 3*share/64)); !strings.Contains(got, "no room") {
		t.Errorf("above the quota: %s", got)
	}
}

// TestUnwritten: a charge whose grain cannot be written fails with the system's error and charges nothing.
// The grains from before can still be charged, and later charges succeed.
func TestUnwritten(t *testing.T) {
	dir := ledgerDir(t)
	me := join(t, terms(dir, "g", 6400, 6400))
	p := start(t, dir, 6400)
	p.must(t, "charge 150") // in two grains
	if got := p.ask(t, "full 100"); !strings.Contains(got, unix.EFBIG.Error()) {
		t.Errorf("a charge that cannot be written: %s", got)
	}
	wantRefusal(t, me.Charge(6400), 6400, 6200, 200, 6400)
	p.must(t, "full 50")
	p.must(t, "charge 100")
	wantRefusal(t, me.Charge(6400), 6400, 6100, 300, 6400)
	p.must(t, "credit 300")
	charge(t, me, 6400)
}

// TestUnwrittenFile: a process that cannot write its file anew after that was removed leaves no file that
// others cannot read.
func TestUnwrittenFile(t *testing.T) {
	dir := ledgerDir(t)
	p := start(t, dir, 6400)
	p.must(t, "charge 150")
	clean(t, dir)
	if got := p.ask(t, "full 100"); !strings.Contains(got, unix.EFBIG.Error()) {
		t.Errorf("a charge that cannot be written: %s", got)
	}
	me := join(t, terms(dir, "g", 6400, 6400))
	charge(t, me, 10)
	p.must(t, "charge 100")
	wantRefusal(t, me.Charge(6400), 6400, 6090, 310, 6400)
}

// TestKilledProcess: what a process held that was killed is free for the next charge,
// and its lease is removed.
func TestKilledProcess(t *testing.T) {
	dir := ledgerDir(t)
	me := join(t, terms(dir, "g", 1000, 1000))
	p := start(t, dir, 1000)
	p.must(t, "charge 900")
	wantRefusal(t, me.Charge(101), 101, 100, 900, 1000)
	p.kill(t)
	charge(t, me, 1000)
	if got := leaseFiles(t, dir); len(got) != 1 {
		t.Errorf("leases: %q", got)
	}
}

// TestKilledWhileOthersWait: a waiter for what a killed process held is notified.
func TestKilledWhileOthersWait(t *testing.T) {
	dir := ledgerDir(t)
	me := join(t, terms(dir, "g", 1000, 1000))
	p := start(t, dir, 1000)
	p.must(t, "charge 900")
	told := make(chan struct{}, 1)
	defer me.Subscribe(func() {
		select {
		case told <- struct{}{}:
		default:
		}
	})()
	wantRefusal(t, me.Charge(500), 500, 100, 900, 1000)
	p.kill(t)
	select {
	case <-told:
	case <-time.After(time.Minute):
		t.Fatal("nobody was told")
	}
	charge(t, me, 500)
}

// TestKilledAnywhere kills processes at random moments: while they charge, credit, join and leave.
// Each time all is free again, and nothing is left.
func TestKilledAnywhere(t *testing.T) {
	seed := testseed.One(t)
	dir := ledgerDir(t)
	me := join(t, terms(dir, "g", 1000, 1000))
	rng := rand.New(rand.NewPCG(seed, 2))
	rounds := 40
	if testing.Short() {
		rounds = 10
	}
	for range rounds {
		a, b := start(t, dir, 1000), start(t, dir, 1000)
		a.must(t, "churn")
		b.must(t, "churn")
		time.Sleep(time.Duration(rng.IntN(5000)) * time.Microsecond)
		a.kill(t)
		time.Sleep(time.Duration(rng.IntN(1000)) * time.Microsecond)
		b.kill(t)
		charge(t, me, 1000)
		me.Credit(1000)
	}
	join(t, terms(dir, "g", 1000, 1000)) // sweeps the drafts
	if got := leaseFiles(t, dir); len(got) != 2 {
		t.Errorf("leases: %q", got)
	}
}

// TestThirdProcessSees: a process that has no part in the ledger sees the holders.
func TestThirdProcessSees(t *testing.T) {
	dir := ledgerDir(t)
	a, b := start(t, dir, 1000), start(t, dir, 1000)
	a.must(t, "charge 300")
	b.must(t, "charge 500")
	b.must(t, "credit 100")
	cmd := exec.CommandContext(t.Context(), os.Args[0], dir, "0")
	cmd.Env = append(os.Environ(), childEnv+"=look")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var held []leases.Holder
	if err := json.Unmarshal(out, &held); err != nil {
		t.Fatal(err)
	}
	if len(held) != 2 {
		t.Fatalf("%s", out)
	}
	slices.SortFunc(held, func(a, b leases.Holder) int { return cmp.Compare(a.Live, b.Live) })
	for i, want := range []leases.Holder{
		{PID: a.cmd.Process.Pid, Live: 300, Peak: 300},
		{PID: b.cmd.Process.Pid, Live: 400, Peak: 500},
	} {
		h := held[i]
		if h.PID != want.PID || h.Live != want.Live || h.Peak != want.Peak || h.Quota != 1000 || h.Group != "g" ||
			h.Device != device {
			t.Errorf("%+v; want %+v", h, want)
		}
		if age := time.Since(h.Started); age < 0 || age > time.Minute {
			t.Errorf("it started at %v", h.Started)
		}
	}
}
