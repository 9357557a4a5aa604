package nvml

import (
	"time"
	"unsafe"
)

// The kinds of events that say something of a device's health, as bits.
const (
	EventDoubleBitECC uint64 = 2
	EventXID          uint64 = 8
)

// NoInstance is the number of an instance in an event that is not of one.
const NoInstance = 1<<32 - 1

// Event is nvmlEventData_t: what happened to a GPU.
type Event struct {
	Device          Device // the GPU, also if it happened in an instance
	Kind            uint64
	Data            uint64 // of EventXID its number; 999 is an unknown one
	GPUInstance     uint32 // NoInstance: it concerns the whole GPU
	ComputeInstance uint32
}

// Events waits for what happens to devices. One goroutine may call it at a time.
type Events struct {
	l   *Library
	set uintptr
}

// Events makes a set without devices. The caller closes it before the library.
func (l *Library) Events() (*Events, error) {
	e := &Events{l: l}
	if err := l.call("nvmlEventSetCreate", uintptr(unsafe.Pointer(&e.set))); err != nil {
		return nil, err
	}
	return e, nil
}

// Add has the set wait for a GPU's events of some kinds, of those that the GPU can tell. It is
// ErrNotSupported if there are none.
func (e *Events) Add(d Device, kinds uint64) error {
	var can uint64
	if err := e.l.call("nvmlDeviceGetSupportedEventTypes", uintptr(d), uintptr(unsafe.Pointer(&can))); err != nil {
		return err
	}
	if kinds &= can; kinds == 0 {
		return ErrNotSupported
	}
	return e.l.call("nvmlDeviceRegisterEvents", uintptr(d), uintptr(kinds), e.set)
}

// Wait returns the next event; ErrTimeout if there is none for a time.
func (e *Events) Wait(most time.Duration) (Event, error) {
	var event Event
	err := e.l.call("nvmlEventSetWait_v2", e.set, uintptr(unsafe.Pointer(&event)), uintptr(most.Milliseconds()))
	return event, err
}

// Close gives the set up.
func (e *Events) Close() { _ = e.l.call("nvmlEventSetFree", e.set) }
