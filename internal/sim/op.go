package sim

// OpKind is a kind of operation of a device, for the fault hook. Its text is for messages.
type OpKind string

// The operations, in the order of the methods of tier.Device.
const (
	OpAlloc        OpKind = "alloc"
	OpFree         OpKind = "free"
	OpCopyToDevice OpKind = "copy to device"
	OpCopyToHost   OpKind = "copy to host"
	OpCopyPeer     OpKind = "copy to peer"
	OpCopyRegions  OpKind = "copy regions"
	OpFill         OpKind = "fill"
	OpDigest       OpKind = "digest"
	OpNewStream    OpKind = "new stream"
	OpRecord       OpKind = "record"
	OpWaitEvent    OpKind = "wait event"
)

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
