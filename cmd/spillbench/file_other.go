//go:build !linux

package main

import (
	"errors"
	"os"
)

// openAnonymous says that there are no files without names here.
func openAnonymous(string) (*os.File, error) { return nil, errors.ErrUnsupported }

// giveName is not reached, as there is no file to name.
func giveName(*os.File, string) error { return errors.ErrUnsupported }
