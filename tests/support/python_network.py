"""The loopback transport as the compiled loop calls it, through Python: chunks obey a test's network and clock."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from kvconnector.errors import KVConnectorError, OperationCancelledError, TransportError
from kvconnector.transport import NO_FILENO, Buffer, Completion, MessageSizeError
from kvconnector.transport.ucx.abi import (
    ERR_BUSY,
    ERR_CANCELED,
    ERR_MESSAGE_TRUNCATED,
    IN_PROGRESS,
    OK,
)
from tests.support.loopback import LoopbackTransport

_NS_PER_S = 1_000_000_000
_FIRST_STATUS, _NUM_STATUSES = -20, 70
"""The latest failures have these numbers, none of which means anything to the loop."""
_POLL_S = 50e-6


class PythonNetwork:
    """`Network` over `LoopbackTransport` for slots in host memory. A request is a ticket, an endpoint's handle its id.

    `clock` is also the loop's, so that time may be a test's. Who uses it keeps the slots until the transport is closed.
    """

    fileno = -1
    worker = 0

    def __init__(self, transport: LoopbackTransport, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._clock = clock
        self._bytes: dict[int, int] = {}
        self._ended: dict[int, KVConnectorError | None] = {}
        self._adopted: set[int] = set()
        self._others: list[Completion] = []
        self._errors: dict[int, KVConnectorError] = {}
        self._num_errors = 0
        self._failure: BaseException | None = None
        fileno = transport.fileno()
        self.watched: tuple[int, ...] = () if fileno == NO_FILENO else (fileno,)
        self._kept = [
            (name, _prototype(count)(self._guarded(function)))
            for name, count, function in (
                ("clock_gettime", 2, self._read_clock),
                ("worker_progress", 1, self._progress),
                ("worker_arm", 1, self._arm),
                ("tag_send", 5, self._send),
                ("tag_recv", 6, self._recv),
                ("request_status", 1, self._status),
                ("recv_test", 2, self._test),
                ("request_free", 1, self._free),
                ("request_cancel", 2, self._cancel),
                ("tag_probe", 5, self._probe),
            )
        ]
        self.functions = {name: _address(function) for name, function in self._kept}
        if clock is time.monotonic:
            del self.functions["clock_gettime"]

    def now_ns(self) -> int:
        return round(self._clock() * _NS_PER_S)

    def handle(self, endpoint: int) -> int:
        """See `Network`. Losses show where something is sent."""
        return endpoint

    def lanes(self, endpoint: int) -> str:
        return ""

    def cancel(self, request: int) -> None:
        self._transport.cancel(request)

    def adopt(
        self, request: int, tag: int, buffer: Buffer, endpoint: int | None
    ) -> Callable[[], bool]:
        if request not in self._ended:
            self._adopted.add(request)
        self._free(request)
        return lambda: request not in self._adopted

    def error_of(self, status: int, chunk: int) -> KVConnectorError:
        found = self._errors.get(status)
        return found or TransportError("a chunk was not received", chunk=chunk)

    def progress(self, *, others_move: bool) -> list[Completion]:
        self._progress(0)
        others, self._others = self._others, []
        return others

    def is_control_arriving(self) -> bool:
        """See `Network`: they show in `watched`."""
        return False

    def check(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _guarded(self, function: Callable[..., int]) -> Callable[..., int]:
        """What C can call: an error is a status."""

        def call(*arguments: int) -> int:
            try:
                return function(*arguments)
            except KVConnectorError as error:
                return self._status_of(error)
            except BaseException as error:
                self._failure = self._failure or error
                return ERR_CANCELED

        return call

    def _status_of(self, error: KVConnectorError | None) -> int:
        if error is None:
            return OK
        if isinstance(error, MessageSizeError):
            return ERR_MESSAGE_TRUNCATED
        if isinstance(error, OperationCancelledError):
            return ERR_CANCELED
        status = _FIRST_STATUS - self._num_errors % _NUM_STATUSES
        self._num_errors += 1
        self._errors[status] = error
        return status

    def _read_clock(self, kind: int, timespec: int) -> int:
        words = (ctypes.c_int64 * 2).from_address(timespec)
        words[0], words[1] = divmod(self.now_ns(), _NS_PER_S)
        return 0

    def _progress(self, worker: int) -> int:
        for completion in self._transport.progress():
            ticket = completion.ticket
            if ticket in self._bytes:
                self._ended[ticket] = completion.error
            elif ticket in self._adopted:
                self._adopted.remove(ticket)
            else:
                self._others.append(completion)
        return 0

    def _arm(self, worker: int) -> int:
        if self.watched:
            return OK
        time.sleep(_POLL_S)
        return ERR_BUSY

    def _send(self, endpoint: int, address: int, nbytes: int, tag: int, param: int) -> int:
        ticket = self._transport.send(endpoint, tag, self._buffer(address, nbytes))
        self._bytes[ticket] = nbytes
        return ticket

    def _recv(self, worker: int, address: int, nbytes: int, tag: int, *unused: int) -> int:
        ticket = self._transport.recv(tag, self._buffer(address, nbytes))
        self._bytes[ticket] = nbytes
        return ticket

    def _buffer(self, address: int, nbytes: int) -> Buffer:
        return Buffer(address, nbytes, "cpu", owner=None)

    def _status(self, request: int) -> int:
        if request not in self._ended:
            return IN_PROGRESS
        return self._status_of(self._ended[request])

    def _test(self, request: int, info: int) -> int:
        status = self._status(request)
        if status == OK:
            ctypes.c_int64.from_address(info + 8).value = self._bytes[request]
        return status

    def _free(self, request: int) -> int:
        self._bytes.pop(request, None)
        self._ended.pop(request, None)
        return 0

    def _cancel(self, worker: int, request: int) -> int:
        self._transport.cancel(request)
        return 0

    def _probe(self, worker: int, tag: int, mask: int, remove: int, info: int) -> int:
        return int(self._transport.has_control())


def _prototype(num_arguments: int) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * num_arguments)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None  # it is a function
    return address
