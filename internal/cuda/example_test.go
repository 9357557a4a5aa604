package cuda_test

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/cuda"
)

// A program asks for the driver, and does without if there is none.
func ExampleLoad() {
	lib, err := cuda.Load("/nowhere/libcuda.so.1")
	if errors.Is(err, cuda.ErrUnavailable) {
		fmt.Println("simulating a GPU:", errors.Is(err, cuda.ErrNoLibrary))
		return
	}
	d, err := lib.Open(0, 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer d.Close()
	var m *cuda.Mark
	err = d.Here(func(c *cuda.Calls) error {
		s, err := c.NewStream()
		if err != nil {
			return err
		}
		m, err = c.Mark(s, nil)
		return errors.Join(err, c.DestroyStream(s))
	})
	if err == nil {
		<-m.Done()
	}
	// Output: simulating a GPU: true
}
