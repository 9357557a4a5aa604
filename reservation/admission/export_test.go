package admission

// Alone says whether the task was admitted only because no other ran.
func (g *Grant) Alone() bool { return g.alone }
