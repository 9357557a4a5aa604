// Package test holds the scenarios of whole engines: crashes, faults of disks and devices, lost
// GPUs, quotas, deadlocks, what persists, and random operations under random budgets. It has no
// code beside its tests.
package test
