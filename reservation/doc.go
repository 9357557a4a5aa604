// Package reservation promises bytes.
package reservation
