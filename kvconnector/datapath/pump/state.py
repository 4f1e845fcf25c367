"""The record that the compiled loop works on, the memory that it points to, and the meaning of its results.

The structs of libucp are laid out by offset: `transport.ucx` loads only versions whose headers say the same.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvconnector.errors import CorruptionError, KVConnectorError, TransportError
from kvconnector.transport import MessageSizeError
from kvconnector.transport.base import CONTROL_TAG_BIT
from kvconnector.transport.ucx import UcxTransport, abi
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.digests import CORRUPTED
from kvconnector_kernels.pump.driver_lock import LOCK

if TYPE_CHECKING:
    from kvconnector.datapath.pump.copies import Copies

NS_PER_S = 1_000_000_000
LOOK = r.NOBODY
"""The `RUN` of a single pass that keeps the GIL and the lock: to the loop its owner is inline."""
_PATIENCE_NS = 2_000_000
"""A consumer mostly confirms a read within this time after its last chunk, so one turn of the driver handles both."""
_RUN_WORDS = r.RUN.itemsize // 8
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
_LIBC_FUNCTIONS = ("clock_gettime", "poll", "usleep", "read", "write")


def function_address(library: Any, name: str) -> int:
    """Return the address of a C function."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None  # getattr would have raised
    return address


def error_of(row: Mapping[str, int], transport: UcxTransport) -> KVConnectorError | None:
    """Return why a send or a receive failed, or None."""
    kind, value, chunk = (row[f"error_{name}"] for name in ("kind", "value", "chunk"))
    if kind == r.NO_ERROR:
        return None
    if kind == r.COPY_ERROR and value == CORRUPTED:
        return CorruptionError("a chunk is not what its producer sent", chunk=chunk)
    if kind == r.COPY_ERROR:
        return TransportError("a chunk cannot be copied", chunk=chunk, status=value)
    if kind == r.SIZE_ERROR or value == abi.ERR_MESSAGE_TRUNCATED:
        size = {"message_bytes": value} if kind == r.SIZE_ERROR else {}
        return MessageSizeError("the message does not fit its receive", chunk=chunk, **size)
    return transport.error_of(value, chunk)


class LoopState:
    """A `STATE` and all that it points to, except for the rows of reads and slots.

    `pace_s`, in seconds: how long the loop spins after something moved, and the pauses between looks at descriptors and
    at work under way.
    """

    def __init__(
        self, transport: UcxTransport, copies: Copies, pace_s: tuple[float, float, float]
    ) -> None:
        self.record: npt.NDArray[np.void] = np.zeros((), r.STATE)
        self.address = self.record.ctypes.data
        self.numbers = r.numbers_of(self.record)
        """The fields of `record` in order, each an int."""
        self.now_ns = time.monotonic_ns
        """The clock that the loop reads."""
        lock = np.zeros(1, LOCK)
        self.lock = lock.view(np.int32).data
        """The words of the driver lock."""
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Wakes the driver, see `kvconnector_kernels.pump.driver_lock`."""
        self._close = weakref.finalize(self, os.close, self.wake_fd)
        self._transport_fd = transport.fileno()
        recv_info, one = np.zeros(2, np.int64), np.ones(1, np.int64)
        self._wake_fds = np.array([(self.wake_fd, _POLLIN, 0)], _POLL_FD)
        self._runs = np.zeros(3, r.RUN)
        self._runs["owner"][[LOOK, r.DRIVER, r.INLINE]] = r.INLINE, r.DRIVER, r.INLINE
        self.limits = r.numbers_of(self._runs)[r.index_of(r.RUN, "limit_ns") :: _RUN_WORDS]
        """The longest that an owner's next run may take, in ns; below 0 for one look at everything."""
        self.limits[LOOK] = -1
        self.watched: dict[int, tuple[int, ...]] = {}
        """The descriptors of the caller's that end an owner's runs."""
        self._poll_fds: dict[int, npt.NDArray[np.void]] = {}
        params = _request_params(recv_info, on_gpu=copies.on_gpu)
        state = self.record
        libc, libucp = ctypes.CDLL(None), transport.libucp
        for name in _LIBC_FUNCTIONS:
            state[name] = function_address(libc, name)
        for name, function in _UCP_FUNCTIONS.items():
            state[name] = function_address(libucp.library.keeping, function)
        state["worker"] = libucp.worker_handle
        state["control_tag"] = CONTROL_TAG_BIT - (1 << 64)  # the same bits, signed
        state["send_param"], state["recv_param"] = map(ctypes.addressof, params)
        state["recv_info"], state["one"] = recv_info.ctypes.data, one.ctypes.data
        state["runs"], state["lock"] = self._runs.ctypes.data, lock.ctypes.data
        state["wake_fds"] = self._wake_fds.ctypes.data
        state["copy"], state["copy_context"] = copies.function, copies.context
        state["begin"], state["begin_argument"] = copies.begin
        state["job_bytes"] = copies.job.itemsize
        state["patience_ns"] = _PATIENCE_NS
        pace_ns = [round(seconds * NS_PER_S) for seconds in pace_s]
        state["spin_ns"], state["look_ns"], state["pause_ns"] = pace_ns
        if copies.digests is not None:
            copies.digests.attach(state)
        self._kept = recv_info, one, params
        for owner in (LOOK, r.DRIVER, r.INLINE):
            self.watch(owner, ())

    def close(self) -> None:
        """Close `wake_fd`. Later wake-ups write nowhere, since another file may get its number. Idempotent."""
        self._wake_fds["fd"] = -1
        self._close()

    def watch(self, owner: int, fds: tuple[int, ...]) -> None:
        """End an owner's runs when one of these descriptors of the caller's is readable."""
        self.watched[owner] = fds
        # poll(2) skips a negative descriptor: only the driver is woken
        wake_fd = self.wake_fd if owner == r.DRIVER else -1
        watched = (self._transport_fd, wake_fd, *fds)
        poll_fds = self._poll_fds[owner] = np.zeros(len(watched), _POLL_FD)
        poll_fds["fd"] = watched
        poll_fds["events"] = _POLLIN
        self._runs[owner]["poll_fds"] = poll_fds.ctypes.data
        self._runs[owner]["num_fds"] = len(watched)


def _request_params(recv_info: npt.NDArray[np.int64], *, on_gpu: bool) -> list[Any]:
    """Return the parameters of sends, and of receives that leave tag and length in `recv_info`."""
    # a pointer's device is stated for host memory only: UCX identifies a GPU by more than its kind
    known = 0 if on_gpu else abi.OP_FIELD_MEMORY_TYPE
    return [
        abi.RequestParam(
            op_attr_mask=known | more,
            memory_type=abi.MEMORY_TYPE_HOST,
            recv_info=recv_info.ctypes.data,
        )
        for more in (0, abi.OP_FIELD_RECV_INFO)
    ]
