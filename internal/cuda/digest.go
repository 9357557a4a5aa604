package cuda

import (
	_ "embed" // the kernel's text
	"errors"
	"fmt"
)

// digestText is the kernel as text, which the driver compiles for whatever device it has: a binary
// would be for the devices that were known when it was made.
//
//go:embed digest.ptx
var digestText string

const (
	digestName = "spillway_digest"
	// digestThreads is the number of threads of a block in the kernel's text.
	digestThreads = 256
	// digestBlocks is how many blocks a multiprocessor has at once: as many as fit on each kind
	// that there is (1024 threads, 64 registers each). More would be done when these are, with an
	// uneven rest.
	digestBlocks = 4
	// digestPair is what a thread takes at a time.
	digestPair = 16
)

// digestGrid returns how many threads compute the digest of size > 0 bytes: one for each pair
// of words, or as many as the device can have at once.
func digestGrid(size int64, multiprocessors int) Grid {
	const taken = digestThreads * digestPair
	enough := (size-1)/taken + 1
	most := digestBlocks * int64(max(multiprocessors, 1))
	return Grid{Blocks: uint32(min(enough, most)), Threads: digestThreads}
}

// PrepareDigest loads the kernel that Digest needs, unless that is done. It takes as long as the
// driver needs to compile it, milliseconds to tenths of a second, which is why Digest should find
// it loaded. ErrNoKernel means that this driver cannot have it, and is the answer to all later
// calls.
func (d *Device) PrepareDigest() error {
	return d.Here(func(c *Calls) error {
		_, err := c.digestKernel()
		return err
	})
}

// Digest puts a kernel on s that adds the hash and the sum of size bytes at src to the two words at
// out, as tier.DigestBytes defines them; the first word has position first. It adds so that pieces
// can follow each other; out must have been set, as by Fill. Both addresses are multiples of 8 in
// device memory that the context can use, which is not checked: a kernel that finds none there
// takes the context with it.
func (c *Calls) Digest(s Stream, src Ptr, size, first int64, out Ptr) error {
	if src%8 != 0 || out%8 != 0 || size < 0 {
		return &Error{Call: digestName, Code: ErrInvalidValue,
			Name: fmt.Sprintf("%d bytes at %#x, added to %#x: not words of memory", size, uint64(src), uint64(out))}
	}
	if size == 0 {
		return nil
	}
	k, err := c.digestKernel()
	if err != nil {
		return err
	}
	// A driver that loads lazily may find out only now.
	grid := digestGrid(size, k.multiprocessors)
	return kernelError(c.Launch(s, k.function, grid, uint64(src), uint64(size), uint64(first), uint64(out)))
}

// kernel is what has come of loading the kernel.
type kernel struct {
	err             error // ErrNoKernel: it cannot be loaded, ever
	module          Module
	function        Function
	multiprocessors int
}

// digestKernel returns the kernel, and loads it if it is not loaded. One goroutine loads it while the
// others wait: for a driver that is busy with another call, and never for the device. A failure that
// may not be there the next time is forgotten.
func (c *Calls) digestKernel() (k kernel, err error) {
	d := c.dev
	d.loading <- struct{}{}
	defer func() { <-d.loading }()
	if d.kernel.module != 0 || d.kernel.err != nil {
		return d.kernel, d.kernel.err
	}
	if k.multiprocessors, err = c.attribute(d.handle, attributeMultiprocessors); err != nil {
		return k, err
	}
	if k.module, err = c.LoadModule(append([]byte(digestText), 0)); err == nil {
		if k.function, err = c.Function(k.module, digestName); err != nil {
			err = errors.Join(err, c.UnloadModule(k.module))
		}
	}
	if err = kernelError(err); err == nil {
		d.kernel = k
	} else if errors.Is(err, ErrNoKernel) {
		d.kernel.err = err
	}
	return k, err
}

// kernelError makes ErrNoKernel of errors that a driver will always return: it has no compiler, or
// one that does not understand the text.
func kernelError(err error) error {
	for _, code := range []Code{ErrInvalidImage, ErrNoBinaryForGPU, ErrInvalidPTX, ErrNoJITCompiler, ErrUnsupportedPTX,
		ErrJITDisabled, ErrNotFound, ErrNotSupported} {
		if errors.Is(err, code) {
			return fmt.Errorf("%w: %w", ErrNoKernel, err)
		}
	}
	return err
}
