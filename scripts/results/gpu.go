package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Check is the part of a document of scripts/gpu-check.sh that the table of a real GPU shows.
type Check struct {
	Schema          string
	Date            time.Time
	Small, Emulator bool // a trial
	Host            struct {
		CPU    string
		Cores  int
		Memory int64 `json:"memory_bytes"`
	}
	Device struct {
		Name, Driver string
		Link         string `json:"pcie_link"`
	}
	Steps []Step
}

// Step is a part of a check.
type Step struct {
	Name           string
	Status         int // exit status
	Passed, Failed int // tests
	Result         struct {
		Rows   []Edge // of bandwidth
		Input  struct{ Bytes int64 }
		Config struct {
			GPU  int64 `json:"gpu_memory_bytes"`
			Host int64 `json:"host_memory_bytes"`
		}
		Verify struct{ Batches, Mismatches int64 }
		Phases []struct{ Seconds float64 }
	}
}

// Edge is the speed of moves of one size from one memory to another.
type Edge struct {
	From, To string
	Bytes    int64
	Threads  int
	State    string  // of a disk's extents
	Speed    float64 `json:"gib_per_s"`
	Limit    float64 `json:"limit_gib_per_s"`
	BothWays bool    `json:"both_ways"`
}

// newestCheck reads the newest check of a real GPU. It returns nil if there is none.
func newestCheck(root string) (*Check, error) {
	c := new(Check)
	name, err := newest(filepath.Join(root, "docs", "results"), c, false)
	if name == "" {
		return nil, err
	}
	trial := c.Small || c.Emulator
	if day := c.Date.UTC().Format(time.DateOnly); trial || c.Schema != "spillway.gpu-check/v1" ||
		!strings.HasPrefix(filepath.Base(name), day) {
		return nil, fmt.Errorf("%s: schema %q of %s, a trial: %v", name, c.Schema, day, trial)
	}
	return c, nil
}

const gib = 1 << 30

// gpuTable returns README's table of a real GPU.
func gpuTable(c *Check) (string, error) {
	passed := 0
	steps := make(map[string]*Step)
	for _, s := range c.Steps {
		if s.Failed > 0 || s.Status != 0 {
			return "", fmt.Errorf("step %s of the check failed", s.Name)
		}
		passed += s.Passed
		steps[s.Name] = &s
	}
	bandwidth, disk, run := steps["bandwidth"], steps["bandwidth-disk"], steps["run"]
	if bandwidth == nil || disk == nil || run == nil {
		return "", fmt.Errorf("the check of %s lacks a step bandwidth, bandwidth-disk or run", c.Device.Name)
	}
	var sizes []int64
	for _, e := range bandwidth.Result.Rows {
		if !slices.Contains(sizes, e.Bytes) {
			sizes = append(sizes, e.Bytes)
		}
	}
	slices.Sort(sizes)
	var b strings.Builder
	b.WriteString(wrapped(fmt.Sprintf("Measured on %s by `scripts/gpu-check.sh`: "+
		"%s (%s, driver %s), %d cores (%s), %.0f GiB. GiB/s, Spillway / baseline. "+
		"The baseline is the driver's own asynchronous copy, or raw direct I/O, in the same run.",
		c.Date.Format("2 January 2006"), c.Device.Name, c.Device.Link, c.Device.Driver,
		c.Host.Cores, c.Host.CPU, float64(c.Host.Memory)/gib)))
	b.WriteString("\n| batches of |")
	for _, n := range sizes {
		fmt.Fprintf(&b, " %d MiB |", n>>20)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(sizes)) + "\n")
	for _, line := range []struct {
		what string
		of   *Step
		is   func(Edge) bool
	}{
		{"GPU → pinned host memory", bandwidth,
			func(e Edge) bool { return e.From == "gpu:0" && e.Threads == 1 && !e.BothWays }},
		{"pinned host memory → GPU", bandwidth,
			func(e Edge) bool { return e.To == "gpu:0" && e.Threads == 1 && !e.BothWays }},
		{"both directions at once, two threads", bandwidth, func(e Edge) bool { return e.BothWays }},
		{"GPU → disk", disk,
			func(e Edge) bool { return e.From == "gpu:0" && e.To == "disk:0" && e.State != "" }},
		{"disk → GPU", disk, func(e Edge) bool { return e.From == "disk:0" && e.To == "gpu:0" }},
	} {
		b.WriteString("| " + line.what + " |")
		found := false
		for _, n := range sizes {
			i := slices.IndexFunc(line.of.Result.Rows, func(e Edge) bool { return e.Bytes == n && line.is(e) })
			if i < 0 {
				b.WriteString(" |")
				continue
			}
			e := line.of.Result.Rows[i]
			found = true
			fmt.Fprintf(&b, " %.1f / %.1f |", e.Speed, e.Limit)
		}
		if !found {
			return "", fmt.Errorf("the check of %s has not measured %s", c.Device.Name, line.what)
		}
		b.WriteString("\n")
	}
	r := &run.Result
	if r.Verify.Mismatches != 0 || r.Verify.Batches == 0 || len(r.Phases) < 2 {
		return "", errors.New("the run of the check was not verified")
	}
	b.WriteString("\n" + wrapped(fmt.Sprintf("A generated table of %.1f GiB was loaded "+
		"through %.0f GiB of GPU memory and %.0f GiB of host memory onto the disk in %.1f s, "+
		"then fetched back to the GPU and digested in %.1f s. "+
		"All %d digests matched. On that driver %d tests passed and none failed.",
		float64(r.Input.Bytes)/gib, float64(r.Config.GPU)/gib, float64(r.Config.Host)/gib,
		r.Phases[0].Seconds, r.Phases[1].Seconds, r.Verify.Batches, passed)))
	return b.String(), nil
}
