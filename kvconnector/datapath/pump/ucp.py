"""libucp as the pump calls it: addresses of its functions, and the parameter structs that they read.

The structs are laid out here by offset, so only versions of libucp are pumped whose header says the same.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvconnector.errors import TransportError
from kvconnector.transport.base import CONTROL_TAG_BIT
from kvconnector.transport.ucx.libucp import Libucp
from kvconnector_kernels.pump import records as r

if TYPE_CHECKING:
    from kvconnector.transport.ucx import UcxTransport

KNOWN_VERSIONS = ((1, 18), (1, 22))
"""First and last minor version of libucp whose `ucp_request_param_t` and `ucp_tag_recv_info_t` were compared."""

_FIELD_MEMORY_TYPE, _FIELD_RECV_INFO = 1 << 6, 1 << 7
_MEMORY_TYPE_HOST = 0
_REQUEST_PARAM = np.dtype(
    {
        "names": ["op_attr_mask", "memory_type", "recv_info"],
        "formats": ["<u4", "<i4", "<i8"],
        "offsets": [0, 48, 56],
        "itemsize": 128,
    }
)
_FUNCTIONS = {
    r.WORKER_PROGRESS: "ucp_worker_progress",
    r.TAG_SEND: "ucp_tag_send_nbx",
    r.TAG_RECV: "ucp_tag_recv_nbx",
    r.REQUEST_STATUS: "ucp_request_check_status",
    r.RECV_TEST: "ucp_tag_recv_request_test",
    r.REQUEST_FREE: "ucp_request_free",
    r.REQUEST_CANCEL: "ucp_request_cancel",
    r.WORKER_ARM: "ucp_worker_arm",
    r.TAG_PROBE: "ucp_tag_probe_nb",
}
_POLL_FD = np.dtype([("fd", "<i4"), ("events", "<i2"), ("revents", "<i2")])
_POLLIN = 1


def check_version(libucp: Libucp) -> None:
    """Raise `TransportError` unless the pump knows this libucp."""
    version = libucp.version()
    if not KNOWN_VERSIONS[0] <= version[:2] <= KNOWN_VERSIONS[1]:
        raise TransportError(
            "this libucp's structs are not known", version=version, known=KNOWN_VERSIONS
        )


def function_address(library: Any, name: str) -> int:
    """Where a C function is."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None  # getattr would have raised
    return address


class Calls:
    """The `calls` row of a pump over one transport's worker, for who sits in its seat: `r.DRIVER` or `r.VISITOR`.

    `risen_fd` is an eventfd that wakes the driver, see `kvconnector_kernels.pump.seat`, as the words at `seat_address`.

    Raises:
        TransportError: a version of libucp that is not known.
    """

    def __init__(
        self, transport: UcxTransport, device: str, *, who: int, seat_address: int, risen_fd: int
    ) -> None:
        libucp = transport.libucp
        check_version(libucp)
        libc = ctypes.CDLL(None)
        self._params = np.zeros(2, _REQUEST_PARAM)
        self._recv_info = np.zeros(2, np.int64)
        self._poll_fds: npt.NDArray[np.void] = np.zeros(0, _POLL_FD)
        self._watched: tuple[int, ...] = ()
        # poll(2) passes over a negative descriptor: nobody wakes a visitor
        self._own_fds = (transport.fileno(), risen_fd if who == r.DRIVER else -1)
        row = self.row = np.zeros(r.CALL_COLUMNS, np.int64)
        for column, name in _FUNCTIONS.items():
            row[column] = function_address(libucp.library, name)
        row[r.CLOCK] = function_address(libc, "clock_gettime")
        row[r.POLL] = function_address(libc, "poll")
        row[r.READ] = function_address(libc, "read")
        row[r.WRITE] = function_address(libc, "write")
        self._one = np.ones(1, np.int64)
        row[r.ONE] = self._one.ctypes.data
        row[r.WORKER] = libucp.worker_handle
        row[r.CONTROL_TAG] = CONTROL_TAG_BIT - (1 << 64)  # the same bits, signed
        # which device a pointer is on is known for host memory only: UCX wants to know a GPU by more than its kind
        known = _FIELD_MEMORY_TYPE if device == "cpu" else 0
        self._params["op_attr_mask"] = known, known | _FIELD_RECV_INFO
        self._params["memory_type"] = _MEMORY_TYPE_HOST
        self._params["recv_info"] = self._recv_info.ctypes.data
        row[r.SEND_PARAM] = self._params.ctypes.data
        row[r.RECV_PARAM] = self._params.ctypes.data + _REQUEST_PARAM.itemsize
        row[r.RECV_INFO] = self._recv_info.ctypes.data
        row[r.SEAT], row[r.WHO] = seat_address, who
        self._risen_fds = np.array([(risen_fd, _POLLIN, 0)], _POLL_FD)
        row[r.RISEN_FDS] = self._risen_fds.ctypes.data
        self.watch(())

    def watch(self, fds: tuple[int, ...]) -> None:
        """Let a run end when one of these is readable."""
        if fds == self._watched and len(self._poll_fds):
            return
        self._watched = fds
        self._poll_fds = np.zeros(len(self._own_fds) + len(fds), _POLL_FD)
        self._poll_fds["fd"] = (*self._own_fds, *fds)
        self._poll_fds["events"] = _POLLIN
        self.row[r.POLL_FDS] = self._poll_fds.ctypes.data
        self.row[r.NUM_FDS] = len(self._poll_fds)
