// The driver, its devices and their contexts.
#include "emulator.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

__thread context *stack[MAX_STACK];
__thread int depth;

static int device_known(int dev)
{
	if (!emu.initialized)
		return NOT_INITIALIZED;
	return dev >= 0 && dev < emu.devices ? OK : INVALID_DEVICE;
}

EXPORT int cuDriverGetVersion(int *version)
{
	int result = enter("cuDriverGetVersion", true);
	if (!result)
		*version = emu.version;
	return leave(result);
}

EXPORT int cuInit(unsigned flags)
{
	int result = enter("cuInit", true);
	REQUIRE(!result, result);
	REQUIRE(flags == 0, INVALID_VALUE);
	REQUIRE(emu.devices > 0, NO_DEVICE);
	for (int i = 0; i < emu.devices && !emu.initialized; i++) {
		device *d = &emu.dev[i];
		d->capacity = emu.memory / GRANULE * GRANULE;
		d->memory = mmap(NULL, d->capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (d->memory == MAP_FAILED)
			abort();
		d->default_pool = calloc(1, sizeof(pool));
		d->default_pool->device = i;
		for (int a = 1; a <= REUSE_ALLOW_INTERNAL_DEPENDENCIES; a++)
			d->default_pool->reuse[a] = 1;
		d->default_pool->id = object_new(POOL, d->default_pool);
		emu.live[POOL]--; // it is the device's
	}
	emu.initialized = true;
	return leave(OK);
}

EXPORT int cuDeviceGetCount(int *n)
{
	int result = enter("cuDeviceGetCount", true);
	REQUIRE(!result, result);
	REQUIRE(emu.initialized, NOT_INITIALIZED);
	*n = emu.devices;
	return leave(OK);
}

#define DEVICE_CALL(name)               \
	int result = enter(name, true); \
	if (!result)                    \
		result = device_known(dev); \
	REQUIRE(!result, result)

EXPORT int cuDeviceGet(int *out, int dev)
{
	DEVICE_CALL("cuDeviceGet");
	*out = dev;
	return leave(OK);
}

EXPORT int cuDeviceGetName(char *name, int n, int dev)
{
	DEVICE_CALL("cuDeviceGetName");
	snprintf(name, n, "Spillway CUDA emulator %d", dev);
	return leave(OK);
}

static int uuid(const char *symbol, uint8_t *out, int dev)
{
	DEVICE_CALL(symbol);
	for (int i = 0; i < 16; i++)
		out[i] = 0xe0 + i;
	out[15] = dev;
	return leave(OK);
}

EXPORT int cuDeviceGetUuid(uint8_t *out, int dev) { return uuid("cuDeviceGetUuid", out, dev); }
EXPORT int cuDeviceGetUuid_v2(uint8_t *out, int dev) { return uuid("cuDeviceGetUuid_v2", out, dev); }

EXPORT int cuDeviceTotalMem_v2(size_t *n, int dev)
{
	DEVICE_CALL("cuDeviceTotalMem_v2");
	*n = emu.dev[dev].capacity;
	return leave(OK);
}

EXPORT int cuDeviceGetPCIBusId(char *id, int n, int dev)
{
	DEVICE_CALL("cuDeviceGetPCIBusId");
	snprintf(id, n, "0000:%02X:00.0", 0xe0 + dev);
	return leave(OK);
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int dev)
{
	DEVICE_CALL("cuDeviceGetAttribute");
	switch (attribute) {
	case 16: *value = 4; break;           // multiprocessors
	case 18: *value = 0; break;           // integrated
	case 19: *value = 1; break;           // maps host memory
	case 20: *value = 0; break;           // compute mode
	case 33: *value = 0xe0 + dev; break;  // PCI bus
	case 34: *value = 0; break;           // PCI device
	case 40: *value = 2; break;           // engines that copy
	case 41: *value = 1; break;           // unified addressing
	case 50: *value = 0; break;           // PCI domain
	case 75: *value = 7; break;           // compute capability
	case 76: *value = 5; break;
	case 91: *value = 1; break;           // host pointers of registered memory can be used
	case 99: *value = 1; break;           // host memory can be registered
	case 115: *value = emu.version >= 11020; break; // memory pools
	default: REQUIRE(attribute > 0 && attribute < 160, INVALID_VALUE); *value = 0;
	}
	return leave(OK);
}

EXPORT int cuDeviceCanAccessPeer(int *can, int dev, int peer)
{
	DEVICE_CALL("cuDeviceCanAccessPeer");
	REQUIRE(!device_known(peer), INVALID_DEVICE);
	*can = emu.peer && dev != peer;
	return leave(OK);
}

static context *context_new(int dev)
{
	context *c = calloc(1, sizeof(context));
	if (!c)
		abort();
	c->device = dev;
	c->id = object_new(CONTEXT, c);
	return c;
}

static void context_end(context *c)
{
	c->ending = true;
	context_drain(c);
	context_clear(c);
	object_end(CONTEXT, c->id);
	c->id = 0; // threads on whose stacks it lies find it dead; it stays for them
}

EXPORT int cuDevicePrimaryCtxRetain(handle *out, int dev)
{
	DEVICE_CALL("cuDevicePrimaryCtxRetain");
	device *d = &emu.dev[dev];
	if (!d->primary)
		d->primary = context_new(dev);
	d->primary->retained++;
	*out = d->primary->id;
	return leave(OK);
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int dev)
{
	const int told = enter("cuDevicePrimaryCtxRelease_v2", true);
	REQUIRE(!device_known(dev), device_known(dev));
	context *c = emu.dev[dev].primary;
	REQUIRE(c, INVALID_CONTEXT);
	if (--c->retained > 0)
		return leave(told);
	emu.dev[dev].primary = NULL;
	context_end(c);
	return leave(told);
}

// Contexts that a program makes for itself.
EXPORT int cuCtxCreate_v2(handle *out, unsigned flags, int dev)
{
	DEVICE_CALL("cuCtxCreate_v2");
	REQUIRE(!(flags & ~0x1fu) && depth < MAX_STACK, INVALID_VALUE);
	stack[depth++] = context_new(dev);
	*out = stack[depth - 1]->id;
	return leave(OK);
}

EXPORT int cuCtxDestroy_v2(handle h)
{
	const int told = enter("cuCtxDestroy_v2", true);
	context *c = object(CONTEXT, h);
	REQUIRE(c && c != emu.dev[c->device].primary, INVALID_CONTEXT);
	if (depth && stack[depth - 1] == c)
		depth--;
	context_end(c);
	return leave(told);
}

// devices_reset gives up what cuInit has made.
void devices_reset(void)
{
	for (int i = 0; i < emu.devices && emu.initialized; i++) {
		device *d = &emu.dev[i];
		emu.live[POOL]++; // which the device's own is not counted in
		object_end(POOL, d->default_pool->id);
		free(d->default_pool);
		munmap(d->memory, d->capacity);
		free(d->blocks);
		*d = (device){0};
	}
	emu.initialized = false;
}

context *current(int *result)
{
	context *c = depth ? stack[depth - 1] : NULL;
	while (emu.initialized && c && c->full)
		pthread_cond_wait(&emu.changed, &emu.lock);
	if (!emu.initialized)
		*result = NOT_INITIALIZED;
	else if (!c || !c->id)
		*result = INVALID_CONTEXT;
	else if (c->error)
		*result = c->error;
	else
		return c;
	return NULL;
}

EXPORT int cuCtxSetCurrent(handle h)
{
	int result = enter("cuCtxSetCurrent", true);
	REQUIRE(!result, result);
	context *c = object(CONTEXT, h);
	REQUIRE(!h || c, INVALID_CONTEXT);
	if (!h)
		depth = depth ? depth - 1 : 0;
	else
		stack[depth ? depth - 1 : depth++] = c;
	return leave(OK);
}

EXPORT int cuCtxPushCurrent_v2(handle h)
{
	int result = enter("cuCtxPushCurrent_v2", true);
	REQUIRE(!result, result);
	context *c = object(CONTEXT, h);
	REQUIRE(c && depth < MAX_STACK, INVALID_CONTEXT);
	stack[depth++] = c;
	return leave(OK);
}

EXPORT int cuCtxPopCurrent_v2(handle *h)
{
	int result = enter("cuCtxPopCurrent_v2", true);
	REQUIRE(!result, result);
	REQUIRE(depth, INVALID_CONTEXT);
	depth--;
	if (h)
		*h = stack[depth]->id;
	return leave(OK);
}

EXPORT int cuCtxGetCurrent(handle *h)
{
	int result = enter("cuCtxGetCurrent", false);
	REQUIRE(!result, result);
	*h = depth ? stack[depth - 1]->id : 0;
	return leave(OK);
}

EXPORT int cuCtxGetDevice(int *dev)
{
	CALL("cuCtxGetDevice");
	*dev = c->device;
	return leave(OK);
}

EXPORT int cuCtxSynchronize(void)
{
	CALL("cuCtxSynchronize");
	context_drain(c);
	synchronized(c);
	return leave(c->error);
}

EXPORT int cuCtxEnablePeerAccess(handle peer, unsigned flags)
{
	CALL("cuCtxEnablePeerAccess");
	context *p = object(CONTEXT, peer);
	REQUIRE(p && p != c, INVALID_CONTEXT);
	REQUIRE(flags == 0, INVALID_VALUE);
	REQUIRE(emu.peer && p->device != c->device, PEER_ACCESS_UNSUPPORTED);
	REQUIRE(!c->peer[p->device], PEER_ACCESS_ALREADY_ENABLED);
	c->peer[p->device] = true;
	return leave(OK);
}

EXPORT int cuCtxDisablePeerAccess(handle peer)
{
	CALL("cuCtxDisablePeerAccess");
	context *p = object(CONTEXT, peer);
	REQUIRE(p, INVALID_CONTEXT);
	REQUIRE(c->peer[p->device], PEER_ACCESS_NOT_ENABLED);
	c->peer[p->device] = false;
	return leave(OK);
}

static const struct {
	int code;
	const char *name, *text;
} results[] = {
	{OK, "CUDA_SUCCESS", "no error"},
	{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported"},
	{INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX compilation failed"},
	{221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "PTX JIT compiler library not found"},
	{UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
	{INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	{NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
	{ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	{PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
	{PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
	{HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part of the memory is already registered"},
	{HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "the memory is not registered"},
	{NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	{STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
	{999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int describe(const char *symbol, int code, bool name, const char **out)
{
	int result = enter(symbol, false);
	REQUIRE(!result, result);
	for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
		if (results[i].code == code) {
			*out = name ? results[i].name : results[i].text;
			return leave(OK);
		}
	}
	*out = NULL;
	return leave(INVALID_VALUE);
}

EXPORT int cuGetErrorName(int code, const char **out) { return describe("cuGetErrorName", code, true, out); }
EXPORT int cuGetErrorString(int code, const char **out) { return describe("cuGetErrorString", code, false, out); }
