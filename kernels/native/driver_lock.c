/* The lock on a loop: only its owner touches the records, the transport, the control channel and the sessions.
 *
 * Owner. One 32-bit word says who owns the lock: `DRIVER` (the driver's thread), `INLINE` (an engine's thread, which
 * makes progress in the driver's place) or `NOBODY`. The word changes only by compare-and-exchange. There is no queue:
 * each side tries to acquire the lock.
 *
 * When it is free. The driver's thread owns the lock while it works. It releases the lock in three places, all inside
 * the loop: while it sleeps, between two passes if an engine's thread wants the lock, and from its last pass until it has
 * the GIL back. The third is the purpose of the lock: otherwise a driver's thread that waits for the GIL of a busy engine
 * would keep the engine from its own transfers. Waking a thread and handing it the GIL costs 0.2 ms, and inline progress
 * only a few microseconds. If the driver's thread has worked in Python for long, it first sleeps for `yield_gil_us` in
 * this third place, unless the run itself took that long: otherwise it would take the GIL again before a waiting thread
 * is awake.
 *
 * GIL. Python calls `kvc_try_acquire`, `kvc_release_inline` and `kvc_notify` without releasing the GIL: they take
 * microseconds, and no other Python thread runs in between. It releases the GIL for `kvc_wait_until_free` and the loop.
 * The driver's thread acquires the lock again only when it has the GIL (`kvc_wait_until_free`, then `kvc_try_acquire`).
 * If it owned the lock while it waits for the GIL, the thread that has the GIL could make no progress inline, and both
 * would stand still.
 *
 * Which thread. `inline_thread` is the native id of the thread that owns the lock inline, otherwise 0. It is written in
 * C, so that no Python instruction lies between acquiring the lock and recording the owner: an interrupt
 * (KeyboardInterrupt) may come between any two instructions, and the interrupted thread must know whether it owns the
 * lock.
 *
 * Wanted. While the loop spins it owns the lock nearly all the time, so a single attempt of an engine's thread would
 * mostly find the lock taken. The engine's thread therefore sets `wanted` and waits for at most `limit_ns`, while it
 * holds the GIL. The loop looks at the word in every pass, and hands the lock over to that thread.
 *
 * Wake-ups. `kvc_release_inline` and `kvc_notify` write to an eventfd on which the driver's thread sleeps, in the loop
 * and in `await_release`. UCX's own descriptor does not suffice, because whoever sleeps on it must arm it again after
 * each progress. A lost wake-up costs at most `PARK_MS`.
 *
 * Pending. `pending` says that there is work for a turn of the driver. The lock's owner clears it before it looks for
 * work, so work that arrives later sets it again. The driver's thread returns at once with the work that it found or that
 * was reported. Until it has the GIL, an engine's thread may still take this work.
 *
 * Offers. If the engine computes in Python, it takes 5 ms to get the GIL, and from the last pass until then only the
 * engine's thread moves chunks, once in each poll. So if the last waits for the GIL were long and the engine polls often,
 * the loop continues to move chunks for `offer_work_ns`, and returns only if no poll has taken the work by then. Work
 * that inline progress leaves for a turn is offered in the same way. If an engine's thread finds that the driver's thread
 * has been waiting for long, it sleeps for a moment, so that the driver's thread gets the GIL and is soon back in the
 * loop.
 *
 * What breaks if this changes: a second owner corrupts UCX's worker and the sessions, without an error; a lock that is
 * never released stops every transfer of the worker forever; a `kvc_try_acquire` that releases the GIL lets an
 * interrupt, or another thread, in between.
 */
#include "kvc.h"

#include <unistd.h>

enum { PARK_MS = 1000, HAND_OVER_NS = 50000 };

/* Returns the eventfd, or -1 once it is closed, which another thread may do at any time. A pollfd is the system's
 * struct, whose members are not atomic. */
static int wake_fd_of(const struct kvc_state *state)
{
    return __atomic_load_n(&state->wake_fd->fd, __ATOMIC_ACQUIRE);
}

/* Make the driver look for work again, if it sleeps in the loop. */
static void wake_driver(const struct kvc_state *state)
{
    static const uint64_t one = 1;
    /* a full counter wakes it as well, and a closed data path has no driver to wake */
    if (write(wake_fd_of(state), &one, sizeof one) < 0)
        return;
}

/* Consume the wake-ups so far. */
void kvc_lock_forget_wakes(struct kvc_state *state)
{
    uint64_t count;
    if (read(wake_fd_of(state), &count, sizeof count) < 0)
        return; /* there were none */
}

static void await_release(struct kvc_state *state)
{
    struct pollfd wake = {.fd = wake_fd_of(state), .events = POLLIN};
    poll(&wake, 1, PARK_MS);
    kvc_lock_forget_wakes(state);
}

/* Let another thread make progress inline. No effect in such a thread, which ends with `kvc_release_inline`. */
void kvc_lock_release(struct kvc_state *state, const struct kvc_run *run)
{
    if (run->owner == KVC_DRIVER)
        kvc_store(&state->lock->owner, KVC_NOBODY);
}

/* Acquire the lock after `kvc_lock_release`. While another thread owns it, sleep until it is free. */
void kvc_lock_acquire(struct kvc_state *state, const struct kvc_run *run)
{
    while (run->owner == KVC_DRIVER && !kvc_exchange(&state->lock->owner, KVC_NOBODY, KVC_DRIVER))
        await_release(state);
}

/* Hand the lock over to an engine's thread that wants it, and acquire it again. The thread may lose its core meanwhile,
 * so this waits for it for a moment only. */
void kvc_lock_hand_over(struct kvc_state *state, const struct kvc_run *run)
{
    if (run->owner != KVC_DRIVER || !kvc_load(&state->lock->wanted))
        return;
    kvc_lock_release(state, run);
    int64_t until = kvc_now_ns(state) + HAND_OVER_NS;
    while (kvc_load(&state->lock->wanted) && kvc_now_ns(state) < until)
        ;
    /* waking this thread would take as long as the other one's work, so it spins */
    until = kvc_now_ns(state) + state->spin_after_work_ns;
    while (kvc_load(&state->lock->owner) != KVC_NOBODY && kvc_now_ns(state) < until)
        ;
    kvc_lock_acquire(state, run);
}

/* Sleep while pending work is offered to another thread, which takes it within a step of the engine. */
void kvc_lock_offer_asleep(struct kvc_state *state, const struct kvc_run *run)
{
    struct pollfd wake = {.fd = wake_fd_of(state), .events = POLLIN};
    kvc_lock_release(state, run);
    poll(&wake, 1, 1);
    kvc_lock_acquire(state, run);
    kvc_lock_forget_wakes(state);
}

/* Returns true if the loop must return, with work that it found or that was reported: the driver's thread once it has
 * offered the work to others for `offer_work_ns`, which is 0 unless waiting for the GIL takes longer. */
bool kvc_must_return(struct kvc_state *state, const struct kvc_run *run, int found, int64_t now)
{
    if (run->owner == KVC_INLINE)
        return found || kvc_has_pending(state);
    if (found)
        kvc_store(&state->lock->pending, 1);
    if (!kvc_has_pending(state)) {
        state->pending_ns = 0;
        return false;
    }
    if (!state->pending_ns)
        state->pending_ns = now;
    return now - state->pending_ns >= state->offer_work_ns;
}

/* Acquire the lock if it is free, or if the driver's thread hands it over within `limit_ns`, which it does between two
 * passes of the loop. Returns true if it was acquired. `thread`: the native id of a thread that makes progress inline,
 * else 0. */
bool kvc_try_acquire(struct kvc_state *state, int64_t owner, int64_t limit_ns, int64_t thread)
{
    bool is_ours = kvc_exchange(&state->lock->owner, KVC_NOBODY, (uint32_t)owner);
    /* outside the loop it needs the GIL, which the caller has */
    if (!is_ours && limit_ns > 0 && kvc_load(&state->lock->looping)) {
        int64_t until = kvc_now_ns(state) + limit_ns;
        kvc_store(&state->lock->wanted, 1);
        do
            is_ours = kvc_exchange(&state->lock->owner, KVC_NOBODY, (uint32_t)owner);
        while (!is_ours && kvc_now_ns(state) < until);
        kvc_store(&state->lock->wanted, 0);
    }
    if (is_ours)
        kvc_store(&state->lock->inline_thread, (uint32_t)thread);
    return is_ours;
}

/* Wait without a limit until nobody owns the lock. The caller then acquires it with the GIL: otherwise it would keep
 * others out while it waits for the GIL. */
void kvc_wait_until_free(struct kvc_state *state)
{
    while (kvc_load(&state->lock->owner) != KVC_NOBODY)
        await_release(state);
}

/* End inline progress. */
void kvc_release_inline(struct kvc_state *state)
{
    kvc_store(&state->lock->inline_thread, 0);
    kvc_store(&state->lock->owner, KVC_NOBODY);
    wake_driver(state);
}

/* Set `pending`. Returns true if the driver's thread will see it, and no thread makes progress inline. */
bool kvc_notify(struct kvc_state *state)
{
    kvc_store(&state->lock->pending, 1);
    wake_driver(state);
    return kvc_load(&state->lock->owner) != KVC_INLINE;
}

/* Busy-wait for a flag. Returns true if it is or becomes nonzero within the time. */
bool kvc_wait_flag(const kvc_flag *flag, int64_t limit_ns)
{
    struct kvc_state clock = {.clock_gettime = clock_gettime};
    int64_t until = kvc_now_ns(&clock) + limit_ns;
    while (!kvc_load(flag))
        if (kvc_now_ns(&clock) >= until)
            return false;
    return true;
}
