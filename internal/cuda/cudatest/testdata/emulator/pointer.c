// What is known of an address, whoever allocated there.
#include "emulator.h"

// A driver writes each answer in its own width; who asks for one does not find the next one's bytes.
static int answer(int attribute, void *out, int type, uint64_t start, uint64_t size, bool mapped)
{
	switch (attribute) {
	case MEMORY_TYPE: *(uint32_t *)out = type; return OK;
	case RANGE_START_ADDR: *(uint64_t *)out = start; return OK;
	case RANGE_SIZE: *(uint64_t *)out = size; return OK;
	case MAPPED: *(uint8_t *)out = mapped; return OK;
	}
	return INVALID_VALUE;
}

EXPORT int cuPointerGetAttribute(void *out, int attribute, uint64_t addr)
{
	int result = enter("cuPointerGetAttribute", true);
	REQUIRE(!result, result);
	REQUIRE(emu.initialized, NOT_INITIALIZED);
	const block *b = find(addr, 1);
	if (b) {
		// That memory of a pool has a number of its own is nowhere written.
		if (attribute == (b->pool ? MEMPOOL_HANDLE : BUFFER_ID)) {
			*(uint64_t *)out = b->pool ? b->pool->id : ADDRESS_OF(b->ctx->device, b->off);
			return leave(OK);
		}
		return leave(answer(attribute, out, TYPE_DEVICE, ADDRESS_OF(b->ctx->device, b->off), b->size, !emu.plain_unmapped));
	}
	uint64_t base, n, start, size;
	bool mapped;
	if (virtual_mapping(addr, &base, &n, &mapped) && virtual_range(addr, &start, &size))
		return leave(answer(attribute, out, TYPE_DEVICE, start, size, mapped));
	const registration *r = is_device(addr) ? NULL : registered(addr);
	REQUIRE(r, INVALID_VALUE);
	if (attribute == BUFFER_ID) {
		*(uint64_t *)out = r->addr;
		return leave(OK);
	}
	return leave(answer(attribute, out, TYPE_HOST, r->addr, r->size, true));
}
