"""The loop, and the lock on it: see kernels/native/loop.c and driver_lock.c. All take the address of a `State`.

Calls that keep the GIL take microseconds, or must not let another Python thread run in between.
"""

from __future__ import annotations

from kvconnector_kernels.library import keeping, releasing

run = releasing.kvc_run_loop
"""Move chunks until there is something to do for Python, or the time of the owner's run is over. Returns `NOTICE`,
`READABLE` or `TIMEOUT`. For the driver's thread, which has released the lock on return."""
look = keeping.kvc_run_loop
"""`run` for inline progress. It keeps the GIL: otherwise a driver's thread that waits for the GIL would get it while it
cannot have the lock, again and again."""

try_acquire = keeping.kvc_try_acquire
"""`try_acquire(state, owner, limit_ns, thread)`: acquire the lock if it is free, or if the driver's thread hands it
over within the time. Returns True if it was acquired. `thread` is the native id of a thread that makes progress inline,
else 0."""
wait_until_free = releasing.kvc_wait_until_free
"""Wait without a limit until nobody owns the lock. The caller then acquires it with the GIL: otherwise it would keep
others out while it waits for the GIL."""
release_inline = keeping.kvc_release_inline
"""End inline progress."""
notify = keeping.kvc_notify
"""Report that there is work. Returns True if the driver's thread will see it, and no thread makes progress inline."""

append_digest = keeping.kvc_append_digest
"""`append_digest(state, chunk, nbytes)`: write the digest of a chunk after it; both have `nbytes`. Returns 0 or the
device's error."""
check_digest = keeping.kvc_check_digest
"""`check_digest(state, chunk, nbytes)`: compare a chunk with its digest. Returns 0, `CORRUPTED` or the device's
error."""
