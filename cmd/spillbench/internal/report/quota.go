package report

import (
	"fmt"
	"io"

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

// Print writes the limit and the holders for people.
func (q *Quota) Print(w io.Writer) {
	fmt.Fprintf(w, "spillbench quota: %s\n\n", q.Env.lineWithoutDisk())
	switch {
	case q.Limit == "":
		fmt.Fprintln(w, "limit of GPU memory: none (SPILLWAY_GPU_MEMORY_LIMIT is not set)")
	case q.LimitBytes == 0:
		fmt.Fprintf(w, "limit of GPU memory: %s of all GPUs, by %s\n", q.Limit, q.Source)
	default:
		fmt.Fprintf(w, "limit of GPU memory: %s, by %s\n", q.Limit, q.Source)
	}
	if q.Ratio != 0 {
		fmt.Fprintf(w, "oversubscription ratio: %g\n", q.Ratio)
	}
	if q.PhysicalBytes != 0 {
		fmt.Fprintf(w, "each GPU counts as having: %s\n", size.Approx(q.PhysicalBytes))
	}
	if q.Ledger == "" {
		fmt.Fprintln(w, "ledger: none (SPILLWAY_GPU_QUOTA_DIR is not set): other processes are not asked")
		return
	}
	fmt.Fprintf(w, "ledger: %s", q.Ledger)
	if q.Group != "" {
		fmt.Fprintf(w, ", group %s", q.Group)
	}
	fmt.Fprint(w, "\n\n")
	if len(q.Holders) == 0 {
		fmt.Fprintln(w, "no process has a lease")
		return
	}
	rows := [][]string{{"GPU", "group", "process", "since", "quota", "holds", "peak"}}
	for _, h := range q.Holders {
		rows = append(rows, []string{
			h.Device, h.Group, fmt.Sprint(h.PID), h.Started.Format("2006-01-02 15:04:05"), size.Approx(h.Quota), size.Approx(h.Live), size.Approx(h.Peak),
		})
	}
	table(w, rows)
	for _, h := range q.Holders {
		if h.Lost > 0 {
			fmt.Fprintf(w, "process %d: files of the ledger were removed %d times under it\n", h.PID, h.Lost)
		}
	}
}
