/* Runs the library's sources under a sanitizer, linked with them: test_sanitizers.py builds it and names a part.
 *
 * Races (threads): board, crew, lock, notes. Memory and arithmetic: copies, conversions, loop, block_table. Each compares what it gets
 * with a naive version, and ends with status 0; what a sanitizer finds ends the process with another one.
 */
#include "kvc.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static _Thread_local uint64_t seed = 88172645463325252u;

static uint64_t draw(uint64_t count) /* below `count` */
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % count;
}

static pthread_t start(void *(*body)(void *), void *argument)
{
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, body, argument));
    return thread;
}

/* ---- board: a producer grants a lease, fills its blocks and takes them back; consumers read as the data path does ---- */

enum { NUM_LEASES = 5000, BLOCK_WORDS = 32 };
static struct kvc_board_entry board[2 * KVC_ENTRIES_PER_BUCKET];
static _Atomic(uint32_t) block[BLOCK_WORDS]; /* relaxed: another lease's bytes may be read, and then do not count */
static _Atomic(uint32_t) newest;
static _Atomic(int) ended;

static void key_of(uint32_t lease, uint32_t key[4])
{
    key[0] = lease;
    key[1] = key[2] = key[3] = 7;
}

static void *read_leases(void *argument)
{
    (void)argument;
    int64_t num_valid = 0;
    while (!atomic_load(&ended)) {
        uint32_t key[4], found[BLOCK_WORDS], lease = atomic_load_explicit(&newest, memory_order_relaxed);
        key_of(lease, key);
        if (kvc_board_look_up(board, 2, key) < 0)
            continue;
        for (int word = 0; word < BLOCK_WORDS; word++)
            found[word] = atomic_load_explicit(&block[word], memory_order_relaxed);
        int64_t numbers = kvc_board_look_up(board, 2, key);
        if (numbers < 0)
            continue;
        CHECK((uint32_t)numbers == lease && numbers >> 32 == lease + 1);
        for (int word = 0; word < BLOCK_WORDS; word++)
            CHECK(found[word] == lease);
        num_valid++;
    }
    return (void *)(intptr_t)num_valid;
}

static void run_board(void)
{
    pthread_t readers[2];
    for (int index = 0; index < 2; index++)
        readers[index] = start(read_leases, NULL);
    for (uint32_t lease = 1; lease < NUM_LEASES; lease++) {
        uint32_t key[4];
        key_of(lease, key);
        struct kvc_board_entry *entry = &board[(lease & 1) * KVC_ENTRIES_PER_BUCKET + lease / 2 % KVC_ENTRIES_PER_BUCKET];
        for (int word = 0; word < BLOCK_WORDS; word++)
            atomic_store_explicit(&block[word], lease, memory_order_relaxed);
        kvc_board_claim(entry, key, lease);
        kvc_board_write(&entry->num_tokens, lease);
        kvc_board_write(&entry->ahead, lease + 1);
        kvc_board_write(&entry->ready, lease);
        atomic_store_explicit(&newest, lease, memory_order_relaxed);
        if (draw(4) == 0)
            sched_yield();
        kvc_board_clear(entry);
    }
    atomic_store(&ended, 1);
    for (int index = 0; index < 2; index++)
        pthread_join(readers[index], NULL);
}

/* ---- copies: any layouts, against a naive copy ---- */

struct pool {
    char *memory;
    int64_t nbytes;
    struct kvc_part *parts;
    int32_t *ids;
    int64_t num_blocks;
    struct kvc_side side;
};

enum { PARTS = 2 };

struct shape {
    int64_t heads, tokens, dim, item;
};

/* A pool in an order of its axes, whose memory is not a byte longer than it must be. */
static struct pool draw_pool(struct shape shape, int64_t run, int64_t step, int64_t skip)
{
    struct pool pool = {0};
    int64_t block_size = 1 + (int64_t)draw(9), heads = shape.heads + (int64_t)draw(3), start = (int64_t)draw(12);
    int64_t last_turn = (skip + shape.tokens - 1) / run;
    int64_t last = start + last_turn * step + (skip + shape.tokens - 1 - last_turn * run);
    int64_t num_ids = last / block_size + 1;
    pool.num_blocks = num_ids + (int64_t)draw(3);
    int64_t counts[3] = {heads, block_size, shape.dim}, strides[3], gap = (int64_t)draw(2) * shape.item;
    int order[3] = {0, 1, 2}, swap = (int)draw(3);
    if (swap) {
        order[swap - 1] = swap;
        order[swap] = swap - 1;
    }
    int64_t stride = shape.item;
    for (int axis = 2; axis >= 0; axis--) {
        strides[order[axis]] = stride;
        stride = stride * counts[order[axis]] + (axis ? gap : 0);
    }
    int64_t part_bytes = stride * pool.num_blocks;
    pool.nbytes = PARTS * part_bytes;
    pool.memory = malloc((size_t)pool.nbytes);
    pool.parts = malloc(PARTS * sizeof *pool.parts);
    pool.ids = malloc((size_t)num_ids * sizeof *pool.ids);
    CHECK(pool.memory && pool.parts && pool.ids);
    for (int64_t at = 0; at < pool.nbytes; at++)
        pool.memory[at] = (char)draw(256);
    for (int part = 0; part < PARTS; part++)
        pool.parts[part] =
            (struct kvc_part){pool.memory + part * part_bytes, stride, strides[0], strides[1], strides[2]};
    for (int64_t index = 0; index < num_ids; index++)
        pool.ids[index] = (int32_t)index;
    for (int64_t index = num_ids - 1; index > 0; index--) {
        int64_t other = (int64_t)draw((uint64_t)index + 1);
        int32_t id = pool.ids[index];
        pool.ids[index] = pool.ids[other];
        pool.ids[other] = id;
    }
    pool.side = (struct kvc_side){pool.parts, pool.ids, block_size, heads - shape.heads, start, run, step, skip};
    return pool;
}

static char *item_at(const struct kvc_part *part, const struct kvc_side *side, int64_t head, int64_t token, int64_t dim)
{
    int64_t turn = (side->skip_tokens + token) / side->run_tokens;
    int64_t position = side->token_start + turn * side->step_tokens + (side->skip_tokens + token) % side->run_tokens;
    return part->base + side->block_ids[position / side->block_size] * part->block_stride +
           (side->head_start + head) * part->head_stride + position % side->block_size * part->token_stride +
           dim * part->dim_stride;
}

static struct pool draw_side(struct shape shape)
{
    if (draw(3))
        return draw_pool(shape, INT32_MAX, INT32_MAX, 0);
    int64_t run = 1 + (int64_t)draw(4);
    return draw_pool(shape, run, run + (int64_t)draw(5), (int64_t)draw((uint64_t)run));
}

static void free_pool(struct pool *pool)
{
    free(pool->memory);
    free(pool->parts);
    free(pool->ids);
}

static struct kvc_copy_job job_of(struct shape shape, const struct pool *src, const struct pool *dst)
{
    struct kvc_copy_job job = {.num_parts = PARTS, .num_heads = shape.heads, .num_tokens = shape.tokens,
                               .head_dim = shape.dim, .item_bytes = shape.item, .is_streamed = draw(2) != 0};
    int64_t row = shape.dim * shape.item;
    job.part_stride = shape.heads * shape.tokens * row;
    job.nbytes = PARTS * job.part_stride;
    job.slot = (struct kvc_part){NULL, 0, row, shape.heads * row, shape.item};
    if (src)
        job.src = src->side;
    if (dst)
        job.dst = dst->side;
    return job;
}

static void expect_copied(struct shape shape, const struct pool *src, const struct pool *dst, const char *before)
{
    char *want = malloc((size_t)dst->nbytes);
    CHECK(want);
    memcpy(want, before, (size_t)dst->nbytes);
    for (int part = 0; part < PARTS; part++)
        for (int64_t head = 0; head < shape.heads; head++)
            for (int64_t token = 0; token < shape.tokens; token++)
                for (int64_t dim = 0; dim < shape.dim; dim++) {
                    char *to = item_at(&dst->parts[part], &dst->side, head, token, dim);
                    memcpy(want + (to - dst->memory), item_at(&src->parts[part], &src->side, head, token, dim),
                           (size_t)shape.item);
                }
    CHECK(!memcmp(want, dst->memory, (size_t)dst->nbytes));
    free(want);
}

static struct shape draw_shape(void)
{
    return (struct shape){1 + (int64_t)draw(4), 1 + (int64_t)draw(40), 1 + (int64_t)draw(40), 1 << draw(4)};
}

static void run_copies(void)
{
    for (int round = 0; round < 3000; round++) {
        struct shape shape = draw_shape();
        struct pool src = draw_side(shape), dst = draw_side(shape);
        char *before = malloc((size_t)dst.nbytes);
        CHECK(before);
        memcpy(before, dst.memory, (size_t)dst.nbytes);
        kvc_flag fence = 0;
        if (draw(2)) {
            struct kvc_copy_job job = job_of(shape, &src, &dst);
            kvc_copy_cpu(NULL, &job, NULL, &fence, 5);
        } else { /* through a slot of exactly the chunk's size */
            struct kvc_copy_job pack = job_of(shape, &src, NULL), unpack = job_of(shape, NULL, &dst);
            char *slot = malloc((size_t)pack.nbytes);
            CHECK(slot);
            kvc_copy_cpu(NULL, &pack, slot, &fence, 4);
            kvc_copy_cpu(NULL, &unpack, slot, &fence, 5);
            free(slot);
        }
        CHECK(kvc_load(&fence) == 5);
        expect_copied(shape, &src, &dst, before);
        free(before);
        free_pool(&src);
        free_pool(&dst);
    }
}

/* ---- conversions: any layouts, types and rules, by every kind of vectors, against a search for the number ---- */

enum { NUM_TYPES = KVC_FLOAT8_E5M2 + 1 };
static const struct {
    int item_bytes, mantissa_bits, bias;
    uint32_t last;     /* the largest magnitude that is a number */
    uint32_t infinity; /* 0: it has none */
    uint32_t nan;      /* that is stored */
} types[NUM_TYPES] = {
    [KVC_FLOAT16] = {2, 10, 15, 0x7BFF, 0x7C00, 0x7E00},
    [KVC_BFLOAT16] = {2, 7, 127, 0x7F7F, 0x7F80, 0x7FC0},
    [KVC_FLOAT8_E4M3] = {1, 3, 7, 0x7E, 0, 0x7F},
    [KVC_FLOAT8_E5M2] = {1, 2, 15, 0x7B, 0x7C, 0x7F},
};

/* The number of a magnitude. Infinity's is the one that would follow the last. */
static double number_of(int type, uint32_t magnitude)
{
    int bits = types[type].mantissa_bits;
    uint32_t exponent = magnitude >> bits, fraction = magnitude & ((1u << bits) - 1);
    double number = exponent ? fraction + (1u << bits) : fraction;
    for (int power = (exponent ? (int)exponent : 1) - types[type].bias - bits; power; power += power < 0 ? 1 : -1)
        number = power < 0 ? number / 2 : number * 2;
    return number;
}

static uint32_t load_item(const char *at, int64_t item)
{
    uint16_t wide;
    if (item == 1)
        return (uint8_t)*at;
    memcpy(&wide, at, sizeof wide);
    return wide;
}

/* What an item is stored as. */
static uint32_t converted(uint32_t item, int src, int dst, int rounding, struct kvc_scale scale)
{
    static double numbers[NUM_TYPES][1 << 15];
    if (numbers[KVC_BFLOAT16][1] == 0)
        for (int type = KVC_FLOAT16; type < NUM_TYPES; type++)
            for (uint32_t magnitude = 0; magnitude <= types[type].last + 1; magnitude++)
                numbers[type][magnitude] = number_of(type, magnitude);
    uint32_t sign_bit = types[src].item_bytes == 1 ? 0x80 : 0x8000, magnitude = item & (sign_bit - 1);
    uint32_t sign = item & sign_bit ? (types[dst].item_bytes == 1 ? 0x80 : 0x8000) : 0;
    bool is_infinite = types[src].infinity && magnitude == types[src].infinity;
    if (magnitude > types[src].last && !is_infinite)
        return rounding == KVC_TRUNCATED ? types[dst].last : types[dst].nan | (rounding == KVC_CAST ? sign : 0);
    float value = is_infinite ? __builtin_inff() : (float)numbers[src][magnitude];
    value = types[src].item_bytes == 1 ? value * scale.src : value;
    if (types[dst].item_bytes == 1)
        value = rounding == KVC_TRUNCATED ? value * (1 / scale.dst) : value / scale.dst;
    if (rounding == KVC_TRUNCATED && value == 0)
        sign = 0;
    if (rounding == KVC_TRUNCATED && dst == KVC_FLOAT8_E4M3 && value < 0x1p-6f)
        value = (float)((value + 0x1p23) - 0x1p23); /* in doubles, whose last bit there is 2^-29 */
    uint32_t low = 0, high = types[dst].last + 1; /* the last one that is not above the value is in [low, high) */
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (numbers[dst][middle] <= value)
            low = middle;
        else
            high = middle;
    }
    double below = value - numbers[dst][low], above = numbers[dst][low + 1] - value;
    if (rounding != KVC_TRUNCATED && (below > above || (below == above && low % 2)))
        low++;
    bool has_infinity = types[dst].infinity && (types[dst].item_bytes == 2 || rounding == KVC_CAST);
    if (low > types[dst].last && !has_infinity)
        low = types[dst].last;
    return sign | low;
}

static struct kvc_scale draw_scale(void)
{
    static const float scales[] = {1, 0.5f, 0.0371f, 3.7f, 1e-6f, 250, 1e30f, 1e-30f};
    return (struct kvc_scale){scales[draw(8)], scales[draw(8)]};
}

static void draw_types(int *src, int *dst, int *rounding)
{
    do {
        *src = KVC_FLOAT16 + (int)draw(4);
        *dst = KVC_FLOAT16 + (int)draw(4);
    } while (types[*src].item_bytes == 2 && types[*dst].item_bytes == 2);
    *rounding = types[*dst].item_bytes == 1 ? (int)draw(3) : KVC_NEAREST;
}

static void convert_every_item(void)
{
    enum { MAX_ITEMS = 1 << 16 };
    static char src_items[2 * MAX_ITEMS], dst_items[2 * MAX_ITEMS];
    int src, dst, rounding;
    draw_types(&src, &dst, &rounding);
    int64_t src_item = types[src].item_bytes, dst_item = types[dst].item_bytes, count = src_item == 1 ? 256 : MAX_ITEMS;
    for (int64_t index = 0; index < count; index++)
        memcpy(src_items + index * src_item, &(uint32_t){(uint32_t)index}, (size_t)src_item); /* little-endian */
    struct kvc_scale scale = draw_scale();
    kvc_convert_row(dst_items, dst_item, src_items, src_item, count, KVC_CONVERSION(src, dst, rounding), scale);
    for (int64_t index = 0; index < count; index++)
        CHECK(load_item(dst_items + index * dst_item, dst_item) ==
              converted((uint32_t)index, src, dst, rounding, scale));
}

static void convert_pools(void)
{
    int src_type, dst_type, rounding;
    draw_types(&src_type, &dst_type, &rounding);
    struct shape shape = {1 + (int64_t)draw(4), 1 + (int64_t)draw(40), 1 + (int64_t)draw(150), types[src_type].item_bytes};
    struct pool src = draw_side(shape);
    shape.item = types[dst_type].item_bytes;
    struct pool dst = draw_side(shape);
    struct kvc_scale scales[PARTS * 4];
    bool is_one_scale = draw(2);
    for (int index = 0; index < PARTS * 4; index++)
        scales[index] = index % shape.heads && is_one_scale ? scales[index - 1] : draw_scale();
    char *want = malloc((size_t)dst.nbytes);
    CHECK(want);
    memcpy(want, dst.memory, (size_t)dst.nbytes);
    for (int part = 0; part < PARTS; part++)
        for (int64_t head = 0; head < shape.heads; head++)
            for (int64_t token = 0; token < shape.tokens; token++)
                for (int64_t dim = 0; dim < shape.dim; dim++) {
                    const char *from = item_at(&src.parts[part], &src.side, head, token, dim);
                    uint32_t item = converted(load_item(from, types[src_type].item_bytes), src_type, dst_type,
                                              rounding, scales[part * shape.heads + head]);
                    memcpy(want + (item_at(&dst.parts[part], &dst.side, head, token, dim) - dst.memory), &item,
                           (size_t)shape.item);
                }
    kvc_flag fence = 0;
    bool is_packed = draw(2);
    struct kvc_copy_job job = job_of(shape, &src, is_packed ? NULL : &dst), unpack = job_of(shape, NULL, &dst);
    job.conversion = KVC_CONVERSION(src_type, dst_type, rounding);
    job.scales = scales;
    char *slot = malloc((size_t)job.nbytes);
    CHECK(slot);
    kvc_copy_cpu(NULL, &job, slot, &fence, 5);
    if (is_packed)
        kvc_copy_cpu(NULL, &unpack, slot, &fence, 5);
    CHECK(!memcmp(want, dst.memory, (size_t)dst.nbytes));
    free(slot);
    free(want);
    free_pool(&src);
    free_pool(&dst);
}

static void run_conversions(void)
{
    int best = kvc_vectors;
    for (kvc_vectors = KVC_BASELINE; kvc_vectors <= best; kvc_vectors++) {
        for (int round = 0; round < 150; round++)
            convert_every_item();
        for (int round = 0; round < 300; round++)
            convert_pools();
    }
    kvc_vectors = best;
}

/* ---- crew: helpers share reads with the thread that begins them; some are stopped ---- */

static void *help(void *crew)
{
    kvc_help(crew);
    return NULL;
}

static void run_crew(void)
{
    enum { NUM_HELPERS = 3, NUM_FENCES = 4 };
    struct kvc_crew crew = {.eventfd = eventfd(0, EFD_SEMAPHORE)};
    static kvc_flag fences[NUM_FENCES];
    pthread_t helpers[NUM_HELPERS];
    for (int index = 0; index < NUM_HELPERS; index++)
        helpers[index] = start(help, &crew);
    for (int round = 0; round < 1500; round++) {
        struct shape shape = draw_shape();
        struct pool src = draw_side(shape), dst = draw_side(shape);
        char *before = malloc((size_t)dst.nbytes);
        struct kvc_copy_read *read = malloc(sizeof *read + sizeof(struct kvc_copy_job));
        CHECK(before && read);
        memcpy(before, dst.memory, (size_t)dst.nbytes);
        *read = (struct kvc_copy_read){1, 0, 1 + (int64_t)draw(200), NUM_HELPERS};
        *(struct kvc_copy_job *)(read + 1) = job_of(shape, &src, &dst);
        kvc_flag *fence = &fences[draw(NUM_FENCES)];
        uint32_t value = 1;
        kvc_store(fence, 0);
        bool is_stopped = draw(4) == 0;
        if (is_stopped) {
            kvc_read_cpu(&crew, read, fence, value);
            kvc_close_fence(fence, value);
        } else {
            while (kvc_read_cpu(&crew, read, fence, value) == KVC_MORE)
                ;
        }
        while (kvc_load(fence) != value)
            sched_yield();
        if (!is_stopped)
            expect_copied(shape, &src, &dst, before);
        /* nobody touches any of it now */
        memset(dst.memory, 0, (size_t)dst.nbytes);
        free(before);
        free(read);
        free_pool(&src);
        free_pool(&dst);
    }
    kvc_store(&crew.is_closed, 1);
    uint64_t wakes = NUM_HELPERS;
    CHECK(write(crew.eventfd, &wakes, sizeof wakes) > 0);
    for (int index = 0; index < NUM_HELPERS; index++)
        pthread_join(helpers[index], NULL);
    close(crew.eventfd);
}

/* ---- a UCX of this process: messages by tag ---- */

struct message {
    uint64_t tag;
    const void *buffer;
    size_t nbytes;
    bool is_matched;
    bool is_sent;
};

struct post {
    uint64_t tag;
    void *buffer;
    size_t nbytes;
    const struct message *message;
};

enum { MAX_MESSAGES = 4096 };
static struct message messages[MAX_MESSAGES];
static struct post posts[MAX_MESSAGES];
static int num_messages, num_posts;

static unsigned progress(void *worker)
{
    (void)worker;
    for (int index = 0; index < num_messages; index++) {
        struct message *message = &messages[index];
        for (int at = 0; !message->is_matched && at < num_posts; at++)
            if (!posts[at].message && posts[at].tag == message->tag) {
                CHECK(message->nbytes <= posts[at].nbytes);
                memcpy(posts[at].buffer, message->buffer, message->nbytes);
                posts[at].message = message;
                message->is_matched = true;
            }
    }
    return 0;
}

static void *send_tagged(void *endpoint, const void *buffer, size_t count, uint64_t tag, const void *param)
{
    (void)endpoint;
    (void)param;
    CHECK(num_messages < MAX_MESSAGES);
    messages[num_messages] = (struct message){.tag = tag, .buffer = buffer, .nbytes = count};
    return &messages[num_messages++];
}

static void *recv_tagged(void *worker, void *buffer, size_t count, uint64_t tag, uint64_t mask, const void *param)
{
    (void)worker;
    (void)param;
    CHECK(mask == UINT64_MAX && num_posts < MAX_MESSAGES);
    posts[num_posts] = (struct post){.tag = tag, .buffer = buffer, .nbytes = count};
    return &posts[num_posts++];
}

static kvc_status send_status(void *request)
{
    return ((struct message *)request)->is_matched ? 0 : 1;
}

static kvc_status recv_test(void *request, struct kvc_tag_info *info)
{
    const struct post *post = request;
    if (!post->message)
        return 1;
    *info = (struct kvc_tag_info){post->tag, post->message->nbytes};
    return 0;
}

static void *no_message(void *worker, uint64_t tag, uint64_t mask, int removes, struct kvc_tag_info *info)
{
    (void)worker, (void)tag, (void)mask, (void)removes, (void)info;
    return NULL;
}

static void forget_request(void *request)
{
    (void)request;
}

static void cancel_request(void *worker, void *request)
{
    (void)worker, (void)request;
}

static kvc_status arm(void *worker)
{
    (void)worker;
    return 0;
}

static uint64_t sum(const void *address, size_t nbytes)
{
    uint64_t found = nbytes;
    for (size_t at = 0; at < nbytes; at++)
        found = found * 31 + ((const unsigned char *)address)[at];
    return found;
}

static struct kvc_state new_state(struct kvc_lock *lock, struct pollfd *wake, struct kvc_run *runs,
                                  struct kvc_tag_info *info)
{
    runs[KVC_NOBODY] = (struct kvc_run){KVC_INLINE, 0, wake, 1};
    runs[KVC_DRIVER] = (struct kvc_run){KVC_DRIVER, KVC_NS_PER_MS, wake, 1};
    runs[KVC_INLINE] = (struct kvc_run){KVC_INLINE, 0, wake, 1};
    return (struct kvc_state){
        .runs = runs,
        .copy = kvc_copy_cpu,
        .job_bytes = sizeof(struct kvc_copy_job),
        .worker_progress = progress,
        .worker_arm = arm,
        .tag_send = send_tagged,
        .tag_recv = recv_tagged,
        .tag_probe = no_message,
        .request_status = send_status,
        .request_free = forget_request,
        .request_cancel = cancel_request,
        .recv_test = recv_test,
        .recv_info = info,
        .clock_gettime = clock_gettime,
        .usleep = usleep,
        .wake_fd = wake,
        .lock = lock,
    };
}

/* ---- loop: reads in several chunks each, packed, sent, received and unpacked; direct ones beside ---- */

static void run_loop(void)
{
    enum { NUM = 5, CHUNKS = 4, SLOTS = 3, SLOT_BYTES = PARTS * 4 * 40 * 40 * 8 + KVC_DIGEST_BYTES };
    for (int round = 0; round < 60; round++) {
        num_messages = num_posts = 0;
        struct kvc_lock lock = {.owner = KVC_DRIVER};
        struct pollfd wake = {.fd = eventfd(0, EFD_NONBLOCK), .events = POLLIN};
        struct kvc_run runs[3];
        struct kvc_tag_info info;
        struct kvc_state state = new_state(&lock, &wake, runs, &info);
        bool is_checked = draw(2);
        state.digest = is_checked ? sum : NULL;
        struct kvc_send sends[NUM] = {0};
        struct kvc_receive receives[NUM] = {0};
        struct kvc_read reads[NUM] = {0};
        struct kvc_slot slots[2][SLOTS] = {0};
        kvc_flag slot_fences[2][SLOTS] = {0}, read_fences[NUM] = {0};
        for (int side = 0; side < 2; side++)
            for (int slot = 0; slot < SLOTS; slot++)
                slots[side][slot] = (struct kvc_slot){
                    .program = -1, .address = malloc(SLOT_BYTES), .fence = &slot_fences[side][slot]};
        state.sends = sends;
        state.receives = receives;
        state.reads = reads;
        state.send_slots = slots[0];
        state.recv_slots = slots[1];
        state.num_sends = state.num_receives = state.num_reads = NUM;
        state.num_send_slots = state.num_recv_slots = SLOTS;

        struct shape shapes[NUM];
        struct pool src[NUM][CHUNKS], dst[NUM][CHUNKS];
        char *before[NUM][CHUNKS];
        struct kvc_copy_job packs[NUM][CHUNKS], unpacks[NUM][CHUNKS];
        struct kvc_copy_read *direct[NUM];
        for (int index = 0; index < NUM; index++) {
            shapes[index] = draw_shape();
            direct[index] = malloc(sizeof *direct[index] + CHUNKS * sizeof(struct kvc_copy_job));
            *direct[index] = (struct kvc_copy_read){CHUNKS, 0, 1 + (int64_t)draw(5000), 0};
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                src[index][chunk] = draw_side(shapes[index]);
                dst[index][chunk] = draw_side(shapes[index]);
                struct pool *to = &dst[index][chunk];
                before[index][chunk] = malloc((size_t)to->nbytes);
                memcpy(before[index][chunk], to->memory, (size_t)to->nbytes);
                packs[index][chunk] = job_of(shapes[index], &src[index][chunk], NULL);
                unpacks[index][chunk] = job_of(shapes[index], NULL, to);
                ((struct kvc_copy_job *)(direct[index] + 1))[chunk] = job_of(shapes[index], &src[index][chunk], to);
                packs[index][chunk].nbytes += is_checked ? KVC_DIGEST_BYTES : 0;
                unpacks[index][chunk].nbytes += is_checked ? KVC_DIGEST_BYTES : 0;
            }
        }
        int begun = 0, over = 0;
        for (int step = 0; over < NUM; step++) {
            CHECK(step < 100000);
            if (begun < NUM && draw(3) == 0) {
                bool is_direct = draw(3) == 0;
                if (is_direct) {
                    reads[begun] = (struct kvc_read){.phase = KVC_RUNNING, .jobs = (char *)direct[begun],
                                                     .function = kvc_read_cpu, .fence = &read_fences[begun]};
                } else {
                    sends[begun] = (struct kvc_send){.phase = KVC_RUNNING, .jobs = (char *)packs[begun],
                                                     .first_tag = begun * 1000, .num_chunks = CHUNKS, .window = 1};
                    receives[begun] = (struct kvc_receive){.phase = KVC_RUNNING, .jobs = (char *)unpacks[begun],
                                                           .first_tag = begun * 1000, .num_chunks = CHUNKS,
                                                           .window = 1, .limit = CHUNKS};
                }
                int running = 0;
                for (int index = 0; index < NUM; index++)
                    running += receives[index].phase == KVC_RUNNING;
                if (running > SLOTS) { /* as the data path does, which counts slots first */
                    sends[begun].phase = receives[begun].phase = KVC_VACANT;
                } else {
                    begun++;
                    state.num_inline++;
                }
            }
            state.entering = draw(2) ? KVC_NOBODY : KVC_INLINE;
            kvc_run_loop(&state);
            over = 0;
            for (int index = 0; index < begun; index++)
                over += reads[index].phase == KVC_OVER || (receives[index].phase == KVC_OVER);
        }
        for (int index = 0; index < NUM; index++) {
            CHECK(!sends[index].error_kind && !receives[index].error_kind && !reads[index].error_kind);
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                expect_copied(shapes[index], &src[index][chunk], &dst[index][chunk], before[index][chunk]);
                free_pool(&src[index][chunk]);
                free_pool(&dst[index][chunk]);
                free(before[index][chunk]);
            }
            free(direct[index]);
        }
        for (int side = 0; side < 2; side++)
            for (int slot = 0; slot < SLOTS; slot++)
                free(slots[side][slot].address);
        close(wake.fd);
    }
}

/* ---- lock: the driver's thread in the loop, engines' threads inline, and threads that report work ---- */

struct locked {
    struct kvc_state state;
    int64_t num_turns; /* plain: only the owner of the lock may touch it */
    _Atomic(int) begun, ended;
};

static void *drive(void *argument)
{
    struct locked *shared = argument;
    struct kvc_state *state = &shared->state;
    atomic_store(&shared->begun, 1);
    do {
        state->entering = KVC_DRIVER;
        kvc_run_loop(state);
        while (!kvc_try_acquire(state, KVC_DRIVER, 0, 0))
            kvc_wait_until_free(state);
        kvc_store(&state->lock->pending, 0);
        shared->num_turns++;
        state->yield_gil_us = (int64_t)draw(3) * 10;
        state->offer_work_ns = (int64_t)draw(3) * 50000;
    } while (!atomic_load(&shared->ended));
    return NULL;
}

/* The GIL: Python lets one thread at a time begin a run, see `entering`. */
static pthread_mutex_t gil = PTHREAD_MUTEX_INITIALIZER;

static void *run_inline(void *argument)
{
    struct locked *shared = argument;
    struct kvc_state *state = &shared->state;
    for (int round = 0; round < 2000; round++) {
        pthread_mutex_lock(&gil);
        if (kvc_try_acquire(state, KVC_INLINE, 20000, round + 1)) {
            CHECK(kvc_load(&state->lock->inline_thread) == (uint32_t)round + 1);
            kvc_store(&state->lock->pending, 0);
            state->entering = draw(2) ? KVC_NOBODY : KVC_INLINE;
            kvc_run_loop(state);
            shared->num_turns++;
            state->num_inline++;
            state->return_by_ns = kvc_now_ns(state) + (int64_t)draw(100000);
            kvc_release_inline(state);
        } else {
            kvc_notify(state);
        }
        pthread_mutex_unlock(&gil);
        if (draw(8) == 0)
            usleep(20);
    }
    return NULL;
}

static void run_lock(void)
{
    struct kvc_lock lock = {.owner = KVC_DRIVER};
    struct pollfd wake = {.fd = eventfd(0, EFD_NONBLOCK), .events = POLLIN};
    struct kvc_run runs[3];
    struct kvc_tag_info info;
    struct locked shared = {.state = new_state(&lock, &wake, runs, &info)};
    pthread_t driver = start(drive, &shared), engines[2];
    /* on a busy machine the engines' threads could end first, without ever finding the lock free */
    while (!atomic_load(&shared.begun))
        usleep(20);
    for (int index = 0; index < 2; index++)
        engines[index] = start(run_inline, &shared);
    for (int index = 0; index < 2; index++)
        pthread_join(engines[index], NULL);
    atomic_store(&shared.ended, 1);
    kvc_notify(&shared.state);
    pthread_join(driver, NULL);
    CHECK(shared.num_turns > shared.state.num_inline && kvc_load(&lock.owner) == KVC_DRIVER);
    close(wake.fd);
}

/* ---- notes: UCX logs in several threads ---- */

extern struct kvc_log kvc_log;
int kvc_note_message(const char *file, unsigned line, const char *function, int level, const void *component,
                     const char *format, va_list values);

__attribute__((format(printf, 2, 3))) static int note(int level, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    int found = kvc_note_message("some.c", 7, "function", level, NULL, format, values);
    va_end(values);
    return found;
}

enum { NOTES_EACH = KVC_NUM_NOTES / 4 };

static void *log_much(void *argument)
{
    for (int round = 0; round < NOTES_EACH; round++) {
        CHECK(note(2, "thread %d says %d%*s", *(int *)argument, round, 2 * KVC_NOTE_BYTES, "") == 0);
        CHECK(note(5, "debug %d", round) == 1);
    }
    return NULL;
}

static void run_notes(void)
{
    pthread_t threads[4];
    int numbers[4], found[4] = {0};
    for (int index = 0; index < 4; index++) {
        numbers[index] = index;
        threads[index] = start(log_much, &numbers[index]);
    }
    for (int index = 0; index < 4; index++)
        pthread_join(threads[index], NULL);
    CHECK(atomic_load(&kvc_log.count) == KVC_NUM_NOTES);
    for (uint64_t index = 0; index < KVC_NUM_NOTES; index++) {
        int thread, round;
        CHECK(atomic_load(&kvc_log.notes[index].number) == index + 1);
        CHECK(sscanf(kvc_log.notes[index].text, "thread %d says %d", &thread, &round) == 2);
        CHECK(found[thread]++ == round);
    }
}

/* ---- block tables ---- */

static void run_block_table(void)
{
    for (int round = 0; round < 2000; round++) {
        int64_t ratio = 1 << draw(3), kernel = 1 << draw(4), world = 1 + (int64_t)draw(3), rows = 1 + (int64_t)draw(5);
        int64_t ids_each = 1 + (int64_t)draw(6), width = ids_each * ratio, interleave = kernel;
        int32_t *table = calloc((size_t)(rows * width), sizeof *table), *target = calloc((size_t)(rows * width), sizeof *table);
        int32_t *lengths = calloc((size_t)rows, sizeof *lengths), *found = calloc((size_t)rows, sizeof *found);
        int32_t *records = malloc((size_t)rows * 6 * sizeof *records), *ids = malloc((size_t)ids_each * sizeof *ids);
        int32_t *order = malloc((size_t)rows * sizeof *order), *starts = calloc((size_t)rows + 1, sizeof *starts);
        for (int64_t id = 0; id < ids_each; id++)
            ids[id] = (int32_t)draw(1000);
        for (int64_t row = 0; row < rows; row++) {
            int32_t count = (int32_t)draw((uint64_t)ids_each + 1);
            memcpy(records + row * 6, (int32_t[]){(int32_t)draw(2), (int32_t)row, 0, count, (int32_t)(ids_each - count), count},
                   6 * sizeof *records);
            order[row] = (int32_t)draw((uint64_t)rows + 2) - 1;
            starts[row + 1] = starts[row] + (int32_t)draw(6);
        }
        kvc_apply_writes(table, width, lengths, records, rows, ids, 1, ratio);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < lengths[row]; column++)
                CHECK(table[row * width + column] ==
                      ids[ids_each - lengths[row] / ratio + column / ratio] * ratio + column % ratio);
        kvc_gather_rows(table, width, rows, lengths, target, width, found, order, rows);
        int64_t num_positions = starts[rows], num_slots = num_positions + (int64_t)draw(4);
        int64_t *positions = malloc(sizeof *positions * (size_t)(num_positions + 1));
        int64_t *slots = malloc(sizeof *slots * (size_t)(num_slots + 1));
        for (int64_t token = 0; token < num_positions; token++)
            positions[token] = (int64_t)draw((uint64_t)(width * kernel * world * 2)) - 2;
        struct kvc_token_share share = {ratio * kernel, kernel, world, (int64_t)draw((uint64_t)world), interleave, draw(2) ? 1 : kernel,
                                        draw(2)};
        kvc_map_slots(target, width, found, starts, rows, positions, num_positions, slots, num_slots, &share);
        for (int64_t token = num_positions; token < num_slots; token++)
            CHECK(slots[token] == -1);
        free(table), free(target), free(lengths), free(found), free(records), free(ids), free(order), free(starts);
        free(positions), free(slots);
    }
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"board", run_board}, {"copies", run_copies}, {"crew", run_crew},   {"loop", run_loop},
                 {"lock", run_lock},   {"notes", run_notes},   {"block_table", run_block_table},
                 {"conversions", run_conversions}};
    for (size_t index = 0; index < sizeof parts / sizeof *parts; index++)
        if (count == 2 && !strcmp(parts[index].name, arguments[1])) {
            parts[index].run();
            return 0;
        }
    fprintf(stderr, "no part of that name\n");
    return 2;
}
