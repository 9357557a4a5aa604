// Package archtest holds no code, but the tests of what the whole module's
// source has to look like: which package may import which, that gofmt would
// change nothing, that every package says what it is for, and that "unsafe" is
// imported only by files named for it. It reads the source and runs no tool, so
// it needs no network and no module cache.
//
//	layout_test.go   the layout: the packages, in the order of their imports
//	source_test.go   reads the module's source
//	rules_test.go    the rules, each held against a module that breaks it
package archtest
