"""The operations that a UCX worker has under way, and the meaning of their ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvconnector.errors import (
    KVConnectorError,
    LocalError,
    OperationCancelledError,
    PeerLostError,
    TransportError,
)
from kvconnector.transport.tagged_messages import (
    Buffer,
    Completion,
    ControlFailed,
    MessageSizeError,
    RegistrationError,
    buffer_of_bytes,
)
from kvconnector.transport.ucx.abi import (
    ERR_CANCELED,
    ERR_IO_ERROR,
    ERR_MESSAGE_TRUNCATED,
    IN_PROGRESS,
    OK,
)
from kvconnector.transport.ucx.address import WorkerAddress
from kvconnector.transport.ucx.libucp import Libucp, Posted

_LOSS_STATUSES = frozenset((-3, -6, -23, -24, -25, -80))
"""I/O error, unreachable, rejected, not connected, connection reset, endpoint timeout."""


@dataclass(slots=True, eq=False, repr=False)
class Endpoint:
    """An endpoint of UCX. If it is `watched`, UCX reports the loss of the peer; else the peer's process is looked at.
    `lanes`: see `UcxTransport.lanes`. `falls_back` is True if it uses TCP although RDMA ports are active.
    `unsent_control_bytes` are the bytes of control messages that UCX has not finished.
    """

    handle: int
    peer: WorkerAddress
    lanes: str
    watched: bool
    lost: PeerLostError | None = None
    falls_back: bool = False

    def __repr__(self) -> str:
        watch = "watched by UCX" if self.watched else "its process watched"
        state = f"lost: {self.lost.statement}" if self.lost else watch
        return f"<Endpoint {self.lanes} to process {self.peer.process_id}, {state}>"

    unsent_control_bytes: int = 0


End: TypeAlias = Callable[[KVConnectorError | None], None]
"""Takes the error of an operation that has ended, or None."""


@dataclass(slots=True)
class _Operation:
    """One send (`endpoint` is set) or receive that UCX has not finished. `end` is called once, when the operation or
    the wait for it ends, and is None after that. `control_bytes` are the bytes of a control message.
    """

    request: int
    tag: int
    buffer: Buffer
    endpoint: Endpoint | None
    end: End | None = None
    control_bytes: int = 0
    cancelled: bool = False


class RequestTable:
    """Keeps every operation until UCX has released its memory, and reports its end once.

    An I/O error is a loss if `may_have_lost_a_peer` returns True, else a refused registration.
    """

    def __init__(self, libucp: Libucp, may_have_lost_a_peer: Callable[[], bool]) -> None:
        self._libucp = libucp
        self._may_have_lost_a_peer = may_have_lost_a_peer
        self.operations: dict[int, _Operation] = {}
        """By ticket, for as long as UCX may use their memory."""
        self.finished: list[Completion] = []
        self.failed_control: list[ControlFailed] = []
        """Both are for the transport to take."""
        self._num_tickets = 0

    def send(self, endpoint: Endpoint, tag: int, buffer: Buffer) -> int:
        """Post a message. Returns its ticket."""
        ticket = self._new_ticket()
        if endpoint.lost is not None:
            self.finished.append(Completion(ticket, endpoint.lost))
            return ticket
        host = buffer.device == "cpu"
        posted = self._libucp.tag_send(
            endpoint.handle, buffer.address, buffer.nbytes, tag, host=host
        )
        self._book(ticket, posted, _Operation(posted.request, tag, buffer, endpoint))
        return ticket

    def recv(self, tag: int, buffer: Buffer) -> int:
        """Post a receive. Returns its ticket."""
        ticket = self._new_ticket()
        posted = self._libucp.tag_recv(buffer.address, buffer.nbytes, tag)
        self._book(ticket, posted, _Operation(posted.request, tag, buffer, None))
        return ticket

    def adopt(
        self,
        request: int,
        tag: int,
        buffer: Buffer,
        endpoint: Endpoint | None,
        end: End | None = None,
    ) -> int:
        """Own a request that was posted elsewhere, and its memory, until UCX releases it. Returns its ticket."""
        ticket = self._new_ticket()
        self.operations[ticket] = _Operation(request, tag, buffer, endpoint, end)
        return ticket

    def keep_control(
        self, posted: Posted, endpoint: Endpoint, endpoint_id: int, tag: int, payload: bytes
    ) -> None:
        """Keep a control message that UCX did not send at once. It gets no ticket. Raises the error that UCX returned
        instead.
        """

        def end(error: KVConnectorError | None) -> None:
            if error is not None:
                self.failed_control.append(ControlFailed(endpoint_id, error))

        buffer = buffer_of_bytes(payload)
        operation = _Operation(posted.request, tag, buffer, endpoint, end, len(payload))
        if posted.status == IN_PROGRESS:
            self.operations[self._new_ticket()] = operation
            endpoint.unsent_control_bytes += len(payload)
        elif (error := self._error(operation, posted.status, 0)) is not None:
            raise error

    def cancel(self, ticket: int) -> None:
        """Cancel a receive, or stop waiting for a send, which UCX cannot take back: its memory stays owned. Raises
        LocalError: no operation had this ticket.
        """
        if not 0 < ticket <= self._num_tickets:
            raise LocalError("no operation has this ticket", ticket=ticket)
        operation = self.operations.get(ticket)
        if operation is None or operation.end is None:
            return
        if operation.endpoint is not None:
            _end(operation, OperationCancelledError("the send was cancelled", ticket=ticket))
        else:
            operation.cancelled = True
            self._libucp.request_cancel(operation.request)

    def fail(
        self, make_error: Callable[[], KVConnectorError], endpoint: Endpoint | None = None
    ) -> None:
        """End the wait for all sends through an endpoint, or for everything; the memory stays owned until UCX releases
        it.
        """
        for operation in self.operations.values():
            if endpoint is None or operation.endpoint is endpoint:
                _end(operation, make_error())

    def is_sending(self, endpoint: Endpoint) -> bool:
        """Returns True if UCX holds a send through this endpoint."""
        return any(operation.endpoint is endpoint for operation in self.operations.values())

    def collect(self) -> None:
        """End the operations that UCX has finished."""
        finished = []
        for ticket, operation in self.operations.items():
            if operation.endpoint is not None:
                status, length = self._libucp.send_status(operation.request), 0
            else:
                status, length = self._libucp.recv_status(operation.request)
            if status != IN_PROGRESS:
                finished.append((ticket, status, length))
        for ticket, status, length in finished:
            operation = self.operations.pop(ticket)
            self._libucp.request_free(operation.request)
            if operation.endpoint is not None:
                operation.endpoint.unsent_control_bytes -= operation.control_bytes
            _end(operation, self._error(operation, status, length))

    def num_bytes(self) -> int:
        """Return the bytes of the operations under way. Those that were given up do not count: UCX holds some of them
        for good, such as a send within the host whose peer's process died in the middle of it.
        """
        waited = (each for each in self.operations.values() if each.end is not None)
        return sum(operation.buffer.nbytes for operation in waited)

    def has_receives(self) -> bool:
        """Returns True if UCX still holds a receive."""
        return any(operation.endpoint is None for operation in self.operations.values())

    def cancel_all(self) -> None:
        """Cancel everything except control messages, see `cancel`."""
        for ticket, operation in self.operations.items():
            if not operation.control_bytes:
                self.cancel(ticket)

    def _new_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    def _book(self, ticket: int, posted: Posted, operation: _Operation) -> None:
        operation.end = lambda error: self.finished.append(Completion(ticket, error))
        if posted.status == IN_PROGRESS:
            self.operations[ticket] = operation
        else:
            _end(operation, self._error(operation, posted.status, posted.message_bytes))

    def _error(self, operation: _Operation, status: int, length: int) -> KVConnectorError | None:
        """Return the error for a final status; None for success. `length` is a received message's."""
        receiving = operation.endpoint is None
        expected = operation.buffer.nbytes
        if status == ERR_MESSAGE_TRUNCATED or (status == OK and receiving and length != expected):
            return MessageSizeError(
                "the message does not fit its receive",
                tag=operation.tag,
                message_bytes=length if length != expected else None,
                buffer_bytes=expected,
            )
        if status == OK:
            return None
        if operation.endpoint is not None and operation.endpoint.lost is not None:
            return operation.endpoint.lost
        if status == ERR_CANCELED and operation.cancelled:
            return OperationCancelledError("the receive was cancelled", tag=operation.tag)
        what = "a receive" if receiving else "a send"
        return self.error_of(status, what, tag=operation.tag)

    def error_of(self, status: int, what: str, **context: object) -> KVConnectorError:
        """Return the error for `what` ("a send"), which ended with this status."""
        context["ucx_status"] = self._libucp.library.status_text(status)
        if status == ERR_IO_ERROR and not self._may_have_lost_a_peer():
            text = "UCX could not register the memory of a message"
            return RegistrationError(text, **context)
        if status in _LOSS_STATUSES or status == ERR_CANCELED:
            return PeerLostError("the peer was lost", **context)
        return TransportError(f"UCX failed {what}", **context)


def _end(operation: _Operation, error: KVConnectorError | None) -> None:
    end, operation.end = operation.end, None
    if end is not None:
        end(error)
