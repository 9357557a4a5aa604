// What the files of the emulator share. One lock guards everything; what is
// slow (the bytes of a copy, a delay) happens without it, on the worker thread
// of a stream.
#ifndef EMULATOR_H
#define EMULATOR_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

// The results that the emulator gives, by the driver's numbers.
enum {
	OK = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201,
	PEER_ACCESS_UNSUPPORTED = 217,
	INVALID_PTX = 218,
	UNSUPPORTED_PTX_VERSION = 222,
	INVALID_HANDLE = 400,
	NOT_FOUND = 500,
	NOT_READY = 600,
	ILLEGAL_ADDRESS = 700,
	PEER_ACCESS_ALREADY_ENABLED = 704,
	PEER_ACCESS_NOT_ENABLED = 705,
	HOST_MEMORY_ALREADY_REGISTERED = 712,
	HOST_MEMORY_NOT_REGISTERED = 713,
	NOT_SUPPORTED = 801,
	STREAM_CAPTURE_UNSUPPORTED = 900,
};

typedef uint64_t handle; // what callers hold: a kind, and a number never given twice

enum kind { CONTEXT, STREAM, EVENT, POOL, MODULE, FUNCTION, ALLOCATION, REGISTRATION, HOST_ALLOCATION, PHYSICAL, ADDRESS_RANGE, KINDS };

enum { MAX_DEVICES = 16, MAX_STACK = 4096, MAX_FAILURES = 64, GRANULE = 512, MAX_QUEUED = 2000 };

// Device addresses carry the device in their upper 16 bits. No process has
// memory there, so whoever takes one for a pointer crashes.
#define TAG 0x5a00ull
#define VIRTUAL_TAG (TAG + MAX_DEVICES) // of addresses that programs map themselves
#define ADDRESS_OF(dev, off) ((TAG + (dev)) << 48 | (uint64_t)(off))

typedef struct pool {
	handle id;
	struct context *ctx; // that it goes with: the current one when it was made, or else the device's
	int device;
	size_t max_size;
	uint64_t threshold; // reserved bytes above this are given back at a synchronization
	uint64_t used, used_high;
	uint64_t reserved, reserved_high;
	bool readable[MAX_DEVICES]; // by peers
	int reuse[4]; // by attribute: what may be used again of what is freed
} pool;

typedef struct context {
	handle id;
	int device;
	int retained;
	int error;   // what every call returns once work has failed for good
	int workers; // threads of its streams, those of destroyed ones too
	int leaving; // of these, those of destroyed ones
	int full;    // calls that wait for room on a stream
	bool ending;
	bool peer[MAX_DEVICES];
} context;

// A piece of a device's memory, live or freed with the work before the free still to be done.
typedef struct block {
	uint64_t off, size, charge;
	context *ctx;
	pool *pool; // NULL if from cuMemAlloc
	bool freed;
	struct stream *freed_on; // where the free has its turn, of a pool that lets others wait for that
	struct event *turn;
} block;

typedef struct device {
	uint8_t *memory;
	uint64_t capacity;
	block **blocks; // by offset
	size_t nblocks, cap;
	context *primary;
	pool *default_pool;
	uint64_t plain; // bytes of cuMemAlloc
} device;

// The questions about an address that the emulator answers.
enum { MEMORY_TYPE = 2, BUFFER_ID = 7, RANGE_START_ADDR = 11, RANGE_SIZE = 12, MAPPED = 13, MEMPOOL_HANDLE = 17 };
enum { TYPE_HOST = 1, TYPE_DEVICE = 2 };

enum { REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3 };

typedef struct event {
	handle id; // 0 once destroyed
	context *ctx;
	int refs;
	uint64_t recorded, completed;
	int error;
} event;

enum work_kind { COPY, FILL, RECORD, WAIT_EVENT, FREE, LAUNCH, WAIT_VALUE, WRITE_VALUE };

typedef struct span {
	uint8_t *dst;
	const uint8_t *src;
	size_t n;
} span;

typedef struct work {
	struct work *next;
	enum work_kind kind;
	span *spans; // COPY
	size_t nspans;
	span one;
	uint8_t value; // FILL
	event *event;
	uint64_t seq;
	block *block; // FREE
	int device;
	uint32_t *word; // WAIT_VALUE, WRITE_VALUE
	uint32_t want;
	const struct kernel *kernel;
	uint64_t args[8];
	bool quiet; // a wait that does not mind how the work before went
} work;

typedef struct stream {
	handle id;
	context *ctx;
	pthread_cond_t wake;
	work *first, *last;
	uint64_t put, done; // pieces of work
	int error;
	bool ending;
} stream;

typedef struct registration {
	uintptr_t addr;
	size_t size;
	context *ctx;
	bool portable, ours; // ours: of cuMemHostAlloc
} registration;

typedef struct module {
	handle id;
	context *ctx;
	char *image;
} module;

// A kernel that the emulator knows by name. run is given the context and the
// arguments, each widened to 64 bits; it returns a result. Its blocks are of whole warps.
typedef struct kernel {
	const char *name;
	unsigned max_threads; // of a block
	int nargs;
	int sizes[8];
	int (*run)(context *c, const uint64_t *args);
} kernel;

typedef struct function {
	handle id;
	module *module;
	const kernel *kernel;
} function;

struct failure {
	char symbol[64]; // empty: any that counts
	int64_t after, times;
	int code;
};

extern struct state {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	bool initialized;
	unsigned resets;
	int devices;
	uint64_t memory;
	int version;
	bool peer;
	int64_t lying; // copies to peers that do nothing: 1 to a device of a higher number, 2 to one of a lower, 3 both
	int64_t delay_ns;
	int64_t bytes_per_second;
	int64_t register_limit; // bytes; -1 for none
	int64_t registered;
	bool capturing; // a thread records a graph, and no other is to disturb it
	// What is nowhere written of memory that the driver has allocated itself.
	int64_t plain_access; // that cuMemGetAccess answers; -1: an error
	bool plain_unmapped;  // that it is not said to be mapped
	bool unregister_home; // host memory is unregistered in the context only that it was registered in
	device dev[MAX_DEVICES];

	struct failure failures[MAX_FAILURES];
	int nfailures;
	int64_t work_after; // pieces of work until one fails; -1 for none
	int work_code;
	bool work_sticky;

	int64_t live[KINDS], abandoned[KINDS];
	registration *regs; // by address
	size_t nregs, regcap;
} emu;

extern __thread context *stack[MAX_STACK];
extern __thread int depth;

// Handles.
handle object_new(enum kind k, void *o);
void *object(enum kind k, handle h);
void object_end(enum kind k, handle h);
void each_object(enum kind k, void (*f)(void *o, void *arg), void *arg);

// enter takes the lock, counts the call, and returns a failure that was asked
// for. Every call leaves through leave.
int enter(const char *symbol, bool counts);
int leave(int result);
// count counts what is no call.
void count(const char *what);
// current returns the thread's context or NULL; *result says why. While a call waits for room on a stream, all others of
// its context wait, too: a driver has a lock then that they need.
context *current(int *result);
void context_clear(context *c);
void devices_reset(void);
void unpin_all(void);
void unpin_of(context *c);

// Memory.
block *block_at(int dev, uint64_t off);
block *find(uint64_t addr, size_t n);
uint8_t *device_bytes(context *c, uint64_t addr, size_t n, int *result);
uint8_t *kernel_bytes(context *c, uint64_t addr, size_t n);
bool is_device(uint64_t addr);
bool is_virtual(uint64_t addr);
uint8_t *virtual_bytes(int device, uint64_t addr, size_t n);
bool virtual_mapping(uint64_t addr, uint64_t *base, uint64_t *n, bool *mapped);
bool virtual_range(uint64_t addr, uint64_t *base, uint64_t *n);
void block_free(int dev, block *b);
const registration *registered(uintptr_t addr);
enum pinned { PINNED, PAGEABLE, STRADDLES } host_range(context *c, uintptr_t addr, size_t n);
void pool_trim(pool *p, uint64_t keep);
void synchronized(context *c);

// Streams.
stream *stream_of(handle h, context *c, int *result);
int stream_put(stream *s, work w);
void stream_drain(stream *s);
void stream_end(stream *s);
void context_drain(context *c);
void event_unref(event *e);

// CALL begins an exported call that wants a current context c.
#define CALL(name)                      \
	int result = enter(name, true); \
	if (result)                     \
		return leave(result);   \
	context *c = current(&result);  \
	if (!c)                         \
		return leave(result)

// RELEASE begins a call that gives something up. A failure that was asked for is
// told, but it is given up nevertheless: that is how a driver tells of work that
// failed earlier.
#define RELEASE(name)                       \
	const int told = enter(name, true); \
	int result = OK;                    \
	context *c = current(&result);      \
	if (!c)                             \
		return leave(result)

// REQUIRE leaves the call unless cond holds.
#define REQUIRE(cond, code)                  \
	do {                                 \
		if (!(cond))                 \
			return leave(code);  \
	} while (0)

#endif
