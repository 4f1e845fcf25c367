"""C functions that UCX calls in its own threads: see kernels/native/ucx_callbacks.c.

A thread that holds the GIL may be waiting for a lock of UCX's, and the thread that calls back may hold that lock. So
these functions touch only plain memory and libc. Python reads that memory later.
"""

from __future__ import annotations

from kvconnector_kernels.library import address_of_function, keeping
from kvconnector_kernels.pump.records import NUM_NOTES, Log

__all__ = ["LOG_HANDLER", "LOG_MEMORY", "NUM_NOTES"]

LOG_HANDLER = address_of_function("kvc_note_message")
"""The address of a handler of UCX's log, which keeps warnings and worse in `LOG_MEMORY`."""
LOG_MEMORY = Log.in_dll(keeping, "kvc_log")
"""The last `NUM_NOTES` messages, and how many there were."""
