// A consumer of the Arrow C device data interface, as a program that is not Go's would be
// one. It knows the structs as the interface publishes them, and nothing of Spillway.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct ArrowSchema {
  const char *format;
  const char *name;
  const char *metadata;
  int64_t flags;
  int64_t n_children;
  struct ArrowSchema **children;
  struct ArrowSchema *dictionary;
  void (*release)(struct ArrowSchema *);
  void *private_data;
};

struct ArrowArray {
  int64_t length;
  int64_t null_count;
  int64_t offset;
  int64_t n_buffers;
  int64_t n_children;
  const void **buffers;
  struct ArrowArray **children;
  struct ArrowArray *dictionary;
  void (*release)(struct ArrowArray *);
  void *private_data;
};

struct ArrowDeviceArray {
  struct ArrowArray array;
  int64_t device_id;
  int32_t device_type;
  void *sync_event;
  int64_t reserved[3];
};

static uint64_t mix(uint64_t h, uint64_t v) { return (h ^ v) * 1099511628211u; }

static uint64_t bytes(uint64_t h, const uint8_t *p, int64_t n) {
  h = mix(h, (uint64_t)n);
  for (int64_t i = 0; i < n; i++) h = mix(h, p[i]);
  return h;
}

static int width(const char *f) {
  switch (f[0]) {
    case 'c': case 'C': return 1;
    case 's': case 'S': return 2;
    case 'i': case 'I': case 'f': return 4;
    case 'l': case 'L': case 'g': return 8;
  }
  return 0;
}

static uint64_t value(uint64_t h, const struct ArrowSchema *s, const struct ArrowArray *a, int64_t row) {
  int64_t i = row + a->offset;
  const char *f = s->format;
  const uint8_t *valid = a->n_buffers > 0 ? a->buffers[0] : NULL;
  if (f[0] == 'n' || (valid != NULL && a->null_count != 0 && !(valid[i / 8] >> (i % 8) & 1))) return mix(h, 0xdead);
  if (s->dictionary != NULL) {
    int w = width(f);
    uint64_t k = 0;
    memcpy(&k, (const uint8_t *)a->buffers[1] + i * w, w);
    return value(h, s->dictionary, a->dictionary, (int64_t)k);
  }
  if (strcmp(f, "b") == 0) return mix(h, ((const uint8_t *)a->buffers[1])[i / 8] >> (i % 8) & 1);
  if (strcmp(f, "u") == 0 || strcmp(f, "z") == 0) {
    const int32_t *o = a->buffers[1];
    return bytes(h, (const uint8_t *)a->buffers[2] + o[i], o[i + 1] - o[i]);
  }
  if (strcmp(f, "U") == 0 || strcmp(f, "Z") == 0) {
    const int64_t *o = a->buffers[1];
    return bytes(h, (const uint8_t *)a->buffers[2] + o[i], o[i + 1] - o[i]);
  }
  if (strcmp(f, "vu") == 0 || strcmp(f, "vz") == 0) {
    const int32_t *v = (const int32_t *)a->buffers[1] + 4 * i;
    if (v[0] <= 12) return bytes(h, (const uint8_t *)(v + 1), v[0]);
    const int64_t *sizes = a->buffers[a->n_buffers - 1];
    if (v[2] >= a->n_buffers - 3 || (int64_t)v[3] + v[0] > sizes[v[2]]) return mix(h, 0xbad);
    return bytes(h, (const uint8_t *)a->buffers[2 + v[2]] + v[3], v[0]);
  }
  if (strcmp(f, "+s") == 0) {
    for (int64_t c = 0; c < a->n_children; c++) h = value(h, s->children[c], a->children[c], i);
    return h;
  }
  if (strcmp(f, "+l") == 0) {
    const int32_t *o = a->buffers[1];
    h = mix(h, (uint64_t)(o[i + 1] - o[i]));
    for (int64_t j = o[i]; j < o[i + 1]; j++) h = value(h, s->children[0], a->children[0], j);
    return h;
  }
  int w = width(f);
  if (w == 0 || f[1] != 0) return mix(h, 0xbad);
  uint64_t v = 0;
  memcpy(&v, (const uint8_t *)a->buffers[1] + i * w, w);
  return mix(h, v);
}

// consume hashes all rows and releases the array and the schema.
uint64_t consume(struct ArrowDeviceArray *d, struct ArrowSchema *s) {
  uint64_t h = 14695981039346656037u;
  if (d->device_type != 1 || d->sync_event != NULL || strcmp(s->format, "+s") != 0) h = 1;
  for (int64_t row = 0; row < d->array.length; row++) h = value(h, s, &d->array, row);
  d->array.release(&d->array);
  s->release(s);
  if (d->array.release != NULL || s->release != NULL) return 2;
  return h;
}

// consume_child moves the first column out of the array, releases the rest, and hashes the
// column afterwards.
uint64_t consume_child(struct ArrowDeviceArray *d, struct ArrowSchema *s) {
  uint64_t h = 14695981039346656037u;
  struct ArrowArray moved_array = *d->array.children[0];
  struct ArrowSchema moved_schema = *s->children[0];
  d->array.children[0]->release = NULL;
  s->children[0]->release = NULL;
  d->array.release(&d->array);
  s->release(s);
  for (int64_t row = 0; row < moved_array.length; row++) h = value(h, &moved_schema, &moved_array, row);
  moved_array.release(&moved_array);
  moved_schema.release(&moved_schema);
  return h;
}

static uint64_t touched;

// touch reads both ends of the n bytes of a buffer, which may be NULL only if there are none, and counts what is missing.
static int touch(const void *p, int64_t n) {
  if (n == 0) return 0;
  if (p == NULL) return 1;
  touched += ((const uint8_t *)p)[0] + ((const uint8_t *)p)[n - 1];
  return 0;
}

static int64_t last(const void *offsets, int wide, int64_t i) {
  return wide ? ((const int64_t *)offsets)[i] : ((const int32_t *)offsets)[i];
}

static int whole(const struct ArrowSchema *s, const struct ArrowArray *a) {
  int missing = 0;
  const char *f = s->format;
  const int64_t n = a->length + a->offset;
  int bad = a->length < 0 || a->offset < 0;
  for (int64_t i = 0; i < a->n_children; i++) missing += whole(s->children[i], a->children[i]);
  if (s->dictionary != NULL) missing += whole(s->dictionary, a->dictionary);
  if (f[0] == 'n' || strncmp(f, "+r", 2) == 0) return missing + bad;
  if (strncmp(f, "+u", 2) == 0) {
    missing += touch(a->buffers[0], n);
    return missing + (f[2] == 'd' ? touch(a->buffers[1], 4 * n) : 0);
  }
  missing += touch(a->buffers[0], a->null_count == 0 ? 0 : (n + 7) / 8);
  if (a->null_count > 0 && a->buffers[0] != NULL) {
    int64_t nulls = 0;
    for (int64_t i = a->offset; i < n; i++) nulls += !(((const uint8_t *)a->buffers[0])[i / 8] >> (i % 8) & 1);
    bad += nulls != a->null_count;
  }
  if (strcmp(f, "+s") == 0 || strncmp(f, "+w:", 3) == 0) return missing + bad;
  const int wide = strchr("UZ", f[0]) != NULL || (f[0] == '+' && (f[1] == 'L' || strcmp(f, "+vL") == 0));
  if (strncmp(f, "+v", 2) == 0) return missing + bad + touch(a->buffers[1], (wide ? 8 : 4) * n) + touch(a->buffers[2], (wide ? 8 : 4) * n);
  if (f[0] == 'v') {
    missing += touch(a->buffers[1], 16 * n) + (a->buffers[a->n_buffers - 1] == NULL);
    for (int64_t i = 2; i < a->n_buffers - 1; i++) missing += touch(a->buffers[i], ((const int64_t *)a->buffers[a->n_buffers - 1])[i - 2]);
    return missing + bad;
  }
  if (strchr("uzUZ", f[0]) != NULL || f[0] == '+') {
    if (touch(a->buffers[1], (wide ? 8 : 4) * (n + 1))) return missing + 1;
    const int64_t end = last(a->buffers[1], wide, n);
    if (f[0] != '+') return missing + bad + touch(a->buffers[2], end);
    return missing + bad + (end > a->children[0]->length);
  }
  if (f[0] == 'b') return missing + bad + touch(a->buffers[1], (n + 7) / 8);
  int64_t w = width(f);
  if (f[0] == 't') w = strcmp(f, "tin") == 0 ? 16 : strcmp(f, "tdD") == 0 || strcmp(f, "tts") == 0 || strcmp(f, "ttm") == 0 || strcmp(f, "tiM") == 0 ? 4 : 8;
  if (f[0] == 'w') w = atoll(f + 2);
  if (f[0] == 'e') w = 2;
  if (f[0] == 'd') {
    const char *bits = strrchr(f, ',');
    w = bits == strchr(f, ',') ? 16 : atoll(bits + 1) / 8;
  }
  return missing + bad + (w == 0 && f[0] != 'w') + touch(a->buffers[1], w * n);
}

// missing says how many buffers are not there although the interface wants them, counts of nulls are wrong, and types are
// unknown to it, and reads the ends of the buffers.
uint64_t missing(struct ArrowDeviceArray *d, struct ArrowSchema *s) { return (uint64_t)whole(s, &d->array); }

static int64_t released;

static void counting(struct ArrowArray *a) {
  struct ArrowArray *inner = a->private_data;
  released++;
  inner->release(inner);
  free(inner);
  a->release = NULL;
}

// produce makes the array one of this library's own, whose releases it counts.
void produce(struct ArrowDeviceArray *d) {
  struct ArrowArray *inner = malloc(sizeof *inner);
  *inner = d->array;
  d->array.private_data = inner;
  d->array.release = counting;
}

int64_t releases(void) { return released; }
