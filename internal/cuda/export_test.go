package cuda

// SymbolNames returns the names of all functions, and which are needed.
func SymbolNames() map[string]bool {
	names := make(map[string]bool)
	for _, s := range new(symbols).table() {
		names[s.name] = s.required
	}
	return names
}
