//go:build !race

package host

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// TestHugeOff reads the kernel's settings as they are written by the versions of it.
func TestHugeOff(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		off   bool
	}{
		"always":         {map[string]string{"enabled": "[always] madvise never\n"}, false},
		"madvise":        {map[string]string{"enabled": "always [madvise] never\n"}, false},
		"never":          {map[string]string{"enabled": "always madvise [never]\n"}, true},
		"not to be seen": {nil, false},
		"nonsense":       {map[string]string{"enabled": "]["}, false},
		"inherited, never": {map[string]string{
			"enabled": "always madvise [never]\n", "hpage_pmd_size": "2097152\n",
			"hugepages-2048kB/enabled": "always [inherit] madvise never\n",
		}, true},
		"never, but for this size": {map[string]string{
			"enabled": "always madvise [never]\n", "hpage_pmd_size": "2097152\n",
			"hugepages-2048kB/enabled": "always inherit [madvise] never\n",
		}, false},
		"all but this size": {map[string]string{
			"enabled": "[always] madvise never\n", "hpage_pmd_size": "2097152\n",
			"hugepages-2048kB/enabled": "always inherit madvise [never]\n",
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for f, text := range c.files {
				p := filepath.Join(dir, f)
				if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o700), os.WriteFile(p, []byte(text), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			if err := hugeOff(dir); (err != nil) != c.off {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestHugeOffForTheProcess: a program may be started with huge pages off.
func TestHugeOffForTheProcess(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0); err != nil {
		t.Skip("needs PR_SET_THP_DISABLE: ", err)
	}
	err := hugeOff(t.TempDir())
	if e := unix.Prctl(unix.PR_SET_THP_DISABLE, 0, 0, 0, 0); e != nil {
		t.Error(e)
	}
	if !errors.Is(err, errHugeOff) {
		t.Errorf("%v", err)
	}
}
