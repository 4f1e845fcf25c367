"""The endpoints of a UCX worker, until UCX has closed them."""

from __future__ import annotations

from collections.abc import Callable

from kvconnector.errors import LocalError, OperationCancelledError, PeerLostError
from kvconnector.transport.ucx.abi import IN_PROGRESS, ErrorCallback
from kvconnector.transport.ucx.address import WorkerAddress
from kvconnector.transport.ucx.libucp import Libucp, Posted
from kvconnector.transport.ucx.requests import Endpoint, RequestTable

QUARANTINE_S = 60.0
"""Seconds that an endpoint is kept after it was given up, if closing it at once would not be safe."""


class UcxEndpoints:
    """The endpoints of one worker: open, quarantined, and closing.

    Closing is safe once nothing of the endpoint is in flight. UCX's tcp keeps the socket of a closed endpoint for as
    long as the peer may send, and crashes when the peer ends while bytes of ours still wait there. So an endpoint
    between hosts with sends under way is quarantined until they have ended or UCX has reported the peer's loss.

    An endpoint within the host is quarantined for the whole time, for messages of a living peer refer to it by address;
    connecting to the same worker again reuses it. If its process died in the middle of a send, UCX never ends that
    send, and the endpoint stays until the worker is destroyed.
    """

    def __init__(self, libucp: Libucp, requests: RequestTable, clock: Callable[[], float]) -> None:
        self._libucp = libucp
        self._requests = requests
        self._clock = clock
        self._open: dict[int, Endpoint] = {}
        self._quarantined: list[tuple[float, Endpoint]] = []
        self._closing: list[int] = []
        self._watched: dict[int, Endpoint] = {}
        self._failures: list[tuple[int, int]] = []
        self._num_opened = 0
        self._callback = ErrorCallback(self._on_failure)

    def __repr__(self) -> str:
        quarantined = f", {len(self._quarantined)} quarantined" if self._quarantined else ""
        return f"{list(self._open.values())}{quarantined}"

    def open(self, peer: WorkerAddress, *, watched: bool) -> int:
        """Open an endpoint to a worker. Returns its id."""
        self._num_opened += 1
        for quarantined in self._quarantined:
            endpoint = quarantined[1]
            if endpoint.peer == peer and endpoint.lost is None and not watched:
                self._quarantined.remove(quarantined)
                self._open[self._num_opened] = endpoint
                return self._num_opened
        handle = self._libucp.ep_create(peer.ucx_address, self._callback if watched else None)
        endpoint = Endpoint(handle, peer, self._libucp.ep_lanes(handle), watched)
        if watched:
            self._watched[handle] = endpoint
        self._open[self._num_opened] = endpoint
        return self._num_opened

    def get(self, endpoint_id: int) -> Endpoint:
        """Return the open endpoint with this id. Raises LocalError: there is none."""
        try:
            return self._open[endpoint_id]
        except KeyError:
            raise LocalError("no such endpoint", endpoint=endpoint_id) from None

    def retire(self, endpoint_id: int) -> None:
        """Give up an endpoint and end its sends. UCX may go on sending them for a while."""
        endpoint = self._open.pop(endpoint_id, None)
        if endpoint is None:
            return
        self._requests.fail(
            lambda: OperationCancelledError("the endpoint was disconnected", endpoint=endpoint_id),
            endpoint,
        )
        self._quarantined.append((self._clock() + QUARANTINE_S, endpoint))
        self.end_quarantines()

    def end_quarantines(self) -> None:
        """Close the quarantined endpoints that can be closed now."""
        now_s = self._clock()
        for quarantined in self._quarantined[:]:
            until_s, endpoint = quarantined
            is_sending = self._requests.is_sending(endpoint)
            over = now_s >= until_s
            if (over or not is_sending) if endpoint.watched else (over and not is_sending):
                self._quarantined.remove(quarantined)
                self._close(endpoint)

    def book_failures(self) -> None:
        """Close the endpoints whose loss UCX has reported."""
        failures, self._failures = self._failures, []
        for handle, status in failures:
            endpoint = self._watched.get(handle)
            if endpoint is not None:
                text = self._libucp.library.status_text(status)
                lost = PeerLostError("the peer was lost", ucx_status=text, lanes=endpoint.lanes)
                self._lose(endpoint, lost)
                self._close(endpoint)

    def has_losses(self, local: WorkerAddress) -> bool:
        """Returns True if the peer of an open endpoint is gone, reported or not."""
        self.check_processes(local)
        return bool(self._failures) or any(each.lost for each in self._open.values())

    def check_processes(self, local: WorkerAddress) -> None:
        """Mark the endpoints as lost whose process on this host has ended."""
        for endpoint in self._open.values():
            peer = endpoint.peer
            if endpoint.watched or endpoint.lost is not None or not peer.same_host(local):
                continue
            if not peer.process_alive():
                pid = peer.process_id
                self._lose(endpoint, PeerLostError("the peer's process has ended", process_id=pid))

    def flush_all(self) -> None:
        """Begin to flush the watched endpoints: closing one drops what it has not sent."""
        for endpoint in self._open.values():
            if endpoint.watched and endpoint.handle and endpoint.lost is None:
                self.wait_closing(self._libucp.ep_flush(endpoint.handle))

    def close_all(self) -> None:
        """Begin to close every endpoint."""
        for endpoint in [*self._open.values(), *(item[1] for item in self._quarantined)]:
            # An endpoint to a dead process is left to the worker: it might flush forever.
            if endpoint.watched or endpoint.lost is None:
                self._close(endpoint)
        self._open.clear()
        self._quarantined.clear()

    def wait_closing(self, posted: Posted) -> None:
        """Keep a request whose completion matters only when the transport closes."""
        if posted.status == IN_PROGRESS:
            self._closing.append(posted.request)

    def collect_closing(self) -> None:
        """Free the closing requests that have ended."""
        for request in [r for r in self._closing if self._libucp.send_status(r) != IN_PROGRESS]:
            self._closing.remove(request)
            self._libucp.request_free(request)

    def all_closed(self) -> bool:
        """Returns True if every close has ended."""
        return not self._closing

    def _on_failure(self, _arg: int | None, handle: int, status: int) -> None:
        # Called by UCX inside a call of ours, where it must not be called back: book it for later.
        self._failures.append((handle, status))

    def _lose(self, endpoint: Endpoint, error: PeerLostError) -> None:
        endpoint.lost = error
        self._requests.fail(lambda: error, endpoint)

    def _close(self, endpoint: Endpoint) -> None:
        if endpoint.handle:
            self._watched.pop(endpoint.handle, None)
            # the next endpoint may have the same handle
            self._failures = [each for each in self._failures if each[0] != endpoint.handle]
            self.wait_closing(self._libucp.ep_close(endpoint.handle, force=endpoint.watched))
            endpoint.handle = 0
