package loss_test

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/internal/loss"
)

var errGone = errors.New("gone")

// All are told once, also those who ask afterwards, and a subscription ends.
func TestSignal(t *testing.T) {
	var l loss.Signal
	told := make(map[string]int)
	tell := func(who string) func(error) {
		return func(why error) {
			if told[who]++; why != errGone || l.Err() != nil && who != "late" {
				t.Errorf("%s is told %v, after others were told %v", who, why, l.Err())
			}
		}
	}
	l.OnLost(tell("early"))
	l.OnLost(tell("gone"))()
	l.Lose(errGone)
	l.Lose(errors.New("once more"))
	l.OnLost(tell("late"))
	if told["early"] != 1 || told["gone"] != 0 || told["late"] != 1 || l.Err() != errGone {
		t.Errorf("told: %v, %v", told, l.Err())
	}
}
