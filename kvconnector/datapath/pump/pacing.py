"""How long the loop's threads wait for each other, for the GIL and for more work.

Each name has its subject and its unit. The theory is in kernels/native/driver_lock.c and in ARCHITECTURE.md (Threads).
The C sources have one such constant more, `PARK_MS`, which bounds the cost of a lost wake-up.
"""

from __future__ import annotations

NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000

# ---- who takes pending work, and who has the GIL: `DriverLock` ----

OFFER_WORK_NS = 30_000
"""How long the driver's thread leaves pending work to an engine's: one that gives an order and then waits for it comes
within this time, and needs no other thread."""
WORKED_LONG_NS = _NS_PER_MS
"""A driver's thread that has worked in Python for this long leaves the GIL to others for `YIELD_GIL_US`. A thread that
wakes because the GIL was free for a moment, and finds it taken again, waits another 5 ms, each time."""
YIELD_GIL_US = 100
"""How long the driver's thread sleeps in the loop for others to take the GIL and the lock."""
LONG_GIL_WAIT_NS = _NS_PER_MS // 2
"""Above this wait an engine that polls comes sooner than the driver's thread gets the GIL."""
LONG_STEP_NS = 5 * _NS_PER_MS
"""The interpreter takes the GIL from a thread that computes for this time without a poll."""
MIN_ASLEEP_NS = _NS_PER_MS
"""No sleep is shorter: work that is offered for less time is offered in a pause."""
GIL_WAITS_AVERAGED = 4
"""The average wait for the GIL covers about this many waits,"""
INLINE_TURNS_REMEMBERED = 64
"""and is forgotten after this many inline turns without one."""

# ---- when the loop looks, and when it returns ----

HOLD_REPORT_NS = 2 * _NS_PER_MS
"""How long a complete send waits to be reported. Nobody waits for it, and a consumer mostly confirms a read within this
time after its last chunk, so one turn of the driver handles both."""
LOOK_AT_FDS_CPU_NS, LOOK_AT_FDS_CUDA_NS = 50_000, 10_000
"""Between two looks at descriptors while chunks move."""
PAUSE_CPU_NS, PAUSE_CUDA_NS = 0, 5_000
"""Between two looks at copies under way. A GPU's chunk takes tens of microseconds, and every look at it may take the
driver's locks from the engine's thread."""
MAX_RUN_S = 0.1
"""Longest run while chunks move: after it Python looks at peers and the device."""
MAX_LEASE_RUN_S = 1e-4
"""Longest run while a read waits for its lease, which Python checks."""
MAX_AWAITED_RUN_S = 1e-3
"""Longest run while a warm-up or the rest of a long control message is to come, at which the loop does not look."""
WAIT_FOR_LEASE_S = 20e-3
"""Seconds that a direct read waits for its lease to be published, or for the producer's kernels to fill its blocks.
After that the producer is asked to send it, and waits itself."""
