// Package oneline joins errors on one line, as logs and warnings need them.
package oneline

import "fmt"

// Join returns an error that wraps those of errs that are not nil; nil if there is none. It reads
// "first; then second".
func Join(errs ...error) (all error) {
	for _, err := range errs {
		switch {
		case err == nil:
		case all == nil:
			all = err
		default:
			all = fmt.Errorf("%w; then %w", all, err)
		}
	}
	return all
}
