package thread

import (
	"fmt"
	"strings"
	"time"
)

// CPUTime is the time of a CPU since the system started, in ticks; see Tick.
type CPUTime struct {
	Busy int64 // with processes, the kernel, interrupts, and other virtual machines of the host (steal)
	Idle int64 // also while waiting for I/O
}

// Tick is the unit of CPUTime: USER_HZ is 100 for all programs.
const Tick = 10 * time.Millisecond

// CPUTimes returns the times of the online CPUs, by number. The text is that of /proc/stat; lines that
// are not understood are left out.
func CPUTimes(text string) map[int]CPUTime {
	times := map[int]CPUTime{}
	for line := range strings.Lines(text) {
		var cpu uint
		var user, nice, system, idle, iowait, irq, softirq, steal uint64 // user has the time of guests
		n, _ := fmt.Sscanf(line, "cpu%d %d %d %d %d %d %d %d %d",
			&cpu, &user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal)
		if n >= 5 && !strings.HasPrefix(line, "cpu ") { // which has the sums
			times[int(cpu)] = CPUTime{
				Busy: int64(user + nice + system + irq + softirq + steal),
				Idle: int64(idle + iowait),
			}
		}
	}
	return times
}
