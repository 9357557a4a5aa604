package main

import (
	"fmt"
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
		var cpu uint
		var user, nice, system, idle, iowait, irq, softirq, steal uint64 // user has the time of guests
		n, _ := fmt.Sscanf(line, "cpu%d %d %d %d %d %d %d %d %d",
			&cpu, &user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal)
		if n >= 5 && !strings.HasPrefix(line, "cpu ") { // which has the sums
			times[int(cpu)] = cpuTime{
				Busy: int64(user + nice + system + irq + softirq + steal),
				Idle: int64(idle + iowait),
			}
		}
	}
	return times
}
