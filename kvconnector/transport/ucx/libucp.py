"""libucp by handle: the dozen C calls behind tagged messages, on the library that a binding has loaded.

Calls that may copy or wait for the kernel (`ep_create`, and `worker_progress` if it is to) release the GIL; the others
return within microseconds and keep it, since giving it up costs more than the call when another Python thread is busy.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, ClassVar, NamedTuple, TypeAlias

from kvconnector.errors import TransportError

OK = 0
IN_PROGRESS = 1
ERR_MESSAGE_TRUNCATED = -9
ERR_BUSY = -15
ERR_CANCELED = -16
_ERR_LAST = -100

_SONAME = "libucp.so.0"
_OP_FIELD_FLAGS = 1 << 4
_OP_FIELD_MEMORY_TYPE = 1 << 6
_OP_FIELD_RECV_INFO = 1 << 7
_CLOSE_FORCE = 1
_EP_FIELD_REMOTE_ADDRESS = 1 << 0
_EP_FIELD_ERR_MODE = 1 << 1
_EP_FIELD_ERR_HANDLER = 1 << 2
_EP_ATTR_TRANSPORTS = 1 << 3
_ERR_MODE_NONE = 0
_ERR_MODE_PEER = 1
_MEMORY_TYPE_HOST = 0
_MAX_LANES = 64
_ENTITY_NAME_MAX = 32
_SOCKADDR_STORAGE_BYTES = 128

_Status = c_int8
"""`ucs_status_t` is a packed enumeration: one byte, the rest of the register is undefined."""

ErrorCallback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, _Status)
"""`void (*)(void *arg, ucp_ep_h ep, ucs_status_t status)`."""


class TagInfo(ctypes.Structure):
    """`ucp_tag_recv_info_t`."""

    _fields_: ClassVar = [("sender_tag", c_uint64), ("length", c_size_t)]


class _RequestParam(ctypes.Structure):
    """`ucp_request_param_t`, up to the last field that is used here; the mask says which are valid."""

    _fields_: ClassVar = [
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("reserved", c_void_p * 4),
    ]


class _EpParams(ctypes.Structure):
    """`ucp_ep_params_t`; only the first fields are used."""

    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_callback", c_void_p),
        ("err_arg", c_void_p),
        ("reserved", c_void_p * 16),
    ]


class _TransportEntry(ctypes.Structure):
    """`ucp_transport_entry_t`."""

    _fields_: ClassVar = [("transport_name", c_char_p), ("device_name", c_char_p)]


class _EpAttr(ctypes.Structure):
    """`ucp_ep_attr_t`."""

    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("name", ctypes.c_char * _ENTITY_NAME_MAX),
        ("local_sockaddr", c_uint64 * (_SOCKADDR_STORAGE_BYTES // 8)),
        ("remote_sockaddr", c_uint64 * (_SOCKADDR_STORAGE_BYTES // 8)),
        ("entries", POINTER(_TransportEntry)),
        ("num_entries", c_uint),
        ("entry_size", c_size_t),
        ("user_data", c_void_p),
    ]


class Posted(NamedTuple):
    """What posting an operation gave: a request that is under way, or else (request 0) its final status."""

    request: int
    status: int
    message_bytes: int = 0


_DONE = Posted(0, OK)

Unexpected: TypeAlias = tuple[int, int, int]
"""A message that came before its receive: its handle, tag and bytes."""


class Libucp:
    """The functions of the libucp in this process, for one worker. Raises TransportError: no libucp is loaded."""

    def __init__(self, worker: int) -> None:
        self._worker = c_void_p(worker)
        try:
            releasing = ctypes.CDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError as exc:
            raise TransportError("the binding has not loaded libucp", soname=_SONAME) from exc
        keeping = ctypes.PyDLL(_SONAME, handle=releasing._handle)
        _declare(releasing, keeping)
        self._releasing, self._keeping = releasing, keeping
        self._info = TagInfo()
        self._send_param = _RequestParam()
        self._recv_param = _RequestParam(
            op_attr_mask=_OP_FIELD_RECV_INFO, recv_info=ctypes.addressof(self._info)
        )
        self._host_send_param = _RequestParam(
            op_attr_mask=_OP_FIELD_MEMORY_TYPE, memory_type=_MEMORY_TYPE_HOST
        )
        self._host_recv_param = _RequestParam(
            op_attr_mask=_OP_FIELD_RECV_INFO | _OP_FIELD_MEMORY_TYPE,
            memory_type=_MEMORY_TYPE_HOST,
            recv_info=ctypes.addressof(self._info),
        )

    @property
    def worker_handle(self) -> int:
        """The `ucp_worker_h`."""
        return self._worker.value or 0

    @property
    def library(self) -> Any:
        """The loaded library, for callers that want the addresses of its functions."""
        return self._keeping

    def version(self) -> tuple[int, int, int]:
        """Major, minor and release number of the library."""
        numbers = (c_uint(), c_uint(), c_uint())
        self._keeping.ucp_get_version(*(byref(number) for number in numbers))
        return numbers[0].value, numbers[1].value, numbers[2].value

    def status_text(self, status: int) -> str:
        """UCX's words for a status."""
        text: bytes = self._keeping.ucs_status_string(status)
        return text.decode(errors="replace")

    def worker_progress(self, *, keeps_gil: bool) -> bool:
        """Advance communication once; did anything move?"""
        library = self._keeping if keeps_gil else self._releasing
        return bool(library.ucp_worker_progress(self._worker))

    def worker_arm(self) -> int:
        """Arm the event descriptor: OK, or ERR_BUSY if there are events to progress first."""
        return int(self._keeping.ucp_worker_arm(self._worker))

    def worker_signal(self) -> None:
        """Make the event descriptor readable."""
        self._keeping.ucp_worker_signal(self._worker)

    def worker_event_fd(self) -> int:
        """The worker's event descriptor; it belongs to the worker."""
        fd = c_int()
        self._check(self._keeping.ucp_worker_get_efd(self._worker, byref(fd)), "no event fd")
        return fd.value

    def ep_create(self, address: bytes, error_callback: Any) -> int:
        """An endpoint to a worker. With `error_callback`, UCX watches for the loss of the peer."""
        guarded = error_callback is not None
        params = _EpParams(
            field_mask=_EP_FIELD_REMOTE_ADDRESS | _EP_FIELD_ERR_MODE | _EP_FIELD_ERR_HANDLER,
            address=ctypes.cast(c_char_p(address), c_void_p),
            err_mode=_ERR_MODE_PEER if guarded else _ERR_MODE_NONE,
            err_callback=ctypes.cast(error_callback, c_void_p) if guarded else None,
        )
        endpoint = c_void_p()
        status = self._releasing.ucp_ep_create(self._worker, byref(params), byref(endpoint))
        self._check(status, "UCX cannot reach the peer")
        return endpoint.value or 0

    def ep_close(self, endpoint: int, *, force: bool) -> Posted:
        """Begin to close an endpoint; forced, which only a watched one may be, it does not wait for its peer."""
        param = _RequestParam(op_attr_mask=_OP_FIELD_FLAGS, flags=_CLOSE_FORCE if force else 0)
        return _posted(self._keeping.ucp_ep_close_nbx(endpoint, byref(param)))

    def ep_flush(self, endpoint: int) -> Posted:
        """Begin to push out what was sent by an endpoint."""
        return _posted(self._keeping.ucp_ep_flush_nbx(endpoint, byref(_RequestParam())))

    def ep_lanes(self, endpoint: int) -> str:
        """The lanes of an endpoint, as "transport/device" joined by "+"."""
        entries = (_TransportEntry * _MAX_LANES)()
        attr = _EpAttr(
            field_mask=_EP_ATTR_TRANSPORTS,
            entries=entries,
            num_entries=_MAX_LANES,
            entry_size=ctypes.sizeof(_TransportEntry),
        )
        self._check(self._keeping.ucp_ep_query(endpoint, byref(attr)), "no lanes known")
        found = [
            (e.transport_name or b"", e.device_name or b"") for e in entries[: attr.num_entries]
        ]
        return b"+".join(dict.fromkeys(map(b"/".join, found))).decode()

    def tag_send(
        self, endpoint: int, address: int | bytes, nbytes: int, tag: int, *, host: bool
    ) -> Posted:
        """Post a tagged message, of bytes or at an address. `host` spares UCX the question which device it is on."""
        param = self._host_send_param if host else self._send_param
        return _posted(self._keeping.ucp_tag_send_nbx(endpoint, address, nbytes, tag, byref(param)))

    def tag_recv(self, address: int, nbytes: int, tag: int, *, host: bool) -> Posted:
        """Post a receive for exactly this tag."""
        param = self._host_recv_param if host else self._recv_param
        raw = self._keeping.ucp_tag_recv_nbx(
            self._worker, address, nbytes, tag, 2**64 - 1, byref(param)
        )
        posted = _posted(raw)
        return posted if posted.request else Posted(0, posted.status, self._info.length)

    def take_unexpected(self, tag: int = 0, mask: int = 0) -> Unexpected | None:
        """Take the oldest message that nobody has received and whose tag is `tag` in the bits of `mask`; None if there
        is none. It must be received, see `receive_unexpected`.
        """
        handle = self._keeping.ucp_tag_probe_nb(self._worker, tag, mask, 1, byref(self._info))
        if not handle:
            return None
        return handle, int(self._info.sender_tag), int(self._info.length)

    def find_unexpected(self, tag: int, mask: int) -> int | None:
        """The tag of the message that `take_unexpected` would take, if there is one."""
        found = self._keeping.ucp_tag_probe_nb(self._worker, tag, mask, 0, byref(self._info))
        return int(self._info.sender_tag) if found else None

    def receive_unexpected(self, handle: int, address: int, nbytes: int) -> Posted:
        """Receive a message that was taken into host memory; no memory refuses its content."""
        param = byref(self._host_send_param)
        return _posted(
            self._keeping.ucp_tag_msg_recv_nbx(self._worker, address or None, nbytes, handle, param)
        )

    def send_status(self, request: int) -> int:
        """Status of a send or a close."""
        return int(self._keeping.ucp_request_check_status(request))

    def recv_status(self, request: int) -> tuple[int, int]:
        """Status of a receive, and once it has ended the length of its message in bytes."""
        status = int(self._keeping.ucp_tag_recv_request_test(request, byref(self._info)))
        return status, int(self._info.length)

    def request_cancel(self, request: int) -> None:
        """Cancel a receive that no message has matched. Sends are not cancelled by UCX."""
        self._keeping.ucp_request_cancel(self._worker, request)

    def request_free(self, request: int) -> None:
        """Give a request back; one that is under way is freed by UCX when it ends."""
        self._keeping.ucp_request_free(request)

    def _check(self, status: int, message: str) -> None:
        if status != OK:
            raise TransportError(message, ucx_status=self.status_text(status))


def context_resources(context: int) -> set[tuple[str, str]]:
    """(transport, device) of all that a context may use, such as ("tcp", "eth0") or ("rc_mlx5", "mlx5_0:1"), from its
    printed description. Raises TransportError: there is no memory.
    """
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = c_void_p
    libc.fclose.argtypes = libc.free.argtypes = [c_void_p]
    text, nbytes = c_void_p(), c_size_t()
    stream = libc.open_memstream(byref(text), byref(nbytes))
    if not stream:
        raise TransportError("no memory to describe UCX's context in")
    library = ctypes.PyDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    library.ucp_context_print_info(c_void_p(context), c_void_p(stream))
    libc.fclose(stream)
    info = ctypes.string_at(text, nbytes.value).decode(errors="replace")
    libc.free(text)
    resources = [
        line.split()[-1].partition("/") for line in info.splitlines() if " resource " in line
    ]
    return {(transport, device) for transport, _, device in resources}


def _posted(raw: int | None) -> Posted:
    """Decode a `ucs_status_ptr_t`: null, a request, or a negative status."""
    if not raw:
        return _DONE
    if raw >= 2**64 + _ERR_LAST:
        return Posted(0, raw - 2**64)
    return Posted(raw, IN_PROGRESS)


def _declare(releasing: Any, keeping: Any) -> None:
    """Argument and result types. Everything not listed here is not called."""
    p, size, tag = c_void_p, c_size_t, c_uint64
    signatures: dict[str, tuple[Any, ...]] = {
        "ucp_worker_progress": (c_uint, p),
        "ucp_ep_create": (_Status, p, p, p),
        "ucp_get_version": (None, p, p, p),
        "ucs_status_string": (c_char_p, _Status),
        "ucp_worker_arm": (_Status, p),
        "ucp_worker_signal": (_Status, p),
        "ucp_worker_get_efd": (_Status, p, p),
        "ucp_ep_close_nbx": (p, p, p),
        "ucp_ep_flush_nbx": (p, p, p),
        "ucp_ep_query": (_Status, p, p),
        "ucp_tag_send_nbx": (p, p, p, size, tag, p),
        "ucp_tag_recv_nbx": (p, p, p, size, tag, tag, p),
        "ucp_tag_probe_nb": (p, p, tag, tag, c_int, p),
        "ucp_tag_msg_recv_nbx": (p, p, p, size, p, p),
        "ucp_request_check_status": (_Status, p),
        "ucp_tag_recv_request_test": (_Status, p, p),
        "ucp_request_cancel": (None, p, p),
        "ucp_request_free": (None, p),
    }
    for library in (releasing, keeping):
        for name, (restype, *argtypes) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = restype, argtypes
