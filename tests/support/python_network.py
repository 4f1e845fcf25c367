"""The loopback transport as the compiled loop calls it, through Python: chunks obey a test's network and clock."""

import ctypes
from types import SimpleNamespace

from kvconnector.errors import KVConnectorError, OperationCancelledError, TransportError
from kvconnector.transport import Buffer, MessageSizeError
from kvconnector.transport.ucx.abi import (
    ERR_BUSY,
    ERR_CANCELED,
    ERR_MESSAGE_TRUNCATED,
    IN_PROGRESS,
    OK,
)

_NS_PER_S = 1_000_000_000
_FIRST_STATUS, _NUM_STATUSES = -20, 70
"""The status numbers of the latest failures, which mean nothing to the loop."""


class PythonNetwork:
    """A `LoopbackTransport` with libucp's functions for the loop of one data path, for slots in host memory.

    A request is a ticket, an endpoint's handle its id. Once the data path is attached, the loop also reads the test's
    `clock`. The user must keep the slots until the transport is closed.
    """

    def __init__(self, transport, clock):
        self._transport, self._clock = transport, clock
        self._bytes, self._ended, self._adopted = {}, {}, set()
        self._others, self._errors, self._num_errors = [], {}, 0
        self._failure, self.arriving_control = None, ()
        functions = {
            "ucp_worker_progress": (1, self._progress),
            "ucp_worker_arm": (1, lambda worker: ERR_BUSY),
            "ucp_tag_send_nbx": (5, self._send),
            "ucp_tag_recv_nbx": (6, self._recv),
            "ucp_request_check_status": (1, self._status),
            "ucp_tag_recv_request_test": (2, self._test),
            "ucp_request_free": (1, self._free),
            "ucp_request_cancel": (2, lambda worker, request: transport.cancel(request)),
            "ucp_tag_probe_nb": (5, lambda *_: transport.has_control()),
        }
        called = {name: self._as_c(*each) for name, each in functions.items()}
        library = SimpleNamespace(keeping=SimpleNamespace(**called))
        self.libucp = SimpleNamespace(
            library=library, worker_handle=0, request_cancel=transport.cancel
        )
        self._c_clock = self._as_c(2, self._read_clock)

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def attach(self, datapath):
        """Let a data path's loop read the test's clock. Returns the data path."""
        datapath.state.now_ns = self._now_ns
        datapath.state.record.clock_gettime = ctypes.cast(self._c_clock, ctypes.c_void_p).value
        return datapath

    def _as_c(self, count, function):
        """Return a function that C can call with `count` arguments; errors become status numbers."""

        def call(*arguments):
            try:
                return int(function(*arguments) or 0)
            except KVConnectorError as error:
                return self._status_of(error)
            except BaseException as error:
                self._failure = self._failure or error
                return ERR_CANCELED

        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * count)(call)

    def _now_ns(self):
        return round(self._clock() * _NS_PER_S)

    def endpoint_handle(self, endpoint):
        """See `UcxTransport`. A loss shows at the next send."""
        return endpoint

    def lanes(self, endpoint):
        return ""

    def adopt(self, request, tag, buffer, endpoint):
        if request not in self._ended:
            self._adopted.add(request)
        self._free(request)
        return lambda: request not in self._adopted

    def error_of(self, status, chunk):
        found = self._errors.get(status)
        return found or TransportError("a chunk was not received", chunk=chunk)

    def progress(self, *, others_move):
        self._progress(0)
        others, self._others = self._others, []
        return others

    def check(self):
        """Raise an error of a function that the loop called, which could not raise it there."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _status_of(self, error):
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

    def _read_clock(self, kind, timespec):
        words = (ctypes.c_int64 * 2).from_address(timespec)
        words[0], words[1] = divmod(self._now_ns(), _NS_PER_S)

    def _progress(self, worker):
        for completion in self._transport.progress():
            ticket = completion.ticket
            if ticket in self._bytes:
                self._ended[ticket] = completion.error
            elif ticket in self._adopted:
                self._adopted.remove(ticket)
            else:
                self._others.append(completion)

    def _send(self, endpoint, address, nbytes, tag, param):
        return self._posted(self._transport.send(endpoint, tag, _slot(address, nbytes)), nbytes)

    def _recv(self, worker, address, nbytes, tag, *unused):
        return self._posted(self._transport.recv(tag, _slot(address, nbytes)), nbytes)

    def _posted(self, ticket, nbytes):
        self._bytes[ticket] = nbytes
        return ticket

    def _status(self, request):
        if request not in self._ended:
            return IN_PROGRESS
        return self._status_of(self._ended[request])

    def _test(self, request, info):
        status = self._status(request)
        if status == OK:
            ctypes.c_int64.from_address(info + 8).value = self._bytes[request]
        return status

    def _free(self, request):
        self._bytes.pop(request, None)
        self._ended.pop(request, None)


def _slot(address, nbytes):
    return Buffer(address, nbytes, "cpu", owner=None)
