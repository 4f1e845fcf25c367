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
ASK_FOR_LOCK_NS = 20_000
"""How long an engine's thread waits, with the GIL, until the driver's hands the lock over between two passes. Without
it a try finds the lock of a spinning loop free in 16 to 20 of 100 cases."""
YIELD_S = 50e-6
"""How long an engine's thread that polls sleeps to let a driver's thread that waits long have the GIL: until that has
it, nobody moves chunks between two polls. With the offers that `LONG_GIL_WAIT_NS` decides on, a packed request of 32
MiB beside an engine of pure Python took 2.2 ms, not 5.1."""
LONG_GIL_WAIT_NS, LONG_STEP_NS = 500_000, 5_000_000
"""If the driver's thread waits longer than the first for the GIL, and the engine polls at shorter intervals than the
second, the loop offers its work to the engine for two such intervals. The interpreter takes the GIL from a thread after
the second time, so an engine that polls less often is not waited for."""

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
