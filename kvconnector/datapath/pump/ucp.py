"""libucp as the loop calls it, without Python in between.

The structs are laid out by offset, so only versions of libucp are called so whose header says the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvconnector.datapath.pump.network import function_address
from kvconnector.errors import KVConnectorError, PeerLostError, TransportError
from kvconnector.transport import Buffer, Completion, MessageSizeError
from kvconnector.transport.ucx import UcxTransport
from kvconnector.transport.ucx.libucp import ERR_CANCELED, ERR_MESSAGE_TRUNCATED, Libucp
from kvconnector.transport.ucx.requests import LOSS_STATUSES

KNOWN_VERSIONS = ((1, 18), (1, 22))
"""First and last minor version of libucp whose `ucp_request_param_t` and `ucp_tag_recv_info_t` were compared."""

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


def check_version(libucp: Libucp) -> None:
    """Raise `TransportError` unless this libucp's structs are known."""
    version = libucp.version()
    if not KNOWN_VERSIONS[0] <= version[:2] <= KNOWN_VERSIONS[1]:
        raise TransportError(
            "this libucp's structs are not known", version=version, known=KNOWN_VERSIONS
        )


class UcxNetwork:
    """`Network` whose functions are libucp's own.

    Raises:
        TransportError: a version of libucp that is not known.
    """

    name = "pump"
    path_name = "packed"
    watched: tuple[int, ...] = ()

    def __init__(self, transport: UcxTransport) -> None:
        libucp = transport.libucp
        check_version(libucp)
        self._transport = transport
        self.fileno = transport.fileno()
        self.functions = {
            field: function_address(libucp.library, name) for field, name in _FUNCTIONS.items()
        }
        self.worker = libucp.worker_handle
        self.now_ns = time.monotonic_ns
        self.handle = transport.endpoint_handle
        self.lanes = transport.lanes
        self.cancel = libucp.request_cancel
        self.is_control_arriving = transport.is_control_arriving

    def adopt(
        self, request: int, tag: int, buffer: Buffer, endpoint: int | None
    ) -> Callable[[], bool]:
        """See `Network`."""
        ticket = self._transport.adopt(request, tag, buffer, endpoint)
        return lambda: not self._transport.holds(ticket)

    def error_of(self, status: int, chunk: int) -> KVConnectorError:
        """See `Network`."""
        text = self._transport.libucp.status_text(status)
        if status == ERR_MESSAGE_TRUNCATED:
            return MessageSizeError("the message does not fit its receive", chunk=chunk)
        if status == ERR_CANCELED or status in LOSS_STATUSES:
            return PeerLostError("the peer was lost", chunk=chunk, ucx_status=text)
        return TransportError("UCX failed a chunk", chunk=chunk, ucx_status=text)

    def progress(self, *, others_move: bool) -> list[Completion]:
        """See `Network`."""
        return self._transport.progress(others_move=others_move)

    def check(self) -> None:
        """See `Network`. libucp's functions raise nothing."""
