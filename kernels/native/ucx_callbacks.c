/* What UCX calls in its own threads. They must not wait for the GIL: a thread that holds it may be waiting for
 * a lock of UCX's, and the thread that calls back may hold that lock. So they touch only memory of this file and libc.
 * Python reads that memory later. */
#include "kvc.h"

#include <stdarg.h>
#include <stdio.h>

enum { LEVEL_WARN = 2, STOP = 0, CONTINUE = 1 };

KVC_API struct kvc_log kvc_log;

KVC_API int kvc_note_message(const char *file, unsigned line, const char *function, int level, const void *component,
                             const char *format, va_list values);

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
