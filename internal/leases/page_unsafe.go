package leases

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// A lease file is one page. Its head is written once, before the file has its name;
// each of its words has a cache line of its own, because they are written by their owner
// and read by all.
const (
	pageSize  = 4096
	groupSize = 128

	leaseMagic = "SPWLEASE"
	genMagic   = "SPWGENER"
	version    = 1

	atVersion    = 8
	atPID        = 16
	atStarted    = 24
	atQuota      = 32
	atPhysical   = 40
	atAdvertised = 48
	atGroupLen   = 56
	atGroup      = 64
	atSum        = atGroup + groupSize // of the bytes before it

	atLimit = 256 // the quota as it is now
	atClaim = 320 // live, and what its owner is about to charge or to give up
	atLive  = 384
	atPeak  = 448
	atLost  = 512 // how often files of the ledger were removed under its owner

	atGeneration = 64 // in the file of that name
)

// head is what a lease says of its owner. It never changes.
type head struct {
	pid        int64
	started    time.Time
	quota      int64
	physical   int64
	advertised int64
	group      string
}

// words are the numbers of a lease that change, in bytes. live ≤ claim at any time.
type words struct {
	limit, claim, live, peak, lost *atomic.Int64
}

func wordsOf(page []byte) words {
	return words{limit: wordOf(page, atLimit), claim: wordOf(page, atClaim), live: wordOf(page, atLive), peak: wordOf(page, atPeak), lost: wordOf(page, atLost)}
}

func (h head) encode() []byte {
	p := make([]byte, pageSize)
	copy(p, leaseMagic)
	binary.LittleEndian.PutUint32(p[atVersion:], version)
	for at, n := range map[int]int64{
		atPID: h.pid, atStarted: h.started.UnixNano(), atQuota: h.quota, atPhysical: h.physical, atAdvertised: h.advertised, atGroupLen: int64(len(h.group)),
	} {
		binary.LittleEndian.PutUint64(p[at:], uint64(n))
	}
	copy(p[atGroup:], h.group)
	binary.LittleEndian.PutUint64(p[atSum:], xxh3.Hash(p[:atSum]))
	return p
}

// errForeign: it is not a lease at all, or one of another version.
var errForeign = errors.New("it is not a lease of this version")

func decode(p []byte) (head, error) {
	if len(p) != pageSize || string(p[:8]) != leaseMagic || binary.LittleEndian.Uint32(p[atVersion:]) != version {
		return head{}, errForeign
	}
	if xxh3.Hash(p[:atSum]) != binary.LittleEndian.Uint64(p[atSum:]) {
		return head{}, errors.New("its checksum is wrong")
	}
	number := func(at int) int64 { return int64(binary.LittleEndian.Uint64(p[at:])) }
	h := head{
		pid: number(atPID), started: time.Unix(0, number(atStarted)),
		quota: number(atQuota), physical: number(atPhysical), advertised: number(atAdvertised),
	}
	n := number(atGroupLen)
	if n < 0 || n > groupSize || h.quota <= 0 || h.physical <= 0 || h.advertised <= 0 {
		return head{}, fmt.Errorf("its numbers make no sense: quota %d, physical %d, advertised %d", h.quota, h.physical, h.advertised)
	}
	h.group = string(p[atGroup : atGroup+n])
	return h, nil
}

// wordOf is the word at a multiple of 8 in a mapped page. Other processes change it.
func wordOf(page []byte, at int) *atomic.Int64 {
	_ = page[at+7]
	return (*atomic.Int64)(unsafe.Pointer(&page[at]))
}
