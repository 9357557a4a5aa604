package report

import (
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/size"
)

// Quota is the document of quota.
type Quota struct {
	Header
	Limit         string          `json:"limit"`          // as it was set, "" for none
	LimitBytes    int64           `json:"limit_bytes"`    // 0 for none, and for a share
	Source        string          `json:"source"`         // the variable that sets it
	Ratio         float64         `json:"ratio"`          // 0 if it is not set
	PhysicalBytes int64           `json:"physical_bytes"` // 0 if it is not set
	Ledger        string          `json:"ledger"`         // directory, "" for none
	Group         string          `json:"group"`
	Holders       []leases.Holder `json:"holders"` // the live holders of leases
}

// Page shows the limit and the holders.
func (q *Quota) Page(notes []string) *Page {
	p := new(Page)
	p.linef("spillbench quota: %s", q.Env.lineWithoutDisk())
	p.linef("")
	switch {
	case q.Limit == "":
		p.linef("limit of GPU memory: none (SPILLWAY_GPU_MEMORY_LIMIT is not set)")
	case q.LimitBytes == 0:
		p.linef("limit of GPU memory: %s of all GPUs, by %s", q.Limit, q.Source)
	default:
		p.linef("limit of GPU memory: %s, by %s", q.Limit, q.Source)
	}
	if q.Ratio != 0 {
		p.linef("oversubscription ratio: %g", q.Ratio)
	}
	if q.PhysicalBytes != 0 {
		p.linef("each GPU counts as having: %s", size.Approx(q.PhysicalBytes))
	}
	limit := &sheet{columns: []column{{key: "limit"}, {key: "limit_bytes"}, {key: "source"}, {key: "ratio"}, {key: "physical_bytes"}, {key: "ledger"}, {key: "group"}}}
	limit.add(q.Limit, q.LimitBytes, q.Source, decimal{value: q.Ratio}, q.PhysicalBytes, q.Ledger, q.Group)
	p.parts = append(p.parts, part{sheet: limit, only: programs})
	q.holders(p)
	p.notes(notes)
	return p
}

// holders adds who holds what.
func (q *Quota) holders(p *Page) {
	if q.Ledger == "" {
		p.linef("ledger: none (SPILLWAY_GPU_QUOTA_DIR is not set): other processes are not asked")
		return
	}
	group := ""
	if q.Group != "" {
		group = ", group " + q.Group
	}
	p.linef("ledger: %s%s", q.Ledger, group)
	p.linef("")
	if len(q.Holders) == 0 {
		p.linef("no process has a lease")
		return
	}
	all := &sheet{columns: []column{{head: "GPU", key: "device"}, {head: "group", key: "group"}, {head: "process", key: "pid"}, {head: "since", key: "started"}, {head: "quota", key: "quota"}, {head: "holds", key: "live"}, {head: "peak", key: "peak"}}}
	for _, h := range q.Holders {
		all.add(h.Device, h.Group, h.PID, h.Started, approx(h.Quota), approx(h.Live), approx(h.Peak))
	}
	p.table(all)
	for _, h := range q.Holders {
		if h.Lost > 0 {
			p.linef("process %d: files of the ledger were removed %d times under it", h.PID, h.Lost)
		}
	}
}
