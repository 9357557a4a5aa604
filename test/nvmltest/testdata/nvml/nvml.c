// A library that stands for NVIDIA's libnvidia-ml.so.1 in tests: the functions that package nvml
// calls, with arguments and structs as C has them. It makes up GPUs whose every number is another,
// so that none can be taken for its neighbour.
//
// With -DNVIDIA_HEADER="…/nvml.h" types and constants are those of NVIDIA's header, and the
// compiler compares the functions and what is asserted below with it.

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#ifdef NVIDIA_HEADER
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include NVIDIA_HEADER
#else
typedef int nvmlReturn_t, nvmlEnableState_t, nvmlIntNvLinkDeviceType_t; // enums
typedef unsigned int nvmlAffinityScope_t;
typedef struct { struct nvmlDevice_st *handle; } nvmlDevice_t;
typedef struct {
	char busIdLegacy[16];
	unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;
typedef struct {
	unsigned long long total, free, used;
} nvmlMemory_t;
enum {
	NVML_SUCCESS = 0, NVML_ERROR_UNINITIALIZED = 1, NVML_ERROR_INVALID_ARGUMENT = 2, NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NOT_FOUND = 6, NVML_ERROR_INSUFFICIENT_SIZE = 7,
	NVML_FEATURE_DISABLED = 0, NVML_FEATURE_ENABLED = 1,
	NVML_NVLINK_DEVICE_TYPE_GPU = 0, NVML_NVLINK_DEVICE_TYPE_IBMNPU = 1, NVML_NVLINK_DEVICE_TYPE_SWITCH = 2, NVML_NVLINK_DEVICE_TYPE_UNKNOWN = 255,
	NVML_AFFINITY_SCOPE_NODE = 0, NVML_DEVICE_MIG_DISABLE = 0, NVML_DEVICE_MIG_ENABLE = 1, NVML_NVLINK_MAX_LINKS = 18,
};
#endif

// As counted by hand.
#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #field)
AT(nvmlPciInfo_t, busIdLegacy, 0);
AT(nvmlPciInfo_t, domain, 16);
AT(nvmlPciInfo_t, bus, 20);
AT(nvmlPciInfo_t, device, 24);
AT(nvmlPciInfo_t, pciDeviceId, 28);
AT(nvmlPciInfo_t, pciSubSystemId, 32);
AT(nvmlPciInfo_t, busId, 36);
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "nvmlPciInfo_t");
AT(nvmlMemory_t, total, 0);
AT(nvmlMemory_t, free, 8);
AT(nvmlMemory_t, used, 16);
_Static_assert(sizeof(nvmlMemory_t) == 24, "nvmlMemory_t");
_Static_assert(sizeof(nvmlDevice_t) == 8 && sizeof(unsigned long) == 8 && sizeof(nvmlReturn_t) == 4, "sizes");
_Static_assert(sizeof(nvmlEnableState_t) == 4 && sizeof(nvmlIntNvLinkDeviceType_t) == 4 && sizeof(nvmlAffinityScope_t) == 4, "enums");
_Static_assert(NVML_SUCCESS == 0 && NVML_ERROR_UNINITIALIZED == 1 && NVML_ERROR_INVALID_ARGUMENT == 2 && NVML_ERROR_NOT_SUPPORTED == 3 &&
	NVML_ERROR_NOT_FOUND == 6 && NVML_ERROR_INSUFFICIENT_SIZE == 7, "results");
_Static_assert(NVML_FEATURE_DISABLED == 0 && NVML_FEATURE_ENABLED == 1 && NVML_AFFINITY_SCOPE_NODE == 0 &&
	NVML_DEVICE_MIG_DISABLE == 0 && NVML_DEVICE_MIG_ENABLE == 1 && NVML_NVLINK_MAX_LINKS == 18, "numbers");
_Static_assert(NVML_NVLINK_DEVICE_TYPE_GPU == 0 && NVML_NVLINK_DEVICE_TYPE_IBMNPU == 1 && NVML_NVLINK_DEVICE_TYPE_SWITCH == 2 &&
	NVML_NVLINK_DEVICE_TYPE_UNKNOWN == 255, "ends of links");

#define API __attribute__((visibility("default")))

enum { GPUS = 2, PLACES = 7 };

struct nvmlDevice_st { int gpu, part; }; // part is 0 for the GPU itself, else its place from 1

static struct nvmlDevice_st devices[GPUS][1 + PLACES];

// Guarded by mutex.
static struct {
	pthread_mutex_t mutex;
	long initialized; // how often
	long name_length, node_words, cpu_words;
	struct { char name[64]; long calls; int code; } function[64];
} state = { .mutex = PTHREAD_MUTEX_INITIALIZER, .node_words = 16, .cpu_words = 128 };

static int find(const char *name) {
	int i = 0;
	for (; i < 63 && state.function[i].name[0]; i++)
		if (!strcmp(state.function[i].name, name))
			return i;
	snprintf(state.function[i].name, sizeof state.function[i].name, "%s", name);
	return i;
}

// enter counts a call and says how it fails, if it does before it begins.
static nvmlReturn_t enter(const char *name, long initialized) {
	pthread_mutex_lock(&state.mutex);
	int i = find(name);
	state.function[i].calls++;
	nvmlReturn_t code = state.function[i].code;
	if (!code && state.initialized < initialized)
		code = NVML_ERROR_UNINITIALIZED;
	pthread_mutex_unlock(&state.mutex);
	return code;
}

static int known(nvmlDevice_t d) {
	struct nvmlDevice_st *h = d.handle;
	return h >= &devices[0][0] && h <= &devices[GPUS - 1][PLACES] && ((char *)h - (char *)devices) % sizeof *h == 0;
}

// ENTER begins a function of the library that is about device d and writes to out.
#define ENTER(d, out) \
	do { \
		nvmlReturn_t code = enter(__func__, 1); \
		if (code) \
			return code; \
		if (!known(d) || !(out)) \
			return NVML_ERROR_INVALID_ARGUMENT; \
	} while (0)

// GPU_ONLY is for what MIG instances do not have.
#define GPU_ONLY(d) \
	if ((d).handle->part) \
		return NVML_ERROR_INVALID_ARGUMENT

static nvmlReturn_t text(char *to, unsigned int length, const char *from) {
	if (strlen(from) + 1 > length)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memset(to, '#', length); // behind the end is something
	strcpy(to, from);
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlInit_v2(void) {
	nvmlReturn_t code = enter(__func__, 0);
	if (code)
		return code;
	pthread_mutex_lock(&state.mutex);
	state.initialized++;
	for (int i = 0; i < GPUS; i++)
		for (int k = 0; k <= PLACES; k++)
			devices[i][k] = (struct nvmlDevice_st){i, k};
	pthread_mutex_unlock(&state.mutex);
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlShutdown(void) {
	nvmlReturn_t code = enter(__func__, 1);
	if (code)
		return code;
	pthread_mutex_lock(&state.mutex);
	state.initialized--;
	pthread_mutex_unlock(&state.mutex);
	return NVML_SUCCESS;
}

API const char *nvmlErrorString(nvmlReturn_t result) {
	switch ((int)result) {
	case 999: return "Unknown Error";
	case 998: return NULL;
	case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
	default: return "what the library says";
	}
}

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *deviceCount) {
	nvmlReturn_t code = enter(__func__, 1);
	if (code)
		return code;
	*deviceCount = GPUS;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
	nvmlReturn_t code = enter(__func__, 1);
	if (code)
		return code;
	if (index >= GPUS)
		return NVML_ERROR_INVALID_ARGUMENT;
	device->handle = &devices[index][0];
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
	ENTER(device, name);
	char buf[4096];
	if (device.handle->part)
		snprintf(buf, sizeof buf, "Spillway NVML fake MIG %dg", device.handle->part);
	else
		snprintf(buf, sizeof buf, "Spillway NVML fake %d", device.handle->gpu);
	for (long n = strlen(buf); n < state.name_length; n++) {
		buf[n] = 'a' + n % 26;
		buf[n + 1] = 0;
	}
	return text(name, length, buf);
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
	ENTER(device, uuid);
	char buf[96];
	snprintf(buf, sizeof buf, "%s-e%de1e2e3-e4e5-e6e7-e8e9-eaebeceded%02d", device.handle->part ? "MIG" : "GPU", device.handle->gpu, device.handle->part);
	return text(uuid, length, buf);
}

static void pci(nvmlPciInfo_t *info, unsigned int domain, unsigned int bus, unsigned int device, unsigned int id) {
	memset(info, '#', sizeof *info);
	snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%04X:%02X:%02X.0", domain & 0xffff, bus, device);
	snprintf(info->busId, sizeof info->busId, "%08X:%02X:%02X.0", domain, bus, device);
	info->domain = domain;
	info->bus = bus;
	info->device = device;
	info->pciDeviceId = id;
	info->pciSubSystemId = 0x153310de;
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
	ENTER(device, info);
	GPU_ONLY(device);
	pci(info, 0, 0x19 + device.handle->gpu, 0, 0x20b510de);
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
	ENTER(device, memory);
	memory->total = (device.handle->gpu + 1ULL) << 34 | (unsigned long long)device.handle->part << 30;
	memory->used = 0x12345678ULL;
	memory->free = memory->total - memory->used;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned int *maxLinkGen) {
	ENTER(device, maxLinkGen);
	GPU_ONLY(device);
	*maxLinkGen = 4 + device.handle->gpu;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned int *currLinkWidth) {
	ENTER(device, currLinkWidth);
	GPU_ONLY(device);
	*currLinkWidth = 16 >> (device.handle->gpu & 1);
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node) {
	ENTER(device, node);
	if (device.handle->gpu == 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*node = 0xffffffff;
	return NVML_SUCCESS;
}

// set marks one thing of the first 64 and the last that there is room for.
static nvmlReturn_t set(unsigned long *words, unsigned int n, long needed, int first) {
	if (n < needed)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memset(words, 0, n * sizeof *words);
	words[0] = 1UL << first;
	words[n - 1] |= 1UL << 63;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int nodeSetSize, unsigned long *nodeSet, nvmlAffinityScope_t scope) {
	ENTER(device, nodeSet);
	if (scope != NVML_AFFINITY_SCOPE_NODE)
		return NVML_ERROR_INVALID_ARGUMENT;
	return set(nodeSet, nodeSetSize, state.node_words, device.handle->gpu);
}

API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int cpuSetSize, unsigned long *cpuSet) {
	ENTER(device, cpuSet);
	return set(cpuSet, cpuSetSize, state.cpu_words, 40 + device.handle->gpu);
}

// Links 0 to 3 are up, 4 is down, and the others are not there.
API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *isActive) {
	ENTER(device, isActive);
	GPU_ONLY(device);
	if (link >= NVML_NVLINK_MAX_LINKS)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (link > 4)
		return NVML_ERROR_NOT_SUPPORTED;
	*isActive = link < 4 ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *info) {
	ENTER(device, info);
	GPU_ONLY(device);
	if (link >= 4)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (link == 2)
		pci(info, 0, 0x1a - device.handle->gpu, 0, 0x20b510de); // the other GPU
	else
		pci(info, 0xab0000 + link, 0xc4 + link, 1 + link, 0x1af110de);
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, nvmlIntNvLinkDeviceType_t *type) {
	static const int types[4] = {NVML_NVLINK_DEVICE_TYPE_SWITCH, NVML_NVLINK_DEVICE_TYPE_IBMNPU, NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_UNKNOWN};
	ENTER(device, type);
	GPU_ONLY(device);
	if (link >= 4)
		return NVML_ERROR_INVALID_ARGUMENT;
	*type = types[link];
	return NVML_SUCCESS;
}

// The first GPU is divided, and the second will be.
API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *currentMode, unsigned int *pendingMode) {
	ENTER(device, currentMode && pendingMode);
	GPU_ONLY(device);
	*currentMode = device.handle->gpu == 0 ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
	*pendingMode = device.handle->gpu == 0 ? NVML_DEVICE_MIG_DISABLE : NVML_DEVICE_MIG_ENABLE;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
	ENTER(device, count);
	GPU_ONLY(device);
	*count = PLACES;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *migDevice) {
	ENTER(device, migDevice);
	GPU_ONLY(device);
	if (index >= PLACES)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (index != 0 && index != 2)
		return NVML_ERROR_NOT_FOUND;
	migDevice->handle = &devices[device.handle->gpu][1 + index];
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) {
	ENTER(device, id);
	if (!device.handle->part)
		return NVML_ERROR_INVALID_ARGUMENT;
	*id = 10 + device.handle->part;
	return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) {
	ENTER(device, id);
	if (!device.handle->part)
		return NVML_ERROR_INVALID_ARGUMENT;
	*id = 20 + device.handle->part;
	return NVML_SUCCESS;
}

// ---- for tests ----

// fake_set changes a setting; 0 if there is such a one.
API int fake_set(const char *name, long value) {
	if (!strcmp(name, "name_length") && value < 4000)
		state.name_length = value;
	else if (!strcmp(name, "node_words"))
		state.node_words = value;
	else if (!strcmp(name, "cpu_words"))
		state.cpu_words = value;
	else
		return 1;
	return 0;
}

// fake_fail makes all calls of a function fail, until it is called with 0.
API void fake_fail(const char *name, int code) {
	pthread_mutex_lock(&state.mutex);
	state.function[find(name)].code = code;
	pthread_mutex_unlock(&state.mutex);
}

API long fake_calls(const char *name) {
	pthread_mutex_lock(&state.mutex);
	long n = state.function[find(name)].calls;
	pthread_mutex_unlock(&state.mutex);
	return n;
}

API long fake_initialized(void) {
	pthread_mutex_lock(&state.mutex);
	long n = state.initialized;
	pthread_mutex_unlock(&state.mutex);
	return n;
}
