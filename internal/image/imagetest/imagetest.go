// Package imagetest lays records out for the tests of packages that move images.
package imagetest

import (
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
)

// LaidOut returns the image of rec, whose dictionaries all lie in the body.
func LaidOut(t testing.TB, rec arrow.RecordBatch) (*batch.Descriptor, []byte) {
	t.Helper()
	l, err := image.NewLayout(rec, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	body := make([]byte, l.Desc.Body)
	if err := l.WriteTo([][]byte{body}); err != nil {
		t.Fatal(err)
	}
	d, err := l.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	return d, body
}
