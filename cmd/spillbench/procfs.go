package main

import (
	"strconv"
	"strings"
	"time"
)

// cpuTime is the time of a CPU since the system started, in ticks; see tick.
type cpuTime struct {
	Busy int64 // with processes, the kernel, interrupts, and other virtual machines of the host (steal)
	Idle int64 // also while waiting for I/O
}

// tick is the unit of cpuTime: USER_HZ is 100 for all programs.
const tick = 10 * time.Millisecond

// cpuTimes returns the times of the online CPUs, by number. The text is that of /proc/stat; lines that
// are not understood are left out.
func cpuTimes(text string) map[int]cpuTime {
	times := map[int]cpuTime{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line) // cpu0 user nice system idle iowait irq softirq steal guest guest_nice
		if len(fields) < 5 {
			continue
		}
		name, ok := strings.CutPrefix(fields[0], "cpu")
		cpu, err := strconv.ParseUint(name, 10, 31)
		if !ok || err != nil {
			continue
		}
		var t cpuTime
		for i, field := range fields[1:min(len(fields), 9)] { // user has the time of guests
			n, err := strconv.ParseInt(field, 10, 64)
			switch {
			case err != nil || n < 0:
				ok = false
			case i == 3 || i == 4:
				t.Idle += n
			default:
				t.Busy += n
			}
		}
		if ok {
			times[int(cpu)] = t
		}
	}
	return times
}
