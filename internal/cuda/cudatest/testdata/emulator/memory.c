// Device memory and its pools.
#include "emulator.h"
#include <stdlib.h>
#include <string.h>

bool is_device(uint64_t addr)
{
	uint64_t tag = addr >> 48;
	return tag >= TAG && tag <= VIRTUAL_TAG;
}

static uint64_t charge_of(uint64_t n) { return (n + GRANULE - 1) / GRANULE * GRANULE; }

// place returns the index of the first block at or after off.
static size_t place(device *d, uint64_t off)
{
	size_t lo = 0, hi = d->nblocks;
	while (lo < hi) {
		size_t mid = (lo + hi) / 2;
		if (d->blocks[mid]->off < off)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

block *block_at(int dev, uint64_t off)
{
	device *d = &emu.dev[dev];
	size_t i = place(d, off);
	return i < d->nblocks && d->blocks[i]->off == off ? d->blocks[i] : NULL;
}

// there returns the block, live or retired, that holds all of n bytes at addr.
static block *there(uint64_t addr, size_t n)
{
	int dev = (int)((addr >> 48) - TAG);
	if (!is_device(addr) || dev >= emu.devices)
		return NULL;
	device *d = &emu.dev[dev];
	uint64_t off = addr & 0xffffffffffffull;
	size_t i = place(d, off + 1);
	if (i == 0)
		return NULL;
	block *b = d->blocks[i - 1];
	if (off - b->off > b->size || n > b->size - (off - b->off))
		return NULL;
	return b;
}

// find returns the live block that holds all of n bytes at addr.
block *find(uint64_t addr, size_t n)
{
	block *b = there(addr, n);
	return b && !b->freed ? b : NULL;
}

static uint8_t *bytes_of(context *c, block *b, uint64_t addr)
{
	int dev = (int)((addr >> 48) - TAG);
	if (!b || (dev != c->device && !(b->pool ? b->pool->readable[c->device] : c->peer[dev])))
		return NULL;
	return emu.dev[dev].memory + (addr & 0xffffffffffffull);
}

// device_bytes returns the memory behind a range of device addresses that
// context c may use, NULL if there is a mistake.
uint8_t *device_bytes(context *c, uint64_t addr, size_t n, int *result)
{
	uint8_t *bytes = is_virtual(addr) ? virtual_bytes(c->device, addr, n) : bytes_of(c, find(addr, n), addr);
	*result = bytes ? OK : INVALID_VALUE;
	return bytes;
}

// kernel_bytes is device_bytes for a kernel that runs: what is to be freed behind it
// is there yet.
uint8_t *kernel_bytes(context *c, uint64_t addr, size_t n)
{
	return is_virtual(addr) ? virtual_bytes(c->device, addr, n) : bytes_of(c, there(addr, n), addr);
}

static uint64_t reserved_by_pools(int dev);

struct sum {
	int dev;
	uint64_t n;
};

static void add_reserved(void *o, void *arg)
{
	pool *p = o;
	struct sum *s = arg;
	if (p->device == s->dev)
		s->n += p->reserved;
}

static uint64_t reserved_by_pools(int dev)
{
	struct sum s = {dev, 0};
	each_object(POOL, add_reserved, &s);
	return s.n;
}

static uint64_t unreserved(int dev) { return emu.dev[dev].capacity - emu.dev[dev].plain - reserved_by_pools(dev); }

static uint64_t high(uint64_t now, uint64_t before) { return now > before ? now : before; }

// allocate takes a piece of c's device, from the pool's books or the device's own.
static int allocate(context *c, pool *p, size_t n, uint64_t *addr)
{
	if (n == 0)
		return INVALID_VALUE;
	device *d = &emu.dev[c->device];
	if (n > d->capacity)
		return OUT_OF_MEMORY;
	uint64_t charge = charge_of(n), spare = p ? p->reserved - p->used : 0;
	if (charge > spare && charge - spare > unreserved(c->device))
		return OUT_OF_MEMORY;
	if (p && p->max_size && charge > p->max_size - p->used)
		return OUT_OF_MEMORY;
	uint64_t off = 0;
	size_t i = 0;
	for (; i < d->nblocks && d->blocks[i]->off - off < charge; i++)
		off = d->blocks[i]->off + d->blocks[i]->charge;
	if (d->capacity - off < charge)
		return OUT_OF_MEMORY;
	if (d->nblocks == d->cap) {
		d->cap = d->cap ? 2 * d->cap : 64;
		d->blocks = realloc(d->blocks, d->cap * sizeof *d->blocks);
	}
	memmove(d->blocks + i + 1, d->blocks + i, (d->nblocks - i) * sizeof *d->blocks);
	d->nblocks++;
	block *b = d->blocks[i] = calloc(1, sizeof *b);
	*b = (block){.off = off, .size = n, .charge = charge, .ctx = c, .pool = p};
	if (p) {
		p->used += charge;
		p->used_high = high(p->used, p->used_high);
		p->reserved = high(p->used, p->reserved);
		p->reserved_high = high(p->reserved, p->reserved_high);
	} else {
		d->plain += charge;
	}
	emu.live[ALLOCATION]++;
	// What is there must not be taken for anything.
	memset(d->memory + off, 0xd7, charge < 4096 ? charge : 4096);
	*addr = ADDRESS_OF(c->device, off);
	return OK;
}

void block_free(int dev, block *b)
{
	device *d = &emu.dev[dev];
	size_t i = place(d, b->off);
	memmove(d->blocks + i, d->blocks + i + 1, (d->nblocks - i - 1) * sizeof *d->blocks);
	d->nblocks--;
	if (b->pool)
		b->pool->used -= b->charge;
	else
		d->plain -= b->charge;
	if (b->turn)
		event_unref(b->turn);
	free(b);
	pthread_cond_broadcast(&emu.changed);
}

EXPORT int cuMemAlloc_v2(uint64_t *addr, size_t n)
{
	CALL("cuMemAlloc_v2");
	return leave(allocate(c, NULL, n, addr));
}

// As with the real driver nothing says so, but all work of the context is done
// when it returns.
EXPORT int cuMemFree_v2(uint64_t addr)
{
	RELEASE("cuMemFree_v2");
	block *b = find(addr, 0);
	REQUIRE(b && addr == ADDRESS_OF(b->ctx->device, b->off) && b->ctx == c, INVALID_VALUE);
	b->freed = true;
	emu.live[ALLOCATION]--;
	context_drain(c);
	block_free(c->device, b);
	return leave(told);
}

// wait_for_free does what a driver may do before a pool takes more from the device: it makes s wait for the free of
// another stream, and nobody is told.
static void wait_for_free(context *c, pool *p, stream *s, size_t n)
{
	device *d = &emu.dev[c->device];
	uint64_t charge = charge_of(n);
	if (!p->reuse[REUSE_ALLOW_INTERNAL_DEPENDENCIES] || charge <= p->reserved - p->used)
		return;
	for (size_t i = 0; i < d->nblocks; i++) {
		block *b = d->blocks[i];
		if (b->pool != p || !b->turn || b->freed_on == s || b->charge < charge)
			continue;
		b->turn->refs++;
		stream_put(s, (work){.kind = WAIT_EVENT, .event = b->turn, .seq = 1, .quiet = true});
		count("internal dependency");
		return;
	}
}

static int allocate_async(const char *symbol, uint64_t *addr, size_t n, bool named, handle hp, handle hs)
{
	CALL(symbol);
	stream *s = stream_of(hs, c, &result);
	REQUIRE(s, result);
	pool *p = named ? object(POOL, hp) : emu.dev[c->device].default_pool;
	REQUIRE(p && p->device == c->device, INVALID_VALUE);
	wait_for_free(c, p, s, n);
	return leave(allocate(c, p, n, addr));
}

EXPORT int cuMemAllocAsync(uint64_t *addr, size_t n, handle s) { return allocate_async("cuMemAllocAsync", addr, n, false, 0, s); }

EXPORT int cuMemAllocFromPoolAsync(uint64_t *addr, size_t n, handle pool, handle s)
{
	return allocate_async("cuMemAllocFromPoolAsync", addr, n, true, pool, s);
}

EXPORT int cuMemFreeAsync(uint64_t addr, handle hs)
{
	CALL("cuMemFreeAsync");
	stream *s = stream_of(hs, c, &result);
	REQUIRE(s, result);
	block *b = find(addr, 0);
	REQUIRE(b && addr == ADDRESS_OF(b->ctx->device, b->off) && b->ctx == c, INVALID_VALUE);
	b->freed = true;
	emu.live[ALLOCATION]--;
	event *turn = NULL;
	if (b->pool && b->pool->reuse[REUSE_ALLOW_INTERNAL_DEPENDENCIES]) {
		turn = b->turn = calloc(1, sizeof *turn);
		turn->ctx = c;
		turn->refs = 2; // the block's and the work's
		b->freed_on = s;
	}
	stream_put(s, (work){.kind = FREE, .block = b, .device = c->device});
	if (turn)
		stream_put(s, (work){.kind = RECORD, .event = turn, .seq = 1});
	return leave(OK);
}

EXPORT int cuMemGetAddressRange_v2(uint64_t *base, size_t *n, uint64_t addr)
{
	CALL("cuMemGetAddressRange_v2");
	bool mapped;
	if (virtual_mapping(addr, base, n, &mapped))
		return leave(OK);
	block *b = find(addr, 1);
	REQUIRE(b, NOT_FOUND);
	*base = ADDRESS_OF(b->ctx->device, b->off);
	*n = b->size;
	return leave(OK);
}

EXPORT int cuMemGetInfo_v2(size_t *avail, size_t *total)
{
	CALL("cuMemGetInfo_v2");
	*avail = unreserved(c->device);
	*total = emu.dev[c->device].capacity;
	return leave(OK);
}

EXPORT int cuDeviceGetDefaultMemPool(handle *out, int dev)
{
	int result = enter("cuDeviceGetDefaultMemPool", true);
	REQUIRE(!result, result);
	REQUIRE(emu.initialized && dev >= 0 && dev < emu.devices, INVALID_DEVICE);
	*out = emu.dev[dev].default_pool->id;
	return leave(OK);
}

struct pool_props { // 88 bytes
	int32_t alloc_type, handle_types, location_type, location_id;
	void *security;
	size_t max_size;
	uint16_t usage;
	uint8_t reserved[54];
};

EXPORT int cuMemPoolCreate(handle *out, const struct pool_props *props)
{
	int result = enter("cuMemPoolCreate", true);
	REQUIRE(!result, result);
	REQUIRE(props->alloc_type == 1 && props->handle_types == 0 && props->location_type == 1 && !props->security, INVALID_VALUE);
	for (size_t i = 0; i < sizeof props->reserved; i++)
		REQUIRE(!props->reserved[i], INVALID_VALUE);
	REQUIRE(emu.initialized && props->location_id >= 0 && props->location_id < emu.devices, INVALID_DEVICE);
	pool *p = calloc(1, sizeof *p);
	p->device = props->location_id;
	p->ctx = depth && stack[depth - 1]->id && stack[depth - 1]->device == p->device ? stack[depth - 1] : emu.dev[p->device].primary;
	p->max_size = props->max_size;
	for (int a = 1; a <= REUSE_ALLOW_INTERNAL_DEPENDENCIES; a++)
		p->reuse[a] = 1;
	*out = p->id = object_new(POOL, p);
	return leave(OK);
}

EXPORT int cuMemPoolDestroy(handle h)
{
	const int told = enter("cuMemPoolDestroy", true);
	pool *p = object(POOL, h);
	REQUIRE(p && p != emu.dev[p->device].default_pool, INVALID_VALUE);
	// A driver keeps a pool with live allocations until they are freed. Nobody of
	// ours should do that, so here it is a mistake; retired ones are waited for.
	while (object(POOL, h) == p && p->used) {
		device *d = &emu.dev[p->device];
		for (size_t i = 0; i < d->nblocks; i++)
			REQUIRE(d->blocks[i]->pool != p || d->blocks[i]->freed, INVALID_VALUE);
		pthread_cond_wait(&emu.changed, &emu.lock);
	}
	REQUIRE(object(POOL, h) == p, INVALID_VALUE); // its context ended meanwhile
	object_end(POOL, h);
	free(p);
	return leave(told);
}

void pool_trim(pool *p, uint64_t keep)
{
	if (p->reserved > keep)
		p->reserved = high(p->used, keep);
}

static void trim_to_threshold(void *o, void *arg)
{
	pool *p = o;
	if (p->device == *(int *)arg)
		pool_trim(p, p->threshold);
}

// synchronized does what pools do when somebody has waited.
void synchronized(context *c) { each_object(POOL, trim_to_threshold, &c->device); }

EXPORT int cuMemPoolTrimTo(handle h, size_t keep)
{
	int result = enter("cuMemPoolTrimTo", true);
	REQUIRE(!result, result);
	pool *p = object(POOL, h);
	REQUIRE(p, INVALID_VALUE);
	pool_trim(p, keep);
	return leave(OK);
}

static int pool_attribute(const char *symbol, handle h, int attribute, void *value, bool set)
{
	int result = enter(symbol, true);
	REQUIRE(!result, result);
	pool *p = object(POOL, h);
	REQUIRE(p && attribute >= 1 && attribute <= 8, INVALID_VALUE);
	if (attribute <= 3) {
		if (set)
			p->reuse[attribute] = *(int *)value;
		else
			*(int *)value = p->reuse[attribute];
		return leave(OK);
	}
	uint64_t *field[] = {&p->threshold, &p->reserved, &p->reserved_high, &p->used, &p->used_high};
	uint64_t *f = field[attribute - 4];
	if (!set)
		*(uint64_t *)value = *f;
	else if (attribute == 4)
		*f = *(uint64_t *)value;
	else if ((attribute == 6 || attribute == 8) && *(uint64_t *)value == 0)
		*f = *field[attribute - 5];
	else
		return leave(INVALID_VALUE);
	return leave(OK);
}

EXPORT int cuMemPoolSetAttribute(handle h, int a, void *v) { return pool_attribute("cuMemPoolSetAttribute", h, a, v, true); }
EXPORT int cuMemPoolGetAttribute(handle h, int a, void *v) { return pool_attribute("cuMemPoolGetAttribute", h, a, v, false); }

struct access {
	int32_t location_type, location_id, flags;
};

EXPORT int cuMemPoolSetAccess(handle h, const struct access *map, size_t n)
{
	int result = enter("cuMemPoolSetAccess", true);
	REQUIRE(!result, result);
	pool *p = object(POOL, h);
	REQUIRE(p && n > 0, INVALID_VALUE);
	for (size_t i = 0; i < n; i++) {
		const struct access *a = &map[i];
		REQUIRE(a->location_type == 1 && (a->flags == 0 || a->flags == 3), INVALID_VALUE);
		REQUIRE(a->location_id >= 0 && a->location_id < emu.devices, INVALID_DEVICE);
		REQUIRE(emu.peer || a->location_id == p->device, INVALID_DEVICE);
		p->readable[a->location_id] = a->flags == 3;
	}
	return leave(OK);
}

static void abandon_event(void *o, void *arg)
{
	event *e = o;
	if (e->ctx != arg)
		return;
	emu.abandoned[EVENT]++;
	object_end(EVENT, e->id);
	e->id = 0;
	event_unref(e);
}

static void abandon_function(void *o, void *arg)
{
	function *f = o;
	if (f->module->ctx == arg) {
		object_end(FUNCTION, f->id);
		free(f);
	}
}

static void abandon_module(void *o, void *arg)
{
	module *m = o;
	if (m->ctx != arg)
		return;
	emu.abandoned[MODULE]++;
	object_end(MODULE, m->id);
	free(m->image);
	free(m);
}

static void abandon_pool(void *o, void *arg)
{
	pool *p = o;
	if (p->ctx != arg) // also the device's own, which has none
		return;
	emu.abandoned[POOL]++;
	object_end(POOL, p->id);
	free(p);
}

static void abandon_stream(void *o, void *arg)
{
	stream *s = o;
	if (s->ctx == arg) {
		emu.abandoned[STREAM]++;
		stream_end(s);
	}
}

// context_clear gives up what c still has, and counts it as abandoned.
void context_clear(context *c)
{
	each_object(STREAM, abandon_stream, c);
	while (c->workers)
		pthread_cond_wait(&emu.changed, &emu.lock);
	each_object(EVENT, abandon_event, c);
	each_object(FUNCTION, abandon_function, c);
	each_object(MODULE, abandon_module, c);
	unpin_of(c);
	device *d = &emu.dev[c->device];
	for (size_t i = d->nblocks; i-- > 0;) {
		block *b = d->blocks[i];
		if (b->ctx == c) {
			emu.abandoned[ALLOCATION]++;
			emu.live[ALLOCATION]--;
			block_free(c->device, b);
		}
	}
	each_object(POOL, abandon_pool, c);
	pthread_cond_broadcast(&emu.changed);
	pool_trim(d->default_pool, 0);
}
