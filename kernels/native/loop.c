/* The loop: every chunk of every program from memory to memory, in one call that holds no GIL.
 *
 * A send packs each chunk into a slot and posts it; once UCX has sent the chunk, the slot is free. A receive keeps its
 * slots: each is posted, unpacked, and posted again for its next chunk. A direct read of a peer's memory copies one part
 * per call, or everything at once on a GPU. Nothing waits while anything else can move.
 *
 * Threads. The caller owns the driver lock (driver_lock.c). The loop releases it between passes and while it sleeps, and
 * must therefore look up everything that it knows about the records again after that.
 */
#include "kvc.h"

enum {
    OK = 0,
    IN_PROGRESS = 1,
    MESSAGE_TRUNCATED = -9,
    CANCELED = -16,
    LAST_ERROR = -100,
};

enum {
    MAX_PROGRESS_STEPS = 64,
    NUM_OWN_FDS = 2, /* UCX's descriptor, and the eventfd that wakes the driver */
};

/* ---- what all programs share: slots, copies, failures ---- */

/* Returns the first free slot, which was used recently, or null. */
static struct kvc_slot *find_free(struct kvc_slot *slots, int64_t num_slots)
{
    for (int64_t index = 0; index < num_slots; index++)
        if (slots[index].state == KVC_FREE)
            return &slots[index];
    return NULL;
}

static void free_slot(struct kvc_slot *slot)
{
    slot->state = KVC_FREE;
    slot->program = -1;
}

/* Keep the first error; begin nothing new. `program` is what a send, a receive or a read begins with. */
static void fail(void *program, int kind, int64_t value, int64_t chunk)
{
    struct kvc_program *failed = program;
    failed->stopped = 1;
    if (failed->error_kind == KVC_NO_ERROR) {
        failed->error_kind = kind;
        failed->error_value = value;
        failed->error_chunk = chunk;
    }
}

static char *job_of(const struct kvc_state *state, char *jobs, int64_t chunk)
{
    return jobs + chunk * state->job_bytes;
}

/* Returns the bytes of a chunk, with which its job begins. */
static int64_t chunk_bytes(const struct kvc_state *state, char *jobs, int64_t chunk)
{
    int64_t nbytes;
    memcpy(&nbytes, job_of(state, jobs, chunk), sizeof nbytes);
    return nbytes;
}

/* Begin to pack or unpack the slot's chunk; the copy sets the slot's fence. Returns 0 or the copy's error. */
static int64_t begin_copy(const struct kvc_state *state, char *jobs, struct kvc_slot *slot)
{
    slot->fence_value = (slot->fence_value + 1) & UINT32_MAX;
    return state->copy(state->copy_context, job_of(state, jobs, slot->chunk), slot->address, slot->fence,
                       slot->fence_value);
}

/* Returns true if the slot's last copy has ended. */
static bool is_copied(const struct kvc_slot *slot)
{
    return kvc_load(slot->fence) == slot->fence_value;
}

/* Returns true if UCX has refused an operation: a `ucs_status_ptr_t` is null, a request, or an error. */
static bool is_error(const void *request)
{
    intptr_t value = (intptr_t)request;
    return LAST_ERROR <= value && value < 0;
}

/* ---- digests, for verify=checksum: stated after packing, checked before unpacking ----
 *
 * A digest is XXH3 of 64 bits, big-endian, in the `DIGEST_BYTES` after the chunk, which the bytes of its job count. A
 * GPU's chunk is copied to the host to be hashed, and its digest back: the loop waits for both, which needs the room on
 * the host to be pinned. */

static uint64_t digest_of(const struct kvc_state *state, const void *chunk, int64_t nbytes)
{
    return __builtin_bswap64(state->digest(chunk, (size_t)nbytes));
}

/* Write the digest of a packed chunk after it; both have `nbytes`. Returns 0 or the device's error. */
int64_t kvc_append_digest(struct kvc_state *state, void *chunk, int64_t nbytes)
{
    if (!state->digest)
        return 0;
    int64_t size = nbytes - KVC_DIGEST_BYTES;
    uint64_t device = (uint64_t)(uintptr_t)chunk, digest;
    char *host = state->digest_room ? state->digest_room : chunk;
    int status = state->digest_room ? state->copy_to_host(host, device, (size_t)size) : 0;
    if (status)
        return status;
    digest = digest_of(state, host, size);
    if (!state->digest_room) {
        memcpy(host + size, &digest, sizeof digest);
        return 0;
    }
    memcpy(host, &digest, sizeof digest);
    return state->copy_to_device(device + (uint64_t)size, host, sizeof digest);
}

/* Compare a chunk with the digest after it; both have `nbytes`. Returns 0, `CORRUPTED` or the device's error. */
int64_t kvc_check_digest(struct kvc_state *state, void *chunk, int64_t nbytes)
{
    if (!state->digest)
        return 0;
    const char *host = chunk;
    if (state->digest_room) {
        host = state->digest_room;
        int status = state->copy_to_host(state->digest_room, (uint64_t)(uintptr_t)chunk, (size_t)nbytes);
        if (status)
            return status;
    }
    uint64_t stated;
    memcpy(&stated, host + nbytes - KVC_DIGEST_BYTES, sizeof stated);
    return stated == digest_of(state, host, nbytes - KVC_DIGEST_BYTES) ? 0 : KVC_CORRUPTED;
}

/* ---- sends ---- */

/* Finish the packing of a chunk. If its digest cannot be appended, the send stops and drops this and all later chunks. */
static void end_pack(struct kvc_state *state, struct kvc_send *send, struct kvc_slot *slot)
{
    int64_t error = kvc_append_digest(state, slot->address, chunk_bytes(state, send->jobs, slot->chunk));
    if (error)
        fail(send, KVC_COPY_ERROR, error, slot->chunk);
    slot->state = KVC_PACKED;
    send->packed_ns = kvc_now_ns(state);
}

/* Free the slots that UCX has sent, and finish chunks that are packed. */
static bool retire_sends(struct kvc_state *state)
{
    bool moved = false;
    for (int64_t index = 0; index < state->num_send_slots; index++) {
        struct kvc_slot *slot = &state->send_slots[index];
        if (slot->state == KVC_COPYING) {
            if (is_copied(slot)) {
                end_pack(state, &state->sends[slot->program], slot);
                moved = true;
            }
        } else if (slot->state == KVC_POSTED) {
            kvc_status status = state->request_status(slot->request);
            if (status == IN_PROGRESS)
                continue;
            moved = true;
            state->request_free(slot->request);
            if (slot->program >= 0) {
                struct kvc_send *send = &state->sends[slot->program];
                send->num_in_flight--;
                send->sent_ns = kvc_now_ns(state);
                if (status != OK)
                    fail(send, KVC_UCX_ERROR, status, slot->chunk);
            }
            free_slot(slot);
            if (status != OK)
                slot->state = KVC_FAILED;
        }
    }
    return moved;
}

static void post_send(struct kvc_state *state, struct kvc_send *send, struct kvc_slot *slot)
{
    if (!send->sending_ns)
        send->sending_ns = kvc_now_ns(state);
    void *request = state->tag_send(send->endpoint, slot->address, (size_t)chunk_bytes(state, send->jobs, slot->chunk),
                                    (uint64_t)(send->first_tag + slot->chunk), state->send_param);
    if (is_error(request)) {
        fail(send, KVC_UCX_ERROR, (intptr_t)request, slot->chunk);
        free_slot(slot);
        return;
    }
    send->num_posted++;
    if (!request) {
        send->sent_ns = kvc_now_ns(state);
        free_slot(slot);
        return;
    }
    slot->state = KVC_POSTED;
    slot->request = request;
    slot->owner = send->owner;
    send->num_in_flight++;
}

/* Post packed chunks, those of each program in order; drop those of stopped programs. */
static bool post_packed(struct kvc_state *state)
{
    bool moved = false, again;
    do {
        again = false;
        for (int64_t index = 0; index < state->num_send_slots; index++) {
            struct kvc_slot *slot = &state->send_slots[index];
            if (slot->state != KVC_PACKED)
                continue;
            struct kvc_send *send = &state->sends[slot->program];
            if (send->stopped) {
                send->num_copying--;
                free_slot(slot);
                again = true;
            } else if (slot->chunk == send->num_posted) {
                send->num_copying--;
                post_send(state, send, slot);
                again = true;
            }
        }
        moved = moved || again;
    } while (again);
    return moved;
}

/* Begin to pack the next chunk into the slot. */
static void pack(struct kvc_state *state, struct kvc_send *send, struct kvc_slot *slot)
{
    slot->chunk = send->next_chunk;
    if (!send->packing_ns)
        send->packing_ns = kvc_now_ns(state);
    int64_t error = begin_copy(state, send->jobs, slot);
    if (error) {
        fail(send, KVC_COPY_ERROR, error, slot->chunk);
        return;
    }
    slot->state = KVC_COPYING;
    slot->program = send - state->sends;
    if (is_copied(slot))
        end_pack(state, send, slot);
    send->next_chunk++;
    send->num_copying++;
}

static bool may_pack(const struct kvc_send *send)
{
    return send->phase == KVC_RUNNING && !send->stopped && send->next_chunk < send->num_chunks &&
           send->num_copying + send->num_in_flight < send->window;
}

/* Pack one chunk, taking the sends in turn, so that it is posted before the next. Returns true if there was one. */
static bool pack_next(struct kvc_state *state)
{
    struct kvc_slot *slot = find_free(state->send_slots, state->num_send_slots);
    for (int64_t count = 0; slot && count < state->num_sends; count++) {
        int64_t turn = state->send_turn % state->num_sends;
        state->send_turn = turn + 1;
        if (may_pack(&state->sends[turn])) {
            pack(state, &state->sends[turn], slot);
            return true;
        }
    }
    return false;
}

/* End sends whose blocks are no longer read, even if slots are still in flight. Returns true if there are any. */
static bool end_sends(struct kvc_state *state)
{
    bool ended = false;
    for (int64_t index = 0; index < state->num_sends; index++) {
        struct kvc_send *send = &state->sends[index];
        bool is_complete = send->num_posted == send->num_chunks && send->num_in_flight == 0;
        if (send->phase == KVC_RUNNING && send->num_copying == 0 && (is_complete || send->stopped)) {
            send->phase = KVC_OVER;
            ended = true;
            for (int64_t slot = 0; slot < state->num_send_slots; slot++)
                if (state->send_slots[slot].state == KVC_POSTED && state->send_slots[slot].program == index)
                    state->send_slots[slot].program = -1;
        }
    }
    return ended;
}

/* ---- receives ---- */

/* Post a receive for the next chunk in the slot, if the peer sends one. */
static void post_or_free(struct kvc_state *state, struct kvc_receive *receive, struct kvc_slot *slot)
{
    int64_t chunk = receive->next_chunk;
    if (chunk >= receive->limit) {
        free_slot(slot);
        return;
    }
    void *request = state->tag_recv(state->worker, slot->address, (size_t)chunk_bytes(state, receive->jobs, chunk),
                                    (uint64_t)(receive->first_tag + chunk), UINT64_MAX, state->recv_param);
    receive->next_chunk++;
    slot->chunk = chunk;
    if (is_error(request)) {
        fail(receive, KVC_UCX_ERROR, (intptr_t)request, chunk);
        free_slot(slot);
        return;
    }
    receive->num_posted++;
    if (!request) {
        slot->state = KVC_ARRIVED;
        slot->length = (int64_t)state->recv_info->length;
        return;
    }
    slot->state = KVC_POSTED;
    slot->request = request;
}

/* Receive nothing more from a peer whose endpoint has failed: libucp may crash on what it sent before. */
static void abandon(struct kvc_state *state, struct kvc_receive *receive)
{
    if (receive->limit > receive->next_chunk)
        receive->limit = receive->next_chunk;
    int64_t program = receive - state->receives;
    for (int64_t index = 0; index < state->num_recv_slots; index++)
        if (state->recv_slots[index].state == KVC_POSTED && state->recv_slots[index].program == program)
            state->request_cancel(state->worker, state->recv_slots[index].request);
}

/* Check a chunk that arrived, and begin to unpack it. Returns 0 or an error. */
static int64_t unpack(struct kvc_state *state, struct kvc_receive *receive, struct kvc_slot *slot)
{
    receive->arrived_ns = kvc_now_ns(state);
    if (!receive->arriving_ns)
        receive->arriving_ns = receive->arrived_ns;
    int64_t error = kvc_check_digest(state, slot->address, slot->length);
    return error ? error : begin_copy(state, receive->jobs, slot);
}

/* Unpack the chunk of a receive that ended, or skip to the next chunk if the program is stopped. */
static void take_chunk(struct kvc_state *state, struct kvc_slot *slot, kvc_status status)
{
    struct kvc_receive *receive = &state->receives[slot->program];
    receive->num_posted--;
    if (status == OK && slot->length == chunk_bytes(state, receive->jobs, slot->chunk)) {
        if (!receive->stopped) {
            int64_t error = unpack(state, receive, slot);
            if (!error) {
                slot->state = KVC_COPYING;
                receive->num_copying++;
                return;
            }
            fail(receive, KVC_COPY_ERROR, error, slot->chunk);
        }
    } else if (slot->chunk < receive->limit) {
        if (status == OK) {
            fail(receive, KVC_SIZE_ERROR, slot->length, slot->chunk);
        } else {
            fail(receive, KVC_UCX_ERROR, status, slot->chunk);
            if (status != MESSAGE_TRUNCATED && status != CANCELED)
                abandon(state, receive);
        }
    }
    post_or_free(state, receive, slot);
}

/* Take the chunks that arrived, and the slots whose chunks are unpacked. */
static bool move_receives(struct kvc_state *state)
{
    bool moved = false;
    for (int64_t index = 0; index < state->num_recv_slots; index++) {
        struct kvc_slot *slot = &state->recv_slots[index];
        if (slot->state == KVC_POSTED) {
            kvc_status status = state->recv_test(slot->request, state->recv_info);
            if (status == IN_PROGRESS)
                continue;
            moved = true;
            slot->length = (int64_t)state->recv_info->length;
            state->request_free(slot->request);
            slot->state = KVC_ARRIVED;
            take_chunk(state, slot, status);
        } else if (slot->state == KVC_ARRIVED) {
            moved = true;
            take_chunk(state, slot, OK);
        } else if (slot->state == KVC_COPYING && is_copied(slot)) {
            moved = true;
            struct kvc_receive *receive = &state->receives[slot->program];
            receive->num_copying--;
            receive->num_unpacked++;
            post_or_free(state, receive, slot);
        }
    }
    return moved;
}

/* Give each new program its slots: the caller has checked that there are enough. */
static void begin_receives(struct kvc_state *state)
{
    for (int64_t program = 0; program < state->num_receives; program++) {
        struct kvc_receive *receive = &state->receives[program];
        if (receive->phase != KVC_RUNNING || receive->started_ns)
            continue;
        receive->started_ns = kvc_now_ns(state) + 1;
        for (int64_t count = 0; count < receive->window; count++) {
            struct kvc_slot *slot = find_free(state->recv_slots, state->num_recv_slots);
            if (!slot)
                break;
            slot->program = program;
            post_or_free(state, receive, slot);
        }
    }
}

/* End receives that write nothing more or hold no slots. Returns true if there are any. */
static bool end_receives(struct kvc_state *state)
{
    bool changed = false;
    for (int64_t index = 0; index < state->num_receives; index++) {
        struct kvc_receive *receive = &state->receives[index];
        int64_t phase = receive->phase;
        bool is_ending = receive->stopped || receive->num_unpacked == receive->num_chunks;
        if (phase == KVC_RUNNING && is_ending && receive->num_copying == 0) {
            phase = KVC_QUIET;
            receive->ended_ns = kvc_now_ns(state);
        }
        if (phase == KVC_QUIET && receive->num_posted == 0)
            phase = KVC_OVER;
        changed = changed || phase != receive->phase;
        receive->phase = phase;
    }
    return changed;
}

/* ---- direct reads ---- */

static void begin_read(struct kvc_state *state, struct kvc_read *read)
{
    if (!read->started_ns)
        read->started_ns = kvc_now_ns(state);
    int64_t value = (read->fence_value + 1) & UINT32_MAX;
    int64_t status = read->function(read->context, read->jobs, read->fence, value);
    read->num_calls++;
    if (status == KVC_MORE)
        return;
    read->all_begun = 1;
    read->fence_value = value;
    if (status != KVC_ALL)
        fail(read, KVC_READ_ERROR, status, 0);
}

/* Make one call for one of the reads, in turn. The loop looks at nothing else during the call. */
static bool begin_reads(struct kvc_state *state)
{
    for (int64_t count = 0; count < state->num_reads; count++) {
        int64_t turn = state->read_turn % state->num_reads;
        state->read_turn = turn + 1;
        struct kvc_read *read = &state->reads[turn];
        if (read->phase == KVC_RUNNING && !read->stopped && !read->all_begun) {
            begin_read(state, read);
            return true;
        }
    }
    return false;
}

/* End reads that write nothing more. Returns true if there are any. */
static bool end_reads(struct kvc_state *state)
{
    bool ended = false;
    for (int64_t index = 0; index < state->num_reads; index++) {
        struct kvc_read *read = &state->reads[index];
        if (read->phase != KVC_RUNNING)
            continue;
        if (read->stopped && !read->all_begun)
            kvc_close_fence(read->fence, (uint32_t)read->fence_value);
        if ((read->stopped || read->all_begun) && kvc_load(read->fence) == read->fence_value) {
            read->phase = KVC_OVER;
            read->ended_ns = kvc_now_ns(state);
            ended = true;
        }
    }
    return ended;
}

/* ---- the loop itself ---- */

/* Make one pass: move everything that can move now. */
static bool move_once(struct kvc_state *state)
{
    for (int step = 0; step < MAX_PROGRESS_STEPS && state->worker_progress(state->worker); step++)
        ;
    bool moved = retire_sends(state);
    moved = pack_next(state) || moved;
    moved = post_packed(state) || moved;
    moved = move_receives(state) || moved;
    return begin_reads(state) || moved;
}

/* Returns true if a message for the caller is there, which stays where it is. */
static bool has_control(const struct kvc_state *state)
{
    return state->tag_probe(state->worker, state->control_tag, state->control_tag, 0, state->recv_info) != NULL;
}

/* Returns the reason to return at once, or 0 if there is none. */
static int find_reason(struct kvc_state *state)
{
    bool ended = end_sends(state);
    ended = end_receives(state) || ended;
    ended = end_reads(state) || ended;
    if (ended || (state->wants_slots && find_free(state->recv_slots, state->num_recv_slots)))
        return KVC_NOTICE;
    return has_control(state) ? KVC_READABLE : 0;
}

/* Returns true if a copy is under way, whose end no descriptor shows. */
static bool is_busy(const struct kvc_state *state)
{
    for (int64_t index = 0; index < state->num_sends; index++)
        if (state->sends[index].phase == KVC_RUNNING && state->sends[index].num_copying)
            return true;
    for (int64_t index = 0; index < state->num_receives; index++)
        if (state->receives[index].phase == KVC_RUNNING && state->receives[index].num_copying)
            return true;
    for (int64_t index = 0; index < state->num_reads; index++)
        if (state->reads[index].phase == KVC_RUNNING)
            return true;
    return false;
}

/* Returns true if a descriptor from `first` on is readable within the time. A signal counts as one: Python must run to
 * handle it. */
static bool is_readable(const struct kvc_run *run, int64_t first, int64_t timeout_ms)
{
    int64_t count = run->num_fds - first;
    if (count <= 0 && timeout_ms == 0)
        return false;
    return poll(run->poll_fds + first, (nfds_t)count, (int)timeout_ms) != 0;
}

/* Sleep until UCX or a watched descriptor is readable, or the time is over. */
static void sleep_for(struct kvc_state *state, const struct kvc_run *run, int64_t left_ns)
{
    if (state->worker_arm(state->worker) != OK)
        return;
    kvc_lock_release(state, run);
    is_readable(run, 0, left_ns / KVC_NS_PER_MS + 1);
    kvc_lock_acquire(state, run);
    if (run->owner == KVC_DRIVER)
        kvc_lock_forget_wakes(state);
}

/* While something may end at any moment, look again at once, because even the shortest sleep is too long; else sleep. */
static void rest(struct kvc_state *state, const struct kvc_run *run, int64_t now, int64_t left_ns)
{
    if (now - state->moved_ns < state->spin_after_work_ns || is_busy(state))
        return;
    if (run->owner == KVC_DRIVER && kvc_has_pending(state))
        kvc_lock_offer_asleep(state, run);
    else
        sleep_for(state, run, left_ns);
}

/* Returns true if inline progress has left work for a turn, or a deadline has passed that it knew of. */
static bool is_due(const struct kvc_state *state, const struct kvc_run *run, int64_t now)
{
    return run->owner == KVC_DRIVER && state->return_by_ns && now >= state->return_by_ns;
}

/* Nanoseconds to sleep at most. */
static int64_t until_due(const struct kvc_state *state, const struct kvc_run *run, int64_t now, int64_t left_ns)
{
    bool is_sooner = run->owner == KVC_DRIVER && state->return_by_ns && state->return_by_ns - now < left_ns;
    return is_sooner ? state->return_by_ns - now : left_ns;
}

static int move(struct kvc_state *state, const struct kvc_run *run)
{
    int64_t start = kvc_now_ns(state), num_inline = -1;
    for (;;) {
        if (num_inline != state->num_inline) {
            /* work that the caller, or inline progress, has added */
            num_inline = state->num_inline;
            state->pending_ns = 0;
            begin_receives(state);
        }
        bool moved = move_once(state);
        int reason = find_reason(state);
        int64_t now = kvc_now_ns(state);
        if (!reason && is_readable(run, NUM_OWN_FDS, 0))
            reason = KVC_READABLE;
        if (!reason && is_due(state, run, now))
            reason = KVC_TIMEOUT;
        if (kvc_must_return(state, run, reason, now))
            return reason ? reason : KVC_READABLE;
        int64_t left_ns = start + run->limit_ns - now;
        if (moved)
            state->moved_ns = now;
        if (left_ns <= 0)
            return KVC_TIMEOUT;
        kvc_lock_hand_over(state, run);
        if (!moved)
            rest(state, run, now, until_due(state, run, now, left_ns));
    }
}

/* Move chunks until a program ends (`NOTICE`), a descriptor is readable or a message for the caller is there
 * (`READABLE`), or the time is over. `entering` says who runs it, and that owner's `runs` for how long.
 *
 * With a time of 0 it returns after a single pass. The caller owns the lock; the
 * driver has released it on return. The driver's thread calls this without the GIL, an engine's thread with it:
 * otherwise a driver's thread that waits for the GIL would get it while it cannot have the lock, again and again. */
int64_t kvc_run_loop(struct kvc_state *state)
{
    const struct kvc_run *run = &state->runs[state->entering];
    bool is_driver = run->owner == KVC_DRIVER;
    int64_t entered_ns = kvc_now_ns(state);
    if (is_driver) {
        state->return_by_ns = state->pending_ns = 0;
        kvc_store(&state->lock->looping, 1);
    }
    if (state->begin)
        state->begin(state->begin_argument);
    int reason = move(state, run);
    if (!is_driver)
        return reason;
    int64_t left_ns = state->left_loop_ns = kvc_now_ns(state);
    kvc_store(&state->lock->looping, 0);
    kvc_lock_release(state, run);
    /* during a longer run others could have the GIL */
    if (left_ns - entered_ns < state->yield_gil_us * 1000)
        state->usleep((unsigned)state->yield_gil_us);
    return reason;
}
