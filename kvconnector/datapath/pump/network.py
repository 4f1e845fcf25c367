"""What the loop and its bookkeeping want of a transport: C functions to call, and what their results mean."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvconnector.errors import CorruptionError, KVConnectorError, TransportError
from kvconnector.transport import Buffer, Completion, MessageSizeError
from kvconnector.transport.base import CONTROL_TAG_BIT
from kvconnector_kernels.pump import records as r

_FIELD_MEMORY_TYPE, _FIELD_RECV_INFO = 1 << 6, 1 << 7
_MEMORY_TYPE_HOST = 0
REQUEST_PARAM = np.dtype(
    {
        "names": ["op_attr_mask", "memory_type", "recv_info"],
        "formats": ["<u4", "<i4", "<i8"],
        "offsets": [0, 48, 56],
        "itemsize": 128,
    }
)
"""libucp's `ucp_request_param_t`, as far as it is used."""
_POLL_FD = np.dtype([("fd", "<i4"), ("events", "<i2"), ("revents", "<i2")])
_POLLIN = 1


class Network(Protocol):
    """A transport as one worker's chunks use it. `requests` are what its send and receive functions return."""

    name: str
    path_name: str
    """What a transfer's record calls a read that came this way."""
    fileno: int
    """Readable when there is something to progress; -1: see `watched`."""
    watched: tuple[int, ...]
    """Descriptors whose readiness only the caller of the loop can handle."""

    @property
    def functions(self) -> Mapping[int, int]:
        """Addresses by column of the calls: what libucp offers, and a clock."""

    @property
    def worker(self) -> int:
        """What these functions take as their worker."""

    def now_ns(self) -> int:
        """The time that the loop reads."""

    def handle(self, endpoint: int) -> int:
        """What a send takes as its endpoint, valid until the transport is used otherwise.

        Raises:
            KVConnectorError: there is none any more, or its peer is lost.
        """

    def lanes(self, endpoint: int) -> str:
        """What messages travel by, as "transport/device" joined by "+"; empty if that is not known."""

    def cancel(self, request: int) -> None:
        """End a receive, if its message is not arriving."""

    def adopt(
        self, request: int, tag: int, buffer: Buffer, endpoint: int | None
    ) -> Callable[[], bool]:
        """Leave an operation and its memory to the transport. Whether its memory is free again by then."""

    def error_of(self, status: int, chunk: int) -> KVConnectorError:
        """Why an operation failed."""

    def progress(self, *, others_move: bool) -> list[Completion]:
        """See `Transport`: of operations that were not posted by the loop."""

    def is_control_arriving(self) -> bool:
        """Whether a control message is on its way that the caller has begun to take."""

    def check(self) -> None:
        """Raise what went wrong in a function that the loop called, and could not tell it."""


CORRUPTED = 2
"""What a copy that finds a chunk damaged returns."""


def error_of(row: npt.NDArray[np.int64], network: Network) -> KVConnectorError | None:
    """A program's error, or None."""
    kind, value, chunk = (
        int(row[column]) for column in (r.ERROR_KIND, r.ERROR_VALUE, r.ERROR_CHUNK)
    )
    if kind == r.NO_ERROR:
        return None
    if kind == r.COPY_ERROR and value == CORRUPTED:
        return CorruptionError("a chunk is not what its producer sent", chunk=chunk)
    if kind == r.COPY_ERROR:
        return TransportError("a chunk cannot be copied", chunk=chunk, status=value)
    if kind == r.SIZE_ERROR:
        return MessageSizeError(
            "the message does not fit its receive", chunk=chunk, message_bytes=value
        )
    return network.error_of(value, chunk)


def function_address(library: Any, name: str) -> int:
    """Where a C function is."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None  # getattr would have raised
    return address


class Calls:
    """The `calls` row of a pump over one network, for one owner of its lock: `r.DRIVER` or `r.INLINE`.

    `wake_fd` is an eventfd that wakes the driver. It and the words at `lock_address`: see
    `kvconnector_kernels.pump.driver_lock`.
    """

    def __init__(
        self, network: Network, device: str, *, who: int, lock_address: int, wake_fd: int
    ) -> None:
        libc = ctypes.CDLL(None)
        self._params = np.zeros(2, REQUEST_PARAM)
        self._recv_info = np.zeros(2, np.int64)
        self._poll_fds: npt.NDArray[np.void] = np.zeros(0, _POLL_FD)
        self._watched: tuple[int, ...] = ()
        self._always_watched = network.watched
        # poll(2) passes over a negative descriptor: only the driver is woken
        self._own_fds = (network.fileno, wake_fd if who == r.DRIVER else -1)
        row = self.row = np.zeros(r.CALL_COLUMNS, np.int64)
        row[r.CLOCK] = function_address(libc, "clock_gettime")
        row[r.POLL] = function_address(libc, "poll")
        row[r.READ] = function_address(libc, "read")
        row[r.WRITE] = function_address(libc, "write")
        for column, address in network.functions.items():
            row[column] = address
        row[r.WORKER] = network.worker
        self._one = np.ones(1, np.int64)
        row[r.ONE] = self._one.ctypes.data
        row[r.CONTROL_TAG] = CONTROL_TAG_BIT - (1 << 64)  # the same bits, signed
        # which device a pointer is on is known for host memory only: UCX wants to know a GPU by more than its kind
        known = _FIELD_MEMORY_TYPE if device == "cpu" else 0
        self._params["op_attr_mask"] = known, known | _FIELD_RECV_INFO
        self._params["memory_type"] = _MEMORY_TYPE_HOST
        self._params["recv_info"] = self._recv_info.ctypes.data
        row[r.SEND_PARAM] = self._params.ctypes.data
        row[r.RECV_PARAM] = self._params.ctypes.data + REQUEST_PARAM.itemsize
        row[r.RECV_INFO] = self._recv_info.ctypes.data
        row[r.LOCK], row[r.WHO] = lock_address, who
        self._wake_fds = np.array([(wake_fd, _POLLIN, 0)], _POLL_FD)
        row[r.WAKE_FDS] = self._wake_fds.ctypes.data
        self.watch(())

    def watch(self, fds: tuple[int, ...]) -> None:
        """Let a run end when one of these is readable."""
        if fds == self._watched and len(self._poll_fds):
            return
        self._watched = fds
        watched = (*self._own_fds, *self._always_watched, *fds)
        self._poll_fds = np.zeros(len(watched), _POLL_FD)
        self._poll_fds["fd"] = watched
        self._poll_fds["events"] = _POLLIN
        self.row[r.POLL_FDS] = self._poll_fds.ctypes.data
        self.row[r.NUM_FDS] = len(self._poll_fds)
