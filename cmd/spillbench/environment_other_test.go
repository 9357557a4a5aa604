//go:build !linux

package main

// childCommand is only started on Linux.
func childCommand(string, []string) int { return 1 }
