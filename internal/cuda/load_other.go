//go:build !linux || !(amd64 || arm64)

package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"time"
)

type loader struct{}

func openLibrary(string) (loader, error) {
	return loader{}, fmt.Errorf("on %s/%s: %w", runtime.GOOS, runtime.GOARCH, errors.ErrUnsupported)
}

func (loader) find(string) uintptr { return 0 }
func (loader) close()              {}

func invoke(uintptr, []uintptr) Code { return ErrNotSupported }

func nap(d time.Duration) { time.Sleep(d) }

func wakePromptly(bool) {}
