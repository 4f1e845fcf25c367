"""How long threads leave work, the lock and the GIL to each other, and how often they look.

Each name has its subject and its unit, and each text says what keeps it. The theory is in kernels/native/driver_lock.c
and in ARCHITECTURE.md (Threads). The C sources have one such constant more, `PARK_MS`, which bounds the cost of a lost
wake-up. docs/benchmarks/gpus.md has what `bench gil` shows with each of eleven switched off: only without
`PAUSE_CUDA_NS` do requests take longer beyond doubt. For the others the figures here are those of the whole that a
constant belongs to.
"""

from __future__ import annotations

NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000

# ---- who works, and for how long: the GIL ----

WORK_S = 1e-3
"""For how long any thread handles events in Python at a time: a turn of the driver's, `start_step` in an engine's. A
driver's thread that has worked for as long then leaves the GIL for `YIELD_GIL_US`. A thread that wakes because the GIL
was free for a moment, and finds it taken again, waits another 5 ms, each time: with 10,000 queued prompts the longest
step took 28 to 219 ms."""
POLL_WORK_S = 0.7e-3
"""For how long a poll of the engine works on pending events. With `start_step` it delays a step by less than 5 ms."""
YIELD_GIL_US = 100
"""How long the driver's thread sleeps in the loop for others to take the GIL and the lock, see `WORK_S`."""
YIELD_S = 50e-6
"""How long an engine's thread sleeps to let a starved driver's thread have the GIL."""
LONG_GIL_WAIT_NS = _NS_PER_MS // 2
"""Above this average wait the driver's thread does not compete for the GIL: an engine that polls comes sooner. Beside
pure Python a driver that competed waited 45 to 160 ms."""
LONG_STEP_NS = 5 * _NS_PER_MS
"""Python takes the GIL from a thread that computes for this time without a poll, so above it nothing is won by waiting
for the engine."""
MIN_ASLEEP_NS = _NS_PER_MS
"""No sleep in place of competing is shorter: the loop offers work for less time in a pause, without sleeping."""
GIL_WAITS_AVERAGED = 4
"""The average wait for the GIL covers about this many waits,"""
INLINE_TURNS_REMEMBERED = 64
"""and is forgotten after this many inline turns without one."""

# ---- who has the lock ----

OFFER_WORK_NS = 30_000
"""How long the driver's thread leaves pending work to an engine's: one that gives an order and then waits for it comes
within this time, and needs no other thread. Such inline progress takes a direct read of 2 MiB from 1.12 to 0.75 ms."""
POLL_LIMIT_S, WAIT_LIMIT_S = 5e-6, 50e-6
"""How long an engine's thread tries to acquire the lock: when it polls, and when it has nothing else to do."""
LOOK_AGAIN_S = 1e-3
"""After this time a thread looks again for what wakes nobody: an engine's that waits and found the lock taken; the loop
while a warm-up or the rest of a long control message is to come."""

# ---- when the loop looks, and when it returns ----

HOLD_REPORT_NS = 2 * _NS_PER_MS
"""How long a complete send waits to be reported. Nobody waits for it, and a consumer mostly confirms a read within this
time after its last chunk, so one turn of the driver handles both."""
LOOK_AT_FDS_CPU_NS, LOOK_AT_FDS_CUDA_NS = 50_000, 10_000
"""Between two looks at descriptors while chunks move."""
PAUSE_CUDA_NS = 5_000
"""Between two looks at copies under way. A GPU's chunk takes tens of microseconds, and every look at it may take the
driver's locks from the engine's thread."""
MAX_RUN_S = 0.1
"""Longest run while chunks move: after it Python looks at peers and the device."""
MAX_LEASE_RUN_S = 1e-4
"""Longest run while a read waits for its lease, which Python checks."""
WAIT_FOR_LEASE_S = 20e-3
"""Seconds that a direct read waits for its lease to be published, or for the producer's kernels to fill its blocks.
After that the producer is asked to send it, and waits itself."""
MAX_UNSETTLED_SLEEP_S = 5e-3
"""Longest sleep while the control channel may have messages that its descriptor does not show."""
MAX_SLEEP_S = 0.5
"""Longest sleep at all: a transport notices some losses only when it is polled."""
