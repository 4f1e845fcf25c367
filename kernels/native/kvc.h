/* The compiled half of kvconnector's data path, as Python and the sources of this folder see it.
 *
 * Python has no API here: it loads the library with ctypes and sees these structs through one mirror,
 * kvconnector_kernels/pump/records.py. The mirror is compared with `kvc_layout` when it is imported, so a struct that was changed
 * on one side only is refused at once. Tests compare constants and the functions' arguments with this header, and the
 * library's `kvc_sources` with the sources: it has no version that somebody could forget to raise.
 *
 * Every field of a record that Python keeps in an array takes 8 bytes, so that Python can write a row as numbers. The
 * writer of a field is in brackets: C is the caller between two runs, P the loop. Without brackets both write it.
 *
 * Memory orders. A `kvc_flag` is written by one thread or device and read by another: stored with release, loaded with
 * acquire, unless a comment says more. Records are plain memory that only the owner of the driver lock touches.
 */
#ifndef KVC_H
#define KVC_H

#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define KVC_API __attribute__((visibility("default")))

typedef _Atomic(uint32_t) kvc_flag;
_Static_assert(sizeof(kvc_flag) == 4, "a flag is a 32-bit word that a GPU can write, too");
_Static_assert(sizeof(void *) == 8, "records hold pointers in 8 bytes");

static inline uint32_t kvc_load(const kvc_flag *flag)
{
    return atomic_load_explicit(flag, memory_order_acquire);
}

static inline void kvc_store(kvc_flag *flag, uint32_t value)
{
    atomic_store_explicit(flag, value, memory_order_release);
}

static inline bool kvc_exchange(kvc_flag *flag, uint32_t expected, uint32_t value)
{
    return atomic_compare_exchange_strong_explicit(flag, &expected, value, memory_order_seq_cst,
                                                   memory_order_seq_cst);
}

enum { KVC_NS_PER_MS = 1000000, KVC_NS_PER_S = 1000000000 };

/* Phases of a program [P]: a free record is `VACANT`, which the caller sets. */
enum { KVC_VACANT, KVC_RUNNING, KVC_QUIET, KVC_OVER };

/* Why a program failed [P]. `error_value` is a UCX status, the status of a copy or of a read, or the bytes of a
 * message. */
enum { KVC_NO_ERROR, KVC_UCX_ERROR, KVC_COPY_ERROR, KVC_SIZE_ERROR, KVC_READ_ERROR };

/* States of a slot [P]. The caller takes a `FAILED` one, whose message may still be read; a `DETACHED` one lacks
 * memory. */
enum { KVC_FREE, KVC_COPYING, KVC_PACKED, KVC_POSTED, KVC_ARRIVED, KVC_FAILED, KVC_DETACHED };

/* Who owns the driver lock, and so may touch the records. */
enum { KVC_NOBODY, KVC_DRIVER, KVC_INLINE };

/* What a read's function returns: a part is done, call again; or all is begun, and the fence will be set. Else an
 * error: nothing is left to begin, and the fence will be set all the same. */
enum { KVC_MORE = -1, KVC_ALL = 0 };

/* Why a run ended. */
enum { KVC_NOTICE = 1, KVC_READABLE = 2, KVC_TIMEOUT = 3 };

/* ---- re-layout and copies in host memory: relayout.c, copy_cpu.c ---- */

/* A part of a layer in a pool, as a logical [block, head, token, dim] array: its address, and strides in bytes. */
struct kvc_part {
    char *base;
    int64_t block_stride;
    int64_t head_stride;
    int64_t token_stride;
    int64_t dim_stride;
};

/* A window into pools: heads from `head_start` on, and tokens in evenly spaced runs of the positions of a list of
 * blocks. `parts` is null for a chunk's slot. */
struct kvc_side {
    const struct kvc_part *parts;
    const int32_t *block_ids;
    int64_t block_size;
    int64_t head_start;
    int64_t token_start;
    int64_t run_tokens;  /* of every `step_tokens` positions the first `run_tokens` */
    int64_t step_tokens;
    int64_t skip_tokens; /* the copy begins so far into the first run */
};

/* Types of elements. Others have no number that could be converted. */
enum { KVC_FLOAT16 = 1, KVC_BFLOAT16, KVC_FLOAT8_E4M3, KVC_FLOAT8_E5M2 };
/* How fp8 stores a value, see convert.c. */
enum { KVC_NEAREST, KVC_TRUNCATED, KVC_CAST };
#define KVC_CONVERSION(src_type, dst_type, rounding) ((rounding) << 16 | (src_type) << 8 | (dst_type))

/* The factor by which a quantised source's numbers are multiplied, and the one by which values are divided before a
 * quantised destination stores them. */
struct kvc_scale {
    float src;
    float dst;
};

/* The same heads and tokens of some parts, from one side to the other. A job's units are all heads of one token of one
 * part, part by part. */
struct kvc_copy_job {
    int64_t nbytes; /* first, as in every job */
    int64_t num_parts;
    int64_t num_heads;
    int64_t num_tokens;
    int64_t head_dim;
    int64_t item_bytes;
    int64_t is_streamed; /* write past the caches */
    int64_t part_stride; /* of a chunk */
    int64_t conversion;  /* 0, or a `KVC_CONVERSION`: then `item_bytes` are those of a chunk, or of the
                          * destination */
    const struct kvc_scale *scales; /* [part, head] of the copy, if elements are converted */
    struct kvc_part slot; /* a chunk's part, whose `base` is known when it is copied; its tokens are block 0 */
    struct kvc_side src;
    struct kvc_side dst;
};

/* A read of a peer's pools. Its jobs follow it. */
struct kvc_copy_read {
    int64_t num_jobs;
    _Atomic(int64_t) next_piece;
    int64_t piece_bytes; /* about the bytes of a piece */
    int64_t num_helpers; /* threads to help with it */
};

enum { KVC_CALL_BYTES = 1 << 20 };

/* Threads that help with a read: see copy_cpu.c. */
struct kvc_crew {
    _Atomic(struct kvc_copy_read *) read; /* the current or last read, and its fence; null before the first one */
    _Atomic(kvc_flag *) fence;
    kvc_flag is_closed; /* helpers return */
    int32_t eventfd;    /* counts the helpers that are wanted */
};

/* ---- launches on a GPU: copy_cuda.c ---- */

enum { KVC_MAX_PARAMS = 40 };

struct kvc_cuda_job {
    int64_t nbytes; /* first, as in every job */
    void *function;
    int64_t num_programs;
    int64_t num_threads;
    int64_t shared_bytes;
    int64_t num_params;
    int64_t slot_param; /* the parameter that is the slot's address */
    void *stream;
    int64_t params[KVC_MAX_PARAMS];
};

/* The CUDA driver's functions. They return a CUresult. */
struct kvc_cuda {
    int (*launch_kernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                         unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **params,
                         void **extra);
    int (*write_value)(void *stream, uint64_t address, uint32_t value, unsigned flags);
    int (*memcpy_to_device)(uint64_t to, const void *from, size_t nbytes, void *stream);
};

/* A read of a peer's pools. The block ids of all its jobs are sent to the GPU first. Its jobs follow it. */
struct kvc_cuda_read {
    int64_t num_jobs;
    uint64_t ids_there;
    const void *ids_here;
    int64_t ids_bytes;
    void *stream;
};

/* A launch of one part, from which the jobs of a span are made: which of a job's words are the block ids of the source
 * and of the destination, and their first parts, -1 for those of a chunk's slot; the tiles, and those along tokens. */
struct kvc_launch {
    int64_t src_ids;
    int64_t dst_ids;
    int64_t src_part;
    int64_t dst_part;
    int64_t num_tiles;
    int64_t num_token_tiles;
    int64_t lead_tokens;  /* tokens before the copy in the first tile */
    int64_t tile_tokens;  /* tokens of a tile */
    int64_t tiles_beside; /* tiles of as many tokens */
};

struct kvc_span {
    int64_t src_further; /* how many tokens further on than the launch it begins, at either side */
    int64_t dst_further;
    int64_t more_tokens; /* how many more it has */
    int64_t num_tokens;
    int64_t src_ids; /* addresses */
    int64_t dst_ids;
    int64_t src_part;
    int64_t dst_part;
    int64_t stream;
    int64_t part_bytes;
    int64_t max_programs;       /* of a job, */
    int64_t max_uncapped_bytes; /* unless it has at most this number of bytes */
};

/* ---- the loop: loop.c ---- */

#define KVC_PROGRAM_FIELDS                                                                                             \
    int64_t phase;                                                                                                     \
    int64_t stopped;      /* begin nothing new */                                                                      \
    char *jobs;           /* [C] what is to be copied */                                                               \
    int64_t error_kind;                                                                                                \
    int64_t error_value;                                                                                               \
    int64_t error_chunk;

#define KVC_CHUNK_FIELDS                                                                                               \
    int64_t first_tag;    /* [C] tag of chunk 0 */                                                                     \
    int64_t num_chunks;   /* [C] */                                                                                    \
    int64_t window;       /* [C] most chunks in slots at a time */                                                     \
    int64_t next_chunk;   /* [P] the next to be packed, or whose receive is to be posted */                            \
    int64_t num_posted;   /* [P] sends: posted so far; receives: posted now */                                         \
    int64_t num_copying;  /* [P] slots being packed, or packed and not posted; being unpacked */

/* What every program begins with. */
struct kvc_program {
    KVC_PROGRAM_FIELDS
};

struct kvc_send {
    KVC_PROGRAM_FIELDS
    KVC_CHUNK_FIELDS
    void *endpoint; /* [C] null once it is gone */
    int64_t num_in_flight;
    int64_t owner;      /* [C] whatever the caller wants to find on the slots in flight */
    int64_t packing_ns; /* [P] when the first chunk began to be packed; 0: none did. Then when the last one was */
    int64_t packed_ns;
    int64_t sending_ns; /* [P] when the first chunk was posted; when UCX had finished with the last one */
    int64_t sent_ns;
};

struct kvc_receive {
    KVC_PROGRAM_FIELDS
    KVC_CHUNK_FIELDS
    int64_t started_ns; /* [P] */
    int64_t ended_ns;   /* [P] */
    int64_t limit;      /* chunks that the peer sends */
    int64_t num_unpacked; /* [P] */
    int64_t arriving_ns;  /* [P] when the first chunk arrived, and began to be unpacked; when the last one did */
    int64_t arrived_ns;
};

typedef int64_t kvc_read_function(void *context, void *read, kvc_flag *fence, int64_t fence_value);

struct kvc_read {
    KVC_PROGRAM_FIELDS
    int64_t started_ns;          /* [P] */
    int64_t ended_ns;            /* [P] */
    kvc_read_function *function; /* [C] see `KVC_ALL` */
    void *context;               /* [C] */
    int64_t num_calls;           /* [P] */
    int64_t all_begun;           /* [P] nothing is left to begin */
    kvc_flag *fence;             /* [C] is set when everything is done */
    int64_t fence_value;
};

struct kvc_slot {
    int64_t state;
    int64_t program; /* [P] index of the program; -1 if that is over and only the network still has the slot */
    int64_t chunk;   /* [P] */
    void *request;   /* [P] UCX's, while posted */
    void *address;   /* [C] */
    kvc_flag *fence; /* [C] the copy sets it */
    int64_t fence_value; /* [P] */
    int64_t length;      /* [P] bytes of the message that arrived */
    int64_t owner;       /* [P] that of the send, for as long as UCX has the slot */
};

/* One for each owner: the driver's rests while another takes place inline. [C] */
struct kvc_run {
    int64_t owner;           /* `DRIVER` or `INLINE` */
    int64_t limit_ns;        /* how long it may take; 0: a single pass */
    struct pollfd *poll_fds; /* UCX's descriptor, the eventfd of `wake_fd` or -1, then those of the caller */
    int64_t num_fds;         /* of the whole array */
};

/* The driver lock: see driver_lock.c. Each word on cache lines of its own. */
struct kvc_lock {
    _Alignas(64) kvc_flag owner;
    _Alignas(64) kvc_flag pending;       /* there is work for a turn of the driver */
    _Alignas(64) kvc_flag looping;       /* the driver's thread is in the loop, or sleeps there */
    _Alignas(64) kvc_flag inline_thread; /* the native id of the thread that owns the lock inline */
    _Alignas(64) kvc_flag wanted;        /* an engine's thread waits for the driver's to hand the lock over */
};

/* ucp_tag_recv_info_t */
struct kvc_tag_info {
    uint64_t tag;
    uint64_t length;
};

typedef int64_t kvc_copy_function(void *context, void *job, void *slot, kvc_flag *fence, int64_t fence_value);
typedef int8_t kvc_status; /* ucs_status_t is one byte */

/* All of a loop: its settings and counters, C functions, and where the others are. */
struct kvc_state {
    struct kvc_send *sends; /* [C] these arrays move when they grow: no thread keeps one after it released the lock */
    struct kvc_receive *receives;
    struct kvc_read *reads;
    struct kvc_slot *send_slots;
    struct kvc_slot *recv_slots;
    int64_t num_sends;
    int64_t num_receives;
    int64_t num_reads;
    int64_t num_send_slots;
    int64_t num_recv_slots;
    struct kvc_run *runs;  /* [C] three */
    int64_t entering;      /* [C] the owner who begins a run */
    int64_t wants_slots;   /* [C] return once a receive slot is free */
    int64_t return_by_ns;  /* [C] the driver's thread returns then at the latest; 0: when its own time is over */
    /* settings [C] */
    kvc_copy_function *copy; /* returns 0 if it was begun; it sets the fence */
    void *copy_context;
    int64_t job_bytes;                                      /* a job begins with its chunk's bytes */
    uint64_t (*digest)(const void *address, size_t nbytes); /* of a chunk; null: chunks have none */
    void *digest_room; /* pinned host memory that a GPU's chunk is copied to for that; null: chunks are in host memory */
    int (*copy_to_host)(void *to, uint64_t from, size_t nbytes); /* CUresult; both wait */
    int (*copy_to_device)(uint64_t to, const void *from, size_t nbytes);
    int64_t spin_after_work_ns;    /* how long to spin after something moved, before sleeping */
    int64_t offer_work_ns;         /* how long the driver's thread leaves work to others before it returns with it */
    int (*begin)(void *argument);  /* called at the start of each run, if not null */
    void *begin_argument;
    /* C functions [C], the objects they take, and memory for what they return */
    void *worker;
    unsigned (*worker_progress)(void *worker);
    kvc_status (*worker_arm)(void *worker);
    void *(*tag_send)(void *endpoint, const void *buffer, size_t count, uint64_t tag, const void *param);
    void *(*tag_recv)(void *worker, void *buffer, size_t count, uint64_t tag, uint64_t mask, const void *param);
    void *(*tag_probe)(void *worker, uint64_t tag, uint64_t mask, int remove, struct kvc_tag_info *info);
    kvc_status (*request_status)(void *request);
    void (*request_free)(void *request);
    void (*request_cancel)(void *worker, void *request);
    kvc_status (*recv_test)(void *request, struct kvc_tag_info *info);
    void *send_param;
    void *recv_param;
    struct kvc_tag_info *recv_info;
    uint64_t control_tag; /* the bits of a tag of messages that are for the caller, to whom the loop returns */
    int (*clock_gettime)(clockid_t clock, struct timespec *time);
    int (*usleep)(unsigned microseconds);
    struct pollfd *wake_fd; /* the eventfd that wakes the driver: the lock is free, or something is pending */
    struct kvc_lock *lock;
    /* counters */
    int64_t send_turn;     /* [P] the send whose turn it is */
    int64_t read_turn;     /* [P] the read whose turn it is */
    int64_t num_inline;    /* [C] how often progress was made inline */
    int64_t moved_ns;      /* when there was work last */
    int64_t yield_gil_us;  /* [C] how long the driver's thread leaves GIL and lock to others after a shorter run */
    int64_t pending_ns;    /* [P] since when something is pending; 0 if nothing is */
    int64_t left_loop_ns;  /* [P] when the driver's thread left the loop, to wait for the GIL */
    int64_t shared_gil_ns; /* [C] when it got the GIL after others could have it */
};

/* ---- the lease board: board.c ---- */

struct kvc_board_entry {
    kvc_flag key[4];
    kvc_flag expected;
    kvc_flag ready;
    kvc_flag num_tokens;
    kvc_flag ahead;
};

enum { KVC_ENTRIES_PER_BUCKET = 8 };

/* ---- digests of chunks: loop.c ---- */

enum { KVC_DIGEST_BYTES = 8, KVC_CORRUPTED = 1 << 16 };

/* ---- functions that UCX calls: ucx_callbacks.c ---- */

enum { KVC_NUM_NOTES = 256, KVC_NOTE_BYTES = 256 };

/* A message of UCX's log. `number` is written last, and is one more than the messages before it. */
struct kvc_note {
    _Atomic(uint64_t) number;
    const char *file;
    const char *function;
    uint64_t line;
    uint64_t leaks_expected;
    char text[KVC_NOTE_BYTES];
};

struct kvc_log {
    _Atomic(uint64_t) count;
    _Atomic(uint64_t) leaks_expected;
    struct kvc_note notes[KVC_NUM_NOTES];
};

/* ---- what this header's structs look like: layout.c ---- */

struct kvc_layout_entry {
    const char *name; /* "struct" or "struct.field"; null ends the table */
    uint64_t offset;
    uint64_t size;
};

/* ---- functions that the sources share ---- */

/* Time of the monotonic clock. Several threads may read it at once. */
static inline int64_t kvc_now_ns(const struct kvc_state *state)
{
    struct timespec now;
    state->clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * KVC_NS_PER_S + now.tv_nsec;
}

void kvc_copy_part(const struct kvc_part *dst, const struct kvc_side *dst_side, const struct kvc_part *src,
                   const struct kvc_side *src_side, int64_t num_heads, int64_t first, int64_t last, int64_t head_dim,
                   int64_t item_bytes, bool is_streamed);
void kvc_convert_part(const struct kvc_part *dst, const struct kvc_side *dst_side, const struct kvc_part *src,
                      const struct kvc_side *src_side, int64_t num_heads, int64_t first, int64_t last, int64_t head_dim,
                      int64_t conversion, const struct kvc_scale *scales);
enum { KVC_BASELINE, KVC_AVX2, KVC_AVX512 };
extern int kvc_vectors; /* what this processor has for elements without gaps; tests try lesser ones */
void kvc_convert_row(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t count, int64_t conversion,
                     struct kvc_scale scale);
int64_t kvc_element_bytes(int64_t type);
void kvc_end_stream(void);
void kvc_close_fence(kvc_flag *fence, uint32_t value);

void kvc_lock_release(struct kvc_state *state, const struct kvc_run *run);
void kvc_lock_acquire(struct kvc_state *state, const struct kvc_run *run);
void kvc_lock_forget_wakes(struct kvc_state *state);
void kvc_lock_hand_over(struct kvc_state *state, const struct kvc_run *run);
void kvc_lock_offer_asleep(struct kvc_state *state, const struct kvc_run *run);
bool kvc_must_return(struct kvc_state *state, const struct kvc_run *run, int found, int64_t now);

static inline bool kvc_has_pending(const struct kvc_state *state)
{
    return kvc_load(&state->lock->pending) != 0;
}

/* ---- functions that Python calls ---- */

KVC_API extern const struct kvc_layout_entry kvc_layout[];

KVC_API int64_t kvc_board_look_up(const struct kvc_board_entry *board, int64_t num_buckets, const void *key);
KVC_API void kvc_board_claim(struct kvc_board_entry *entry, const void *key, int64_t expected);
KVC_API void kvc_board_clear(struct kvc_board_entry *entry);
KVC_API void kvc_board_write(kvc_flag *word, int64_t value);

KVC_API bool kvc_wait_flag(const kvc_flag *flag, int64_t limit_ns);

KVC_API int64_t kvc_copy_cpu(void *context, void *job, void *slot, kvc_flag *fence, int64_t fence_value);
KVC_API int64_t kvc_read_cpu(void *crew, void *read, kvc_flag *fence, int64_t fence_value);
KVC_API void kvc_help(struct kvc_crew *crew);

KVC_API int64_t kvc_copy_cuda(void *cuda, void *job, void *slot, kvc_flag *fence, int64_t fence_value);
KVC_API int64_t kvc_read_cuda(void *cuda, void *read, kvc_flag *fence, int64_t fence_value);
KVC_API void kvc_fill_jobs(int64_t *first, int64_t row_words, int64_t num_jobs, const int64_t *terms,
                           const int64_t *rows, const struct kvc_launch *launch, const struct kvc_span *span);

KVC_API void kvc_apply_writes(int32_t *table, int64_t width, int32_t *lengths, const int32_t *records,
                              int64_t num_records, const int32_t *ids, int64_t group, int64_t ratio);
KVC_API void kvc_gather_rows(const int32_t *source, int64_t source_width, int64_t num_rows,
                             const int32_t *source_lengths, int32_t *target, int64_t target_width,
                             int32_t *target_lengths, const int32_t *rows, int64_t num_reqs);
struct kvc_token_share {
    int64_t block_size;
    int64_t kernel_block_size;
    int64_t world_size;
    int64_t rank;
    int64_t interleave_tokens;
    int64_t row_tokens; /* tokens that share a slot: the last one writes it */
    int64_t is_ring;    /* a request has one block, in which tokens take turns */
};
KVC_API void kvc_map_slots(const int32_t *table, int64_t width, const int32_t *lengths, const int32_t *query_start_loc,
                           int64_t num_reqs, const int64_t *positions, int64_t num_positions, int64_t *slots,
                           int64_t num_slots, const struct kvc_token_share *share);

KVC_API bool kvc_try_acquire(struct kvc_state *state, int64_t owner, int64_t limit_ns, int64_t thread);
KVC_API void kvc_wait_until_free(struct kvc_state *state);
KVC_API void kvc_release_inline(struct kvc_state *state);
KVC_API bool kvc_notify(struct kvc_state *state);

KVC_API int64_t kvc_run_loop(struct kvc_state *state);
KVC_API int64_t kvc_append_digest(struct kvc_state *state, void *chunk, int64_t nbytes);
KVC_API int64_t kvc_check_digest(struct kvc_state *state, void *chunk, int64_t nbytes);

#endif
