package fsinfo

import (
	"errors"
	"io/fs"
	"math"
	"os"
	"runtime"
	"testing"
)

// A directory's file system has a name and a size, and what is not there has none.
func TestOf(t *testing.T) {
	info, err := Of(t.TempDir())
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip("needs a system that describes file systems")
	}
	if err != nil || info.Name == "" || info.Total < 0 || info.Free < 0 || info.Free > info.Total {
		t.Errorf("%+v, %v", info, err)
	}
	if _, err := Of("not/there"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of what is not there: %v", err)
	}
}

// What /dev/shm has lies in memory, and on this machine.
func TestMemory(t *testing.T) {
	info, err := Of("/dev/shm")
	if err != nil || info.Name != "tmpfs" {
		t.Skipf("needs a tmpfs at /dev/shm: %+v, %v", info, err)
	}
	if !info.Memory || info.Remote {
		t.Errorf("%+v", info)
	}
}

// The sizes that network file systems claim do not become negative.
func TestProduct(t *testing.T) {
	for _, c := range []struct {
		a, b uint64
		want int64
	}{{3, 4096, 12288}, {1 << 62, 2, math.MaxInt64}, {math.MaxUint64, math.MaxUint64, math.MaxInt64}} {
		if got := product(c.a, c.b); got != c.want {
			t.Errorf("%d × %d is %d, want %d", c.a, c.b, got, c.want)
		}
	}
}

func TestOwner(t *testing.T) {
	info, err := os.Stat(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	uid, known := Owner(info)
	if known != (runtime.GOOS == "linux") || known && int(uid) != os.Geteuid() {
		t.Errorf("the owner is %d, %v", uid, known)
	}
}

// Two directories of one file system have the same device, and those of another one do not.
func TestDevice(t *testing.T) {
	device := func(dir string) (uint64, bool) {
		t.Helper()
		info, err := os.Stat(dir)
		if err != nil {
			t.Skipf("needs a directory that can be examined: %v", err)
		}
		return Device(info)
	}
	dir := t.TempDir()
	if err := os.Mkdir(dir+"/sub", 0o700); err != nil {
		t.Fatal(err)
	}
	a, known := device(dir)
	b, _ := device(dir + "/sub")
	if a != b || known != (runtime.GOOS != "windows") {
		t.Errorf("the devices are %d and %d, known: %v", a, b, known)
	}
	if c, _ := device("/proc"); c == a {
		t.Errorf("/proc is on the device of %s", dir)
	}
}
