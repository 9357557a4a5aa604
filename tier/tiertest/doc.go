// Package tiertest holds the suites that every backend passes: RunDevice for a
// device, RunPool for what hands out the memory of a space. Both say in their
// failures which line of the contract in package tier is broken.
package tiertest
