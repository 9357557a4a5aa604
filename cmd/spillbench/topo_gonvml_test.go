//go:build gonvml && cgo && linux

package main

import (
	"path/filepath"
	"reflect"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/test/nvmltest"
)

// TestTopoGoNVML: the document has the same GPUs through both bindings.
func TestTopoGoNVML(t *testing.T) {
	t.Parallel()
	dir := filepath.Dir(nvmltest.New(t).Path)
	var docs [2]report.Topo
	for i, binding := range []string{nvmlRunTime, nvmlGoNVML} {
		decode(t, withLibrary(t, dir, nil, "topo", "--nvml", binding, "--json=-").stdout, &docs[i])
		for k := range docs[i].Topology.GPUs { // the sets have a bit at the end of what is asked for
			docs[i].Topology.GPUs[k].CPUs = nil
		}
	}
	a, b := docs[0].Topology.GPUs, docs[1].Topology.GPUs
	if len(a) != 2 || len(a[0].MIG) != 2 || !reflect.DeepEqual(a, b) {
		t.Errorf("%+v\n%+v", a, b)
	}
}
