package image

import (
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/payload"
)

// TestNullsOfTableRows: the number of nulls that a table has for an array is that of all its rows.
// If fewer are shown, the planner counts their nulls.
func TestNullsOfTableRows(t *testing.T) {
	valid := []byte{0b1111_0110, 0b0111_1111} // rows 0, 3 and 15 are null
	for _, c := range []struct{ rows, nulls, want, reads int64 }{
		{16, 3, 3, 0}, {16, Unknown, 3, 1}, {16, 0, 0, 0}, {8, 3, 2, 1}, {3, 3, 1, 1}, {0, 3, 0, 0},
	} {
		column := &DeviceArray{Length: 16, Nulls: c.nulls, Buffers: []payload.DeviceRange{
			{Addr: 1 << 20, Length: 2}, {Addr: 1 << 21, Length: 64},
		}}
		reads := int64(0)
		p, err := PlanTable(DeviceTable{
			Schema: arrowgen.Schema(arrow.PrimitiveTypes.Int32), Rows: c.rows, Columns: []*DeviceArray{column},
		}, func(all []Peek) error {
			for _, r := range all {
				reads++
				r.Take(valid[r.Addr-1<<20:][:r.N], 0)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Descriptor.Nodes[0]; got != (payload.Node{Length: c.rows, Nulls: c.want}) || reads != c.reads {
			t.Errorf("%d rows of an array with %d nulls: %+v after %d reads, want %d nulls after %d", c.rows, c.nulls, got, reads, c.want, c.reads)
		}
	}
}
