/* Re-layout in host memory: one part's tokens from one layout of blocks, heads, tokens and dims to another.
 *
 * Tokens are taken in boxes: evenly spaced tokens within one block on each side. A box whose elements lie without gaps
 * and in the same order on both sides is one run of bytes, and such runs that follow each other on both sides become
 * one. Every other box is copied row by row, or item by item if the innermost dimension differs. The inner loop follows
 * the destination's finer axis, so that writes are in order.
 *
 * Streaming stores bypass the caches. That avoids reading the destination's lines first, a third of the memory traffic.
 */
#include "kvc.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum {
    TILE_ITEMS = 32, /* items on a side of a square tile: a tile stays in the first-level cache on both sides */
    LINE_BYTES = 64,
    MIN_STREAMED_BYTES = 128, /* shorter runs spend more on their unaligned ends than streaming saves */
};

/* The order in which [head, token, dim] lies without gaps. */
enum dense_order { NOT_DENSE, HND, NHD, HDN };

struct strides {
    int64_t outer;
    int64_t inner;
};

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Copy whole lines to an address that is a multiple of their size, past the caches. All loads of a line come first: a line
 * whose stores are interrupted by a cache miss may leave the processor in parts. */
#if defined(__x86_64__)

static void stream_lines_sse(char *dst, const char *src, int64_t nbytes)
{
    for (int64_t at = 0; at < nbytes; at += LINE_BYTES) {
        const __m128i *from = (const __m128i *)(src + at);
        __m128i *to = (__m128i *)(dst + at);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
}

/* Two stores a line: a tenth to a fifth faster than four where the source is not in a cache. */
__attribute__((target("avx"))) static void stream_lines_avx(char *dst, const char *src, int64_t nbytes)
{
    for (int64_t at = 0; at < nbytes; at += LINE_BYTES) {
        const __m256i *from = (const __m256i *)(src + at);
        __m256i *to = (__m256i *)(dst + at);
        __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
    }
}

static bool has_avx;

/* Run when the library is loaded: in a virtual machine cpuid takes longer than a small copy. Compilers offer the same by
 * __builtin_cpu_supports, which not all of them can link into a shared library. */
__attribute__((constructor)) static void look_for_avx(void)
{
    unsigned eax, ebx, ecx, edx, enabled;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_AVX) || !(ecx & bit_OSXSAVE))
        return;
    __asm__("xgetbv" : "=a"(enabled), "=d"(edx) : "c"(0));
    has_avx = (enabled & 6) == 6; /* the system saves both halves of its registers */
}

static void stream_lines(char *dst, const char *src, int64_t nbytes)
{
    if (has_avx)
        stream_lines_avx(dst, src, nbytes);
    else
        stream_lines_sse(dst, src, nbytes);
}

#elif defined(__aarch64__)

static void stream_lines(char *dst, const char *src, int64_t nbytes)
{
    for (int64_t at = 0; at < nbytes; at += LINE_BYTES)
        __asm__ volatile("ldp q0, q1, [%1]\n\tldp q2, q3, [%1, #32]\n\tstnp q0, q1, [%0]\n\tstnp q2, q3, [%0, #32]"
                         :
                         : "r"(dst + at), "r"(src + at)
                         : "v0", "v1", "v2", "v3", "memory");
}

#else

static void stream_lines(char *dst, const char *src, int64_t nbytes)
{
    memcpy(dst, src, (size_t)nbytes);
}

#endif

/* Streamed lines are ordered by a fence only: without it another thread might not see them after a flag. */
void kvc_end_stream(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
    atomic_thread_fence(memory_order_seq_cst);
}

static void copy_run(char *dst, const char *src, int64_t nbytes, bool is_streamed)
{
    if (!is_streamed || nbytes < MIN_STREAMED_BYTES) {
        if (nbytes)
            memcpy(dst, src, (size_t)nbytes);
        return;
    }
    int64_t lead = (int64_t)(-(uintptr_t)dst % LINE_BYTES);
    if (lead)
        memcpy(dst, src, (size_t)lead);
    int64_t end = lead + (nbytes - lead) / LINE_BYTES * LINE_BYTES;
    stream_lines(dst + lead, src + lead, end - lead);
    if (end < nbytes)
        memcpy(dst + end, src + end, (size_t)(nbytes - end));
}

/* Copy items that lie evenly spaced on both sides. They may lie anywhere, aligned or not: a memcpy of a constant size is
 * one load and one store. */
#define COPY_ITEMS(dst, dst_step, src, src_step, count, item_bytes)                                                    \
    do {                                                                                                               \
        char *to = (dst);                                                                                              \
        const char *from = (src);                                                                                      \
        int64_t left = (count);                                                                                        \
        for (; left >= 4; left -= 4) {                                                                                 \
            memcpy(to, from, item_bytes);                                                                              \
            memcpy(to + (dst_step), from + (src_step), item_bytes);                                                    \
            memcpy(to + 2 * (dst_step), from + 2 * (src_step), item_bytes);                                            \
            memcpy(to + 3 * (dst_step), from + 3 * (src_step), item_bytes);                                            \
            to += 4 * (dst_step);                                                                                      \
            from += 4 * (src_step);                                                                                    \
        }                                                                                                              \
        for (; left > 0; left--) {                                                                                     \
            memcpy(to, from, item_bytes);                                                                              \
            to += (dst_step);                                                                                          \
            from += (src_step);                                                                                        \
        }                                                                                                              \
    } while (0)

/* Copy an [outer, inner] matrix item by item. The inner axis is the destination's finer one; mostly it is contiguous
 * there, which is worth a loop of its own. */
#define DEFINE_COPY_STRIDED(item_bytes)                                                                                \
    static void copy_strided_##item_bytes(char *dst, struct strides dst_by, const char *src, struct strides src_by,    \
                                          int64_t num_outer, int64_t num_inner)                                        \
    {                                                                                                                  \
        for (int64_t outer_tile = 0; outer_tile < num_outer; outer_tile += TILE_ITEMS) {                               \
            int64_t outer_end = least(outer_tile + TILE_ITEMS, num_outer);                                             \
            for (int64_t inner_tile = 0; inner_tile < num_inner; inner_tile += TILE_ITEMS) {                           \
                int64_t count = least(inner_tile + TILE_ITEMS, num_inner) - inner_tile;                                \
                for (int64_t outer = outer_tile; outer < outer_end; outer++) {                                         \
                    char *first = dst + outer * dst_by.outer + inner_tile * dst_by.inner;                              \
                    const char *origin = src + outer * src_by.outer + inner_tile * src_by.inner;                       \
                    if (dst_by.inner == item_bytes)                                                                    \
                        COPY_ITEMS(first, item_bytes, origin, src_by.inner, count, item_bytes);                        \
                    else                                                                                               \
                        COPY_ITEMS(first, dst_by.inner, origin, src_by.inner, count, item_bytes);                      \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_COPY_STRIDED(1)
DEFINE_COPY_STRIDED(2)
DEFINE_COPY_STRIDED(4)
DEFINE_COPY_STRIDED(8)

static void swap_axes(struct strides *dst_by, struct strides *src_by, int64_t *num_outer, int64_t *num_inner)
{
    *dst_by = (struct strides){dst_by->inner, dst_by->outer};
    *src_by = (struct strides){src_by->inner, src_by->outer};
    int64_t count = *num_outer;
    *num_outer = *num_inner;
    *num_inner = count;
}

/* Copy one head's [token, dim] matrix whose dim is not contiguous on both sides. */
static void copy_matrix(char *dst, struct strides dst_by, const char *src, struct strides src_by, int64_t num_tokens,
                        int64_t head_dim, int64_t item_bytes, bool is_streamed)
{
    int64_t num_outer = num_tokens, num_inner = head_dim;
    if (dst_by.outer < dst_by.inner)
        swap_axes(&dst_by, &src_by, &num_outer, &num_inner);
    if (dst_by.inner == item_bytes && src_by.inner == item_bytes) {
        for (int64_t outer = 0; outer < num_outer; outer++)
            copy_run(dst + outer * dst_by.outer, src + outer * src_by.outer, num_inner * item_bytes, is_streamed);
        return;
    }
    switch (item_bytes) {
    case 1: copy_strided_1(dst, dst_by, src, src_by, num_outer, num_inner); break;
    case 2: copy_strided_2(dst, dst_by, src, src_by, num_outer, num_inner); break;
    case 4: copy_strided_4(dst, dst_by, src, src_by, num_outer, num_inner); break;
    default: copy_strided_8(dst, dst_by, src, src_by, num_outer, num_inner); break;
    }
}

/* Copy a [head, token] matrix of contiguous rows, joined along an axis that is contiguous on both sides. */
static void copy_rows(char *dst, struct strides dst_by, const char *src, struct strides src_by, int64_t num_heads,
                      int64_t num_tokens, int64_t row_bytes, bool is_streamed)
{
    int64_t num_outer = num_heads, num_inner = num_tokens;
    if (dst_by.outer < dst_by.inner)
        swap_axes(&dst_by, &src_by, &num_outer, &num_inner);
    bool is_joined = dst_by.inner == row_bytes && src_by.inner == row_bytes;
    for (int64_t outer = 0; outer < num_outer; outer++) {
        char *to = dst + outer * dst_by.outer;
        const char *from = src + outer * src_by.outer;
        if (is_joined) {
            copy_run(to, from, num_inner * row_bytes, is_streamed);
            continue;
        }
        for (int64_t inner = 0; inner < num_inner; inner++) {
            copy_run(to, from, row_bytes, is_streamed);
            to += dst_by.inner;
            from += src_by.inner;
        }
    }
}

/* Evenly spaced tokens in one block: the first one's address, how many they are, and the strides of all axes. */
struct box {
    char *base;
    int64_t num_tokens;
    int64_t head_stride;
    int64_t token_stride;
    int64_t dim_stride;
};

static enum dense_order dense_order(const struct box *box, int64_t num_heads, int64_t num_tokens, int64_t head_dim,
                                    int64_t item_bytes)
{
    int64_t head = box->head_stride, token = box->token_stride, dim = box->dim_stride;
    int64_t row_bytes = head_dim * item_bytes;
    bool is_head_outermost = head == num_tokens * row_bytes || num_heads == 1;
    if (dim == item_bytes || head_dim == 1) {
        if (is_head_outermost && (token == row_bytes || num_tokens == 1))
            return HND;
        bool is_token_outermost = token == num_heads * row_bytes || num_tokens == 1;
        if (is_token_outermost && (head == row_bytes || num_heads == 1))
            return NHD;
    } else if (is_head_outermost && token == item_bytes && dim == num_tokens * item_bytes) {
        return HDN;
    }
    return NOT_DENSE;
}

/* Returns the box that begins with a token of the copy. */
static struct box box_at(const struct kvc_part *part, const struct kvc_side *side, int64_t token)
{
    int64_t turn = (side->skip_tokens + token) / side->run_tokens;
    int64_t place = side->skip_tokens + token - turn * side->run_tokens;
    int64_t position = side->token_start + turn * side->step_tokens + place;
    int64_t index = position / side->block_size, offset = position - index * side->block_size;
    struct box box = {
        .base = part->base + side->head_start * part->head_stride + side->block_ids[index] * part->block_stride +
                offset * part->token_stride,
        .num_tokens = least(side->block_size - offset, side->run_tokens - place),
        .head_stride = part->head_stride,
        .token_stride = part->token_stride,
        .dim_stride = part->dim_stride,
    };
    if (side->run_tokens == 1) {
        box.num_tokens = (side->block_size - offset + side->step_tokens - 1) / side->step_tokens;
        box.token_stride *= side->step_tokens;
    }
    return box;
}

static void copy_box(const struct box *dst, const struct box *src, int64_t num_heads, int64_t num_tokens,
                     int64_t head_dim, int64_t item_bytes, bool is_streamed)
{
    bool is_dim_joined = dst->dim_stride == item_bytes && src->dim_stride == item_bytes;
    if (is_dim_joined || head_dim == 1) {
        copy_rows(dst->base, (struct strides){dst->head_stride, dst->token_stride}, src->base,
                  (struct strides){src->head_stride, src->token_stride}, num_heads, num_tokens, head_dim * item_bytes,
                  is_streamed);
        return;
    }
    for (int64_t head = 0; head < num_heads; head++)
        copy_matrix(dst->base + head * dst->head_stride, (struct strides){dst->token_stride, dst->dim_stride},
                    src->base + head * src->head_stride, (struct strides){src->token_stride, src->dim_stride},
                    num_tokens, head_dim, item_bytes, is_streamed);
}

/* Copy the tokens `first` to `last` of one part, all heads. Checks nothing. `kvc_end_stream` follows if streamed. */
void kvc_copy_part(const struct kvc_part *dst, const struct kvc_side *dst_side, const struct kvc_part *src,
                   const struct kvc_side *src_side, int64_t num_heads, int64_t first, int64_t last, int64_t head_dim,
                   int64_t item_bytes, bool is_streamed)
{
    /* one run that still grows */
    char *run_dst = NULL;
    const char *run_src = NULL;
    int64_t run_bytes = 0, count;
    for (int64_t token = first; token < last; token += count) {
        struct box to = box_at(dst, dst_side, token), from = box_at(src, src_side, token);
        count = least(last - token, least(to.num_tokens, from.num_tokens));
        enum dense_order dense = dense_order(&to, num_heads, count, head_dim, item_bytes);
        if (dense == NOT_DENSE || dense != dense_order(&from, num_heads, count, head_dim, item_bytes)) {
            copy_box(&to, &from, num_heads, count, head_dim, item_bytes, is_streamed);
            continue;
        }
        if (!run_bytes || to.base != run_dst + run_bytes || from.base != run_src + run_bytes) {
            copy_run(run_dst, run_src, run_bytes, is_streamed);
            run_dst = to.base;
            run_src = from.base;
            run_bytes = 0;
        }
        run_bytes += num_heads * count * head_dim * item_bytes;
    }
    copy_run(run_dst, run_src, run_bytes, is_streamed);
}

static bool are_alike(const struct kvc_scale *scales, int64_t count)
{
    for (int64_t index = 1; index < count; index++)
        if (scales[index].src != scales[0].src || scales[index].dst != scales[0].dst)
            return false;
    return true;
}

/* Convert the tokens `first` to `last` of one part, all heads: `scales` has one pair for each. Checks nothing.
 *
 * Heads of one scale that follow each other are one row. Otherwise memory is read in its order: in NHD a token's heads,
 * then the next token's. */
void kvc_convert_part(const struct kvc_part *dst, const struct kvc_side *dst_side, const struct kvc_part *src,
                      const struct kvc_side *src_side, int64_t num_heads, int64_t first, int64_t last, int64_t head_dim,
                      int64_t conversion, const struct kvc_scale *scales)
{
    int64_t src_item = kvc_element_bytes(conversion >> 8 & 255), dst_item = kvc_element_bytes(conversion & 255), count;
    bool is_one_scale = are_alike(scales, num_heads);
    for (int64_t token = first; token < last; token += count) {
        struct box to = box_at(dst, dst_side, token), from = box_at(src, src_side, token);
        count = least(last - token, least(to.num_tokens, from.num_tokens));
        int64_t heads = num_heads, num_rows = count, row_items = head_dim;
        struct strides to_by = {to.token_stride, to.dim_stride}, from_by = {from.token_stride, from.dim_stride};
        if (head_dim == 1 || (to_by.outer == dst_item && from_by.outer == src_item))
            swap_axes(&to_by, &from_by, &num_rows, &row_items);
        bool is_dense = to_by.inner == dst_item && from_by.inner == src_item;
        if (is_dense && is_one_scale && to.head_stride == row_items * dst_item &&
            from.head_stride == row_items * src_item) {
            row_items *= heads;
            heads = 1;
        }
        if (is_dense && to_by.outer == row_items * dst_item && from_by.outer == row_items * src_item) {
            row_items *= num_rows;
            num_rows = 1;
        }
        bool is_token_first = from_by.outer > from.head_stride;
        int64_t outer = is_token_first ? num_rows : heads, inner = is_token_first ? heads : num_rows;
        for (int64_t index = 0; index < outer; index++)
            for (int64_t other = 0; other < inner; other++) {
                int64_t row = is_token_first ? index : other, head = is_token_first ? other : index;
                kvc_convert_row(to.base + head * to.head_stride + row * to_by.outer, to_by.inner,
                                from.base + head * from.head_stride + row * from_by.outer, from_by.inner, row_items,
                                conversion, scales[head]);
            }
    }
}
