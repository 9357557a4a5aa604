package disk

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

func (osFS) OpenAnonymous(dir string, direct bool) (File, error) {
	return openFile(dir, unix.O_TMPFILE|os.O_RDWR, direct)
}

func openFile(path string, flags int, direct bool) (File, error) {
	if direct {
		flags |= unix.O_DIRECT
	}
	f, err := os.OpenFile(path, flags|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	return newFile(f, direct), nil
}

// directAlignment asks statx (Linux 6.1). Where the answer is that the file cannot
// do direct I/O after all, it returns 0, 0.
func directAlignment(f *os.File) (address, offset int) {
	address, offset = fallbackAlignment, fallbackAlignment
	_ = control(f, func(fd int) error {
		var st unix.Statx_t
		err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
		if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
			address, offset = int(st.Dio_mem_align), int(st.Dio_offset_align)
		}
		return err
	})
	return address, offset
}

func (f *osFile) Allocate(off, n int64) error {
	return control(f.File, func(fd int) error { return unix.Fallocate(fd, 0, off, n) })
}

func (f *osFile) Punch(off, n int64) error {
	return control(f.File, func(fd int) error {
		return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	})
}

// control calls f with a descriptor that stays open for as long, again if it was
// interrupted: the Go runtime's signals reach system calls that last.
func control(file *os.File, f func(fd int) error) error {
	conn, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = conn.Control(func(fd uintptr) {
		for {
			inner = f(int(fd))
			if !errors.Is(inner, unix.EINTR) {
				return
			}
		}
	})
	if err != nil {
		return err
	}
	return inner
}

// Lock uses flock: the lock is the open file's, so it ends with the process however
// that ends, and two volumes in one process exclude each other too.
func (osFS) Lock(path string, create bool) (Lock, error) {
	flags := os.O_RDWR | unix.O_CLOEXEC | unix.O_NOFOLLOW
	if create {
		flags |= os.O_CREATE | os.O_EXCL
	}
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, err
	}
	if err := lockOpen(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return locked{f}, nil
}

// locked is a file that this process has locked.
type locked struct{ *os.File }

// Close ends the lock at once. To close the file is not enough: a child process that another
// goroutine is starting has it open, too, until it becomes another program.
func (l locked) Close() error {
	return errors.Join(control(l.File, func(fd int) error { return unix.Flock(fd, unix.LOCK_UN) }), l.File.Close())
}

func lockOpen(f *os.File) error {
	err := control(f, func(fd int) error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrLocked
	}
	if err != nil {
		return err
	}
	// The process that had the lock before may have removed the file. It may have links all the
	// same, where one that is open gets another name then. No name is used twice.
	_, err = os.Lstat(f.Name())
	return err
}
