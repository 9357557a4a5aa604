// Package report holds what spillbench prints: the documents that --json writes, the description of
// the machine in each of them, and how --format shows them.
//
//	Run ── run          Verify ── verify    Bandwidth ── bandwidth    Compare ── compare
//	Quota ── quota      Topo ── topo
//	each with Header: schema, command, Env
//
//	Document ── Page ───────▶ lines and tables: table, Markdown, CSV
//	         ── Benchmarks ─▶ Go's benchmark format
//	         ── Write ──────▶ JSON, as JSONSchema says
//
// The documents are plain values and belong to the caller. Their keys are the
// schema spillway.spillbench/v1 and do not change: sizes are in bytes, times in
// seconds, rates in GiB/s.
package report

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"io"
	"regexp"
	"runtime"
	"time"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/timeline"
)

// Schema names the documents' version.
const Schema = "spillway.spillbench/v1"

//go:embed schema/spillbench.v1.schema.json
var jsonSchema string

// JSONSchema returns the JSON Schema (draft 2020-12) of all documents of version Schema. It has each
// key that they have, and allows no other.
func JSONSchema() string { return jsonSchema }

// Header begins every document.
type Header struct {
	Schema  string `json:"schema"`
	Command string `json:"command"`
	Env     Env    `json:"env"`
	// Warnings are the engine's: what the machine refused or does not report. Commands that open
	// none have none.
	Warnings []diag.Warning `json:"warnings"`

	Version   string    `json:"version"`    // of the module, "(devel)" if it is not known
	GoVersion string    `json:"go_version"` // that built the program, such as "go1.26.0"
	Args      []string  `json:"args"`       // of the command line, as given
	Time      time.Time `json:"time"`       // when the command began, in UTC
}

// NewHeader returns the header of a command's document that began now, without arguments.
func NewHeader(command string, env Env, warnings []diag.Warning) Header {
	h := Header{
		Schema: Schema, Command: command, Env: env, Warnings: append([]diag.Warning{}, warnings...),
		Version: Version(), GoVersion: runtime.Version(),
	}
	h.Stamp(nil, time.Now())
	return h
}

// Stamp sets the arguments of the command line, which it copies, and when the command began.
func (h *Header) Stamp(args []string, began time.Time) {
	h.Args, h.Time = append([]string{}, args...), began.UTC().Truncate(time.Millisecond)
}

func (h *Header) header() *Header { return h }

// Env describes the machine that figures were measured on. What is not known is
// empty or 0.
type Env struct {
	CPU        string `json:"cpu"`
	Cores      int    `json:"cores"`       // that the process may use
	Memory     int64  `json:"memory"`      // that the process may use, in bytes
	Kernel     string `json:"kernel"`      // name and release
	FileSystem string `json:"file_system"` // of the spill directories, joined by commas
	DirectIO   bool   `json:"direct_io"`   // all spill volumes use it
	GPU        string `json:"gpu"`         // "sim" for an engine's simulated one
	Driver     string `json:"driver"`      // of the GPU
	PCIeLink   string `json:"pcie_link"`   // as "PCIe 4 x16"
	Commit     string `json:"commit"`      // of this program, "+dirty" if changed since
	GOOS       string `json:"goos"`        // the system that this program was built for, by Go's name
	GOARCH     string `json:"goarch"`      // and the processor
}

// Config is what a command ran with, defaults filled in.
type Config struct {
	GPU                  string  `json:"gpu"`
	GPUMemoryBytes       int64   `json:"gpu_memory_bytes"`
	HostMemoryBytes      int64   `json:"host_memory_bytes"`
	Disks                []Disk  `json:"disks"`
	Limit                float64 `json:"limit"`
	Trigger              float64 `json:"trigger"`
	Stop                 float64 `json:"stop"`
	Policy               string  `json:"policy"`
	Codec                string  `json:"codec"`
	Encrypt              bool    `json:"encrypt"` // what goes to disk
	MonitorPeriodSeconds float64 `json:"monitor_period_seconds"`
	StuckAfterSeconds    float64 `json:"stuck_after_seconds"`
	WriteAheadBytesPerS  int64   `json:"write_ahead_bytes_per_s"` // at most; 0: none
	MovesPerEdge         int     `json:"moves_per_edge"`          // of the monitor, at once
	DiskSlots            int     `json:"disk_slots"`              // transfers with disks at once, at most
	RowsPerBatch         int64   `json:"rows_per_batch"`          // 0: as the files have them
	// DiskThrottleBytesPerS is the rate of each spill directory; 0: its own.
	DiskThrottleBytesPerS int64   `json:"disk_throttle_bytes_per_s"`
	Faults                []Fault `json:"faults"` // made on purpose
}

// Fault is one that was asked for, and how many operations it hit.
type Fault struct {
	Spec string `json:"spec"`
	Hits int64  `json:"hits"`
}

// RunConfig is what run ran with.
type RunConfig struct {
	Config
	Seed       uint64 `json:"seed"`
	Place      string `json:"place"`
	Repeat     int    `json:"repeat"`
	Partitions int    `json:"partitions"`
	Passes     int    `json:"passes"`
	Workers    int    `json:"workers"`
	Runs       int    `json:"runs,omitempty"` // beside a warm-up, if there is more than one
}

// Disk is a spill directory.
type Disk struct {
	Dir           string `json:"dir"`
	CapacityBytes int64  `json:"capacity_bytes"`
	CapacityGiven bool   `json:"capacity_given,omitempty"` // else it is what was free, and differs from run to run
}

// Run is the document of run.
type Run struct {
	Header
	Config      RunConfig    `json:"config"`
	Input       Input        `json:"input"`
	Verify      Verification `json:"verify"`
	Spaces      []Space      `json:"spaces"`
	Edges       []Edge       `json:"edges"`
	Waits       Waits        `json:"waits"`
	Phases      []Phase      `json:"phases"`
	WallSeconds float64      `json:"wall_seconds"`

	Runs       []Repetition `json:"runs,omitempty"` // without the warm-up
	RunTimes   *RunTimes    `json:"run_times,omitempty"`
	CPUSeconds float64      `json:"cpu_seconds,omitempty"` // of this process in WallSeconds, user and system
	Processors *Processors  `json:"processors,omitempty"`
	Admission  *Admission   `json:"admission,omitempty"`

	// Error is why the run failed; empty: it did not. Then the figures are of what was done so far.
	Error string `json:"error,omitempty"`
	Held  []Held `json:"held,omitempty"` // when a run failed

	Work     []Work             `json:"work,omitempty"`
	Tasks    []Task             `json:"tasks,omitempty"`    // that waited for room, the longest first
	Limits   []Limit            `json:"limits,omitempty"`   // measured with --html and --listen
	Timeline *timeline.Timeline `json:"timeline,omitempty"` // of the run; recorded for JSON and pages
}

// Held is what was in use of a space, and who held it.
type Held struct {
	Space     string `json:"space"`
	Used      int64  `json:"used_bytes"`
	Available int64  `json:"available_bytes"`
	Text      string `json:"text"` // for people, as Engine.Holders says it
}

// Work is what was moved for the batches of an operator.
type Work struct {
	Plan      string `json:"plan"`
	Operator  string `json:"operator"`
	Port      int    `json:"port"`
	DownBytes int64  `json:"down_bytes"`
	UpBytes   int64  `json:"up_bytes"`
	Unread    int64  `json:"unread_bytes"` // moved down, and dropped without having been used since, before the end dropped all
}

// Task is how long the tasks of a name waited for room.
type Task struct {
	Name    string  `json:"name"`
	Waits   int64   `json:"waits"`
	Total   float64 `json:"total_seconds"` // waits may overlap
	Longest float64 `json:"longest_seconds"`
}

// Limit is what the machine does between two spaces without the engine, by one thread: the best of a
// few transfers of some MiB.
type Limit struct {
	From    string  `json:"from"`
	To      string  `json:"to"`
	GiBPerS float64 `json:"gib_per_s"`
	LimitOf string  `json:"limit_of"` // "memmove", "driver's copy" or "disk I/O"
}

// Input is what was loaded.
type Input struct {
	Sources []string `json:"sources"`
	Rows    int64    `json:"rows"`
	Batches int64    `json:"batches"`
	Bytes   int64    `json:"bytes"` // as laid out for the tiers
}

// Verification is how many batches were compared, over all passes, and how many
// of them differed.
type Verification struct {
	Checked    bool  `json:"checked"`
	Batches    int64 `json:"batches"`
	Mismatches int64 `json:"mismatches"`
	Corrupt    int64 `json:"corrupt,omitempty"` // of Mismatches: the engine found it, and refused the batch
}

// Space is one space's books.
type Space struct {
	ID            string `json:"id"`
	Backend       string `json:"backend"`
	CapacityBytes int64  `json:"capacity_bytes"`
	PeakBytes     int64  `json:"peak_bytes"`
	EndBytes      int64  `json:"end_bytes"` // when everything was closed; anything but 0 is a leak

	// What went through a spill directory's file system, after compression.
	WrittenBytes int64 `json:"written_bytes,omitempty"`
	ReadBytes    int64 `json:"read_bytes,omitempty"`
}

// Edge is what was moved between two spaces. Moves overlap, so Seconds, the sum
// of what they took, may be more than the wall's, and the rate is that of one
// move at a time.
type Edge struct {
	From    string `json:"from"`
	To      string `json:"to"`
	Batches int64  `json:"batches"`
	Bytes   int64  `json:"bytes"`
	Copies  int64  `json:"copies"`        // of the batches, those that had a copy there
	Unmoved int64  `json:"unmoved_bytes"` // of them: they are not in Bytes
	// Ahead is what was moved before it was needed, or copied to a disk. Of it AheadUsed was used
	// then, and AheadInVain never.
	Ahead       int64 `json:"ahead_bytes"`
	AheadUsed   int64 `json:"ahead_used_bytes"`
	AheadInVain int64 `json:"ahead_in_vain_bytes"`

	Seconds  float64          `json:"seconds"`
	GiBPerS  float64          `json:"gib_per_s"`
	ByReason map[string]int64 `json:"by_reason"` // bytes

	// P50, P99 and Longest are of the moves of bytes; percentiles are at most 1/16 too high.
	P50     float64 `json:"p50_seconds,omitempty"`
	P99     float64 `json:"p99_seconds,omitempty"`
	Longest float64 `json:"longest_seconds,omitempty"`
}

// Waits is how long the waits for room took, in seconds.
type Waits struct {
	Count int64   `json:"count"`
	P50   float64 `json:"p50"`
	P99   float64 `json:"p99"`
	P999  float64 `json:"p999,omitempty"` // of 99.9 %
	Max   float64 `json:"max"`
}

// Phase is a part of a run.
type Phase struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
}

// Verify is the document of verify.
type Verify struct {
	Header
	Config Config `json:"config"`
	Files  []File `json:"files"`
}

// File is what verify found in one file.
type File struct {
	Path       string `json:"path"`
	Batches    int64  `json:"batches"`
	Edges      int    `json:"edges"` // pairs of spaces that each batch was moved along, there and back
	Mismatches int64  `json:"mismatches"`
	Error      string `json:"error"` // the first difference, or why the file was not finished; else empty
}

// Document is what a command's result is: each of Run, Verify, Bandwidth, Compare, Quota, Topo
// and Trace. Page shows it; notes are lines of their own.
type Document interface {
	Stamp(args []string, began time.Time)
	Page(notes []string) *Page
}

// Write writes a document as indented JSON. A list of numbers is in one line.
func Write(w io.Writer, document any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(document); err != nil {
		return err
	}
	_, err := w.Write(numbers.ReplaceAllFunc(b.Bytes(), func(list []byte) []byte {
		return append(append([]byte("["), bytes.Join(bytes.Fields(list[1:len(list)-1]), []byte(" "))...), ']')
	}))
	return err
}

// numbers finds lists of numbers. Inside of a text is no end of a line.
var numbers = regexp.MustCompile(`\[\n *-?[0-9][-+.eE0-9]*(,\n *-?[0-9][-+.eE0-9]*)*\n *\]`)
