/* The part of XLA's C interface for custom calls ("FFI") that a handler of arrays with one string attribute needs.

   XLA calls a handler with a call frame: arguments and results (buffers), attributes, the stage of the program's life,
   and the functions that make errors. The structs are those of version 0.1 of the interface (xla/ffi/api/c_api.h, in
   every jaxlib). XLA keeps them and appends new members, and each struct begins with its size as XLA knows it.
   sr_xla_problem compares the sizes. A handler that is built with a newer header would say a newer version, with
   which an older XLA does not start; so the header of XLA is not used. */
#ifndef SR_XLA_FFI_H
#define SR_XLA_FFI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "sync/clock.h"
#include "sync/flag.h"

enum {
    SR_XLA_MAJOR = 0,
    SR_XLA_MINOR = 1,
    SR_XLA_METADATA = 1, /* type of the extension that asks for the handler's version */
    SR_XLA_EXECUTE = 3,  /* stage of a call frame */
    SR_XLA_BUFFER = 1,   /* type of an argument, and of a result */
    SR_XLA_STRING = 4,   /* type of an attribute */
    SR_XLA_ABORTED = 10, /* code of an error */
    SR_XLA_TOKEN = 17    /* dtype of a buffer without data that only orders calls */
};

struct sr_xla_base {
    size_t struct_size;
    struct sr_xla_extension *extensions;
};

struct sr_xla_version {
    struct sr_xla_base base;
    int major_version, minor_version;
};

struct sr_xla_metadata {
    size_t struct_size;
    struct sr_xla_version version;
    uint32_t traits;
};

struct sr_xla_extension {
    size_t struct_size;
    int type;
    struct sr_xla_extension *next;
    struct sr_xla_metadata *metadata; /* if the type is SR_XLA_METADATA */
};

struct sr_xla_buffer {
    struct sr_xla_base base;
    int dtype;
    void *data;
    int64_t ndim;
    int64_t *dims;
};

struct sr_xla_buffers {
    struct sr_xla_base base;
    int64_t count;
    const int *types;
    struct sr_xla_buffer **buffers;
};

struct sr_xla_string {
    const char *text;
    size_t nbytes;
};

struct sr_xla_attributes {
    struct sr_xla_base base;
    int64_t count;
    const int *types;
    struct sr_xla_string **names;
    struct sr_xla_string **values;
};

struct sr_xla_error_args {
    struct sr_xla_base base;
    const char *message;
    int code;
};

struct sr_xla_api {
    struct sr_xla_base base;
    struct sr_xla_version version;
    const void *internal;
    void *(*new_error)(struct sr_xla_error_args *);
};

struct sr_xla_frame {
    struct sr_xla_base base;
    const struct sr_xla_api *api;
    void *context;
    int stage;
    struct sr_xla_buffers arguments, results;
    struct sr_xla_attributes attributes;
};

/* Answer XLA's question for the handler's version. Return false if the frame asks something else. */
static inline bool sr_xla_answer_version(struct sr_xla_frame *frame)
{
    struct sr_xla_extension *extension = frame->base.extensions;
    if (extension == NULL || extension->type != SR_XLA_METADATA)
        return false;
    extension->metadata->version.major_version = SR_XLA_MAJOR;
    extension->metadata->version.minor_version = SR_XLA_MINOR;
    extension->metadata->traits = 0;
    return true;
}

/* NULL if the frame is that of a call with buffers and one string, as this file knows them; else what differs. */
static inline const char *sr_xla_problem(const struct sr_xla_frame *frame)
{
    const struct sr_xla_buffers *sides[2] = {&frame->arguments, &frame->results};
    if (frame->base.struct_size < sizeof *frame || frame->attributes.base.struct_size < sizeof frame->attributes)
        return "its call frames are shorter than those of version 0.1";
    if (frame->attributes.count != 1 || frame->attributes.types[0] != SR_XLA_STRING)
        return "the call has not one string as its attribute";
    for (int side = 0; side < 2; side++) {
        if (sides[side]->base.struct_size < sizeof *sides[side])
            return "its lists of buffers are shorter than those of version 0.1";
        for (int64_t i = 0; i < sides[side]->count; i++)
            if (sides[side]->types[i] != SR_XLA_BUFFER ||
                sides[side]->buffers[i]->base.struct_size < sizeof(struct sr_xla_buffer))
                return "an argument or a result is not a buffer of version 0.1";
    }
    return NULL;
}

static inline int64_t sr_xla_item_count(const struct sr_xla_buffer *buffer)
{
    int64_t count = 1;
    for (int64_t axis = 0; axis < buffer->ndim; axis++)
        count *= buffer->dims[axis];
    return count;
}

/* True if the call only marks the end of a region, see adapters/_jax/xla.py. */
static inline bool sr_xla_is_end(const struct sr_xla_frame *frame)
{
    const struct sr_xla_string *text = frame->attributes.values[0];
    return text->nbytes == 3 && memcmp(text->text, "end", 3) == 0;
}

/* A region has ended on this thread: XLA runs a small program in the thread that calls it. */
static _Thread_local bool sr_xla_has_ended;
/* W: a thread of XLA, when a region has ended there, or a call has failed. R: the main thread, which takes it back. */
static sr_flag sr_xla_end;
static struct sr_event sr_xla_end_event;

static inline void sr_xla_note_own_end(void) { sr_xla_has_ended = true; }

/* Return whether a region has ended on this thread since the last call. */
static inline bool sr_xla_take_own_end(void)
{
    const bool has_ended = sr_xla_has_ended;
    sr_xla_has_ended = false;
    return has_ended;
}

static inline void sr_xla_publish_end(void) { sr_flag_mark(&sr_xla_end, 1, &sr_xla_end_event); }

/* Wait until a region has ended on a thread of XLA, at most `limit_ns`, and return whether one has. The wait sleeps
   only after `yield_ns`: two wakes take longer than a small program does, and on one CPU the program needs the
   yields. */
static inline bool sr_xla_await_end(uint64_t yield_ns, uint64_t limit_ns)
{
    const uint64_t begin = sr_now_ns();
    while (!sr_flag_reached(&sr_xla_end, 1) && sr_now_ns() - begin < yield_ns)
        sr_yield();
    sr_flag_sleep(&sr_xla_end, 1, &sr_xla_end_event, limit_ns);
    return sr_flag_swap(&sr_xla_end, 0) != 0;
}

/* Return a new error with a copy of the message, for the handler to return. */
static inline void *sr_xla_new_error(const struct sr_xla_frame *frame, const char *message)
{
    struct sr_xla_error_args args = {{sizeof args, NULL}, message, SR_XLA_ABORTED};
    return frame->api->new_error(&args);
}

#endif
