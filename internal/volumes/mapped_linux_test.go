//go:build !race

package volumes_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/spillway-db/spillway/internal/volumes"
)

// TestMappedBuffersAreGivenBack compares what the process has mapped, which grows by
// 4 MiB a volume if they are not.
func TestMappedBuffersAreGivenBack(t *testing.T) {
	mapped := func() (pages int64) {
		b, err := os.ReadFile("/proc/self/statm")
		if err != nil {
			t.Skip("needs /proc, to count mapped pages: ", err)
		}
		if _, err := fmt.Sscan(string(b), &pages); err != nil {
			t.Fatal(err)
		}
		return pages * int64(os.Getpagesize())
	}
	dir := t.TempDir()
	use := func() {
		v, err := volumes.Open(volumes.Config{Dir: dir, Capacity: mib, Encrypt: true})
		if err != nil {
			t.Fatal(err)
		}
		e := alloc(t, v, unit)
		write(t, e, aligned(unit), 0)
		if n := v.Mapped(); n < 4*mib {
			t.Errorf("only %d bytes are mapped for requests of %d", n, v.Stats().Request)
		}
		free(v, e)
		if err := v.Close(); err != nil {
			t.Fatal(err)
		}
	}
	use()
	before := mapped()
	const volumes = 60
	for range volumes {
		use()
	}
	if grown := mapped() - before; grown > volumes*4*mib/2 {
		t.Errorf("after %d volumes %d MiB more are mapped", volumes, grown/mib)
	}
}
