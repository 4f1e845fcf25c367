"""The record that the compiled loop works on, the memory that it points to, and the meaning of its results.

The structs of libucp are laid out by offset: `transport.ucx` loads only versions whose headers say the same.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.pump import pacing
from kvconnector.datapath.pump.copies import Copies
from kvconnector.errors import CorruptionError, KVConnectorError, TransportError
from kvconnector.transport import MessageSizeError
from kvconnector.transport.tagged_messages import CONTROL_TAG_BIT
from kvconnector.transport.ucx import UcxTransport, abi
from kvconnector_kernels.library import address_of_function
from kvconnector_kernels.pump import records as r

LOOK = r.NOBODY
"""The run of a single pass that keeps the GIL and the lock: to the loop its owner is inline."""
_POLL_FD = np.dtype([("fd", "<i4"), ("events", "<i2"), ("revents", "<i2")])
_POLLIN = 1

_UCP_FUNCTIONS = {
    "worker_progress": "ucp_worker_progress",
    "tag_send": "ucp_tag_send_nbx",
    "tag_recv": "ucp_tag_recv_nbx",
    "request_status": "ucp_request_check_status",
    "recv_test": "ucp_tag_recv_request_test",
    "request_free": "ucp_request_free",
    "request_cancel": "ucp_request_cancel",
    "worker_arm": "ucp_worker_arm",
    "tag_probe": "ucp_tag_probe_nb",
}
_LIBC_FUNCTIONS = ("clock_gettime", "usleep")
"""libc's, by address so that a test can replace them."""


def error_of(row: Mapping[str, int], transport: UcxTransport) -> KVConnectorError | None:
    """Return why a send or a receive failed, or None."""
    kind, value, chunk = (row[f"error_{name}"] for name in ("kind", "value", "chunk"))
    if kind == r.NO_ERROR:
        return None
    if kind == r.COPY_ERROR and value == r.CORRUPTED:
        return CorruptionError("a chunk differs from what its producer sent", chunk=chunk)
    if kind == r.COPY_ERROR:
        return TransportError("a chunk cannot be copied", chunk=chunk, status=value)
    if kind == r.SIZE_ERROR or value == abi.ERR_MESSAGE_TRUNCATED:
        size = {"message_bytes": value} if kind == r.SIZE_ERROR else {}
        return MessageSizeError("the message does not fit its receive", chunk=chunk, **size)
    return transport.error_of(value, chunk)


class LoopState:
    """A `State` and all that it points to, except for the rows of reads and slots.

    After something moved, the loop spins for `spin_s` seconds before it sleeps.
    """

    def __init__(self, transport: UcxTransport, copies: Copies, spin_s: float) -> None:
        self.record = r.State()
        self.address = ctypes.addressof(self.record)
        self.now_ns = time.monotonic_ns
        """The clock that the loop reads."""
        self.lock = r.aligned_lock()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Wakes the driver, see `DriverLock`."""
        self._close = weakref.finalize(self, os.close, self.wake_fd)
        self._transport_fd = transport.fileno()
        self._wake_fds = np.array([(self.wake_fd, _POLLIN, 0)], _POLL_FD)
        runs = (r.Run * 3)()
        self.runs = list(runs)
        """For each owner, how long its next run may take (0 means one look at everything), and what else ends the run.
        """
        for owner in (LOOK, r.DRIVER, r.INLINE):
            self.runs[owner].owner = r.DRIVER if owner == r.DRIVER else r.INLINE
        self._poll_fds: dict[int, npt.NDArray[np.void]] = {}
        recv_info = r.TagInfo()
        params = _request_params(recv_info, on_gpu=copies.on_gpu)
        state, libc, libucp = self.record, ctypes.CDLL(None), transport.libucp
        for name in _LIBC_FUNCTIONS:
            setattr(state, name, address_of_function(name, libc))
        for name, function in _UCP_FUNCTIONS.items():
            setattr(state, name, address_of_function(function, libucp.library.keeping))
        state.worker = libucp.worker_handle
        state.control_tag = CONTROL_TAG_BIT
        state.send_param, state.recv_param = map(ctypes.addressof, params)
        state.recv_info = ctypes.addressof(recv_info)
        state.runs, state.lock = ctypes.addressof(runs), ctypes.addressof(self.lock)
        state.wake_fd = self._wake_fds.ctypes.data
        state.copy, state.copy_context = copies.function, copies.context
        state.begin, state.begin_argument = copies.begin
        state.job_bytes = ctypes.sizeof(copies.job)
        state.spin_after_work_ns = round(spin_s * pacing.NS_PER_S)
        if copies.digests is not None:
            copies.digests.attach(state)
        self._kept = recv_info, params, runs
        self.watch()

    def close(self) -> None:
        """Close `wake_fd`. Later wake-ups write nowhere, since another file may get its number. Idempotent."""
        self._wake_fds["fd"] = -1
        self._close()

    def watch(self, *fds: int) -> None:
        """End runs, except single passes, when one of these descriptors of the caller's is readable."""
        for owner in (LOOK, r.DRIVER, r.INLINE):
            # poll(2) skips a negative descriptor: only the driver is woken
            wake_fd = self.wake_fd if owner == r.DRIVER else -1
            watched = (self._transport_fd, wake_fd, *(() if owner == LOOK else fds))
            poll_fds = self._poll_fds[owner] = np.zeros(len(watched), _POLL_FD)
            poll_fds["fd"] = watched
            poll_fds["events"] = _POLLIN
            self.runs[owner].poll_fds = poll_fds.ctypes.data
            self.runs[owner].num_fds = len(watched)


def _request_params(recv_info: r.TagInfo, *, on_gpu: bool) -> list[ctypes.Structure]:
    """Return the parameters of sends, and of receives that leave tag and length in `recv_info`."""
    # a pointer's device is stated for host memory only: UCX identifies a GPU by more than its kind
    known = 0 if on_gpu else abi.OP_FIELD_MEMORY_TYPE
    return [
        abi.RequestParam(
            op_attr_mask=known | more,
            memory_type=abi.MEMORY_TYPE_HOST,
            recv_info=ctypes.addressof(recv_info),
        )
        for more in (0, abi.OP_FIELD_RECV_INFO)
    ]
