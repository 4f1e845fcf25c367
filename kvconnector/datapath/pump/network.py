"""What the loop and its bookkeeping want of a transport: C functions to call, and what their results mean.

The structs of libucp are laid out by offset: `transport.ucx` loads only versions whose headers say the same.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnector.errors import CorruptionError, KVConnectorError, PeerLostError, TransportError
from kvconnector.transport import Buffer, MessageSizeError
from kvconnector.transport.base import CONTROL_TAG_BIT
from kvconnector.transport.ucx import UcxTransport, abi
from kvconnector.transport.ucx.requests import LOSS_STATUSES, registration_error
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.digests import CORRUPTED

NS_PER_S = 1_000_000_000
_POLL_FD = np.dtype([("fd", "<i4"), ("events", "<i2"), ("revents", "<i2")])
_POLLIN = 1

_FUNCTIONS = {
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


def error_of(program: Mapping[str, int], network: UcxNetwork) -> KVConnectorError | None:
    """Why a send or a receive failed, or None."""
    kind, value, chunk = (program[f"error_{name}"] for name in ("kind", "value", "chunk"))
    if kind == r.NO_ERROR:
        return None
    if kind == r.COPY_ERROR and value == CORRUPTED:
        return CorruptionError("a chunk is not what its producer sent", chunk=chunk)
    if kind == r.COPY_ERROR:
        return TransportError("a chunk cannot be copied", chunk=chunk, status=value)
    if kind == r.SIZE_ERROR or value == abi.ERR_MESSAGE_TRUNCATED:
        size = {"message_bytes": value} if kind == r.SIZE_ERROR else {}
        return MessageSizeError("the message does not fit its receive", chunk=chunk, **size)
    return network.error_of(value, chunk)


def function_address(library: Any, name: str) -> int:
    """Where a C function is."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None  # getattr would have raised
    return address


class UcxNetwork:
    """A transport as one worker's chunks use it, whose requests are what libucp's functions return."""

    def __init__(self, transport: UcxTransport) -> None:
        libucp = transport.libucp
        self._transport = transport
        self.fileno = transport.fileno()
        """Readable when there is something to progress; -1: there is no such descriptor."""
        self.functions = {
            field: function_address(libucp.library.keeping, name)
            for field, name in _FUNCTIONS.items()
        }
        """Addresses by field of the pump's state."""
        self.worker = libucp.worker_handle
        """What these functions take as their worker."""
        self.now_ns = time.monotonic_ns
        """The time that the loop reads."""
        self.handle = transport.endpoint_handle
        """A send's endpoint, valid until the transport is used otherwise. Raises KVConnectorError: it is lost."""
        self.lanes = transport.lanes
        """What messages to an endpoint travel by, as "transport/device" joined by "+"; empty if that is not known."""
        self.cancel = libucp.request_cancel
        """End a receive, if its message is not arriving."""
        self.progress = transport.progress
        """See `UcxTransport`: of operations that were not posted by the loop."""
        self.arriving_control = transport.arriving_control
        """Control messages on their way that the caller has begun to take."""

    def adopt(
        self, request: int, tag: int, buffer: Buffer, endpoint: int | None
    ) -> Callable[[], bool]:
        """Leave an operation and its memory to the transport. Returns what finds out if the memory is free again."""
        ticket = self._transport.adopt(request, tag, buffer, endpoint)
        return lambda: not self._transport.holds(ticket)

    def error_of(self, status: int, chunk: int) -> KVConnectorError:
        """Why an operation failed."""
        text = self._transport.libucp.library.status_text(status)
        if status == abi.ERR_IO_ERROR and not self._transport.may_have_lost_a_peer():
            return registration_error(chunk=chunk, ucx_status=text)
        if status == abi.ERR_CANCELED or status in LOSS_STATUSES:
            return PeerLostError("the peer was lost", chunk=chunk, ucx_status=text)
        return TransportError("UCX failed a chunk", chunk=chunk, ucx_status=text)


class Calls:
    """What a pump's `state` is to call: the functions of one network and of libc, and the memory that they take."""

    def __init__(self, state: npt.NDArray[np.void], network: UcxNetwork, *, on_gpu: bool) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Wakes the driver, see `kvconnector_kernels.pump.driver_lock`."""
        self._close = weakref.finalize(self, os.close, self.wake_fd)
        libc = ctypes.CDLL(None)
        self._recv_info = np.zeros(2, np.int64)
        self._one = np.ones(1, np.int64)
        self._wake_fds = np.array([(self.wake_fd, _POLLIN, 0)], _POLL_FD)
        self.runs: npt.NDArray[np.void] = np.zeros(3, r.RUN)
        self.runs["owner"] = r.NOBODY, r.DRIVER, r.INLINE
        self.limits = r.numbers_of(self.runs)[r.index_of(r.RUN, "limit_ns") :: r.RUN.itemsize // 8]
        """How long an owner's next run may take, in ns; below 0: one look at everything."""
        state["runs"] = self.runs.ctypes.data
        self._network = network
        self.watched: dict[int, tuple[int, ...]] = {}
        """The caller's descriptors at whose readiness an owner's runs end."""
        self._poll_fds: dict[int, npt.NDArray[np.void]] = {}
        # which device a pointer is on is known for host memory only: UCX wants to know a GPU by more than its kind
        known = 0 if on_gpu else abi.OP_FIELD_MEMORY_TYPE
        self._params = [
            abi.RequestParam(
                op_attr_mask=known | more,
                memory_type=abi.MEMORY_TYPE_HOST,
                recv_info=self._recv_info.ctypes.data,
            )
            for more in (0, abi.OP_FIELD_RECV_INFO)
        ]
        for name in ("clock_gettime", "poll", "usleep", "read", "write"):
            state[name] = function_address(libc, name)
        for name, address in network.functions.items():
            state[name] = address
        state["worker"] = network.worker
        state["control_tag"] = CONTROL_TAG_BIT - (1 << 64)  # the same bits, signed
        state["send_param"], state["recv_param"] = map(ctypes.addressof, self._params)
        state["recv_info"] = self._recv_info.ctypes.data
        state["one"] = self._one.ctypes.data
        state["wake_fds"] = self._wake_fds.ctypes.data
        for owner in (r.DRIVER, r.INLINE):
            self.watch(owner, ())

    def close(self) -> None:
        """Close `wake_fd`, to which nobody writes any more: its number may be anybody's then. Idempotent."""
        self._wake_fds["fd"] = -1
        self._close()

    def watch(self, owner: int, fds: tuple[int, ...]) -> None:
        """Let an owner's runs end when one of these is readable."""
        self.watched[owner] = fds
        # poll(2) passes over a negative descriptor: only the driver is woken
        wake_fd = int(self._wake_fds["fd"][0]) if owner == r.DRIVER else -1
        watched = (self._network.fileno, wake_fd, *fds)
        poll_fds = self._poll_fds[owner] = np.zeros(len(watched), _POLL_FD)
        poll_fds["fd"] = watched
        poll_fds["events"] = _POLLIN
        self.runs[owner]["poll_fds"] = poll_fds.ctypes.data
        self.runs[owner]["num_fds"] = len(watched)
