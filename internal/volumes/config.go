package volumes

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Defaults of Config.
const (
	// DefaultRequest and DefaultDepth keep 8 MiB under way, as eight requests of
	// 1 MiB do, and are some 5 % faster: measured on a virtual NVMe disk with
	// direct I/O, the median of 9 runs of 64 MiB in GiB/s
	//
	//	request × depth   fresh  rewritten  read
	//	 256 KiB × 16     2.30     4.58     2.97
	//	   1 MiB ×  1     2.28     4.13     2.87
	//	   1 MiB ×  8     2.50     4.89     3.21
	//	   2 MiB ×  4     2.55     5.11     3.33
	//	   4 MiB ×  4     2.64     5.41     3.34
	//	   8 MiB ×  2     2.62     5.48     3.40
	//
	// Larger requests gain little more and take longer to cancel: on a disk of
	// 100 MiB/s what is under way ends within 80 ms.
	DefaultRequest = 2 << 20
	DefaultDepth   = 4

	// defaultIdle is longer than the pauses inside a query, so that room is not given back
	// and taken again, and short enough for other users of a full disk.
	defaultIdle = 30 * time.Second
)

// Config describes a volume. Dir and Capacity are required.
type Config struct {
	// Dir is a directory that exists. The volume puts its files there, and touches
	// no others.
	Dir string
	// Capacity is the size in bytes, rounded down to a multiple of 4096. It must
	// be free when the volume is opened, in addition to Reserve.
	Capacity int64
	// Reserve is how many bytes of the file system stay free.
	Reserve int64
	// Space names the volume in the errors of transfers; disk:0 if it is not set.
	// Errors of Alloc are named by the space.
	Space tier.ID
	// Persist lets memory outlive a process that ends without closing the volume, if
	// Volume.Persist was called for it. Files have names then, and the next volume with Persist
	// that is opened in Dir has what they hold. Against a failure of the system, or of its power,
	// it is no help. With Encrypt it needs a Key.
	Persist bool
	// FS is what the volume works on; nil is the real file system.
	FS disk.FS
	// Stripe is shared by all volumes that are used side by side, so that none has to make up for
	// the time in which it was full. Nil: the volume is by itself.
	Stripe *Stripe
	// Request is the length of one read or write in bytes, a multiple of 4096. Depth is how many of
	// them one transfer has under way. On a slow disk both are less: what all transfers have under
	// way takes a quarter of a second there.
	Request int64
	Depth   int
	// Idle is how long freed space that nothing needs stays written, for reuse,
	// before it is given back to the file system. Negative: until Trim or Close.
	Idle time.Duration
	// Events is called when requests are slow or fail, when no room can be taken, and with
	// LookAtRoom; see package events. It may be nil, and must not panic.
	Events func(events.Event)
	// Encrypt makes the volume encrypt and authenticate all bytes that it writes (AES-GCM), in
	// blocks of 64 KiB: Request is a multiple of that then. Bytes that were changed or moved on the
	// disk are a *tier.AlteredError when they are read.
	Encrypt bool
	// Key is a secret of 16, 24 or 32 bytes, from which the volume derives a key of its own; it
	// stays the caller's. Nil: the volume makes a key of 32 bytes. Keys are in memory only, and
	// overwritten when the volume has been closed and all that it handed out is free. Persisted
	// files are found only with the Key that they were written with, and without one if there was
	// none. If a volume finds only files of another key, it is not opened, with a *disk.KeyError,
	// and changes nothing.
	Key []byte
}

// Validate checks the configuration; zero fields that have a default are fine.
func (c Config) Validate() error {
	switch {
	case c.Dir == "":
		return errors.New("disk: a volume needs a directory")
	case c.Capacity < tier.Page:
		return fmt.Errorf("disk: volume %s: capacity %d must be at least %d bytes", c.Dir, c.Capacity, tier.Page)
	case c.Reserve < 0:
		return fmt.Errorf("disk: volume %s: reserve %d must not be negative", c.Dir, c.Reserve)
	}
	if err := CheckKey(c.Encrypt, c.Key, c.Persist); err != nil {
		return fmt.Errorf("disk: volume %s: %w", c.Dir, err)
	}
	return nil
}

// withDefaults returns c with all fields set.
func (c Config) withDefaults() Config {
	c.Capacity -= c.Capacity % tier.Page
	if c.FS == nil {
		c.FS = disk.OS()
	} else {
		c.FS = guardedFS{c.FS}
	}
	c.Request, c.Depth = cmp.Or(c.Request, DefaultRequest), cmp.Or(c.Depth, DefaultDepth)
	if c.Encrypt {
		c.Request = max(blockSize, c.Request/blockSize*blockSize)
	}
	c.Idle, c.Stripe = cmp.Or(c.Idle, defaultIdle), cmp.Or(c.Stripe, new(Stripe))
	if !c.Space.Valid() {
		c.Space = tier.ID{Kind: tier.Disk}
	}
	return c
}

// CheckKey returns an error if a Config's Encrypt, Key and Persist do not fit together.
func CheckKey(encrypt bool, key []byte, persist bool) error {
	switch {
	case key == nil && encrypt && persist:
		return errors.New("Persist with Encrypt needs a Key: one that the volume makes is gone with the process, " +
			"and what persists with it")
	case key == nil:
		return nil
	case !encrypt:
		return errors.New("there is a key, and Encrypt is not set")
	}
	switch len(key) {
	case 16, 24, 32:
		return nil
	}
	return fmt.Errorf("the key has %d bytes, and must have 16, 24 or 32 (none at all: one is made)", len(key))
}
