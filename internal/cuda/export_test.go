package cuda

// SymbolNames returns the names of all functions, and which are needed.
func SymbolNames() map[string]bool {
	names := make(map[string]bool)
	for _, s := range new(symbols).table() {
		names[s.name] = s.required
	}
	return names
}

// DigestPTX is the kernel's text.
func DigestPTX() string { return digestText }

// DigestGrid is the shape in which it is launched.
func DigestGrid(size int64, multiprocessors int) Grid { return digestGrid(size, multiprocessors) }
