package nvml_test

import (
	"errors"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/internal/nvml/nvmltest"
)

func TestEvents(t *testing.T) {
	fake := nvmltest.New(t)
	l := open(t, fake)
	e, err := l.Events()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	second := device(t, l, 1)
	if err := e.Add(second, nvml.EventXID|nvml.EventDoubleBitECC); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Wait(time.Millisecond); !errors.Is(err, nvml.ErrTimeout) {
		t.Errorf("nothing happened: %v", err)
	}
	if n := fake.Event(0, -1, nvml.EventXID, 79); n != 0 {
		t.Errorf("%d wait for a GPU that was not added", n)
	}
	if n := fake.Event(1, 2, nvml.EventXID, 63); n != 1 {
		t.Errorf("%d wait for a GPU that was added", n)
	}
	want := nvml.Event{Device: second, Kind: nvml.EventXID, Data: 63, GPUInstance: 13, ComputeInstance: 23}
	if got, err := e.Wait(time.Minute); err != nil || got != want {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	// One that happens while it waits.
	got := make(chan nvml.Event)
	go func() {
		event, err := e.Wait(time.Minute)
		if err != nil {
			t.Error(err)
		}
		got <- event
	}()
	fake.Event(1, -1, nvml.EventDoubleBitECC, 0)
	if event := <-got; event.Kind != nvml.EventDoubleBitECC || event.GPUInstance != nvml.NoInstance {
		t.Errorf("%+v", event)
	}
	part, err := l.Instance(device(t, l, 0), 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Add(part, nvml.EventXID); !errors.Is(err, nvml.ErrInvalidArgument) {
		t.Errorf("events of an instance: %v", err)
	}
	if err := e.Add(second, 1<<40); !errors.Is(err, nvml.ErrNotSupported) {
		t.Errorf("events that there are not: %v", err)
	}
	for name, ask := range map[string]func() error{
		"nvmlEventSetCreate":               func() error { _, err := l.Events(); return err },
		"nvmlDeviceGetSupportedEventTypes": func() error { return e.Add(second, nvml.EventXID) },
		"nvmlDeviceRegisterEvents":         func() error { return e.Add(second, nvml.EventXID) },
		"nvmlEventSetWait_v2":              func() error { _, err := e.Wait(time.Minute); return err },
	} {
		fake.Fail(name, 999)
		if err := ask(); err == nil || err.Error() != name+": Unknown Error (999)" {
			t.Errorf("%s fails: %v", name, err)
		}
		fake.Fail(name, 0)
	}
}
