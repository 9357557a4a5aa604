// Memory that a program maps itself: it reserves addresses, allocates memory, and puts the one behind the other.
#include "emulator.h"
#include <stdlib.h>
#include <sys/mman.h>

enum { VIRTUAL_GRANULE = 2 << 20, MAX_RANGES = 64, READ_WRITE = 3 };

typedef struct physical {
	handle id; // 0 once released: what is mapped of it stays
	int device;
	uint64_t size;
	int refs;
} physical;

// A piece of a range of addresses.
typedef struct granule {
	physical *memory;      // NULL: nothing is mapped here
	size_t first, count;   // of the mapping, in granules
	uint8_t access[MAX_DEVICES];
} granule;

typedef struct range {
	uint64_t addr, size;
	uint8_t *bytes;
	granule *granules;
} range;

// They stay where they are: a range that is given up leaves its place empty.
static range ranges[MAX_RANGES];
static uint64_t next_addr;

bool is_virtual(uint64_t addr) { return addr >> 48 == VIRTUAL_TAG; }

static range *range_at(uint64_t addr, uint64_t n)
{
	for (int i = 0; i < MAX_RANGES; i++) {
		range *r = &ranges[i];
		if (r->size && addr >= r->addr && addr - r->addr < r->size && n <= r->size - (addr - r->addr))
			return r;
	}
	return NULL;
}

static granule *granule_at(range *r, uint64_t addr) { return &r->granules[(addr - r->addr) / VIRTUAL_GRANULE]; }

// virtual_bytes returns the memory behind n bytes of mapped addresses, which may lie in several mappings, NULL if there
// is none, or none that the device may use.
uint8_t *virtual_bytes(int device, uint64_t addr, size_t n)
{
	range *r = range_at(addr, n);
	if (!r)
		return NULL;
	granule *last = granule_at(r, addr + (n ? n - 1 : 0));
	for (granule *g = granule_at(r, addr); g <= last; g++)
		if (!g->memory || g->access[device] != READ_WRITE)
			return NULL;
	return r->bytes + (addr - r->addr);
}

// virtual_mapping finds the mapping at an address, or, where there is none, the range: that a driver finds nothing there
// is nowhere written. *mapped says which.
bool virtual_mapping(uint64_t addr, uint64_t *base, uint64_t *n, bool *mapped)
{
	range *r = range_at(addr, 1);
	if (!r)
		return false;
	granule *g = granule_at(r, addr);
	*mapped = g->memory;
	*base = g->memory ? r->addr + g->first * VIRTUAL_GRANULE : r->addr;
	*n = g->memory ? g->count * VIRTUAL_GRANULE : r->size;
	return true;
}

bool virtual_range(uint64_t addr, uint64_t *base, uint64_t *n)
{
	range *r = range_at(addr, 1);
	if (!r)
		return false;
	*base = r->addr;
	*n = r->size;
	return true;
}

static void physical_unref(physical *p)
{
	if (--p->refs)
		return;
	emu.dev[p->device].plain -= p->size;
	emu.live[PHYSICAL]--;
	free(p);
}

#define VIRTUAL_CALL(name)              \
	int result = enter(name, true); \
	REQUIRE(!result, result);       \
	REQUIRE(emu.initialized, NOT_INITIALIZED)

EXPORT int cuMemAddressReserve(uint64_t *out, size_t n, size_t alignment, uint64_t hint, uint64_t flags)
{
	(void)hint;
	VIRTUAL_CALL("cuMemAddressReserve");
	REQUIRE(n && n % VIRTUAL_GRANULE == 0 && !(alignment & (alignment - 1)) && alignment <= VIRTUAL_GRANULE && !flags, INVALID_VALUE);
	for (int i = 0; i < MAX_RANGES; i++) {
		range *r = &ranges[i];
		if (r->size)
			continue;
		uint8_t *bytes = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		REQUIRE(bytes != MAP_FAILED, OUT_OF_MEMORY);
		next_addr += VIRTUAL_GRANULE; // so that two do not touch
		*r = (range){VIRTUAL_TAG << 48 | next_addr, n, bytes, calloc(n / VIRTUAL_GRANULE, sizeof(granule))};
		next_addr += n;
		*out = r->addr;
		emu.live[ADDRESS_RANGE]++;
		return leave(OK);
	}
	return leave(OUT_OF_MEMORY);
}

EXPORT int cuMemAddressFree(uint64_t addr, size_t n)
{
	VIRTUAL_CALL("cuMemAddressFree");
	range *r = range_at(addr, n);
	REQUIRE(r && r->addr == addr && r->size == n, INVALID_VALUE);
	for (size_t i = 0; i < n / VIRTUAL_GRANULE; i++)
		REQUIRE(!r->granules[i].memory, INVALID_VALUE);
	munmap(r->bytes, n);
	free(r->granules);
	*r = (range){0};
	emu.live[ADDRESS_RANGE]--;
	return leave(OK);
}

struct allocation_props {
	int32_t type, handle_types, location_type, location_id;
	void *security;
	uint8_t flags[8];
};

EXPORT int cuMemCreate(handle *out, size_t n, const struct allocation_props *props, uint64_t flags)
{
	VIRTUAL_CALL("cuMemCreate");
	REQUIRE(n && n % VIRTUAL_GRANULE == 0 && !flags && props->type == 1 && props->location_type == 1, INVALID_VALUE);
	REQUIRE(props->location_id >= 0 && props->location_id < emu.devices, INVALID_DEVICE);
	device *d = &emu.dev[props->location_id];
	REQUIRE(n <= d->capacity - d->plain, OUT_OF_MEMORY);
	d->plain += n;
	physical *p = calloc(1, sizeof *p);
	*p = (physical){.device = props->location_id, .size = n, .refs = 1};
	*out = p->id = object_new(PHYSICAL, p);
	return leave(OK);
}

EXPORT int cuMemRelease(handle h)
{
	VIRTUAL_CALL("cuMemRelease");
	physical *p = object(PHYSICAL, h);
	REQUIRE(p, INVALID_VALUE);
	object_end(PHYSICAL, h);
	emu.live[PHYSICAL]++; // until nothing is mapped of it
	p->id = 0;
	physical_unref(p);
	return leave(OK);
}

// cuMemRetainAllocationHandle gives one more handle of what a program has mapped, and of nothing else.
EXPORT int cuMemRetainAllocationHandle(handle *out, uint64_t addr)
{
	VIRTUAL_CALL("cuMemRetainAllocationHandle");
	range *r = range_at(addr, 1);
	REQUIRE(r && granule_at(r, addr)->memory, INVALID_VALUE);
	physical *p = granule_at(r, addr)->memory;
	*out = object_new(PHYSICAL, p);
	emu.live[PHYSICAL]--; // it is the memory that counts
	p->refs++;
	return leave(OK);
}

EXPORT int cuMemMap(uint64_t addr, size_t n, size_t offset, handle h, uint64_t flags)
{
	VIRTUAL_CALL("cuMemMap");
	physical *p = object(PHYSICAL, h);
	range *r = range_at(addr, n);
	REQUIRE(p && r && n && (addr - r->addr) % VIRTUAL_GRANULE == 0 && n % VIRTUAL_GRANULE == 0, INVALID_VALUE);
	REQUIRE(offset == 0 && n <= p->size && !flags, INVALID_VALUE);
	granule *g = granule_at(r, addr);
	size_t count = n / VIRTUAL_GRANULE;
	for (size_t i = 0; i < count; i++)
		REQUIRE(!g[i].memory, INVALID_VALUE);
	for (size_t i = 0; i < count; i++)
		g[i] = (granule){.memory = p, .first = g - r->granules, .count = count};
	p->refs++;
	return leave(OK);
}

EXPORT int cuMemUnmap(uint64_t addr, size_t n)
{
	VIRTUAL_CALL("cuMemUnmap");
	range *r = range_at(addr, n);
	REQUIRE(r && n, INVALID_VALUE);
	for (uint64_t at = addr; at < addr + n;) { // whole mappings only
		granule *g = granule_at(r, at);
		REQUIRE(g->memory && at == r->addr + g->first * VIRTUAL_GRANULE && g->count * VIRTUAL_GRANULE <= addr + n - at, INVALID_VALUE);
		at += g->count * VIRTUAL_GRANULE;
	}
	while (n) {
		granule *g = granule_at(r, addr);
		size_t count = g->count;
		physical_unref(g->memory);
		for (size_t i = 0; i < count; i++)
			g[i] = (granule){0};
		addr += count * VIRTUAL_GRANULE;
		n -= count * VIRTUAL_GRANULE;
	}
	return leave(OK);
}

struct location {
	int32_t type, id;
};

struct access_desc {
	struct location location;
	int32_t flags;
};

EXPORT int cuMemSetAccess(uint64_t addr, size_t n, const struct access_desc *descs, size_t count)
{
	VIRTUAL_CALL("cuMemSetAccess");
	range *r = range_at(addr, n);
	REQUIRE(r && n && (addr - r->addr) % VIRTUAL_GRANULE == 0 && n % VIRTUAL_GRANULE == 0, INVALID_VALUE);
	granule *g = granule_at(r, addr);
	for (size_t i = 0; i < n / VIRTUAL_GRANULE; i++)
		REQUIRE(g[i].memory, INVALID_VALUE);
	for (size_t k = 0; k < count; k++) {
		const struct access_desc *d = &descs[k];
		REQUIRE(d->location.type == 1 && (d->flags == 0 || d->flags == 1 || d->flags == READ_WRITE), INVALID_VALUE);
		REQUIRE(d->location.id >= 0 && d->location.id < emu.devices, INVALID_DEVICE);
		for (size_t i = 0; i < n / VIRTUAL_GRANULE; i++) {
			REQUIRE(emu.peer || g[i].memory->device == d->location.id, INVALID_DEVICE);
			g[i].access[d->location.id] = d->flags;
		}
	}
	return leave(OK);
}

EXPORT int cuMemGetAccess(uint64_t *flags, const struct location *location, uint64_t addr)
{
	VIRTUAL_CALL("cuMemGetAccess");
	if (emu.plain_access >= 0 && find(addr, 1)) {
		*flags = emu.plain_access;
		return leave(OK);
	}
	range *r = range_at(addr, 1);
	REQUIRE(r && granule_at(r, addr)->memory, INVALID_VALUE); // of other memory it knows nothing
	REQUIRE(location->type == 1 && location->id >= 0 && location->id < emu.devices, INVALID_DEVICE);
	*flags = granule_at(r, addr)->access[location->id];
	return leave(OK);
}
