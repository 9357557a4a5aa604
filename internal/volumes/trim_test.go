package volumes_test

import (
	"bytes"
	"context"
	"errors"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

func TestTrimGivesRoomBack(t *testing.T) {
	for _, mode := range []string{"punch", "no punch"} {
		t.Run(mode, func(t *testing.T) {
			onLinux(t)
			fsys := faultfs.New(disk.OS(), 1)
			if mode == "no punch" {
				fsys.Add(noPunch)
			}
			v := open(t, volumes.Config{Capacity: 256 * mib, FS: fsys})
			a, b, c := alloc(t, v, 64*mib), alloc(t, v, 20*mib), alloc(t, v, 30*mib)
			data := random(20*mib, 4)
			write(t, b, data, 0)
			free(v, a, c)
			n, err := v.Trim(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			s := v.Stats()
			want := int64(20 * mib)
			if mode == "no punch" {
				want = 84 * mib // what is before the end of b stays
			}
			if s.Backed != want || s.Segments != 1 || n != 128*mib-want || s.Given != n {
				t.Errorf("Trim gave %d MiB back: %+v", n/mib, s)
			}
			if !bytes.Equal(read(t, b, 20*mib, 0), data) {
				t.Error("Trim changed what is in use")
			}
			if n, err := v.Trim(context.Background()); n != 0 || err != nil {
				t.Errorf("a second Trim: %d, %v", n, err)
			}
			d := alloc(t, v, 200*mib) // all of it can be had again
			write(t, d, random(mib, 5), 199*mib)
			if !bytes.Equal(read(t, b, 20*mib, 0), data) {
				t.Error("two memories overlap after Trim")
			}
			free(v, b, d)
		})
	}
}

func TestTrimEndsWithItsContext(t *testing.T) {
	onLinux(t)
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("enough")
	fsys := faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"punch"}, Skip: 2, Effect: faultfs.Do(func(string, string) { cancel(why) })})
	v := open(t, volumes.Config{Capacity: 64 * mib, FS: fsys})
	free(v, alloc(t, v, 64*mib))
	n, err := v.Trim(ctx)
	if !errors.Is(err, why) || n != 12*mib || v.Stats().Backed != 52*mib {
		t.Errorf("gave %d MiB back, %v, %+v", n/mib, err, v.Stats())
	}
}

// TestTrimIdleGivesBackWhatNothingNeeds: in fake time.
func TestTrimIdleGivesBackWhatNothingNeeds(t *testing.T) {
	onLinux(t)
	synctest.Test(t, func(t *testing.T) {
		v := open(t, volumes.Config{Capacity: 256 * mib, Idle: time.Minute})
		all := []tier.FileMemory{alloc(t, v, 64*mib), alloc(t, v, 64*mib), alloc(t, v, 64*mib)}
		free(v, all[1:]...)
		fresh := v.Stats().Fresh
		for range 5 { // 40 of 128 MiB are used now and then
			time.Sleep(20 * time.Second)
			e := alloc(t, v, 40*mib)
			time.Sleep(20 * time.Second)
			free(v, e)
		}
		if s := v.Stats(); s.Backed != 64*mib+40*mib {
			t.Errorf("64 MiB are in use and 40 are taken again and again; backed are %d", s.Backed/mib)
		} else if s.Fresh != fresh {
			t.Errorf("%d MiB were given back and taken again", (s.Fresh-fresh)/mib)
		}
		free(v, all[0])
		time.Sleep(3 * time.Minute)
		if s := v.Stats(); s.Backed != 0 {
			t.Errorf("long after all was freed: %+v", s)
		}
		free(v, alloc(t, v, 200*mib))
		if err := v.Close(); err != nil { // with trimIdle under way
			t.Error(err)
		}
	})
}

// TestTrimIdleGivesBackWhatIsCut: the end of a memory that was cut, though nothing is freed.
func TestTrimIdleGivesBackWhatIsCut(t *testing.T) {
	onLinux(t)
	synctest.Test(t, func(t *testing.T) {
		v := open(t, volumes.Config{Capacity: 64 * mib, Idle: time.Minute})
		e := alloc(t, v, 64*mib)
		v.Shrink(e, mib)
		time.Sleep(3 * time.Minute)
		if s := v.Stats(); s.Backed != mib {
			t.Errorf("%d MiB are kept", s.Backed/mib)
		}
		free(v, e)
	})
}

func TestTrimIdleMindsTheReserve(t *testing.T) {
	onLinux(t)
	synctest.Test(t, func(t *testing.T) {
		fsys := &room{FS: disk.OS()}
		fsys.free.Store(1 << 30)
		v := open(t, volumes.Config{Capacity: 128 * mib, Reserve: 100 * mib, Idle: time.Minute, FS: fsys})
		free(v, alloc(t, v, 128*mib))
		fsys.free.Store(99 * mib)
		time.Sleep(10 * time.Second)
		free(v, alloc(t, v, 128*mib)) // needed, but others need it more
		time.Sleep(time.Minute)
		if s := v.Stats(); s.Backed != 0 {
			t.Errorf("%d MiB are kept while the file system is down to the reserve", s.Backed/mib)
		}
	})
}

func TestNegativeIdleKeepsAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := open(t, volumes.Config{Capacity: 64 * mib, Idle: -1})
		free(v, alloc(t, v, 64*mib))
		time.Sleep(time.Hour)
		if s := v.Stats(); s.Backed != 64*mib {
			t.Errorf("%+v", s)
		}
	})
}

func TestFailedPunchIsWarnedOfAndLosesNothing(t *testing.T) {
	onLinux(t)
	synctest.Test(t, func(t *testing.T) {
		fsys := faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"punch"}, Effect: faultfs.Fail(syscall.EIO)})
		v := open(t, volumes.Config{Capacity: 64 * mib, Idle: time.Second, FS: fsys})
		free(v, alloc(t, v, 64*mib))
		time.Sleep(5 * time.Second)
		s := v.Stats()
		if s.Backed != 64*mib || len(s.Warnings) != 1 {
			t.Errorf("%+v", s)
		}
		oneLine(t, warned(s.Warnings), "segment-0000: input/output error")
		if _, err := v.Trim(context.Background()); !errors.Is(err, syscall.EIO) {
			t.Errorf("Trim: %v", err)
		}
		free(v, alloc(t, v, 64*mib))
	})
}
