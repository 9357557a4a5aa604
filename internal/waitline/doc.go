// Package waitline has the lines in which goroutines wait for what there is too little of.
// Whoever came first is served first, up to a bound.
//
//	Line   for resources that are asked for in amounts: who needs less may pass who needs more
//	Queue  for things that are handed over one by one: nobody passes
//
// Neither knows what is waited for. The owner of a line says who is served, under a lock of its
// own; the line says who that may be.
package waitline
