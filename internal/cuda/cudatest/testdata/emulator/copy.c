// Copies, fills, modules and kernels.
#include "emulator.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STREAM_CALL(name)                      \
	CALL(name);                            \
	stream *s = stream_of(hs, c, &result); \
	REQUIRE(s, result)

// side finds the memory of one side of a copy; *waits is set when the copy
// cannot be asynchronous.
static uint8_t *side(context *c, uint64_t addr, size_t n, bool *waits, int *result)
{
	if (is_device(addr))
		return device_bytes(c, addr, n, result);
	*result = INVALID_VALUE;
	if (!addr)
		return NULL;
	switch (host_range(c, addr, n)) {
	case STRADDLES:
		return NULL;
	case PAGEABLE:
		*waits = true;
		break;
	case PINNED:
		break;
	}
	*result = OK;
	return (uint8_t *)addr;
}

static void count_pageable(void) { count("copy of memory that is not pinned"); }

enum direction { TO_DEVICE, TO_HOST, ON_DEVICE };

static int copy(const char *symbol, enum direction dir, uint64_t dst, uint64_t src, size_t n, handle hs)
{
	STREAM_CALL(symbol);
	REQUIRE(is_device(dst) == (dir != TO_HOST) && is_device(src) == (dir != TO_DEVICE), INVALID_VALUE);
	bool waits = false;
	uint8_t *to = side(c, dst, n, &waits, &result);
	REQUIRE(to, result);
	uint8_t *from = side(c, src, n, &waits, &result);
	REQUIRE(from, result);
	if (n == 0)
		return leave(OK);
	stream_put(s, (work){.kind = COPY, .one = {to, from, n}});
	if (waits) {
		count_pageable();
		stream_drain(s);
	}
	return leave(OK);
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t dst, const void *src, size_t n, handle s)
{
	return copy("cuMemcpyHtoDAsync_v2", TO_DEVICE, dst, (uintptr_t)src, n, s);
}

EXPORT int cuMemcpyDtoHAsync_v2(void *dst, uint64_t src, size_t n, handle s)
{
	return copy("cuMemcpyDtoHAsync_v2", TO_HOST, (uintptr_t)dst, src, n, s);
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t dst, uint64_t src, size_t n, handle s)
{
	return copy("cuMemcpyDtoDAsync_v2", ON_DEVICE, dst, src, n, s);
}

// A copy between devices needs no peer access: a driver goes through the host then.
EXPORT int cuMemcpyPeerAsync(uint64_t dst, handle dst_ctx, uint64_t src, handle src_ctx, size_t n, handle hs)
{
	STREAM_CALL("cuMemcpyPeerAsync");
	context *to_ctx = object(CONTEXT, dst_ctx), *from_ctx = object(CONTEXT, src_ctx);
	REQUIRE(to_ctx && from_ctx, INVALID_CONTEXT);
	REQUIRE(!to_ctx->error && !from_ctx->error, INVALID_CONTEXT);
	uint8_t *to = device_bytes(to_ctx, dst, n, &result);
	REQUIRE(to, result);
	uint8_t *from = device_bytes(from_ctx, src, n, &result);
	REQUIRE(from, result);
	if (n == 0)
		return leave(OK);
	// What IOMMUs do to copies between devices: they succeed, and go elsewhere.
	if (to_ctx->device != from_ctx->device && emu.lying & (to_ctx->device > from_ctx->device ? 1 : 2))
		to = from;
	return leave(stream_put(s, (work){.kind = COPY, .one = {to, from, n}}));
}

EXPORT int cuMemsetD8Async(uint64_t dst, uint8_t value, size_t n, handle hs)
{
	STREAM_CALL("cuMemsetD8Async");
	REQUIRE(is_device(dst), INVALID_VALUE);
	uint8_t *to = device_bytes(c, dst, n, &result);
	REQUIRE(to, result);
	if (n == 0)
		return leave(OK);
	return leave(stream_put(s, (work){.kind = FILL, .one = {to, NULL, n}, .value = value}));
}

struct attributes { // 24 bytes
	uint32_t order;
	int32_t src_type, src_id, dst_type, dst_id;
	uint32_t flags;
};

static bool attributes_ok(const struct attributes *attrs, const size_t *first, size_t n, size_t count)
{
	if (!attrs || !first || n == 0 || n > count || first[0] != 0)
		return false;
	for (size_t i = 0; i < n; i++)
		if (attrs[i].order < 1 || attrs[i].order > 3 || attrs[i].flags > 1 || first[i] >= count || (i && first[i] <= first[i - 1]))
			return false;
	return true;
}

static int batch(const char *symbol, const uint64_t *dsts, const uint64_t *srcs, const size_t *sizes, size_t count,
		 const struct attributes *attrs, const size_t *first, size_t nattrs, size_t *fail, handle hs)
{
	*fail = SIZE_MAX;
	STREAM_CALL(symbol);
	REQUIRE(count && dsts && srcs && sizes && attributes_ok(attrs, first, nattrs, count), INVALID_VALUE);
	span *spans = calloc(count, sizeof *spans);
	bool waits = false;
	for (size_t i = 0; i < count; i++) {
		int why = INVALID_VALUE;
		uint8_t *to = sizes[i] ? side(c, dsts[i], sizes[i], &waits, &why) : NULL;
		uint8_t *from = to ? side(c, srcs[i], sizes[i], &waits, &why) : NULL;
		if (!from) {
			*fail = i;
			free(spans);
			return leave(why);
		}
		spans[i] = (span){to, from, sizes[i]};
	}
	stream_put(s, (work){.kind = COPY, .spans = spans, .nspans = count});
	if (waits) {
		count_pageable();
		stream_drain(s);
	}
	return leave(OK);
}

// CUDA 12.8 says which copy was wrong, CUDA 13 does not.
EXPORT int cuMemcpyBatchAsync(const uint64_t *dsts, const uint64_t *srcs, const size_t *sizes, size_t count,
			      const struct attributes *attrs, const size_t *first, size_t nattrs, size_t *fail, handle s)
{
	size_t ignored;
	return batch("cuMemcpyBatchAsync", dsts, srcs, sizes, count, attrs, first, nattrs, fail ? fail : &ignored, s);
}

EXPORT int cuMemcpyBatchAsync_v2(const uint64_t *dsts, const uint64_t *srcs, const size_t *sizes, size_t count,
				 const struct attributes *attrs, const size_t *first, size_t nattrs, handle s)
{
	size_t ignored;
	return batch("cuMemcpyBatchAsync_v2", dsts, srcs, sizes, count, attrs, first, nattrs, &ignored, s);
}

// spillway_example_add(out, in, n, addend): writes in[i] + addend to out[i], for each of
// n 64-bit integers.
static int example_add(context *c, const uint64_t *args)
{
	uint64_t out = args[0], in = args[1], n = args[2], addend = args[3];
	if (n > SIZE_MAX / 8)
		return ILLEGAL_ADDRESS;
	pthread_mutex_lock(&emu.lock);
	const uint8_t *from = in % 8 == 0 ? kernel_bytes(c, in, 8 * n) : NULL;
	uint8_t *to = from && out % 8 == 0 ? kernel_bytes(c, out, 8 * n) : NULL;
	pthread_mutex_unlock(&emu.lock);
	if (!to)
		return ILLEGAL_ADDRESS;
	for (uint64_t i = 0; i < n; i++) {
		uint64_t x;
		memcpy(&x, from + 8 * i, 8);
		x += addend;
		memcpy(to + 8 * i, &x, 8);
	}
	return OK;
}

// The emulator does not interpret PTX. It knows kernels by their names, and has a function in C for
// each that computes what the kernel's text does: that of the example of tier/cuda/gorgonia. Tests
// in internal/cuda interpret its text. Modules with other kernels can be
// loaded, but their kernels are not found.
static const kernel kernels[] = {
	{"spillway_example_add", 256, 4, {8, 8, 8, 8}, example_add},
};

static const char *blanks(const char *p) { return p + strspn(p, " \t\r\n"); }

// has_entry says whether PTX text declares an entry of that name that others can see.
static bool has_entry(const char *text, const char *name)
{
	size_t n = strlen(name);
	for (const char *p = text; (p = strstr(p, ".visible"));) {
		p = blanks(p + strlen(".visible"));
		if (strncmp(p, ".entry", strlen(".entry")))
			continue;
		p = blanks(p + strlen(".entry"));
		if (!strncmp(p, name, n) && strchr("( \t\r\n", p[n]))
			return true;
	}
	return false;
}

// check_ptx finds what makes text no PTX for this driver. The version of PTX is
// CUDA's less 4, or one minor version older.
static int check_ptx(const char *text)
{
	const char *version = strstr(text, ".version"), *target = strstr(text, ".target");
	int major, minor;
	if (!version || !target || target < version || !strstr(target, ".address_size 64"))
		return INVALID_PTX;
	if (sscanf(version, ".version %d.%d", &major, &minor) != 2 || strncmp(target, ".target sm_", strlen(".target sm_")))
		return INVALID_PTX;
	return (major + 4) * 1000 + minor * 10 > emu.version ? UNSUPPORTED_PTX_VERSION : OK;
}

EXPORT int cuModuleLoadData(handle *out, const void *image)
{
	CALL("cuModuleLoadData");
	REQUIRE(image, INVALID_VALUE);
	result = check_ptx(image);
	REQUIRE(!result, result);
	module *m = calloc(1, sizeof *m);
	m->ctx = c;
	m->image = strdup(image);
	*out = m->id = object_new(MODULE, m);
	return leave(OK);
}

struct search {
	module *m;
	const kernel *k;
	function *found;
};

static void same_function(void *o, void *arg)
{
	function *f = o;
	struct search *s = arg;
	if (f->module == s->m && (!s->k || f->kernel == s->k))
		s->found = f;
}

EXPORT int cuModuleGetFunction(handle *out, handle hm, const char *name)
{
	CALL("cuModuleGetFunction");
	module *m = object(MODULE, hm);
	REQUIRE(m && m->ctx == c, INVALID_HANDLE);
	REQUIRE(has_entry(m->image, name), NOT_FOUND);
	for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
		if (strcmp(kernels[i].name, name))
			continue;
		struct search s = {m, &kernels[i], NULL};
		each_object(FUNCTION, same_function, &s);
		if (!s.found) {
			s.found = calloc(1, sizeof *s.found);
			s.found->module = m;
			s.found->kernel = &kernels[i];
			s.found->id = object_new(FUNCTION, s.found);
		}
		*out = s.found->id;
		return leave(OK);
	}
	return leave(NOT_FOUND);
}

EXPORT int cuModuleUnload(handle hm)
{
	RELEASE("cuModuleUnload");
	module *m = object(MODULE, hm);
	REQUIRE(m && m->ctx == c, INVALID_HANDLE);
	context_drain(c);
	for (struct search s;;) {
		s = (struct search){m, NULL, NULL};
		each_object(FUNCTION, same_function, &s);
		if (!s.found)
			break;
		object_end(FUNCTION, s.found->id);
		free(s.found);
	}
	object_end(MODULE, hm);
	free(m->image);
	free(m);
	return leave(told);
}

EXPORT int cuLaunchKernel(handle hf, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
			  unsigned shared, handle hs, void **params, void **extra)
{
	STREAM_CALL("cuLaunchKernel");
	function *f = object(FUNCTION, hf);
	REQUIRE(f && f->module->ctx == c, INVALID_HANDLE);
	REQUIRE(gx && gy && gz && bx && by && bz && gy < 65536 && gz < 65536 && bx <= 1024 && by <= 1024 && bz <= 64, INVALID_VALUE);
	REQUIRE((uint64_t)bx * by * bz <= f->kernel->max_threads && gx <= INT32_MAX, INVALID_VALUE);
	REQUIRE((uint64_t)bx * by * bz % 32 == 0, INVALID_VALUE); // a driver would not mind, but our kernels would
	REQUIRE(shared <= 48 << 10 && params && !extra, INVALID_VALUE);
	work w = {.kind = LAUNCH, .kernel = f->kernel};
	for (int i = 0; i < f->kernel->nargs; i++)
		memcpy(&w.args[i], params[i], f->kernel->sizes[i]);
	return leave(stream_put(s, w));
}
