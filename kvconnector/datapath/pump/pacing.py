"""How long threads leave work, the lock and the GIL to each other, how often they look, and the bounds of their sleep.

Each name has its subject and its unit, and each text says what keeps it. The theory is in kernels/native/driver_lock.c
and in ARCHITECTURE.md (Threads). `scripts/bench pacing` switches them off one after the other. The C sources have one
such constant more, `PARK_MS`, which bounds the cost of a lost wake-up.
"""

from __future__ import annotations

NS_PER_S = 1_000_000_000

# ---- pace: who works, for how long, and who has the lock ----

WORK_S = 1e-3
"""For how long any thread handles events in Python at a time: a turn of the driver's, `start_step` or a poll in an
engine's. A driver's thread that has worked for as long then leaves the GIL for `YIELD_GIL_US`. A thread that wakes
because the GIL was free for a moment, and finds it taken again, waits another 5 ms, each time. Without this the longest
step with 3,000 queued prompts took 17 ms of the connector's own work, not 5 to 7."""
YIELD_GIL_US = 100
"""How long the driver's thread sleeps in the loop for others to take the GIL and the lock, see `WORK_S`. A thread that
waits for the GIL got it after 9 to 12 ms at most, and after 14 to 219 without."""

# ---- pace: how often the loop looks ----

LOOK_AT_LEASE_S = 1e-4
"""Longest run of the loop while a read waits for its lease, which Python looks up on a board that wakes nobody. Without
it, a read whose lease is late is sent, since `WAIT_FOR_LEASE_S` is over before the next look."""

# ---- bounds of sleep: where nothing wakes a thread ----

LOOK_AGAIN_S = 1e-3
"""After this time a thread looks again: an engine's that waits and found the lock taken; the loop while a warm-up or
the rest of a long control message is to come, or while the control channel may have messages that its descriptor does
not show."""
CHECK_PEERS_S = 0.1
"""Longest run of the loop while chunks move: after it Python looks for lost peers and a failed device."""
MAX_SLEEP_S = 0.5
"""Longest sleep at all: a transport notices some losses only when it is polled."""
