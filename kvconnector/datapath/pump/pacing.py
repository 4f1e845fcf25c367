"""How long threads leave work, the lock and the GIL to each other, how often they look, and how long they sleep.

Each name states its subject and its unit, and each text gives the reason for the value. The theory is in
kernels/native/driver_lock.c and in ARCHITECTURE.md (Threads). `scripts/bench pacing` switches them off one after the
other. The C sources have one more such constant, `PARK_MS`, which bounds the cost of a lost wake-up.
"""

from __future__ import annotations

NS_PER_S = 1_000_000_000

# ---- pace: who works, for how long, and who has the lock ----

WORK_S = 1e-3
"""How long any thread handles events in Python at a time: a turn of the driver's thread, `start_step` or a poll in an
engine's thread. A driver's thread that has worked for this long then leaves the GIL to others for `YIELD_GIL_US`. A
thread that wakes because the GIL was free for a moment, and finds it taken again, waits another 5 ms, each time.
Without this limit the longest step with 3,000 queued prompts had 17 ms of the connector's own work; with it, 5 to 7.
"""
YIELD_GIL_US = 100
"""How long the driver's thread sleeps in the loop for others to take the GIL and the lock, see `WORK_S`. With this
sleep a thread that waits for the GIL got it after at most 9 to 12 ms, and without it after 14 to 219.
"""
ASK_FOR_LOCK_NS = 20_000
"""How long an engine's thread waits, while it holds the GIL, for the driver's thread to hand the lock over between two
passes. Without this wait, an attempt to acquire the lock while the loop spins succeeds in 16 to 20 of 100 cases, and a
packed request of 32 MiB beside an engine of pure Python took 9.4 ms, not 2.0.
"""
YIELD_S = 50e-6
"""How long a polling thread of the engine sleeps to give the GIL to a driver's thread that has waited long for it.
Until the driver's thread has the GIL, nobody moves chunks between two polls. With the offers that `LONG_GIL_WAIT_NS`
decides on, a packed request of 32 MiB beside an engine of pure Python took 2.2 ms, not 5.1.
"""
LONG_GIL_WAIT_NS, LONG_STEP_NS = 500_000, 5_000_000
"""If the driver's thread waits longer than the first time for the GIL, and the engine polls at shorter intervals than
the second, the loop offers its work to the engine for two such intervals. The interpreter takes the GIL from a thread
after the second time, so it makes no sense to wait for an engine that polls less often: work would wait for two of its
intervals, however long.
"""

# ---- pace: how often the loop looks ----

LOOK_AT_LEASE_S = 1e-4
"""Longest run of the loop while a read waits for its lease. Python has to look the lease up, because the board wakes
nobody. Without this limit, `WAIT_FOR_LEASE_S` would be over before the next look, so a read whose lease is late would
always be sent.
"""

# ---- bounds of sleep: where nothing wakes a thread ----

LOOK_AGAIN_S = 1e-3
"""After this time a thread looks again. This is for an engine's thread that waits and found the lock taken, and for the
loop while it awaits a warm-up or the rest of a long control message, or while the control channel may have messages
that its descriptor does not show.
"""
CHECK_PEERS_S = 0.1
"""Longest run of the loop while chunks move: after it Python looks for lost peers and a failed device."""
MAX_SLEEP_S = 0.5
"""The longest sleep in any case: a transport notices some losses only when it is polled."""
