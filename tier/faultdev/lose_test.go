package faultdev_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// TestLose checks that after the loss calls fail, frees succeed and events fail, while earlier work
// completes. A subscriber of a device that wraps the lost one is called, too.
func TestLose(t *testing.T) {
	d := open(t)
	outer := faultdev.New(d, 1)
	calls := 0
	defer outer.OnLost(func(why error) {
		if calls++; why != errFault {
			t.Errorf("the reason is %v", why)
		}
	})()
	outer.OnLost(func(error) { t.Error("a cancelled subscriber was called") })()
	s := stream(t, outer)
	a, b := alloc(t, outer, s, 64), alloc(t, outer, s, 64)
	got := make([]byte, 64)
	ok(t, errors.Join(outer.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: pattern(64)}}), outer.CopyRegions(s, []tier.Region{{HostDst: got, Src: a}})))
	remove := d.Add(faultdev.Rule{Ops: []string{"fill"}, Effect: faultdev.Do(func(string, int64) { d.Lose(errFault) })})
	if err := outer.Fill(s, a, 1, 64); err != errFault {
		t.Errorf("the call during which it is lost: %v", err)
	}
	remove()
	d.Lose(errors.New("once more"))
	if calls != 1 {
		t.Errorf("the subscriber was called %d times", calls)
	}
	e, err := outer.Record(s)
	ok(t, err)
	if err := tier.Wait(context.Background(), e); err != errFault {
		t.Errorf("an event reports %v", err)
	}
	if !bytes.Equal(got, pattern(64)) {
		t.Error("running work was not done")
	}
	for op, err := range map[string]error{
		"copying":  outer.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: pattern(64)}}),
		"fetching": outer.CopyRegions(s, []tier.Region{{HostDst: got, Src: a}}),
		"filling":  outer.Fill(s, a, 1, 64),
		"waiting":  outer.WaitEvent(s, e),
	} {
		if err != errFault {
			t.Errorf("%s: %v", op, err)
		}
	}
	if _, err := outer.Alloc(s, 64); err != errFault {
		t.Errorf("allocating: %v", err)
	}
	if _, err := outer.NewStream(); err != errFault {
		t.Errorf("a stream: %v", err)
	}
	ok(t, errors.Join(outer.Free(s, a), outer.Free(s, b), s.Sync()))
	outer.Reap()
	if n := outer.Outstanding(); n != 0 {
		t.Errorf("%d bytes are outstanding", n)
	}
	late := 0
	outer.OnLost(func(error) { late++ })
	if late != 1 {
		t.Errorf("a late subscriber was called %d times", late)
	}
}
