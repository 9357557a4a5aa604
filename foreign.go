package spillway

import (
	"context"
	"time"

	"github.com/spillway-db/spillway/tier"
)

// foreignPeriod is how often devices are asked how much others hold there. Asking NVIDIA's
// driver may take half a millisecond, which is then 0.05 % of a core for each GPU.
const foreignPeriod = time.Second

// watchForeign keeps what others hold on the GPUs in the books of the spaces there, until ctx
// ends. It has a goroutine of its own, because a driver may take its time to answer.
func (e *Engine) watchForeign(ctx context.Context) {
	gpus := e.gpuSpaces()
	if len(gpus) == 0 {
		return
	}
	tick := time.NewTicker(foreignPeriod)
	defer tick.Stop()
	for {
		for i, s := range gpus {
			var n int64
			var ok bool
			e.panics.Do("Device.MemInfo or FreeBytes", func() { n, ok = s.ForeignOn(e.wrapped[i]) })
			if ok {
				s.SetForeign(n)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// gpuSpaces returns the GPU spaces, by number.
func (e *Engine) gpuSpaces() []*tier.Space {
	var gpus []*tier.Space
	for _, s := range e.spaces {
		if s.Kind() == tier.GPU {
			gpus = append(gpus, s)
		}
	}
	return gpus
}
