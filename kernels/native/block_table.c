/* Block tables in host memory, one call per cache group. A table holds kernel block ids: each of the allocator's ids is
 * `ratio` consecutive ones. */
#include "kvc.h"

enum { PAD_SLOT_ID = -1 };

/* A staged write: `ids[offset : offset + count]` go to `start` of a row; `length` is its new length, or -1 to keep. */
struct write_record {
    int32_t group;
    int32_t row;
    int32_t start;
    int32_t count;
    int32_t offset;
    int32_t length;
};

/* Write staged ids into a group's table [row, width], expanded to kernel ids, and set the rows' lengths. */
void kvc_apply_writes(int32_t *table, int64_t width, int32_t *lengths, const int32_t *records, int64_t num_records,
                      const int32_t *ids, int64_t group, int64_t ratio)
{
    const struct write_record *writes = (const struct write_record *)records;
    for (int64_t index = 0; index < num_records; index++) {
        const struct write_record *write = &writes[index];
        if (write->group != group)
            continue;
        int32_t *at = table + write->row * width + write->start * ratio;
        const int32_t *from = ids + write->offset;
        for (int64_t id = 0; id < write->count; id++)
            for (int64_t step = 0; step < ratio; step++)
                *at++ = (int32_t)(from[id] * ratio + step);
        if (write->length >= 0)
            lengths[write->row] = (int32_t)(write->length * ratio);
    }
}

/* Copy row `rows[i]` of the source to row `i` of the target. After a row's ids the target is zero. A row that does not
 * exist is empty. */
void kvc_gather_rows(const int32_t *source, int64_t source_width, int64_t num_rows, const int32_t *source_lengths,
                     int32_t *target, int64_t target_width, int32_t *target_lengths, const int32_t *rows,
                     int64_t num_reqs)
{
    for (int64_t index = 0; index < num_reqs; index++) {
        int64_t row = rows[index], length = row >= 0 && row < num_rows ? source_lengths[row] : 0;
        int64_t before = target_lengths[index];
        int32_t *to = target + index * target_width;
        if (length)
            memcpy(to, source + row * source_width, (size_t)length * sizeof *to);
        if (length < before)
            memset(to + length, 0, (size_t)(before - length) * sizeof *to);
        target_lengths[index] = (int32_t)length;
    }
}

static int64_t slot_of(const int32_t *row, int64_t length, int64_t position, const struct kvc_token_share *share)
{
    if (share->is_ring && position >= 0)
        position %= share->block_size;
    int64_t virtual_block = share->block_size * share->world_size;
    int64_t block = position / virtual_block, offset = position % virtual_block;
    int64_t turn = offset / share->interleave_tokens;
    int64_t local_offset = turn / share->world_size * share->interleave_tokens + offset % share->interleave_tokens;
    int64_t ratio = share->block_size / share->kernel_block_size;
    int64_t column = block * ratio + local_offset / share->kernel_block_size;
    if (position < 0 || turn % share->world_size != share->rank || (position + 1) % share->row_tokens ||
        column >= length)
        return PAD_SLOT_ID;
    return row[column] * (share->kernel_block_size / share->row_tokens) +
           local_offset % share->kernel_block_size / share->row_tokens;
}

/* Compute the slots of a batch's tokens. A token gets `PAD_SLOT_ID` if another rank stores it, a later token writes the
 * row that it belongs to, or the request holds no block for it; so does every entry of `slots` after the last token. */
void kvc_map_slots(const int32_t *table, int64_t width, const int32_t *lengths, const int32_t *query_start_loc,
                   int64_t num_reqs, const int64_t *positions, int64_t num_positions, int64_t *slots,
                   int64_t num_slots, const struct kvc_token_share *share)
{
    int64_t token = 0;
    for (int64_t request = 0; request < num_reqs; request++) {
        int64_t end = query_start_loc[request + 1];
        if (end > num_positions)
            end = num_positions;
        for (token = query_start_loc[request]; token < end; token++)
            slots[token] = slot_of(table + request * width, lengths[request], positions[token], share);
    }
    token = query_start_loc[num_reqs] < num_positions ? query_start_loc[num_reqs] : num_positions;
    for (; token < num_slots; token++)
        slots[token] = PAD_SLOT_ID;
}
