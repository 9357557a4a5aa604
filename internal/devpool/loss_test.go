package devpool_test

import (
	"errors"
	"maps"
	"testing"

	"github.com/spillway-db/spillway/internal/devpool"
)

var errGone = errors.New("gone")

// TestSignal: each subscriber is called once, one that subscribes after the loss at once, and a
// cancelled one is not.
func TestSignal(t *testing.T) {
	var l devpool.Loss
	calls := make(map[string]int)
	subscribe := func(name string) (cancel func()) {
		return l.OnLost(func(why error) {
			calls[name]++
			if why != errGone || l.Err() != nil && name != "late" {
				t.Errorf("%s is called with %v, after Err returned %v", name, why, l.Err())
			}
		})
	}
	subscribe("early")
	subscribe("cancelled")()
	subscribe("second")
	l.Lose(errGone)
	l.Lose(errors.New("once more"))
	subscribe("late")
	want := map[string]int{"early": 1, "second": 1, "late": 1}
	if !maps.Equal(calls, want) || l.Err() != errGone {
		t.Errorf("calls: %v, want %v; Err is %v", calls, want, l.Err())
	}
}

// TestSignalOfAPanickingSubscriber: a panic does not keep others from being called.
func TestSignalOfAPanickingSubscriber(t *testing.T) {
	var l devpool.Loss
	called := 0
	l.OnLost(func(error) { called++; panic("on purpose") })
	l.OnLost(func(error) { called++ })
	l.Lose(errGone)
	if called != 2 || l.Err() != errGone {
		t.Errorf("%d subscribers were called, want 2; Err is %v", called, l.Err())
	}
}
