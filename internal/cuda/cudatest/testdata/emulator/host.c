// Host memory that is pinned: registered, or allocated so.
#include "emulator.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// reg_place returns the index of the first registration that ends behind addr.
static size_t reg_place(uintptr_t addr)
{
	size_t i = 0;
	while (i < emu.nregs && emu.regs[i].addr + emu.regs[i].size <= addr)
		i++;
	return i;
}

enum pinned host_range(context *c, uintptr_t addr, size_t n)
{
	size_t i = reg_place(addr);
	if (i == emu.nregs || emu.regs[i].addr >= addr + n)
		return PAGEABLE;
	registration *r = &emu.regs[i];
	if (addr < r->addr || addr + n > r->addr + r->size)
		return STRADDLES;
	return r->portable || r->ctx == c ? PINNED : PAGEABLE;
}

// registered returns the registration, or allocation, that addr lies in.
const registration *registered(uintptr_t addr)
{
	size_t i = reg_place(addr);
	return i < emu.nregs && emu.regs[i].addr <= addr ? &emu.regs[i] : NULL;
}

static int pin(context *c, uintptr_t addr, size_t n, bool portable, bool ours)
{
	size_t i = reg_place(addr);
	if (i < emu.nregs && emu.regs[i].addr < addr + n)
		return HOST_MEMORY_ALREADY_REGISTERED;
	if (emu.register_limit >= 0 && (int64_t)n > emu.register_limit - emu.registered)
		return OUT_OF_MEMORY;
	if (emu.nregs == emu.regcap) {
		emu.regcap = emu.regcap ? 2 * emu.regcap : 16;
		emu.regs = realloc(emu.regs, emu.regcap * sizeof *emu.regs);
	}
	memmove(emu.regs + i + 1, emu.regs + i, (emu.nregs - i) * sizeof *emu.regs);
	emu.nregs++;
	emu.registered += n;
	emu.regs[i] = (registration){addr, n, c, portable, ours};
	emu.live[ours ? HOST_ALLOCATION : REGISTRATION]++;
	return OK;
}

static void unpin(size_t i)
{
	registration r = emu.regs[i];
	emu.registered -= r.size;
	memmove(emu.regs + i, emu.regs + i + 1, (emu.nregs - i - 1) * sizeof *emu.regs);
	emu.nregs--;
	emu.live[r.ours ? HOST_ALLOCATION : REGISTRATION]--;
	if (r.ours)
		munmap((void *)r.addr, r.size);
}

// unpin_of ends what c has pinned, also what is portable: that goes with the context that it was pinned in.
void unpin_of(context *c)
{
	for (size_t i = emu.nregs; i-- > 0;) {
		if (emu.regs[i].ctx == c) {
			emu.abandoned[emu.regs[i].ours ? HOST_ALLOCATION : REGISTRATION]++;
			unpin(i);
		}
	}
}

// unpin_all ends what nobody has.
void unpin_all(void)
{
	while (emu.nregs)
		unpin(emu.nregs - 1);
}

EXPORT int cuMemHostRegister_v2(void *p, size_t n, unsigned flags)
{
	CALL("cuMemHostRegister_v2");
	REQUIRE(p && n && !(flags & ~15u) && !is_device((uintptr_t)p), INVALID_VALUE);
	return leave(pin(c, (uintptr_t)p, n, flags & 1, false));
}

EXPORT int cuMemHostUnregister(void *p)
{
	RELEASE("cuMemHostUnregister");
	size_t i = reg_place((uintptr_t)p);
	REQUIRE(i < emu.nregs && emu.regs[i].addr == (uintptr_t)p && !emu.regs[i].ours, HOST_MEMORY_NOT_REGISTERED);
	REQUIRE(!emu.unregister_home || emu.regs[i].ctx == c, INVALID_VALUE);
	context_drain(c);
	unpin(reg_place((uintptr_t)p)); // others may have changed the list meanwhile
	return leave(told);
}

EXPORT int cuMemHostAlloc(void **out, size_t n, unsigned flags)
{
	CALL("cuMemHostAlloc");
	REQUIRE(n && !(flags & ~7u), INVALID_VALUE);
	void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	REQUIRE(p != MAP_FAILED, OUT_OF_MEMORY);
	result = pin(c, (uintptr_t)p, n, flags & 1, true);
	if (result)
		munmap(p, n);
	else
		*out = p;
	return leave(result);
}

EXPORT int cuMemFreeHost(void *p)
{
	RELEASE("cuMemFreeHost");
	size_t i = reg_place((uintptr_t)p);
	REQUIRE(i < emu.nregs && emu.regs[i].addr == (uintptr_t)p && emu.regs[i].ours, INVALID_VALUE);
	context_drain(c);
	unpin(reg_place((uintptr_t)p));
	return leave(told);
}

EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *out, void *p, unsigned flags)
{
	CALL("cuMemHostGetDevicePointer_v2");
	REQUIRE(flags == 0 && host_range(c, (uintptr_t)p, 1) == PINNED, INVALID_VALUE);
	*out = (uintptr_t)p;
	return leave(OK);
}
