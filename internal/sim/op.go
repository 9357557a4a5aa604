package sim

// OpKind is a kind of operation of a device, for the fault hook.
type OpKind uint8

// The operations, in the order of the methods of tier.Device.
const (
	OpAlloc OpKind = iota + 1
	OpFree
	OpCopyToDevice
	OpCopyToHost
	OpCopyPeer
	OpCopyRegions
	OpFill
	OpDigest
	OpNewStream
	OpRecord
	OpWaitEvent
)

var opNames = [...]string{
	OpAlloc:        "alloc",
	OpFree:         "free",
	OpCopyToDevice: "copy to device",
	OpCopyToHost:   "copy to host",
	OpCopyPeer:     "copy to peer",
	OpCopyRegions:  "copy regions",
	OpFill:         "fill",
	OpDigest:       "digest",
	OpNewStream:    "new stream",
	OpRecord:       "record",
	OpWaitEvent:    "wait event",
}

// String returns the operation's name, such as "copy to device".
func (k OpKind) String() string {
	if int(k) >= len(opNames) || opNames[k] == "" {
		return "invalid"
	}
	return opNames[k]
}

// Stage is when the fault hook is called.
type Stage uint8

const (
	// Submit: the call is being made; its arguments are right. An error refuses it.
	Submit Stage = iota
	// Run: the stream's worker has come to the work. An error fails it, and with it
	// the stream. Only work that moves or computes bytes has this stage: copies,
	// Fill and Digest.
	Run
)

// Op is an operation that the fault hook is called for.
type Op struct {
	Kind  OpKind
	Stage Stage
	Index int64 // number of the operation on this device, from 0; the same in both stages
	Bytes int64 // how many bytes it is about; 0 for operations without
}
