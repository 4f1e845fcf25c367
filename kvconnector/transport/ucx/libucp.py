"""libucp by handle: contexts, workers, and the dozen C calls behind tagged messages.

Threads. One thread at a time uses a worker (mode `SERIALIZED`): the one that holds the driver lock. The
compiled loop calls the same functions on the same worker, by their addresses, in the thread that runs the loop. UCX has
a thread of its own, which accepts connections, and calls no code of this package but `log`.

The GIL. Calls that may copy or wait for the kernel (creating and destroying, and `worker_progress` if asked) release
it. The others return within microseconds and keep it, since releasing it costs more than the call when another Python
thread is busy.

Ownership. A context outlives its workers, a worker its endpoints and requests; UCX crashes otherwise. An endpoint or a
request is a number here: `endpoints` and `requests` know when it ends. Nothing has a destructor: owners call `close`.

Errors. The final status of an operation is returned; a call that must succeed raises.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any, NamedTuple, TypeAlias

from kvconnector.errors import TransportError
from kvconnector.transport.ucx import abi
from kvconnector.transport.ucx.abi import IN_PROGRESS, OK
from kvconnector.transport.ucx.library import UcxLibrary

_MAX_LANES = 64
_SURVIVES_WITHOUT_CACHE = (1, 22)
"""Earlier versions look a lost peer's messages up in their cache of registered memory, even if there is none. They have
none where UCX_RCACHE_ENABLE or UCX_MEM_EVENTS turns it off, or they cannot watch which memory is unmapped.
"""

Resource: TypeAlias = tuple[str, str]
"""A transport of UCX's and its device, as ("rc_mlx5", "mlx5_0:1")."""


class Context:
    """A `ucp_context_h` with tagged messages and event descriptors.

    `options` are UCX settings named without `UCX_`. Raises TransportError: UCX cannot start with these. Up to 1.20.0
    UCX only warns of unknown ones.
    """

    def __init__(self, library: UcxLibrary, options: Mapping[str, str]) -> None:
        self.library = library
        self.handle = c_void_p()
        self.survives_losses = True
        """False if UCX crashes when a watched peer is lost before it has taken a large message."""
        if library.version < _SURVIVES_WITHOUT_CACHE:
            try:
                self._open({**options, "RCACHE_ENABLE": "y"})
            except TransportError:
                self.survives_losses = False  # or UCX cannot start with the other options
            else:
                return
        self._open(options)

    def _open(self, options: Mapping[str, str]) -> None:
        library, config = self.library, c_void_p()
        library.check(
            library.keeping.ucp_config_read(None, None, byref(config)),
            "UCX cannot read its environment",
        )
        try:
            for name, value in options.items():
                status = library.keeping.ucp_config_modify(config, name.encode(), value.encode())
                library.check(status, "UCX refused its configuration", option=name, value=value)
            params = abi.ContextParams(
                field_mask=abi.PARAM_FIELD_FEATURES,
                features=abi.FEATURE_TAG | abi.FEATURE_WAKEUP,
            )
            status = library.releasing.ucp_init_version(
                *abi.API_VERSION, byref(params), config, byref(self.handle)
            )
            library.check(status, "UCX refused its configuration", options=dict(options))
        finally:
            library.keeping.ucp_config_release(config)

    def resources(self) -> set[Resource]:
        """Return what this context may use, such as ("tcp", "eth0") or ("rc_mlx5", "mlx5_0:1"), as it prints it. Raises
        TransportError: there is no memory.
        """
        libc = ctypes.CDLL(None)
        libc.open_memstream.restype = c_void_p
        libc.fclose.argtypes = libc.free.argtypes = [c_void_p]
        text, nbytes = c_void_p(), c_size_t()
        stream = libc.open_memstream(byref(text), byref(nbytes))
        if not stream:
            raise TransportError("no memory to describe UCX's context in")
        self.library.keeping.ucp_context_print_info(self.handle, stream)
        libc.fclose(stream)
        info = ctypes.string_at(text, nbytes.value).decode(errors="replace")
        libc.free(text)
        resources = [
            line.split()[-1].partition("/") for line in info.splitlines() if " resource " in line
        ]
        return {(transport, device) for transport, _, device in resources}

    def close(self) -> None:
        """Release the context, whose workers are closed."""
        self.library.releasing.ucp_cleanup(self.handle)


class Posted(NamedTuple):
    """A posted operation: a request that is under way, or (request 0) its final status."""

    request: int
    status: int
    message_bytes: int = 0


_DONE = Posted(0, OK)

Unexpected: TypeAlias = tuple[int, int, int]
"""A message without a receive: its handle, its tag and its number of bytes."""


class Libucp:
    """A worker of a context, which one thread at a time uses. Raises TransportError: UCX cannot make one."""

    def __init__(self, context: Context) -> None:
        self.library = context.library
        self._releasing, self._keeping = self.library.releasing, self.library.keeping
        params = abi.WorkerParams(
            field_mask=abi.WORKER_FIELD_THREAD_MODE, thread_mode=abi.THREAD_MODE_SERIALIZED
        )
        self._worker = c_void_p()
        status = self._releasing.ucp_worker_create(
            context.handle, byref(params), byref(self._worker)
        )
        self.library.check(status, "UCX could not create a worker")
        self.worker_handle = self._worker.value or 0
        self._info = abi.TagInfo()
        self._send_param = abi.RequestParam()
        self._recv_param = abi.RequestParam(
            op_attr_mask=abi.OP_FIELD_RECV_INFO, recv_info=ctypes.addressof(self._info)
        )
        self._host_send_param = abi.RequestParam(
            op_attr_mask=abi.OP_FIELD_MEMORY_TYPE, memory_type=abi.MEMORY_TYPE_HOST
        )

    def address(self) -> bytes:
        """Return the address that peers pass to `ep_create`."""
        address, nbytes = c_void_p(), c_size_t()
        status = self._keeping.ucp_worker_get_address(self._worker, byref(address), byref(nbytes))
        self.library.check(status, "UCX gives a worker no address")
        try:
            return ctypes.string_at(address, nbytes.value)
        finally:
            self._keeping.ucp_worker_release_address(self._worker, address)

    def close(self) -> None:
        """Destroy the worker, with every endpoint and request that it still has."""
        self._releasing.ucp_worker_destroy(self._worker)

    def worker_progress(self, *, keeps_gil: bool) -> bool:
        """Advance communication once; returns True if anything moved."""
        library = self._keeping if keeps_gil else self._releasing
        return bool(library.ucp_worker_progress(self._worker))

    def worker_arm(self) -> int:
        """Arm the event descriptor. Returns OK, or ERR_BUSY if there are events to progress first."""
        return int(self._keeping.ucp_worker_arm(self._worker))

    def worker_signal(self) -> None:
        """Make the event descriptor readable."""
        self._keeping.ucp_worker_signal(self._worker)

    def worker_event_fd(self) -> int:
        """Return the worker's event descriptor, which belongs to the worker."""
        fd = c_int()
        self.library.check(self._keeping.ucp_worker_get_efd(self._worker, byref(fd)), "no event fd")
        return fd.value

    def ep_create(self, address: bytes, error_callback: Any) -> int:
        """Create an endpoint to a worker. With `error_callback`, UCX watches for the loss of the peer."""
        guarded = error_callback is not None
        params = abi.EpParams(
            field_mask=abi.EP_FIELD_REMOTE_ADDRESS
            | abi.EP_FIELD_ERR_MODE
            | abi.EP_FIELD_ERR_HANDLER,
            address=ctypes.cast(c_char_p(address), c_void_p),
            err_mode=abi.ERR_MODE_PEER if guarded else abi.ERR_MODE_NONE,
            err_callback=ctypes.cast(error_callback, c_void_p) if guarded else None,
        )
        endpoint = c_void_p()
        status = self._releasing.ucp_ep_create(self._worker, byref(params), byref(endpoint))
        self.library.check(status, "UCX cannot reach the peer")
        return endpoint.value or 0

    def ep_close(self, endpoint: int, *, force: bool) -> Posted:
        """Begin to close an endpoint. With `force`, which only a watched one may use, it does not wait for its peer."""
        param = abi.RequestParam(
            op_attr_mask=abi.OP_FIELD_FLAGS, flags=abi.CLOSE_FORCE if force else 0
        )
        return _posted(self._keeping.ucp_ep_close_nbx(endpoint, byref(param)))

    def ep_flush(self, endpoint: int) -> Posted:
        """Begin to flush an endpoint."""
        return _posted(self._keeping.ucp_ep_flush_nbx(endpoint, byref(abi.RequestParam())))

    def ep_lanes(self, endpoint: int) -> str:
        """Return the lanes of an endpoint, as "transport/device" joined by "+"."""
        entries = (abi.TransportEntry * _MAX_LANES)()
        attr = abi.EpAttr(
            field_mask=abi.EP_ATTR_TRANSPORTS,
            entries=entries,
            num_entries=_MAX_LANES,
            entry_size=ctypes.sizeof(abi.TransportEntry),
        )
        self.library.check(self._keeping.ucp_ep_query(endpoint, byref(attr)), "no lanes known")
        found = [
            (e.transport_name or b"", e.device_name or b"") for e in entries[: attr.num_entries]
        ]
        return b"+".join(dict.fromkeys(map(b"/".join, found))).decode()

    def tag_send(
        self, endpoint: int, address: int | bytes, nbytes: int, tag: int, *, host: bool
    ) -> Posted:
        """Post a tagged message, of bytes or at an address. `host`: in host memory, so UCX need not ask the driver."""
        param = self._host_send_param if host else self._send_param
        raw = self._keeping.ucp_tag_send_nbx(endpoint, address, nbytes, tag, byref(param))
        return _posted(raw) if raw else _DONE

    def tag_recv(self, address: int, nbytes: int, tag: int) -> Posted:
        """Post a receive for exactly this tag."""
        place = self._worker, address, nbytes, tag, 2**64 - 1
        posted = _posted(self._keeping.ucp_tag_recv_nbx(*place, byref(self._recv_param)))
        return posted if posted.request else Posted(0, posted.status, self._info.length)

    def find_unexpected(
        self, tag: int = 0, mask: int = 0, *, take: bool = True
    ) -> Unexpected | None:
        """Return the oldest message without a receive whose tag is `tag` in the bits of `mask`, or None. With `take`,
        it must then be received, see `receive_unexpected`.
        """
        handle = self._keeping.ucp_tag_probe_nb(self._worker, tag, mask, take, byref(self._info))
        if not handle:
            return None
        return handle, int(self._info.sender_tag), int(self._info.length)

    def receive_unexpected(self, handle: int, address: int, nbytes: int) -> Posted:
        """Receive a message that was taken into host memory. Without memory, UCX drops its content."""
        param = byref(self._host_send_param)
        return _posted(
            self._keeping.ucp_tag_msg_recv_nbx(self._worker, address or None, nbytes, handle, param)
        )

    def send_status(self, request: int) -> int:
        """Return the status of a send or a close."""
        return int(self._keeping.ucp_request_check_status(request))

    def recv_status(self, request: int) -> tuple[int, int]:
        """Return the status of a receive, and once it has ended the bytes of its message."""
        status = int(self._keeping.ucp_tag_recv_request_test(request, byref(self._info)))
        return status, int(self._info.length)

    def request_cancel(self, request: int) -> None:
        """Cancel a receive that no message has matched. UCX does not cancel sends."""
        self._keeping.ucp_request_cancel(self._worker, request)

    def request_free(self, request: int) -> None:
        """Free a request. If it is under way, UCX frees it when it ends."""
        self._keeping.ucp_request_free(request)


def _posted(raw: int | None) -> Posted:
    """Decode a `ucs_status_ptr_t`: null, a request, or a negative status."""
    if not raw:
        return _DONE
    if raw >= 2**64 + abi.ERR_LAST:
        return Posted(0, raw - 2**64)
    return Posted(raw, IN_PROGRESS)
