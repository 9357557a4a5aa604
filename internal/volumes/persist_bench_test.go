package volumes_test

import (
	"bytes"
	"testing"

	"github.com/spillway-db/spillway/internal/volumes"
)

// BenchmarkPersist allocates a page, keeps it with so many bytes of meta as a batch of 8 MiB
// has, and frees it; beside it the same without keeping.
func BenchmarkPersist(b *testing.B) {
	meta := bytes.Repeat([]byte{1}, 2<<10)
	for name, keeps := range map[string]bool{"kept": true, "limit=not-kept": false} {
		b.Run(name, func(b *testing.B) {
			dir := b.TempDir()
			v := openPersistent(b, dir, func(c *volumes.Config) { c.Persist = keeps })
			b.ReportAllocs()
			for b.Loop() {
				e := alloc(b, v, page)
				if keeps {
					if _, err := v.Persist(meta, nil, anyRoom, e); err != nil {
						b.Fatal(err)
					}
				}
				free(v, e)
			}
			closeVolume(b, v)
			wantEmpty(b, dir)
		})
	}
}
