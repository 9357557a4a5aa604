// Package archtest holds no code, only tests of the whole module's source: which package may import
// which, that gofmt changes nothing, that each package has a doc, and that only files named for it
// import "unsafe". It reads the source and runs no tool, so it needs no network and no module
// cache.
//
//	layout_test.go   the layout: the packages, in the order of their imports
//	source_test.go   reads the module's source
//	rules_test.go    the rules, each held against a module that breaks it
package archtest
