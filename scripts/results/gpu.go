package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Check is what the table of a real GPU takes from a document of scripts/gpu-check.sh.
type Check struct {
	Schema   string    `json:"schema"`
	Date     time.Time `json:"date"`
	Small    bool      `json:"small"`
	Emulator bool      `json:"emulator"`
	Host     struct {
		CPU    string `json:"cpu"`
		Cores  int    `json:"cores"`
		Memory int64  `json:"memory_bytes"`
	} `json:"host"`
	Device struct {
		Name   string `json:"name"`
		Driver string `json:"driver"`
		Link   string `json:"pcie_link"`
	} `json:"device"`
	Steps []Step `json:"steps"`
}

// Step is a part of a check.
type Step struct {
	Name   string `json:"name"`
	Status int    `json:"status"`
	Passed int    `json:"passed"` // tests
	Failed int    `json:"failed"`
	Result struct {
		Rows  []Edge `json:"rows"` // of bandwidth
		Input struct {
			Bytes int64 `json:"bytes"`
		} `json:"input"`
		Config struct {
			GPU  int64 `json:"gpu_memory_bytes"`
			Host int64 `json:"host_memory_bytes"`
		} `json:"config"`
		Verify struct {
			Batches    int64 `json:"batches"`
			Mismatches int64 `json:"mismatches"`
		} `json:"verify"`
		Phases []struct {
			Name    string  `json:"name"`
			Seconds float64 `json:"seconds"`
		} `json:"phases"`
	} `json:"result"`
}

// Edge is the speed of moves of one size from one memory to another.
type Edge struct {
	From     string  `json:"from"`
	To       string  `json:"to"`
	Bytes    int64   `json:"bytes"`
	Threads  int     `json:"threads"`
	State    string  `json:"state"` // of a disk's extents
	Speed    float64 `json:"gib_per_s"`
	Limit    float64 `json:"limit_gib_per_s"`
	BothWays bool    `json:"both_ways"`
}

// newestCheck reads the newest check of a real GPU; nil if there is none.
func newestCheck(root string) (*Check, error) {
	names, err := filepath.Glob(filepath.Join(root, "docs", "results", "*.json"))
	if err != nil || len(names) == 0 {
		return nil, err
	}
	name := slices.Max(names)
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	c := new(Check)
	if err := json.Unmarshal(text, c); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if c.Schema != "spillway.gpu-check/v1" || c.Small || c.Emulator || !strings.HasPrefix(filepath.Base(name), c.Date.UTC().Format(time.DateOnly)) {
		return nil, fmt.Errorf("%s: schema %q of %v, a trial: %v", name, c.Schema, c.Date, c.Small || c.Emulator)
	}
	return c, nil
}

// step returns a step that has passed.
func (c *Check) step(name string) (*Step, error) {
	i := slices.IndexFunc(c.Steps, func(s Step) bool { return s.Name == name && s.Status == 0 })
	if i < 0 {
		return nil, fmt.Errorf("the check of %s has no step %q that has passed", c.Device.Name, name)
	}
	return &c.Steps[i], nil
}

const gib = 1 << 30

// gpuTable returns README's table of a real GPU.
func gpuTable(c *Check) (string, error) {
	bandwidth, err := c.step("bandwidth")
	if err != nil {
		return "", err
	}
	disk, err := c.step("bandwidth-disk")
	if err != nil {
		return "", err
	}
	run, err := c.step("run")
	if err != nil {
		return "", err
	}
	var sizes []int64
	for _, e := range bandwidth.Result.Rows {
		if !slices.Contains(sizes, e.Bytes) {
			sizes = append(sizes, e.Bytes)
		}
	}
	slices.Sort(sizes)
	var b strings.Builder
	b.WriteString(wrapped(fmt.Sprintf("Measured on %s by `scripts/gpu-check.sh`: %s (%s, driver %s), %d cores (%s), %.0f GiB. "+
		"GiB/s, Spillway / baseline. The baseline is the driver's own asynchronous copy, or raw direct I/O, in the same run.",
		c.Date.Format("2 January 2006"), c.Device.Name, c.Device.Link, c.Device.Driver, c.Host.Cores, c.Host.CPU, float64(c.Host.Memory)/gib)))
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
		{"GPU → pinned host memory", bandwidth, func(e Edge) bool { return e.From == "gpu:0" && e.Threads == 1 && !e.BothWays }},
		{"pinned host memory → GPU", bandwidth, func(e Edge) bool { return e.To == "gpu:0" && e.Threads == 1 && !e.BothWays }},
		{"both directions at once, two threads", bandwidth, func(e Edge) bool { return e.BothWays }},
		{"GPU → disk", disk, func(e Edge) bool { return e.From == "gpu:0" && e.To == "disk:0" && e.State == "fresh" }},
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
	passed := 0
	for _, s := range c.Steps {
		if s.Failed > 0 || s.Status != 0 {
			return "", fmt.Errorf("step %s of the check failed", s.Name)
		}
		passed += s.Passed
	}
	b.WriteString("\n" + wrapped(fmt.Sprintf("A generated table of %.1f GiB was loaded through %.0f GiB of GPU memory and %.0f GiB of host memory onto the disk in %.1f s, "+
		"then fetched back to the GPU and digested there in %.1f s. All %d digests matched. On that driver %d tests passed and none failed.",
		float64(r.Input.Bytes)/gib, float64(r.Config.GPU)/gib, float64(r.Config.Host)/gib, r.Phases[0].Seconds, r.Phases[1].Seconds, r.Verify.Batches, passed)))
	return b.String(), nil
}
