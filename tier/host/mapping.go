package host

// mapping is an arena's range of addresses. The slices given to its methods are
// whole pages of it. Methods may be called concurrently.
type mapping interface {
	// bytes is the range; it starts at a multiple of step.
	bytes() []byte
	// huge asks for huge pages in the whole range.
	huge() error
	// bind binds the pages of the whole range, which are not present yet, to a
	// NUMA node.
	bind(node int) error
	// lock keeps the pages of b from being swapped, those present and those to
	// come; it makes none present.
	lock(b []byte) error
	// touch makes the pages of b present and changes no byte, also while others
	// write them.
	touch(b []byte) error
	// discard gives the pages of b back; their bytes are undefined afterwards.
	discard(b []byte) error
	// hide makes b unreadable, show readable and writable.
	hide(b []byte) error
	show(b []byte) error
	// release unmaps the range.
	release() error
}
