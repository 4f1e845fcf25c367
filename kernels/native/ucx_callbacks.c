/* Functions that UCX calls in its own threads. They must not wait for the GIL: a thread that holds it may be waiting for
 * a lock of UCX's, and the thread that calls back may hold that lock. So they touch only memory of this file and libc.
 * Python reads that memory later. */
#include "kvc.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LEVEL_WARN = 2, STOP = 0, CONTINUE = 1, BACK_OFF_US = 1000 };

KVC_API struct kvc_log kvc_log;
KVC_API struct kvc_listeners kvc_listeners;

KVC_API int kvc_note_message(const char *file, unsigned line, const char *function, int level, const void *component,
                             const char *format, va_list values);
KVC_API int kvc_accept(int fd, struct sockaddr *address, socklen_t *length);

/* UCX's log handler (`ucs_log_func_t`): formats a warning or worse into a ring of notes, without a lock. */
__attribute__((format(printf, 6, 0)))
int kvc_note_message(const char *file, unsigned line, const char *function, int level, const void *component,
                     const char *format, va_list values)
{
    (void)component;
    if (level > LEVEL_WARN)
        return CONTINUE;
    uint64_t number = atomic_fetch_add_explicit(&kvc_log.count, 1, memory_order_relaxed);
    struct kvc_note *note = &kvc_log.notes[number % KVC_NUM_NOTES];
    note->file = file;
    note->function = function;
    note->line = line;
    note->leaks_expected = atomic_load_explicit(&kvc_log.leaks_expected, memory_order_relaxed);
    vsnprintf(note->text, sizeof note->text, format, values);
    atomic_store_explicit(&note->number, number + 1, memory_order_release);
    return STOP;
}

/* accept(2) that turns connections away once descriptors get scarce, and hides passing errors: at its first error UCX's
 * tcp closes the listening socket for good. */
int kvc_accept(int fd, struct sockaddr *address, socklen_t *length)
{
    int accepted = accept(fd, address, length);
    if (accepted < 0) {
        switch (errno) {
        case EAGAIN:
        case EINTR: /* UCX understands these */
        case EBADF:
        case EINVAL:
        case ENOTSOCK: /* and must see what is wrong with the socket itself */
            return accepted;
        default: break;
        }
        atomic_fetch_add_explicit(&kvc_listeners.failed, 1, memory_order_relaxed);
        usleep(BACK_OFF_US); /* the socket stays readable, and UCX would ask again at once */
        errno = EAGAIN;
        return accepted;
    }
    if ((uint64_t)accepted < atomic_load_explicit(&kvc_listeners.ceiling, memory_order_relaxed))
        return accepted;
    atomic_fetch_add_explicit(&kvc_listeners.refused, 1, memory_order_relaxed);
    close(accepted);
    errno = EAGAIN;
    return -1;
}
