"""The endpoints of a UCX worker, from their opening until UCX has closed them."""

from __future__ import annotations

from kvconnector.errors import LocalError, OperationCancelledError, PeerLostError
from kvconnector.transport.ucx.address import WorkerAddress
from kvconnector.transport.ucx.libucp import IN_PROGRESS, ErrorCallback, Libucp, Posted
from kvconnector.transport.ucx.requests import Link, RequestTable


class Links:
    """The endpoints of one worker, open, put aside, and closing.

    A watched endpoint is closed at once: UCX finds out about late messages by itself. One within the host is
    not, before the worker goes: its peer may be alive and still refer to it by address in messages on their way.
    Connecting to the same worker again takes it up.
    """

    def __init__(self, libucp: Libucp, requests: RequestTable) -> None:
        self._libucp = libucp
        self._requests = requests
        self._open: dict[int, Link] = {}
        self._aside: list[Link] = []
        self._closing: list[int] = []
        self._watched: dict[int, Link] = {}
        self._failures: list[tuple[int, int]] = []
        self._num_created = 0
        self._num_opened = 0
        self._callback = ErrorCallback(self._on_failure)

    def open(self, peer: WorkerAddress, *, watched: bool) -> int:
        """An endpoint to a worker; its id."""
        self._num_opened += 1
        for link in self._aside:
            if link.peer == peer and link.lost is None and not watched:
                self._aside.remove(link)
                self._open[self._num_opened] = link
                return self._num_opened
        self._num_created += 1
        callback = self._callback if watched else None
        handle = self._libucp.ep_create(peer.ucx_address, callback, self._num_created)
        link = Link(handle, peer, watched)
        if watched:
            self._watched[self._num_created] = link
        self._open[self._num_opened] = link
        return self._num_opened

    def get(self, endpoint: int) -> Link:
        """The open endpoint with this id, or `LocalError`."""
        try:
            return self._open[endpoint]
        except KeyError:
            raise LocalError("no such endpoint", endpoint=endpoint) from None

    def retire(self, endpoint: int) -> None:
        """Give an endpoint up and end its sends."""
        link = self._open.pop(endpoint, None)
        if link is None:
            return
        self._requests.fail_sends(
            link,
            lambda: OperationCancelledError("the endpoint was disconnected", endpoint=endpoint),
        )
        if link.watched:
            self._close(link)
        else:
            self._aside.append(link)

    def book_failures(self) -> None:
        """Give up the endpoints whose loss UCX has reported."""
        failures, self._failures = self._failures, []
        for number, status in failures:
            link = self._watched.get(number)
            if link is not None:
                text = self._libucp.status_text(status)
                self._lose(link, PeerLostError("the peer was lost", ucx_status=text))
                self._close(link)

    def look_at_processes(self, local: WorkerAddress) -> None:
        """Give up the endpoints whose process on this host has ended."""
        for link in self._open.values():
            peer = link.peer
            if link.watched or link.lost is not None or not peer.same_host(local):
                continue
            if not peer.process_alive():
                pid = peer.process_id
                self._lose(link, PeerLostError("the peer's process has ended", process_id=pid))

    def flush_all(self) -> None:
        """Begin to push out what was sent: closing a watched endpoint drops it."""
        for link in self._open.values():
            if link.watched and link.handle and link.lost is None:
                self.wait_closing(self._libucp.ep_flush(link.handle))

    def close_all(self) -> None:
        """Begin to close every endpoint."""
        for link in [*self._open.values(), *self._aside]:
            # An endpoint to a dead process is left to the worker: it might flush for ever.
            if link.watched or link.lost is None:
                self._close(link)
        self._open.clear()
        self._aside.clear()

    def wait_closing(self, posted: Posted) -> None:
        """Book a request whose end matters only for an orderly end."""
        if posted.status == IN_PROGRESS:
            self._closing.append(posted.request)

    def collect_closing(self) -> None:
        """Free the closing requests that have ended."""
        for request in [r for r in self._closing if self._libucp.send_status(r) != IN_PROGRESS]:
            self._closing.remove(request)
            self._libucp.request_free(request)

    def all_closed(self) -> bool:
        """Has every close ended?"""
        return not self._closing

    def _on_failure(self, number: int | None, _endpoint: int | None, status: int) -> None:
        # Called by UCX inside a call of ours, where it must not be called back: book it for later.
        self._failures.append((number or 0, status))

    def _lose(self, link: Link, error: PeerLostError) -> None:
        link.lost = error
        self._requests.fail_sends(link, lambda: error)

    def _close(self, link: Link) -> None:
        if link.handle:
            self.wait_closing(self._libucp.ep_close(link.handle, force=link.watched))
            link.handle = 0
        for number in [n for n, watched in self._watched.items() if watched is link]:
            del self._watched[number]
