package main

import (
	"bytes"
	"flag"
	"image"
	"image/draw"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/test/browser"
)

var update = flag.Bool("update", false, "write docs/pictures/report.png anew")

// pictured is the result that the picture of the documentation is of.
var pictured = filepath.Join("..", "..", "docs", "pictures", "report.json")

// TestPicture: the page of the result beside the picture is drawn whole. With -update it becomes the
// picture.
func TestPicture(t *testing.T) {
	if testing.Short() && !*update {
		t.Skip("needs seconds and Chromium: run without -short")
	}
	b := browser.Start(t)
	path := filepath.Join(t.TempDir(), "report.html")
	succeed(t, "report", "-q", pictured, "--html="+path)
	const width, height = 1160, 1006 // as far as the alternative text goes
	s := b.Look("file://"+path, browser.How{Width: width, Height: height, Picture: *update})
	if len(s.Errors)+len(s.Requests)+len(s.Blank)+len(s.Clipped) > 0 || s.Overflow > 0 || s.Plots < 3+3+2+1 {
		t.Errorf("errors %q, requests %q, blank %q, cut %q, %d pixels too wide, %d plots", s.Errors, s.Requests, s.Blank, s.Clipped, s.Overflow, s.Plots)
	}
	for _, part := range []string{"All is well", "What to change", "How full each memory was"} {
		if !strings.Contains(s.Text, part) {
			t.Errorf("the page lacks %q", part)
		}
	}
	if !*update {
		return
	}
	whole, err := png.Decode(bytes.NewReader(s.Picture))
	if err != nil {
		t.Fatal(err)
	}
	top := image.NewRGBA(image.Rect(0, 0, width, height))
	draw.Draw(top, top.Bounds(), whole, image.Point{}, draw.Src)
	var text bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&text, top); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(strings.TrimSuffix(pictured, ".json")+".png", text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}
