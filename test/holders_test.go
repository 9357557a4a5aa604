package test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/busyengine"
	"github.com/spillway-db/spillway/tier"
)

// account returns the holders of a space at a moment when nothing changes hands. The sum of the parts
// must be what is used.
func account(t *testing.T, eng *spillway.Engine, id tier.ID) tier.Holdings {
	t.Helper()
	for try := 0; ; try++ {
		all, ok := eng.Holders(id)
		if !ok {
			t.Fatalf("there is no %s", id)
		}
		sum := all.Engine + all.Retired + all.Others
		for _, h := range slices.Concat(all.Holders, all.Batches) {
			sum += h.Bytes
		}
		s, _ := eng.Reservations().Spaces().ByID(id)
		if all.Others == 0 && sum == all.Used && s.State().Used() == sum {
			return all
		}
		if try == 10_000 {
			t.Fatalf("%d are used, and the parts are %d: %s", all.Used, sum, all)
		}
		time.Sleep(time.Millisecond) // the monitor may be at work
	}
}

// holder returns the part of a kind and an owner.
func holder(all []tier.Holder, what, owner string) (h tier.Holder) {
	for _, one := range all {
		if one.What == what && one.Owner == owner {
			return one
		}
	}
	return h
}

// TestHoldersOfReservations: what programs reserve and draw is theirs, with an owner and without one,
// before and after the reservation is released.
func TestHoldersOfReservations(t *testing.T) {
	t.Parallel()
	eng, _ := telling(t, nil)
	defer closeEngine(t, eng)
	const promised, drawn = 25 * tier.Page, 10 * tier.Page
	gpu := gpuOf(t, eng)
	var all [2]*reservation.Reservation
	var bufs [2]*tier.Buffer
	for i, o := range []*reservation.Owner{nil, reservation.NewOwner("me")} {
		var err error
		all[i], err = eng.Reservations().Reserve(t.Context(), reservation.Specific(gpu.ID()), promised, &reservation.Options{Owner: o})
		if err != nil {
			t.Fatal(err)
		}
		if bufs[i], err = all[i].Alloc(drawn); err != nil {
			t.Fatal(err)
		}
	}
	held := account(t, eng, gpu.ID())
	for _, owner := range []string{"", "me"} {
		if r := holder(held.Holders, "reservation", owner); r.Bytes != promised {
			t.Errorf("of owner %q: %+v", owner, r)
		}
	}
	for _, text := range []string{
		"reservations: 102400 bytes", `reservations, owner "me": 102400 bytes`, "122880 promised",
	} {
		if !strings.Contains(held.String(), text) {
			t.Errorf("%q lacks %q", held, text)
		}
	}
	release(t, all[0], all[1])
	held = account(t, eng, gpu.ID())
	if b := holder(held.Holders, "buffer", ""); b.Bytes != 2*drawn || len(held.Holders) != 1 ||
		!strings.Contains(held.String(), "buffers: 81920 bytes") {
		t.Errorf("buffers whose reservations are released: %s", held)
	}
	for _, b := range bufs {
		if err := b.Release(); err != nil {
			t.Error(err)
		}
	}
	if held = account(t, eng, gpu.ID()); len(held.Holders) != 0 || held.Used != held.Engine ||
		!strings.HasSuffix(held.String(), "nothing is held") {
		t.Errorf("at the end: %s", held)
	}
}

// TestHoldersOfSharedMemory: two tasks hold one batch, whose bytes count once.
func TestHoldersOfSharedMemory(t *testing.T) {
	t.Parallel()
	eng, _ := telling(t, nil)
	defer closeEngine(t, eng)
	_, repo := putMany(t, eng, "q", "op", 2)
	b, _ := repo.Peek(0)
	gpu := gpuOf(t, eng)
	for _, owner := range []string{"a", "b"} {
		h, err := b.Open(reservation.NewOwner(owner).Context(t.Context()), gpu.ID(), false)
		if err != nil {
			t.Fatal(err)
		}
		h.SetOwner(reservation.NewOwner(owner))
		defer h.Close()
	}
	held := account(t, eng, gpu.ID())
	first, second := holder(held.Holders, "handle", "a"), holder(held.Holders, "handle", "b")
	if first.Bytes == 0 || first.Count != 1 || second.Bytes != 0 || second.Count != 1 ||
		len(held.Batches) != 1 || held.Batches[0].Count != 1 {
		t.Errorf("%+v and %+v: %s", first, second, held)
	}
}

// split is a program's own form with two buffers.
type split struct {
	asIs
	more *tier.Buffer
}

func (p *split) Bytes() int64   { return p.asIs.Bytes() + p.more.Charge() }
func (p *split) Release() error { return errors.Join(p.asIs.Release(), p.more.Release()) }

// TestHoldersOfAProgramsOwnForm: its bytes count once, with the batch or with the first of its
// handles. Other buffers of the program are listed by themselves.
func TestHoldersOfAProgramsOwnForm(t *testing.T) {
	t.Parallel()
	eng, _ := openSmall(t, 1<<20, 4<<20)
	defer closeEngine(t, eng)
	repo := scanOf(t, eng)
	const charge = 128 << 10
	r, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.Host), 3*charge)
	if err != nil {
		t.Fatal(err)
	}
	var bufs [3]*tier.Buffer // the last one stays the program's
	for i := range bufs {
		if bufs[i], err = r.Alloc(charge); err != nil {
			t.Fatal(err)
		}
	}
	release(t, r)
	b, err := eng.NewBatch(&split{asIs{numberedRecord(0, 100, wordList(1, 10)), bufs[0]}, bufs[1]})
	if err != nil {
		t.Fatal(err)
	}
	if err := repo.PutBatch(1, b); err != nil {
		t.Fatal(err)
	}
	id := bufs[0].Space().ID()
	held := account(t, eng, id)
	if got := holder(held.Holders, "buffer", ""); got.Bytes != charge || len(held.Batches) != 1 ||
		held.Batches[0].Bytes != 2*charge {
		t.Errorf("at rest: %s", held)
	}
	for _, owner := range []string{"a", "b"} {
		h, err := b.Open(t.Context(), id, false)
		if err != nil {
			t.Fatal(err)
		}
		h.SetOwner(reservation.NewOwner(owner))
		defer h.Close()
	}
	held = account(t, eng, id)
	first, second := holder(held.Holders, "handle", "a"), holder(held.Holders, "handle", "b")
	if first.Bytes != 2*charge || second.Bytes != 0 || holder(held.Holders, "buffer", "").Bytes != charge {
		t.Errorf("%+v and %+v: %s", first, second, held)
	}
	if err := bufs[2].Release(); err != nil {
		t.Error(err)
	}
	if held = account(t, eng, id); len(held.Holders) != 2 {
		t.Errorf("with no other buffers: %s", held)
	}
}

// TestHoldersOfDictionariesOfCopies: a dictionary that batches on disk share counts with them, once.
// When only copies use it, it is listed among other buffers, and it goes with them.
func TestHoldersOfDictionariesOfCopies(t *testing.T) {
	t.Parallel()
	eng, _ := openSmall(t, 1<<20, 4<<20)
	defer closeEngine(t, eng)
	repo := scanOf(t, eng)
	rec, disk := numberedRecord(0, 1000, wordList(1, 5000)), tier.ID{Kind: tier.Disk}
	const n = 3
	for i := range n {
		if err := repo.Put(t.Context(), i, rec, in(tier.Disk)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range n {
		b, _ := repo.Peek(i)
		h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		held := account(t, eng, disk)
		got := holder(held.Holders, "buffer", "")
		switch {
		case i < n-1 && (len(held.Holders) != 0 || len(held.Batches) != 1 || held.Batches[0].Bytes != held.Used):
			t.Errorf("with %d copies, and batches beside them: %s", i+1, held)
		case i == n-1 && (got.Bytes != held.Used || got.Bytes == 0 || len(held.Batches) != 0):
			t.Errorf("with copies alone: %s", held)
		}
	}
	space, _ := eng.Reservations().Spaces().ByID(disk)
	space.DropAllClean()
	if held := account(t, eng, disk); held.Used != 0 || len(held.Holders) != 0 {
		t.Errorf("without copies: %s", held)
	}
}

// TestHoldersWhileDataMoves: what a move writes is no program's buffer.
func TestHoldersWhileDataMoves(t *testing.T) {
	t.Parallel()
	eng, _ := openSmall(t, 1<<20, 4<<20)
	defer closeEngine(t, eng)
	var held tier.Holdings
	var written int64
	imaged := func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		img, err := imageOf(ctx, src, r)
		if err == nil {
			written = img.Bytes()
			held, _ = eng.Holders(img.Space().ID())
		}
		return img, err
	}
	if err := eng.Registry().Register(asIsIn(tier.Host), convert.ImageIn(tier.Host), imaged); err != nil {
		t.Fatal(err)
	}
	repo := scanOf(t, eng)
	// The Reader takes the schema of this one.
	if err := repo.Put(t.Context(), 0, numberedRecord(0, 100, wordList(1, 10))); err != nil {
		t.Fatal(err)
	}
	putAsIs(t, eng, repo, func(own *asIs) batch.Payload { return own })
	repo.CloseInput()
	rd, err := repo.Reader(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer rd.Release()
	for range 2 {
		if !rd.Next() {
			t.Fatal(rd.Err())
		}
	}
	if b := holder(held.Holders, "buffer", ""); b.Bytes != 0 || written == 0 || held.Others < written {
		t.Errorf("%d bytes are being written: %+v in %s", written, b, held)
	}
}

// TestHoldersAddUp: after random work, and with open handles and dictionaries, the parts are what is
// used, in each space.
func TestHoldersAddUp(t *testing.T) {
	t.Parallel()
	eng := busyengine.Open(t, nil)
	defer closeEngine(t, eng)
	if err := busyengine.Work(t.Context(), eng, testseed.One(t), testseed.Rounds(80, 30)); err != nil {
		t.Fatal(err)
	}
	p, err := eng.Plan("words")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := p.Repository("op", 0)
	if err != nil {
		t.Fatal(err)
	}
	rec := arrowgen.Flights(1, 500)
	defer rec.Release()
	for range 3 {
		if err := repo.Put(t.Context(), 0, rec, in(tier.Host)); err != nil {
			t.Fatal(err)
		}
	}
	for h, err := range repo.Drain(t.Context(), 0, tier.Host) {
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		break
	}
	n := 0
	for _, s := range eng.Spaces() {
		all := account(t, eng, s.ID())
		n += len(all.Batches)
	}
	if n == 0 {
		t.Error("there are no batches: the test shows nothing")
	}
}

// TestErrorOfALongWait: the error of a request whose time is over names the space, what holds it, and
// what would help, also where batches at rest do.
func TestErrorOfALongWait(t *testing.T) {
	t.Parallel()
	eng, _ := telling(t, func(c *spillway.Config) {
		c.Disks[0].Capacity = spillway.Bytes(2 << 20)
		c.WriteAhead = -1
	})
	defer closeEngine(t, eng)
	p, err := eng.Plan("query")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := p.Repository("build", 0)
	if err != nil {
		t.Fatal(err)
	}
	rec := arrowgen.Ints(1, 10_000, 1)
	defer rec.Release()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	for err == nil {
		err = repo.Put(ctx, 0, rec, in(tier.Disk))
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	for _, text := range []string{
		"in disk:0 ", `batches of plan "query", operator build:0`, "use up or drop batches", "a larger disk capacity",
	} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("the error lacks %q: %v", text, err)
		}
	}
}
