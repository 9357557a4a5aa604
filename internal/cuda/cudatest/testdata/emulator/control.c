// The state of the emulator, and the functions by which tests control it.
#include "emulator.h"
#include <stdlib.h>
#include <string.h>
#include <stdio.h>

struct state emu = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.changed = PTHREAD_COND_INITIALIZER,
};

enum { MAX_SYMBOLS = 256 };
static struct {
	char name[64];
	int64_t calls;
} symbols[MAX_SYMBOLS];
static int nsymbols;
static int64_t counted;

static int64_t env(const char *name, int64_t otherwise)
{
	const char *s = getenv(name);
	return s && *s ? strtoll(s, NULL, 0) : otherwise;
}

// Programs that tests start cannot be reached by calls.
__attribute__((constructor)) static void configure(void)
{
	emu.devices = env("SPILLWAY_EMULATOR_DEVICES", 1);
	emu.memory = env("SPILLWAY_EMULATOR_MEMORY", 64 << 20);
	emu.version = env("SPILLWAY_EMULATOR_VERSION", 12080);
	emu.delay_ns = env("SPILLWAY_EMULATOR_DELAY_NS", 0);
	emu.peer = env("SPILLWAY_EMULATOR_PEER", true);
	emu.lying = env("SPILLWAY_EMULATOR_LYING_PEER", 0);
	emu.bytes_per_second = 0;
	emu.register_limit = -1;
	emu.capturing = false;
	emu.plain_access = -1;
	emu.plain_unmapped = emu.unregister_home = false;
	emu.work_after = -1;
	if (emu.devices > MAX_DEVICES)
		emu.devices = MAX_DEVICES;
}

static int64_t *calls_of(const char *symbol)
{
	for (int i = 0; i < nsymbols; i++)
		if (!strcmp(symbols[i].name, symbol))
			return &symbols[i].calls;
	if (nsymbols == MAX_SYMBOLS)
		abort();
	snprintf(symbols[nsymbols].name, sizeof symbols[0].name, "%s", symbol);
	symbols[nsymbols].calls = 0; // what it had before a reset
	return &symbols[nsymbols++].calls;
}

int enter(const char *symbol, bool counts)
{
	static __thread unsigned resets;
	pthread_mutex_lock(&emu.lock);
	if (resets != emu.resets)
		depth = 0; // what the thread has current is of no use any more
	resets = emu.resets;
	++*calls_of(symbol);
	if (counts)
		counted++;
	int result = OK;
	for (int i = 0; i < emu.nfailures; i++) {
		struct failure *f = &emu.failures[i];
		if (f->symbol[0] ? strcmp(f->symbol, symbol) != 0 : !counts)
			continue;
		if (f->after > 0) {
			f->after--;
		} else if (f->times != 0) {
			if (f->times > 0)
				f->times--;
			if (!result)
				result = f->code;
		}
	}
	return result;
}

void count(const char *what) { ++*calls_of(what); }

int leave(int result)
{
	pthread_mutex_unlock(&emu.lock);
	return result;
}

// emu_set changes a setting; devices, memory and version before cuInit only.
EXPORT int emu_set(const char *name, int64_t value)
{
	int result = OK;
	pthread_mutex_lock(&emu.lock);
	if (!strcmp(name, "devices") && !emu.initialized && value >= 0 && value <= MAX_DEVICES)
		emu.devices = value;
	else if (!strcmp(name, "memory") && !emu.initialized && value > 0)
		emu.memory = value;
	else if (!strcmp(name, "version") && !emu.initialized)
		emu.version = value;
	else if (!strcmp(name, "peer"))
		emu.peer = value;
	else if (!strcmp(name, "lying_peer") && value >= 0 && value <= 3)
		emu.lying = value;
	else if (!strcmp(name, "delay_ns"))
		emu.delay_ns = value;
	else if (!strcmp(name, "bytes_per_second"))
		emu.bytes_per_second = value;
	else if (!strcmp(name, "register_limit"))
		emu.register_limit = value;
	else if (!strcmp(name, "capturing"))
		emu.capturing = value;
	else if (!strcmp(name, "plain_access"))
		emu.plain_access = value;
	else if (!strcmp(name, "plain_unmapped"))
		emu.plain_unmapped = value;
	else if (!strcmp(name, "unregister_home"))
		emu.unregister_home = value;
	else
		result = INVALID_VALUE;
	pthread_mutex_unlock(&emu.lock);
	return result;
}

// emu_fail makes a call of symbol fail, after so many that pass, so many times
// (-1: for ever). No symbol: any call that counts, which those that poll do not.
EXPORT int emu_fail(const char *symbol, int64_t after, int code, int64_t times)
{
	int result = INVALID_VALUE;
	pthread_mutex_lock(&emu.lock);
	if (emu.nfailures < MAX_FAILURES) {
		struct failure *f = &emu.failures[emu.nfailures++];
		snprintf(f->symbol, sizeof f->symbol, "%s", symbol);
		f->after = after;
		f->times = times;
		f->code = code;
		result = OK;
	}
	pthread_mutex_unlock(&emu.lock);
	return result;
}

// emu_fail_work makes a piece of work fail that moves bytes or computes, after so many
// that pass: the stream alone, or, sticky, the whole context, as a real device does.
EXPORT void emu_fail_work(int64_t after, int code, int sticky)
{
	pthread_mutex_lock(&emu.lock);
	emu.work_after = after;
	emu.work_code = code;
	emu.work_sticky = sticky;
	pthread_mutex_unlock(&emu.lock);
}

EXPORT void emu_clear_failures(void)
{
	pthread_mutex_lock(&emu.lock);
	emu.nfailures = 0;
	emu.work_after = -1;
	pthread_mutex_unlock(&emu.lock);
}

// emu_calls returns how often symbol was called; no symbol: all calls that count.
EXPORT int64_t emu_calls(const char *symbol)
{
	pthread_mutex_lock(&emu.lock);
	int64_t n = *symbol ? *calls_of(symbol) : counted;
	pthread_mutex_unlock(&emu.lock);
	return n;
}

static const char *kinds[KINDS] = {"contexts", "streams", "events", "pools", "modules", "functions", "allocations", "registrations", "host allocations", "physical allocations", "address ranges"};

static int64_t of_kind(const int64_t *counts, const char *kind)
{
	int64_t n = -1;
	pthread_mutex_lock(&emu.lock);
	for (int k = 0; k < KINDS; k++)
		if (!strcmp(kinds[k], kind))
			n = counts[k];
	pthread_mutex_unlock(&emu.lock);
	return n;
}

// emu_live counts what there is of a kind now, emu_abandoned what there was when
// its context was released. -1: no such kind.
EXPORT int64_t emu_live(const char *kind) { return of_kind(emu.live, kind); }
EXPORT int64_t emu_abandoned(const char *kind) { return of_kind(emu.abandoned, kind); }

struct slots {
	void **o;
	size_t n, cap;
};
static struct slots slots[KINDS];

#define HANDLE_TAG 0x7e00ull

handle object_new(enum kind k, void *o)
{
	struct slots *s = &slots[k];
	if (s->n == s->cap) {
		s->cap = s->cap ? 2 * s->cap : 64;
		s->o = realloc(s->o, s->cap * sizeof *s->o);
		if (!s->o)
			abort();
	}
	s->o[s->n++] = o;
	emu.live[k]++;
	return (HANDLE_TAG + k) << 48 | s->n;
}

void *object(enum kind k, handle h)
{
	uint64_t i = h & 0xffffffffffffull;
	if (h >> 48 != HANDLE_TAG + k || i == 0 || i > slots[k].n)
		return NULL;
	return slots[k].o[i - 1];
}

void object_end(enum kind k, handle h)
{
	slots[k].o[(h & 0xffffffffffffull) - 1] = NULL;
	emu.live[k]--;
}

void each_object(enum kind k, void (*f)(void *o, void *arg), void *arg)
{
	for (size_t i = 0; i < slots[k].n; i++)
		if (slots[k].o[i])
			f(slots[k].o[i], arg);
}

// emu_reset makes the library as if it had just been loaded, for a program that is linked with
// it and so cannot load another. Nothing may have a context any more.
EXPORT int emu_reset(void)
{
	int result = INVALID_HANDLE;
	pthread_mutex_lock(&emu.lock);
	if (!emu.live[CONTEXT]) {
		unpin_all();
		devices_reset();
		configure();
		memset(emu.abandoned, 0, sizeof emu.abandoned);
		emu.nfailures = nsymbols = counted = 0;
		emu.resets++;
		result = OK;
	}
	pthread_mutex_unlock(&emu.lock);
	return result;
}
