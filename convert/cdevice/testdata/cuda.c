// The consumer and a producer for the memory of CUDA devices, by a driver library that is found
// at run time. It has a stream of its own in the device's primary context.
#include <dlfcn.h>

#include "consumer.c"

typedef uint64_t handle;

static void *library;
static handle ctx, stream, event;
static int ordinal;

// driver calls a function of the driver's; all of those used here take numbers of 64 bits or fewer.
static int driver(const char *name, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  int (*f)(uint64_t, uint64_t, uint64_t, uint64_t) = (int (*)(uint64_t, uint64_t, uint64_t, uint64_t))dlsym(library, name);
  return f == NULL ? -1 : f(a, b, c, d);
}

// cuda_open makes ready for a device; 0 if all is well.
int cuda_open(const char *path, int device) {
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return -1;
  ordinal = device;
  int err = driver("cuInit", 0, 0, 0, 0);
  if (!err) err = driver("cuDevicePrimaryCtxRetain", (uint64_t)(uintptr_t)&ctx, (uint64_t)device, 0, 0);
  if (!err) err = driver("cuCtxPushCurrent_v2", ctx, 0, 0, 0);
  if (!err) err = driver("cuStreamCreate", (uint64_t)(uintptr_t)&stream, 1, 0, 0);
  if (!err) err = driver("cuEventCreate", (uint64_t)(uintptr_t)&event, 2, 0, 0);
  handle popped;
  driver("cuCtxPopCurrent_v2", (uint64_t)(uintptr_t)&popped, 0, 0, 0);
  return err;
}

int cuda_close(void) {
  handle popped;
  int err = driver("cuCtxPushCurrent_v2", ctx, 0, 0, 0);
  if (!err) err = driver("cuEventDestroy_v2", event, 0, 0, 0);
  if (!err) err = driver("cuStreamDestroy_v2", stream, 0, 0, 0);
  if (!err) err = driver("cuCtxPopCurrent_v2", (uint64_t)(uintptr_t)&popped, 0, 0, 0);
  if (!err) err = driver("cuDevicePrimaryCtxRelease_v2", (uint64_t)ordinal, 0, 0, 0);
  return err;
}

enum { MAX_BUFFERS = 4096 };

// What was allocated for an array, and gets free with it.
static void *on_host[MAX_BUFFERS];
static int n_on_host;
static handle on_device[MAX_BUFFERS];
static int n_on_device;

// rest is how many bytes there are from an address to the end of its allocation: more than the
// buffer has, which nobody tells.
static int rest(uint64_t p, uint64_t *n) {
  uint64_t base, size;
  int err = driver("cuMemGetAddressRange_v2", (uint64_t)(uintptr_t)&base, (uint64_t)(uintptr_t)&size, p, 0);
  *n = err ? 0 : base + size - p;
  return err;
}

static int to_host(const void **buffer) {
  uint64_t n;
  void *host;
  int err = rest((uint64_t)(uintptr_t)*buffer, &n);
  if (!err) err = driver("cuMemHostAlloc", (uint64_t)(uintptr_t)&host, n, 1, 0);
  if (err) return err;
  on_host[n_on_host++] = host;
  err = driver("cuMemcpyDtoHAsync_v2", (uint64_t)(uintptr_t)host, (uint64_t)(uintptr_t)*buffer, n, stream);
  *buffer = host;
  return err;
}

static int to_device(const void **buffer) {
  uint64_t n;
  handle p;
  int err = rest((uint64_t)(uintptr_t)*buffer, &n);
  if (!err) err = driver("cuMemAlloc_v2", (uint64_t)(uintptr_t)&p, n, 0, 0);
  if (err) return err;
  on_device[n_on_device++] = p;
  err = driver("cuMemcpyDtoDAsync_v2", p, (uint64_t)(uintptr_t)*buffer, n, stream);
  *buffer = (const void *)(uintptr_t)p;
  return err;
}

// each calls f for all buffers in device memory.
static int each(const struct ArrowSchema *s, struct ArrowArray *a, int (*f)(const void **)) {
  int64_t n = a->n_buffers;
  if (s->format[0] == 'v') n--; // the lengths of a view's data lie in host memory
  int err = 0;
  for (int64_t i = 0; i < n && !err; i++)
    if (a->buffers[i] != NULL) err = f(&a->buffers[i]);
  for (int64_t i = 0; i < a->n_children && !err; i++) err = each(s->children[i], a->children[i], f);
  if (s->dictionary != NULL && !err) err = each(s->dictionary, a->dictionary, f);
  return err;
}

// cuda_consume waits for the array's event, copies the buffers, hashes all rows, and releases the array and the schema. An
// error of the driver's is the answer.
uint64_t cuda_consume(struct ArrowDeviceArray *d, struct ArrowSchema *s) {
  uint64_t h = 14695981039346656037u;
  handle popped;
  int err = d->device_type != 2 || d->device_id != ordinal;
  if (!err) err = driver("cuCtxPushCurrent_v2", ctx, 0, 0, 0);
  if (!err && d->sync_event != NULL) err = driver("cuStreamWaitEvent", stream, *(handle *)d->sync_event, 0, 0);
  if (!err) err = each(s, &d->array, to_host);
  if (!err) err = driver("cuStreamSynchronize", stream, 0, 0, 0);
  if (err) return (uint64_t)err;
  for (int64_t row = 0; row < d->array.length; row++) h = value(h, s, &d->array, row);
  for (int i = 0; i < n_on_host; i++) err |= driver("cuMemFreeHost", (uint64_t)(uintptr_t)on_host[i], 0, 0, 0);
  n_on_host = 0;
  err |= driver("cuCtxPopCurrent_v2", (uint64_t)(uintptr_t)&popped, 0, 0, 0);
  d->array.release(&d->array);
  s->release(s);
  return err ? (uint64_t)err : h;
}

static int free_failed;

static void freeing(struct ArrowArray *a) {
  handle popped;
  driver("cuCtxPushCurrent_v2", ctx, 0, 0, 0);
  for (int i = 0; i < n_on_device; i++) free_failed |= driver("cuMemFree_v2", on_device[i], 0, 0, 0);
  n_on_device = 0;
  driver("cuCtxPopCurrent_v2", (uint64_t)(uintptr_t)&popped, 0, 0, 0);
  counting(a);
}

static uint32_t *gate; // pinned: the producer's stream waits until it is not 0

// cuda_produce makes the array one of this library's own, with buffers that it has allocated. They are
// filled when cuda_open_gate is called: that is what the array's event stands for.
int cuda_produce(struct ArrowDeviceArray *d, struct ArrowSchema *s) {
  handle popped, word;
  int err = driver("cuCtxPushCurrent_v2", ctx, 0, 0, 0);
  if (!err && gate == NULL) err = driver("cuMemHostAlloc", (uint64_t)(uintptr_t)&gate, 4, 1, 0);
  if (!err) {
    __atomic_store_n(gate, 0, __ATOMIC_RELEASE);
    err = driver("cuMemHostGetDevicePointer_v2", (uint64_t)(uintptr_t)&word, (uint64_t)(uintptr_t)gate, 0, 0);
  }
  if (!err) err = driver("cuStreamWaitValue32_v2", stream, word, 1, 0);
  if (!err) err = each(s, &d->array, to_device);
  if (!err) err = driver("cuEventRecord", event, stream, 0, 0);
  if (!err) err = driver("cuCtxPopCurrent_v2", (uint64_t)(uintptr_t)&popped, 0, 0, 0);
  d->sync_event = &event;
  produce(d);
  d->array.release = freeing;
  return err;
}

void cuda_open_gate(void) { __atomic_store_n(gate, 1, __ATOMIC_RELEASE); }

// cuda_end gives up the gate; it says whether memory could not be freed.
int cuda_end(void) {
  handle popped;
  int err = driver("cuCtxPushCurrent_v2", ctx, 0, 0, 0);
  if (!err && gate != NULL) err = driver("cuMemFreeHost", (uint64_t)(uintptr_t)gate, 0, 0, 0);
  gate = NULL;
  if (!err) err = driver("cuCtxPopCurrent_v2", (uint64_t)(uintptr_t)&popped, 0, 0, 0);
  return err | free_failed;
}
