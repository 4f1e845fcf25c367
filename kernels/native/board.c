/* The entries of a lease board, written and read in an order that holds on every processor.
 *
 * An entry is a seqlock whose sequence is its key, since no key is ever published twice. The producer's stores are
 * releases, the consumer's loads acquires, and a fence separates them from the blocks. So on processors that reorder
 * loads and stores (aarch64, ppc64le), too:
 *
 * - a reader that finds a key finds its `expected`, which was stored before it, or a later one;
 * - a reader that finds `ready` equal to it finds the numbers that were stored before `ready`, or later ones;
 * - a reader that then finds the key again has seen a single lease: a retracted entry loses its key first;
 * - the blocks are read after the first look and before the second.
 *
 * On x86, where loads and stores are seen in order, all this costs no instruction.
 */
#include "kvc.h"

/* Let no load or store move across this, in either direction. On x86 this restrains only the compiler. */
static inline void order_all(void)
{
    atomic_thread_fence(memory_order_acq_rel);
}

static bool has_key(const struct kvc_board_entry *entry, const uint32_t key[4])
{
    bool is_same = true;
    for (int word = 0; word < 4; word++)
        is_same = kvc_load(&entry->key[word]) == key[word] && is_same;
    return is_same;
}

static void store_key(struct kvc_board_entry *entry, const uint32_t key[4])
{
    for (int word = 0; word < 4; word++)
        kvc_store(&entry->key[word], key[word]);
}

/* Returns `num_tokens` of the lease with this key, and in the upper half `ahead`; -1 if it may not be read now. A key
 * has 16 bytes; the first four, little-endian, name one of `num_buckets`, 2**n. */
int64_t kvc_board_look_up(const struct kvc_board_entry *board, int64_t num_buckets, const void *key_bytes)
{
    uint32_t key[4];
    memcpy(key, key_bytes, sizeof key);
    order_all();
    int64_t found = -1;
    const struct kvc_board_entry *bucket = board + (key[0] & (uint64_t)(num_buckets - 1)) * KVC_ENTRIES_PER_BUCKET;
    for (int index = 0; index < KVC_ENTRIES_PER_BUCKET; index++) {
        const struct kvc_board_entry *entry = &bucket[index];
        if (!has_key(entry, key))
            continue;
        uint32_t expected = kvc_load(&entry->expected), ready = kvc_load(&entry->ready);
        uint64_t num_tokens = kvc_load(&entry->num_tokens), ahead = kvc_load(&entry->ahead);
        if (expected != 0 && expected == ready && has_key(entry, key))
            found = (int64_t)(ahead << 32 | num_tokens);
    }
    order_all();
    return found;
}

/* Give an entry without a key to a lease, which may be read once `ready` equals `expected`. */
void kvc_board_claim(struct kvc_board_entry *entry, const void *key_bytes, int64_t expected)
{
    uint32_t key[4];
    memcpy(key, key_bytes, sizeof key);
    kvc_store(&entry->expected, (uint32_t)expected);
    store_key(entry, key);
}

/* Take the key from an entry: the blocks may be written from now on. */
void kvc_board_clear(struct kvc_board_entry *entry)
{
    static const uint32_t no_key[4];
    store_key(entry, no_key);
    kvc_store(&entry->expected, 0);
    order_all();
}

/* Store a word of an entry; everything before it is visible to a thread that reads it. */
void kvc_board_write(kvc_flag *word, int64_t value)
{
    kvc_store(word, (uint32_t)value);
}
