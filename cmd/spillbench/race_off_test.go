//go:build !race

package main

// raced says that the race detector is on, under which all takes ten times as long.
const raced = false
