"""`UcxTransport`: tagged messages over UCX, driven by its owner's thread alone.

Threads. One thread at a time calls this: the driver's, or the engine's under the driver lock. No call waits for another
thread. The compiled loop uses the same worker in that thread, posts and tests requests of its own, and gives up those
that it stops waiting for by `adopt`. UCX's own thread accepts connections and may log (`log`).

Ownership. The transport has the context, the worker, the endpoints and the requests, and ends them in reverse order. A
buffer belongs to UCX until its request has ended, which neither cancelling nor losing the peer brings forward: its
ticket ends at once, and `RequestTable` keeps the memory. A worker that is destroyed takes what is left with it.

Blocking. Only `close` blocks, for its peers, up to `close_timeout_s`. `progress` runs a bounded number of rounds.
Endpoints are found lost by UCX (`watched`), or by looking at processes a few times a second; neither asks the peer.

`connect` only creates an endpoint; UCX wires its lanes with the first message, in a few round trips of both sides'
`progress()`. So exchange one small message when peers meet, not with the first transfer.

With peer error handling UCX ends the sends to a lost peer by itself, but its shared memory cannot do that, and such an
endpoint silently falls back to tcp. So endpoints within a host go without, and `progress()` looks at the peer's process
instead. A peer that is alive and has closed its transport is not noticed there: the control channel notices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from types import MappingProxyType

from kvconnector.errors import (
    IncompatiblePeerError,
    KVConnectorError,
    LocalError,
    OperationCancelledError,
    PeerLostError,
    TransportError,
)
from kvconnector.transport.tagged_messages import (
    CONTROL_TAG_BIT,
    MAX_CONTROL_PER_CALL,
    MAX_UNSENT_CONTROL_BYTES,
    Buffer,
    Completion,
    ControlEvent,
)
from kvconnector.transport.ucx.abi import ERR_BUSY, OK
from kvconnector.transport.ucx.address import WorkerAddress, this_process
from kvconnector.transport.ucx.control import ControlReceives
from kvconnector.transport.ucx.endpoints import UcxEndpoints
from kvconnector.transport.ucx.library import UcxLibrary
from kvconnector.transport.ucx.libucp import Context, Libucp
from kvconnector.transport.ucx.listeners import Listeners, log_descriptor_limit, open_sockets
from kvconnector.transport.ucx.log import LOG_GUARD
from kvconnector.transport.ucx.rdma import RdmaChoice, rdma_devices
from kvconnector.transport.ucx.requests import RequestTable

_MAX_ROUNDS = 64
"""The most rounds of one `progress`: a steady stream must not withhold its completions."""
_MAX_STEPS_PER_ROUND = 256

MAX_HELD_BYTES = 4 << 20
"""With no more bytes than this under way UCX is driven without releasing the GIL: it copies them in less time than the
interpreter lets a thread keep the GIL, and a busy engine's thread keeps it that long whenever it is released.
"""

_TCP_OPTIONS = {"TCP_CONN_NB": "y"}
"""Otherwise connecting to a host that does not answer takes seconds or minutes, and the worker's other peers wait."""
_TCP_SEGMENT_OPTIONS = ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE")

SHARED_MEMORY_TRANSPORTS = frozenset(("sysv", "posix", "xpmem"))
"""UCX's transports for endpoints within a host, with which UCX cannot watch a peer."""


class UcxTransport:
    """A UCX worker, which sends and receives as `base` has it. Once it is closed, every method except `progress`,
    `receive_control`, `disconnect` and `close` raises `LocalError`.

    `options` are UCX settings named without `UCX_`. `tcp_segment_bytes`, if not 0, sets the length of tcp's messages; a
    peer that set another is refused, for UCX would reset the connection. `liveness_interval_s` bounds how often the
    processes of peers on this host are looked at, and `close_timeout_s` how long `close` waits for them. `require_rdma`
    refuses peers on other hosts that UCX has no RDMA lane to; without it, active RDMA ports cause a warning, with the
    reason that `rdma` finds. `clock` is monotonic, in seconds. Raises TransportError: UCX cannot start with these
    options.
    """

    def __init__(
        self,
        library: UcxLibrary,
        *,
        options: Mapping[str, str] = MappingProxyType({}),
        tcp_segment_bytes: int = 0,
        liveness_interval_s: float = 0.25,
        close_timeout_s: float = 2.0,
        require_rdma: bool = False,
        rdma: RdmaChoice | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        log_descriptor_limit()
        options = {**_TCP_OPTIONS, **options}
        if tcp_segment_bytes:
            options |= dict.fromkeys(_TCP_SEGMENT_OPTIONS, str(tcp_segment_bytes))
        with ExitStack() as opened:
            self._context = Context(library, options)
            opened.callback(self._context.close)
            resources = self._context.resources()
            sockets = open_sockets()
            self._libucp = Libucp(self._context)
            opened.callback(self._libucp.close)
            self._listeners = Listeners(before=sockets)
            address = self._libucp.address()
            opened.pop_all()
        self._local = WorkerAddress(
            *this_process(),
            shares_memory=any(name in SHARED_MEMORY_TRANSPORTS for name, _ in resources),
            ucx_address=address,
            tcp_segment_bytes=tcp_segment_bytes,
            ucx_version=library.version[:2],
        )
        self._registers_memory = bool(rdma_devices(resources))
        self._requests = RequestTable(self._libucp, self.may_have_lost_a_peer)
        self._control = ControlReceives(self._libucp, self._requests)
        self.arriving_control = self._control.arriving
        """Control messages that `receive_control` has begun to take, by tag."""
        self._endpoints = UcxEndpoints(self._libucp, self._requests, clock)
        self._falls_back = partial(
            (rdma or RdmaChoice(library)).check, options=options, require_rdma=require_rdma
        )
        self._liveness_interval_s = liveness_interval_s
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._next_look_s = clock()
        self._closed = False
        self._others_move = False
        LOG_GUARD.acquire(library)

    @property
    def address(self) -> bytes:
        """The argument for a peer's `connect`: host, process and UCX's worker address. Stable until `close`."""
        return self._local.encode()

    def connect(self, address: bytes) -> int:
        """Open a sending direction to a worker, without waiting for it. Returns its endpoint id.

        Raises:
            RemoteProtocolError: The bytes are no address of UCX's.
            IncompatiblePeerError: UCX cannot exchange messages with that worker, given both sides' settings.
            TransportError: UCX cannot reach that worker.
        """
        self._check_open()
        peer = WorkerAddress.decode(address)
        peer.check_compatible(self._local)
        watched = not peer.shares_memory_with(self._local)
        if watched and not self._context.survives_losses:
            raise TransportError(
                "UCX before 1.22 crashes when a peer on another host is lost, unless it watches memory: unset"
                " UCX_MEM_EVENTS and UCX_MEM_MMAP_HOOK_MODE",
                library=self._context.library,
            )
        endpoint = self._endpoints.open(peer, watched=watched)
        if not peer.same_host(self._local):
            try:
                opened = self._endpoints.get(endpoint)
                opened.falls_back = self._falls_back(opened.lanes)
            except IncompatiblePeerError:
                self.disconnect(endpoint)
                raise
        return endpoint

    def disconnect(self, endpoint: int) -> None:
        """Give up an endpoint: its pending sends complete with `OperationCancelledError`, and may yet be received. The
        peer may lose its own endpoint to this worker. Idempotent.
        """
        self._endpoints.retire(endpoint)

    def send(self, endpoint: int, tag: int, buffer: Buffer) -> int:
        """Post a message and return its ticket. It may complete before the peer has received it. One to a peer that is
        known to be lost completes with `PeerLostError`; no such endpoint (any more) is a `LocalError`.
        """
        return self._requests.send(self._endpoints.get(endpoint), tag, buffer)

    def recv(self, tag: int, buffer: Buffer) -> int:
        """Post a receive for exactly this tag, from any endpoint, and return its ticket. It does not know its sender,
        so the loss of a peer does not end it unless its message was already arriving: cancel it.
        """
        self._check_open()
        return self._requests.recv(tag, buffer)

    def cancel(self, ticket: int) -> None:
        """End an operation with `OperationCancelledError`, unless it completes first: a receive whose message is
        arriving ends when UCX has released its memory. A cancelled send may still reach the peer, with whatever its
        memory holds then: never reuse its tag. `LocalError`: no such ticket was given.
        """
        self._check_open()
        self._requests.cancel(ticket)

    def progress(self, *, others_move: bool = False) -> list[Completion]:
        """Drive UCX until nothing moves, without blocking, and return what ended, every ticket once. After `close`, one
        call returns what `close` cancelled. `others_move`: operations posted on `libucp` are under way, too.
        """
        self._others_move = others_move
        if not self._closed:
            self._drive()
            now_s = self._clock()
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + self._liveness_interval_s
                self._endpoints.check_processes(self._local)
                self._endpoints.end_quarantines()
                LOG_GUARD.report()
                self._listeners.report()
        finished, self._requests.finished = self._requests.finished, []
        return finished

    def send_control(self, endpoint: int, tag: int, payload: bytes) -> None:
        """Post a control message, without blocking. `payload` is kept for as long as UCX needs it.

        Raises:
            LocalError: no such endpoint (any more).
            PeerLostError: the peer is lost, or `MAX_UNSENT_CONTROL_BYTES` have not left yet.
        """
        opened = self._endpoints.get(endpoint)
        if opened.unsent_control_bytes + len(payload) > MAX_UNSENT_CONTROL_BYTES:
            self._step()
            if opened.unsent_control_bytes + len(payload) > MAX_UNSENT_CONTROL_BYTES:
                raise PeerLostError("the peer no longer accepts control messages")
        if opened.lost is not None:
            raise opened.lost
        posted = self._libucp.tag_send(opened.handle, payload, len(payload), tag, host=True)
        if posted.status != OK:
            self._requests.keep_control(posted, opened, endpoint, tag, payload)

    def receive_control(
        self, limits: Mapping[int, int], *, progress: bool = False
    ) -> list[ControlEvent]:
        """Return the control messages that arrived or failed, at most `MAX_CONTROL_PER_CALL`; never blocks. Call it
        after `progress()`, before sleeping, until it returns nothing. `limits` are the bytes that a message may have,
        by tag; no memory is spent on others. `progress` drives UCX first: call `progress()` as well before sleeping.
        """
        if self._closed:
            return []
        if progress:
            self._step()
        events = self._control.take(limits)
        while self._control.has_begun and len(events) < MAX_CONTROL_PER_CALL:
            self._drive()
            events += self._control.take(limits)
        if self._requests.finished:
            self._libucp.worker_signal()  # found on the way: `progress` must report it
        if self._requests.failed_control:
            events += self._requests.failed_control
            self._requests.failed_control = []
        return events

    def discard_unexpected(self, awaited: Collection[int], mask: int) -> int:
        """Drop messages that `progress` brought and no `recv` was posted for, from the oldest to the first whose tag is
        `awaited` in the bits of `mask`. Returns their number; control messages are not among them.
        """
        count = 0
        while not self._closed:
            found = self._libucp.find_unexpected(0, CONTROL_TAG_BIT, take=False)
            if found is None or found[1] & mask in awaited:
                break
            message = self._libucp.find_unexpected(0, CONTROL_TAG_BIT)
            assert message is not None  # it was just found
            self._control.refuse(message)
            count += 1
        return count

    def fileno(self) -> int:
        """UCX's descriptor, readable when `progress()` has work: wait for it, do not read it."""
        self._check_open()
        return self._libucp.worker_event_fd()

    def close(self) -> None:
        """Cancel what is outstanding and release everything, in order. Control messages still go out. Takes at most
        about `close_timeout_s`, and that only if a peer does not answer. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        deadline_s = self._clock() + self._close_timeout_s
        self._requests.cancel_all()
        self._drive_until(lambda: not self._requests.has_receives(), deadline_s)
        self._requests.fail(lambda: OperationCancelledError("the transport was closed"))
        self._endpoints.flush_all()
        self._drive_until(self._endpoints.all_closed, deadline_s)
        self._endpoints.close_all()
        self._drive_until(self._endpoints.all_closed, deadline_s)
        self._discard_unexpected(deadline_s)
        with LOG_GUARD.leaks_expected() if self._requests.operations else nullcontext():
            self._libucp.close()
            self._context.close()
        LOG_GUARD.release()
        self._requests.operations.clear()  # with the worker, which used their memory

    def __repr__(self) -> str:
        state = "closed" if self._closed else repr(self._endpoints)
        return f"<UcxTransport of {self._libucp.library}: {state}>"

    def falls_back_to_tcp(self, endpoint: int) -> bool:
        """Returns True if an endpoint to another host has no RDMA lane although RDMA ports are active here."""
        return self._endpoints.get(endpoint).falls_back

    def may_have_lost_a_peer(self) -> bool:
        """Returns True if an I/O error may be the loss of a peer: one is, or nothing here is registered with a NIC."""
        return not self._registers_memory or self._endpoints.has_losses(self._local)

    def lanes(self, endpoint: int) -> str:
        """Return the lanes that UCX chose, as "transport/device" joined by "+"."""
        return self._endpoints.get(endpoint).lanes

    @property
    def libucp(self) -> Libucp:
        """The library and the worker, for code that posts operations of its own in the owner's thread."""
        self._check_open()
        return self._libucp

    def endpoint_handle(self, endpoint: int) -> int:
        """Return the `ucp_ep_h` of an endpoint, valid until the next `progress`, `disconnect` or `close`. Raises
        LocalError: no such endpoint. PeerLostError: its peer is lost.
        """
        opened = self._endpoints.get(endpoint)
        if opened.lost is not None:
            raise opened.lost
        return opened.handle

    def adopt(
        self, request: int, tag: int, buffer: Buffer, endpoint: int | None
    ) -> Callable[[], bool]:
        """Own a request that was posted on `libucp` and given up, and its memory: a send by `endpoint`, or a cancelled
        receive. No completion follows. Returns a function that returns True once UCX has let go of the memory, as of
        the last `progress`.
        """
        sender = None if endpoint is None else self._endpoints.get(endpoint)
        ticket = self._requests.adopt(request, tag, buffer, sender)
        return lambda: ticket not in self._requests.operations

    def error_of(self, status: int, chunk: int) -> KVConnectorError:
        """Return why the operation of a chunk failed that was posted on `libucp`."""
        return self._requests.error_of(status, "a chunk", chunk=chunk)

    def _check_open(self) -> None:
        if self._closed:
            raise LocalError("the transport is closed")

    def _drive(self) -> None:
        """Progress until nothing moves and the event descriptor is armed."""
        for _ in range(_MAX_ROUNDS):
            self._step()
            status = self._libucp.worker_arm()
            if status == OK:
                return
            if status != ERR_BUSY:
                text = self._libucp.library.status_text(status)
                raise TransportError("UCX cannot arm its event descriptor", ucx_status=text)
        self._libucp.worker_signal()

    def _step(self) -> None:
        is_light = not self._others_move and self._requests.num_bytes() <= MAX_HELD_BYTES
        keeps_gil = is_light and not self._closed
        for _ in range(_MAX_STEPS_PER_ROUND):
            if not self._libucp.worker_progress(keeps_gil=keeps_gil):
                break
        self._endpoints.book_failures()
        self._requests.collect()
        self._endpoints.collect_closing()

    def _drive_until(self, condition: Callable[[], bool], deadline_s: float) -> None:
        self._step()
        while not condition() and self._clock() < deadline_s:
            self._step()

    def _discard_unexpected(self, deadline_s: float) -> None:
        """Refuse messages that were not received: their senders would wait for that."""
        while (message := self._libucp.find_unexpected()) is not None:
            self._endpoints.wait_closing(self._libucp.receive_unexpected(message[0], 0, 0))
        self._drive_until(self._endpoints.all_closed, deadline_s)
