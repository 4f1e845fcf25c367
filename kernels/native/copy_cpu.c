/* Copies in host memory: of a chunk to or from its slot, and of a read of a peer's pools, alone or with helpers.
 *
 * A read is copied piece by piece. Any thread may take the next piece; the call that finds none left ends the read.
 *
 * Helpers are threads that share a read with the owner of the driver lock, one read at a time.
 *
 * - The word. A read's fence is a 32-bit word in memory that outlives all reads. Its low half gets the read's value when
 *   the read is over. `OPEN` says that threads may join, and `ONE_HELPER` is added for each that has joined. So the word
 *   reaches the value when the last helper leaves, and a read that is over has none.
 * - Writers. The owner of the driver lock names a read in the crew's record, opens its fence, and closes it when no piece
 *   is left or the read is stopped. It names another only when the last one's word has no helper and is not open. A
 *   helper touches a read's jobs and blocks only after it has joined, which fails once the word is closed, and leaves
 *   when no piece is left or the word is closed. Its writes are visible to a thread that then sees the word.
 * - Blocking. Helpers sleep on an eventfd that counts the helpers wanted. No thread waits for them: the loop looks at the
 *   fence again, as it does at a GPU's. A helper that the system does not schedule delays only its own read.
 */
#include "kvc.h"

#include <unistd.h>

#define VALUE 0xFFFFu
#define HELPERS 0x3FFF0000u
#define OPEN 0x40000000u
#define ONE_HELPER (VALUE + 1)

/* Copy the units of a job from `start` to `end`; a chunk is in `slot`. `kvc_end_stream` follows if streamed: it waits
 * until every streamed line is in memory. */
static void copy_units(const struct kvc_copy_job *job, char *slot, int64_t start, int64_t end)
{
    static const int32_t first_block = 0;
    const struct kvc_side chunk = {
        .block_ids = &first_block,
        .block_size = job->num_tokens,
        .run_tokens = INT32_MAX,
        .step_tokens = INT32_MAX,
    };
    const struct kvc_side *src_side = job->src.parts ? &job->src : &chunk;
    const struct kvc_side *dst_side = job->dst.parts ? &job->dst : &chunk;
    while (start < end) {
        int64_t part = start / job->num_tokens, first = start - part * job->num_tokens;
        int64_t last = end - part * job->num_tokens;
        if (last > job->num_tokens)
            last = job->num_tokens;
        struct kvc_part in_slot = job->slot;
        in_slot.base = slot + part * job->part_stride;
        const struct kvc_part *dst = job->dst.parts ? job->dst.parts + part : &in_slot;
        const struct kvc_part *src = job->src.parts ? job->src.parts + part : &in_slot;
        if (job->conversion)
            kvc_convert_part(dst, dst_side, src, src_side, job->num_heads, first, last, job->head_dim, job->conversion,
                             job->scales + part * job->num_heads);
        else
            kvc_copy_part(dst, dst_side, src, src_side, job->num_heads, first, last, job->head_dim, job->item_bytes,
                          job->is_streamed != 0);
        start += last - first;
    }
}

/* Copy a chunk. It is complete on return. */
int64_t kvc_copy_cpu(void *context, void *job_address, void *slot, kvc_flag *fence, int64_t fence_value)
{
    (void)context;
    const struct kvc_copy_job *job = job_address;
    copy_units(job, slot, 0, job->num_parts * job->num_tokens);
    if (job->is_streamed)
        kvc_end_stream();
    kvc_store(fence, (uint32_t)fence_value);
    return 0;
}

/* Copy the next piece of a read, which any thread may do. Returns its bytes. */
static int64_t copy_piece(struct kvc_copy_read *read, bool *is_last)
{
    const struct kvc_copy_job *jobs = (const struct kvc_copy_job *)(read + 1);
    /* threads need to agree only on who has which piece, because the fence orders their writes */
    int64_t piece = atomic_fetch_add_explicit(&read->next_piece, 1, memory_order_relaxed);
    for (int64_t index = 0; index < read->num_jobs; index++) {
        const struct kvc_copy_job *job = &jobs[index];
        int64_t unit_bytes = job->num_heads * job->head_dim * job->item_bytes;
        int64_t num_units = job->num_parts * job->num_tokens;
        int64_t piece_units = read->piece_bytes / unit_bytes;
        if (piece_units < 1)
            piece_units = 1;
        int64_t num_pieces = (num_units + piece_units - 1) / piece_units;
        if (piece < num_pieces) {
            int64_t start = piece * piece_units, end = start + piece_units;
            if (end > num_units)
                end = num_units;
            copy_units(job, NULL, start, end);
            *is_last = index + 1 == read->num_jobs && end == num_units;
            return (end - start) * unit_bytes;
        }
        piece -= num_pieces;
    }
    *is_last = true;
    return 0;
}

/* Let no further helper join. The fence gets its value once those that have joined leave. Idempotent. */
void kvc_close_fence(kvc_flag *fence, uint32_t value)
{
    uint32_t word = kvc_load(fence);
    while ((word & ~HELPERS) != value && !kvc_exchange(fence, word, (word & HELPERS) + value))
        word = kvc_load(fence);
}

/* Wake helpers for a read whose fence is 0. Returns false if they have another one. */
static bool share(struct kvc_crew *crew, struct kvc_copy_read *read, kvc_flag *fence)
{
    kvc_flag *last = atomic_load_explicit(&crew->fence, memory_order_relaxed);
    if (last && kvc_load(last) > VALUE)
        return false;
    /* a late helper may look at both at any time; only the read that it joins counts */
    atomic_store_explicit(&crew->read, read, memory_order_relaxed);
    atomic_store_explicit(&crew->fence, fence, memory_order_release);
    kvc_store(fence, OPEN);
    uint64_t num_wanted = (uint64_t)read->num_helpers;
    /* if nobody could be woken, the read has no helpers */
    return write(crew->eventfd, &num_wanted, sizeof num_wanted) > 0;
}

/* Sleep until there may be a read to help with. Returns the read that was joined, or null. */
static struct kvc_copy_read *join_next(struct kvc_crew *crew)
{
    uint64_t one;
    if (read(crew->eventfd, &one, sizeof one) < 0)
        return NULL;
    kvc_flag *fence = atomic_load_explicit(&crew->fence, memory_order_acquire);
    uint32_t word = fence ? kvc_load(fence) : 0;
    while (word & OPEN) {
        if (kvc_exchange(fence, word, word + ONE_HELPER))
            return atomic_load_explicit(&crew->read, memory_order_relaxed);
        word = kvc_load(fence);
    }
    return NULL;
}

/* Copy some pieces of a read. The fence is set with the last one, or when the last helper leaves. */
int64_t kvc_read_cpu(void *crew, void *read_address, kvc_flag *fence, int64_t fence_value)
{
    struct kvc_copy_read *read = read_address;
    if (read->num_helpers && share(crew, read, fence))
        read->num_helpers = 0;
    /* control messages wait for one call: about a tenth of a millisecond */
    int64_t left = read->piece_bytes > KVC_CALL_BYTES ? read->piece_bytes : KVC_CALL_BYTES;
    bool is_last = false;
    while (left > 0 && !is_last)
        left -= copy_piece(read, &is_last);
    kvc_end_stream();
    if (!is_last)
        return KVC_MORE;
    kvc_close_fence(fence, (uint32_t)fence_value);
    return KVC_ALL;
}

/* What a helping thread does until its crew is closed. */
void kvc_help(struct kvc_crew *crew)
{
    while (!kvc_load(&crew->is_closed)) {
        struct kvc_copy_read *read = join_next(crew);
        if (!read)
            continue;
        kvc_flag *fence = atomic_load_explicit(&crew->fence, memory_order_relaxed);
        bool is_last = false;
        while (kvc_load(fence) & OPEN && !kvc_load(&crew->is_closed) && !is_last)
            copy_piece(read, &is_last);
        kvc_end_stream();
        atomic_fetch_sub_explicit(fence, ONE_HELPER, memory_order_seq_cst);
    }
}
