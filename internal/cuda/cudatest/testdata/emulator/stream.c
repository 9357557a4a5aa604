// Streams, each with a thread that does its work, and events.
#include "emulator.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

stream *stream_of(handle h, context *c, int *result)
{
	stream *s = object(STREAM, h);
	if (!s || s->ctx != c) {
		*result = INVALID_HANDLE; // also of another context than the current one
		return NULL;
	}
	return s;
}

static void pause_for(int64_t ns)
{
	struct timespec t = {ns / 1000000000, ns % 1000000000};
	nanosleep(&t, NULL);
}

static size_t work_bytes(const work *w)
{
	size_t n = 0;
	for (size_t i = 0; i < w->nspans; i++)
		n += w->spans[i].n;
	return n;
}

// move does work that moves bytes or computes; without the lock.
static int move(stream *s, work *w, int64_t delay, int64_t rate)
{
	size_t n = w->kind == COPY ? work_bytes(w) : w->kind == FILL ? w->one.n : 0;
	if (rate > 0)
		delay += (int64_t)((double)n * 1e9 / (double)rate);
	if (delay > 0)
		pause_for(delay);
	switch (w->kind) {
	case COPY:
		for (size_t i = 0; i < w->nspans; i++)
			memmove(w->spans[i].dst, w->spans[i].src, w->spans[i].n);
		return OK;
	case FILL:
		memset(w->one.dst, w->value, w->one.n);
		return OK;
	default:
		return w->kernel->run(s->ctx, w->args);
	}
}

static void complete(event *e, uint64_t seq, int error)
{
	if (seq > e->completed) {
		e->completed = seq;
		e->error = error;
	}
	event_unref(e);
}

static void wait_value(stream *s, work *w)
{
	while (!s->ctx->ending && (int32_t)(__atomic_load_n(w->word, __ATOMIC_ACQUIRE) - w->want) < 0) {
		pthread_mutex_unlock(&emu.lock);
		pause_for(20000);
		pthread_mutex_lock(&emu.lock);
	}
}

static void work_failed(stream *s, int code)
{
	if (!s->error)
		s->error = code;
	if (emu.work_sticky && !s->ctx->error)
		s->ctx->error = code;
}

// run does one piece of work; called and left with the lock held.
static void run(stream *s, work *w)
{
	switch (w->kind) {
	case COPY:
	case FILL:
	case LAUNCH:
		if (s->error || s->ctx->error)
			return;
		if (emu.work_after >= 0 && emu.work_after-- == 0) {
			work_failed(s, emu.work_code);
			return;
		}
		int64_t delay = emu.delay_ns, rate = emu.bytes_per_second;
		pthread_mutex_unlock(&emu.lock);
		int result = move(s, w, delay, rate);
		pthread_mutex_lock(&emu.lock);
		if (result) { // what a kernel does wrong ends the context
			s->error = s->ctx->error = result;
		}
		return;
	case RECORD:
		complete(w->event, w->seq, s->error);
		return;
	case WAIT_EVENT:
		while (w->event->completed < w->seq)
			pthread_cond_wait(&emu.changed, &emu.lock);
		if (w->event->error && !s->error && !w->quiet)
			s->error = w->event->error;
		event_unref(w->event);
		return;
	case FREE:
		block_free(w->device, w->block);
		return;
	case WAIT_VALUE:
		wait_value(s, w);
		return;
	case WRITE_VALUE:
		__atomic_store_n(w->word, w->want, __ATOMIC_RELEASE);
		return;
	}
}

static void *worker(void *arg)
{
	stream *s = arg;
	pthread_mutex_lock(&emu.lock);
	while (s->first || !s->ending) {
		work *w = s->first;
		if (!w) {
			pthread_cond_wait(&s->wake, &emu.lock);
			continue;
		}
		run(s, w);
		s->first = w->next;
		if (!s->first)
			s->last = NULL;
		s->done++;
		if (w->spans != &w->one)
			free(w->spans);
		free(w);
		pthread_cond_broadcast(&emu.changed);
	}
	s->ctx->workers--;
	s->ctx->leaving--;
	pthread_cond_broadcast(&emu.changed);
	pthread_mutex_unlock(&emu.lock);
	pthread_cond_destroy(&s->wake);
	free(s);
	return NULL;
}

// at_once says whether the caller does a piece of work, as a device seems to that has nothing else to do: it moves no
// bytes, waits for nothing, and stands behind no other. One of four is the worker's nevertheless. Where work has a delay
// all of it is.
static bool at_once(const stream *s, const work *w)
{
	if (s->first || s->put % 4 == 0 || emu.delay_ns || emu.bytes_per_second)
		return false;
	return w->kind == RECORD || w->kind == FREE || w->kind == WRITE_VALUE ||
	       (w->kind == WAIT_EVENT && w->event->completed >= w->seq);
}

// stream_put puts work on s, on which there is room for so much.
int stream_put(stream *s, work from)
{
	if (s->put - s->done >= MAX_QUEUED) {
		s->ctx->full++;
		while (s->put - s->done >= MAX_QUEUED)
			pthread_cond_wait(&emu.changed, &emu.lock);
		s->ctx->full--;
		pthread_cond_broadcast(&emu.changed);
	}
	if (at_once(s, &from)) {
		run(s, &from);
		s->put++;
		s->done++;
		pthread_cond_broadcast(&emu.changed);
		return OK;
	}
	work *w = malloc(sizeof *w);
	*w = from;
	if (!w->spans) {
		w->spans = &w->one;
		w->nspans = 1;
	}
	w->next = NULL;
	if (s->last)
		s->last->next = w;
	else
		s->first = w;
	s->last = w;
	s->put++;
	pthread_cond_signal(&s->wake);
	return OK;
}

// stream_drain waits for the work that is on s now.
void stream_drain(stream *s)
{
	handle id = s->id;
	uint64_t put = s->put;
	while (object(STREAM, id) == s && s->done < put)
		pthread_cond_wait(&emu.changed, &emu.lock);
}

struct undone {
	context *c;
	stream *s;
};

static void find_undone(void *o, void *arg)
{
	stream *s = o;
	struct undone *u = arg;
	if (s->ctx == u->c && s->done < s->put)
		u->s = s;
}

// context_drain waits until no stream of c has work, nor one that was destroyed.
void context_drain(context *c)
{
	for (;;) {
		struct undone u = {c, NULL};
		each_object(STREAM, find_undone, &u);
		if (u.s)
			stream_drain(u.s);
		else if (c->leaving)
			pthread_cond_wait(&emu.changed, &emu.lock);
		else
			return;
	}
}

// stream_end gives the handle up; the worker does what is left, and ends.
void stream_end(stream *s)
{
	object_end(STREAM, s->id);
	s->ending = true;
	s->ctx->leaving++;
	pthread_cond_signal(&s->wake);
	pthread_cond_broadcast(&emu.changed);
}

EXPORT int cuStreamCreate(handle *out, unsigned flags)
{
	CALL("cuStreamCreate");
	REQUIRE(flags <= 1, INVALID_VALUE);
	stream *s = calloc(1, sizeof *s);
	s->ctx = c;
	pthread_cond_init(&s->wake, NULL);
	pthread_attr_t attr;
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_t thread;
	int failed = pthread_create(&thread, &attr, worker, s);
	pthread_attr_destroy(&attr);
	if (failed) {
		free(s);
		return leave(OUT_OF_MEMORY);
	}
	c->workers++;
	*out = s->id = object_new(STREAM, s);
	return leave(OK);
}

#define STREAM_CALL(name)                      \
	CALL(name);                            \
	stream *s = stream_of(hs, c, &result); \
	REQUIRE(s, result)

EXPORT int cuStreamDestroy_v2(handle hs)
{
	RELEASE("cuStreamDestroy_v2");
	stream *s = stream_of(hs, c, &result);
	REQUIRE(s, result);
	stream_end(s);
	return leave(told);
}

EXPORT int cuStreamQuery(handle hs)
{
	int result = enter("cuStreamQuery", false);
	REQUIRE(!result, result);
	stream *s = object(STREAM, hs);
	REQUIRE(s, INVALID_HANDLE);
	REQUIRE(!s->ctx->error, s->ctx->error);
	return leave(s->done < s->put ? NOT_READY : s->error);
}

EXPORT int cuStreamSynchronize(handle hs)
{
	STREAM_CALL("cuStreamSynchronize");
	stream_drain(s);
	REQUIRE(object(STREAM, hs) == s, INVALID_HANDLE);
	synchronized(c);
	return leave(c->error ? c->error : s->error);
}

EXPORT int cuStreamWaitEvent(handle hs, handle he, unsigned flags)
{
	STREAM_CALL("cuStreamWaitEvent");
	event *e = object(EVENT, he);
	REQUIRE(e, INVALID_HANDLE);
	REQUIRE(flags == 0, INVALID_VALUE);
	e->refs++;
	return leave(stream_put(s, (work){.kind = WAIT_EVENT, .event = e, .seq = e->recorded}));
}

static uint32_t *word_at(context *c, uint64_t addr, int *result)
{
	*result = INVALID_VALUE;
	if (addr % 4)
		return NULL;
	if (is_device(addr))
		return (uint32_t *)device_bytes(c, addr, 4, result);
	if (host_range(c, addr, 4) != PINNED)
		return NULL;
	*result = OK;
	return (uint32_t *)addr;
}

EXPORT int cuStreamWaitValue32_v2(handle hs, uint64_t addr, uint32_t value, unsigned flags)
{
	STREAM_CALL("cuStreamWaitValue32_v2");
	uint32_t *word = word_at(c, addr, &result);
	REQUIRE(word, result);
	REQUIRE(flags == 0, NOT_SUPPORTED); // greater or equal, cyclically
	return leave(stream_put(s, (work){.kind = WAIT_VALUE, .word = word, .want = value}));
}

EXPORT int cuStreamWriteValue32_v2(handle hs, uint64_t addr, uint32_t value, unsigned flags)
{
	STREAM_CALL("cuStreamWriteValue32_v2");
	uint32_t *word = word_at(c, addr, &result);
	REQUIRE(word, result);
	REQUIRE(flags == 0, NOT_SUPPORTED);
	return leave(stream_put(s, (work){.kind = WRITE_VALUE, .word = word, .want = value}));
}

EXPORT int cuEventCreate(handle *out, unsigned flags)
{
	CALL("cuEventCreate");
	REQUIRE(flags <= 3, INVALID_VALUE);
	event *e = calloc(1, sizeof *e);
	e->ctx = c;
	e->refs = 1;
	*out = e->id = object_new(EVENT, e);
	return leave(OK);
}

void event_unref(event *e)
{
	if (--e->refs == 0)
		free(e);
}

EXPORT int cuEventDestroy_v2(handle he)
{
	RELEASE("cuEventDestroy_v2");
	event *e = object(EVENT, he);
	REQUIRE(e, INVALID_HANDLE);
	object_end(EVENT, he);
	e->id = 0;
	event_unref(e);
	return leave(told);
}

EXPORT int cuEventRecord(handle he, handle hs)
{
	STREAM_CALL("cuEventRecord");
	event *e = object(EVENT, he);
	REQUIRE(e && e->ctx == c, INVALID_HANDLE);
	e->refs++;
	return leave(stream_put(s, (work){.kind = RECORD, .event = e, .seq = ++e->recorded}));
}

// How much a thread minds that others record a graph: 0 is the most, 2 not at all.
static __thread int capture_mode;

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode)
{
	int result = enter("cuThreadExchangeStreamCaptureMode", false);
	REQUIRE(!result, result);
	REQUIRE(mode && *mode >= 0 && *mode <= 2, INVALID_VALUE);
	int before = capture_mode;
	capture_mode = *mode;
	*mode = before;
	return leave(OK);
}

EXPORT int cuEventQuery(handle he)
{
	int result = enter("cuEventQuery", false);
	REQUIRE(!result, result);
	REQUIRE(!emu.capturing || capture_mode, STREAM_CAPTURE_UNSUPPORTED);
	event *e = object(EVENT, he);
	REQUIRE(e, INVALID_HANDLE);
	while (e->ctx->full)
		pthread_cond_wait(&emu.changed, &emu.lock);
	REQUIRE(!e->ctx->error, e->ctx->error);
	return leave(e->completed < e->recorded ? NOT_READY : e->error);
}

EXPORT int cuEventSynchronize(handle he)
{
	CALL("cuEventSynchronize");
	event *e = object(EVENT, he);
	REQUIRE(e, INVALID_HANDLE);
	e->refs++;
	for (uint64_t seq = e->recorded; e->completed < seq;)
		pthread_cond_wait(&emu.changed, &emu.lock);
	int error = e->error;
	event_unref(e);
	synchronized(c);
	return leave(c->error ? c->error : error);
}

static void settle(void *o, void *ignored)
{
	(void)ignored;
	context_drain(o);
}

// emu_settle waits until no stream has work.
EXPORT void emu_settle(void)
{
	pthread_mutex_lock(&emu.lock);
	each_object(CONTEXT, settle, NULL);
	pthread_mutex_unlock(&emu.lock);
}
