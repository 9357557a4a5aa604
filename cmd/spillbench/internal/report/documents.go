package report

import (
	"time"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/observe/page"
	"github.com/spillway-db/spillway/observe/timeline"
	"github.com/spillway-db/spillway/topology"
)

// Schema names the version of the documents.
//
// The JSON keys of this file and of package page are that version: keys may be added, and none may be
// renamed or removed. The folder schema describes the same keys as a JSON Schema, and
// TestSchemaHasEveryKey compares the two. Sizes are in bytes, times in seconds, and rates in GiB/s.
const Schema = "spillway.spillbench/v1"

// Header begins every document.
type Header struct {
	Schema   string         `json:"schema"`
	Command  string         `json:"command"`
	Env      Env            `json:"env"`
	Warnings []diag.Warning `json:"warnings"` // the engine's; empty for commands that open no engine

	Version   string    `json:"version"`    // of the module; "(devel)" if it is not known
	GoVersion string    `json:"go_version"` // that built the program, such as "go1.26.0"
	Args      []string  `json:"args"`       // the command line, as given
	Time      time.Time `json:"time"`       // when the command began, in UTC
}

// Env describes the machine that a document was measured on. Unknown values are empty or 0.
type Env struct {
	CPU        string `json:"cpu"`
	Cores      int    `json:"cores"`       // that the process may use
	Memory     int64  `json:"memory"`      // bytes that the process may use
	Kernel     string `json:"kernel"`      // name and release
	FileSystem string `json:"file_system"` // of the spill directories, separated by commas
	DirectIO   bool   `json:"direct_io"`   // all spill volumes use it
	GPU        string `json:"gpu"`         // "sim" for the simulated GPU of an engine
	Driver     string `json:"driver"`      // of the GPU
	PCIeLink   string `json:"pcie_link"`   // as "PCIe 4 x16"
	Commit     string `json:"commit"`      // of this program; "+dirty" follows if files were changed since
	GOOS       string `json:"goos"`        // the operating system that this program was built for
	GOARCH     string `json:"goarch"`      // the processor that this program was built for
}

// Config is what a command ran with, including defaults.
type Config struct {
	GPU                   string  `json:"gpu"`
	GPUMemoryBytes        int64   `json:"gpu_memory_bytes"`
	HostMemoryBytes       int64   `json:"host_memory_bytes"`
	Disks                 []Disk  `json:"disks"`
	Limit                 float64 `json:"limit"`
	Trigger               float64 `json:"trigger"`
	Stop                  float64 `json:"stop"`
	Policy                string  `json:"policy"`
	Codec                 string  `json:"codec"`
	Encrypt               bool    `json:"encrypt"` // spill files are encrypted
	MonitorPeriodSeconds  float64 `json:"monitor_period_seconds"`
	StuckAfterSeconds     float64 `json:"stuck_after_seconds"`
	WriteAheadBytesPerS   int64   `json:"write_ahead_bytes_per_s"`   // the maximum; 0: nothing is written ahead
	MovesPerEdge          int     `json:"moves_per_edge"`            // concurrent moves of the monitor
	DiskSlots             int     `json:"disk_slots"`                // maximum of concurrent transfers with disks
	RowsPerBatch          int64   `json:"rows_per_batch"`            // 0: as in the files
	DiskThrottleBytesPerS int64   `json:"disk_throttle_bytes_per_s"` // of each spill directory; 0: not limited
	Faults                []Fault `json:"faults"`                    // injected on purpose
}

// Disk is a spill directory.
type Disk struct {
	Dir           string `json:"dir"`
	CapacityBytes int64  `json:"capacity_bytes"`
	CapacityGiven bool   `json:"capacity_given,omitempty"` // false: the capacity is the free space that was found
}

// Fault is a fault that was asked for, with the number of operations that it hit.
type Fault struct {
	Spec string `json:"spec"`
	Hits int64  `json:"hits"`
}

// Parts of documents that pages show as they are.
type (
	Input        = page.Input
	Verification = page.Verification
	Space        = page.Space
	Edge         = page.Edge
	Waits        = page.Waits
	Phase        = page.Phase
	Held         = page.Held
	Work         = page.Work
	Task         = page.Task
)

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

	Error string `json:"error,omitempty"` // why the run failed; the figures then cover what was done before
	Held  []Held `json:"held,omitempty"`  // when a run failed

	Work     []Work             `json:"work,omitempty"`
	Tasks    []Task             `json:"tasks,omitempty"`    // that waited for room, the longest first
	Limits   []Limit            `json:"limits,omitempty"`   // measured with --html and --listen
	Timeline *timeline.Timeline `json:"timeline,omitempty"` // recorded for JSON and pages
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
	Runs       int    `json:"runs,omitempty"` // after a warm-up, if there are more than one
}

// Repetition is one of the runs that --runs asks for, or the only one.
type Repetition struct {
	Seconds    float64 `json:"seconds"`               // of loading, all passes and dropping
	GiBPerS    float64 `json:"gib_per_s"`             // of the input, in these seconds
	CPUSeconds float64 `json:"cpu_seconds,omitempty"` // of this process, user and system; missing where it is not known
}

// RunTimes sums up the seconds of all runs but the warm-up.
type RunTimes struct {
	MedianSeconds float64 `json:"median_seconds"`
	MinSeconds    float64 `json:"min_seconds"`
	MaxSeconds    float64 `json:"max_seconds"`
	Spread        float64 `json:"spread"` // the difference of the two, as a share of the median
	MedianGiBPerS float64 `json:"median_gib_per_s"`
}

// Processors is what the processors did that the command may use, while it ran. It is missing where
// that is not known: not on Linux, or in a cgroup with a CPU quota.
type Processors struct {
	Count       int     `json:"count"`
	OthersShare float64 `json:"others_share"` // of their time, used by other processes and virtual machines
}

// Admission counts the tasks that drop the batches at the end (see Engine.RunTask) and how long they
// waited to be admitted, in seconds.
type Admission struct {
	Admitted int64   `json:"admitted"` // tasks, each attempt counts
	Waited   int64   `json:"waited"`   // of them, those that waited for more than a millisecond
	Retried  int64   `json:"retried"`  // attempts that ran out of memory and were followed by another
	P50      float64 `json:"p50"`      // of the waits of all that were admitted
	P99      float64 `json:"p99"`
	P999     float64 `json:"p999"`
	Max      float64 `json:"max"`
}

// Limit is what one thread transfers between two spaces without the engine: the best of a few
// transfers of some MiB.
type Limit struct {
	From    string  `json:"from"`
	To      string  `json:"to"`
	GiBPerS float64 `json:"gib_per_s"`
	LimitOf string  `json:"limit_of"` // "memmove", "driver's copy" or "disk I/O"
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
	Edges      int    `json:"edges"` // pairs of spaces that each batch was moved between, there and back
	Mismatches int64  `json:"mismatches"`
	Error      string `json:"error"` // the first difference, or why the file was not finished
}

// Bandwidth is the document of bandwidth.
type Bandwidth struct {
	Header
	Config      BandwidthConfig `json:"config"`
	Rows        []BandwidthRow  `json:"rows"`
	WallSeconds float64         `json:"wall_seconds"`
}

// BandwidthConfig is what bandwidth ran with. Sizes that did not fit have no row.
type BandwidthConfig struct {
	Config
	Extent       string  `json:"extent"`        // "quick", "thorough", or "sizes" if --sizes or --threads was given
	PlannedBytes int64   `json:"planned_bytes"` // to be moved by Spillway and by the limit together
	Seed         uint64  `json:"seed"`
	Pairs        int     `json:"pairs"` // for each row
	Sizes        []int64 `json:"sizes_bytes"`
	Threads      []int   `json:"threads"`
}

// BandwidthRow is one edge with one batch size and number of concurrent moves. Rates are medians over
// the pairs and count all moves together.
type BandwidthRow struct {
	From         string           `json:"from"`
	To           string           `json:"to"`
	Bytes        int64            `json:"bytes"`   // of each batch
	Threads      int              `json:"threads"` // batches that move at the same time
	GiBPerS      float64          `json:"gib_per_s"`
	State        string           `json:"state"` // of the disk's room: "fresh" or "rewritten"; "" between memories
	LimitGiBPerS float64          `json:"limit_gib_per_s"`
	LimitOf      string           `json:"limit_of"`             // "memmove", "driver's copy", "peer copy" or "disk I/O"
	Efficiency   float64          `json:"efficiency"`           // median of Spillway's rate by the limit
	Noise        float64          `json:"noise"`                // median distance of the limit's own ratios from 1
	CV           float64          `json:"cv"`                   // coefficient of variation of the rates
	Inconclusive bool             `json:"inconclusive"`         // the efficiency is no further from 1 than the noise
	BothWays     bool             `json:"both_ways,omitempty"`  // half of the moves went the other way at the same time
	Gain         float64          `json:"gain,omitempty"`       // of both ways at once over one way after the other
	LimitGain    float64          `json:"limit_gain,omitempty"` // the same for the limit
	Samples      BandwidthSamples `json:"samples"`
	Error        string           `json:"error,omitempty"` // why the edge was not measured; the figures are 0 then
}

// BandwidthSamples are the rates behind the figures of a row, one a pair, in the order in which they
// were measured: Spillway, the limit, and the limit again.
type BandwidthSamples struct {
	GiBPerS           []float64 `json:"gib_per_s"`
	LimitGiBPerS      []float64 `json:"limit_gib_per_s"`
	LimitAgainGiBPerS []float64 `json:"limit_again_gib_per_s"`
}

// Compare is the document of compare. Rates are medians over the rounds.
type Compare struct {
	Header
	Config      CompareConfig `json:"config"`
	Input       Input         `json:"input"` // the bytes are those of the Arrow buffers
	Verify      Verification  `json:"verify"`
	Ours        OurRates      `json:"ours"`
	Peer        PeerRates     `json:"peer"`
	Ratio       Ratios        `json:"ratio"`
	Samples     []RoundRates  `json:"samples"` // one a round
	WallSeconds float64       `json:"wall_seconds"`
}

// CompareConfig is what compare ran with.
type CompareConfig struct {
	Config
	Peer    string `json:"peer"`
	Seed    uint64 `json:"seed"`
	Repeat  int    `json:"repeat"`
	Rounds  int    `json:"rounds"`
	Workers int    `json:"workers"` // goroutines that move Spillway's batches
}

// Rates are the speeds of spilling and of reading back.
type Rates struct {
	WriteGiBPerS float64 `json:"write_gib_per_s"`
	ReadGiBPerS  float64 `json:"read_gib_per_s"`
}

// OurRates are those of Spillway, with an empty volume.
type OurRates struct {
	Rates
	PutWriteGiBPerS float64 `json:"put_write_gib_per_s"` // including the time to lay out batches in host memory
	Rewritten       Rates   `json:"rewritten"`           // in room that was written before
}

// PeerRates are those of the peer, with its file synced and read without the page cache.
type PeerRates struct {
	Name string `json:"name"`
	Rates
	Warm Rates `json:"warm"` // not synced, and read from the page cache
}

// RoundRates are the rates of one round.
type RoundRates struct {
	Ours OurRates `json:"ours"`
	Peer Rates    `json:"peer"`
	Warm Rates    `json:"warm"` // the peer's
}

// Ratios are Spillway's rates by the peer's: the median over the rounds, with minimum and maximum.
type Ratios struct {
	Write    float64 `json:"write"`
	WriteMin float64 `json:"write_min"`
	WriteMax float64 `json:"write_max"`
	Read     float64 `json:"read"`
	ReadMin  float64 `json:"read_min"`
	ReadMax  float64 `json:"read_max"`
}

// Topo is the document of topo.
type Topo struct {
	Header
	Topology *topology.Topology `json:"topology"`
	Paths    topology.Matrix    `json:"paths"` // between GPUs, NICs and disks
}

// Quota is the document of quota.
type Quota struct {
	Header
	Limit         string          `json:"limit"`          // as it was set; empty: none
	LimitBytes    int64           `json:"limit_bytes"`    // 0: no limit, or one that is a share
	Source        string          `json:"source"`         // the variable that sets the limit
	Ratio         float64         `json:"ratio"`          // 0: not set
	PhysicalBytes int64           `json:"physical_bytes"` // 0: not set
	Ledger        string          `json:"ledger"`         // its directory; empty: none
	Group         string          `json:"group"`
	Holders       []leases.Holder `json:"holders"` // the live holders of leases
}

// Trace is the document of trace replay and trace compare.
type Trace struct {
	Header
	Traces []Replayed `json:"traces"`
}

// Replayed is one trace with its replays.
type Replayed struct {
	File     string    `json:"file"`
	Events   int       `json:"events"`
	Lost     int64     `json:"lost_events"` // always 0: traces lose no events
	CutOff   bool      `json:"cut_off"`     // the end is missing
	Recorded Outcome   `json:"recorded"`
	Replays  []Outcome `json:"replays"`
}

// Outcome is how a workload went with a policy.
type Outcome struct {
	Policy         string  `json:"policy"`
	Error          string  `json:"error"` // why a replay could not go on; the figures are 0 then
	Edges          []Edge  `json:"edges"`
	Bytes          int64   `json:"bytes"`         // of all moves
	FetchedBytes   int64   `json:"fetched_bytes"` // of the moves to faster tiers
	Seconds        float64 `json:"seconds"`
	StalledSeconds float64 `json:"stalled_seconds"` // waits of all callers for batches and for room
	Accesses       int64   `json:"accesses"`
	Found          int64   `json:"found"` // accesses whose batch was where it was wanted
}

// Inspect is the document of inspect.
type Inspect struct {
	Header
	Path        string               `json:"path"`
	Checksums   bool                 `json:"checksums"` // all bytes that are not in use were compared with theirs
	Directories []PersistedDirectory `json:"directories"`
}

// PersistedDirectory is what one process has left on a disk, or what the engine has there that uses it.
type PersistedDirectory struct {
	Path            string           `json:"path"`
	InUse           bool             `json:"in_use"`    // an engine has it locked; the rest is of a moment
	Encrypted       bool             `json:"encrypted"` // with a key of the user's; then only records are counted
	Records         int              `json:"records"`   // of batches and of dictionaries that batches share
	Batches         []PersistedBatch `json:"batches"`   // the oldest first
	Dictionaries    int              `json:"dictionaries"`
	DictionaryBytes int64            `json:"dictionary_bytes"` // of their room on the disk
	Bytes           int64            `json:"bytes"`            // of the room of all records
	FileBytes       int64            `json:"file_bytes"`       // the lengths of the files, which may have holes
	Unlisted        []string         `json:"unlisted"`         // names of files that hold nothing that persists
	Damaged         []string         `json:"damaged"`          // what is lost besides batches with an error, and why
	Error           string           `json:"error"`            // why it cannot be read; else empty
}

// PersistedBatch is a batch that persists.
type PersistedBatch struct {
	ID           uint64   `json:"id"` // in the engine that left it
	Plan         string   `json:"plan"`
	Operator     string   `json:"operator"`
	Port         int      `json:"port"`
	Partition    int      `json:"partition"`
	Rows         int64    `json:"rows"`
	Columns      []string `json:"columns"`      // name and type of each
	Bytes        int64    `json:"bytes"`        // of its room on the disk
	ImageBytes   int64    `json:"image_bytes"`  // uncompressed
	Codec        string   `json:"codec"`        // "none" for plain bytes
	Dictionaries int      `json:"dictionaries"` // that it shares with others
	Error        string   `json:"error"`        // why it cannot be adopted; else empty
}

// Pair is two documents of one command that are compared, A and B.
type Pair struct {
	Document // A
	B        Document
	Names    []string // of both, such as those of their files
}
