"""One-sided access to memory over UCX: registered regions, and the keys with which a peer reads them.

A packed key is parsed by UCX without bounds checks, and an unknown kind of memory crashes it (libucx 1.21), so
`check_key` looks at all that UCX follows before UCX does. What a key's own transport makes of its bytes is left to UCX:
keys come from peers that the control channel has proved.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from ctypes import byref, c_int, c_int8, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar

from kvconnector.errors import RemoteProtocolError, TransportError
from kvconnector.transport.ucx.libucp import OK, Libucp

MAX_KEY_BYTES = 1 << 10

READING_LANES = ("rc_", "dc_", "gga_", "srd")
"""How the lanes are called, at the beginning, that read a peer's memory without the peer."""
RDMA_LANES = (*READING_LANES, "ud_")
"""The same of all lanes whose hardware takes messages past the kernel, those that carry nothing else included."""

_FIELD_ADDRESS, _FIELD_LENGTH, _FIELD_PROT, _FIELD_MEMORY_TYPE = 1 << 0, 1 << 1, 1 << 3, 1 << 4
_PROT_LOCAL_READ, _PROT_REMOTE_READ = 1 << 0, 1 << 8
_MEMORY_TYPE_HOST = 0
_KEY_HEAD = struct.Struct("<QB")
"""The domains that have a key, a bit each, and the kind of memory."""
_PADDING = bytes(1 << 12)
"""Behind a key, so that what UCX may look for after it is nothing."""


class _MapParams(ctypes.Structure):
    """`ucp_mem_map_params_t`."""

    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
        ("reserved", c_void_p * 8),
    ]


@dataclass(frozen=True, slots=True)
class Region:
    """Registered host memory. `key` is what a peer needs to read it, `handle` the `ucp_mem_h`."""

    address: int
    nbytes: int
    handle: int
    key: bytes


def reads_memory(lanes: str, keys: Iterable[bytes]) -> bool:
    """Whether gets with these keys, over lanes as `UcxTransport.lanes` tells them, are made by the network's hardware.

    Over all other lanes UCX asks the peer, which answers when its thread drives UCX. If the asking process ends before,
    libucx 1.21 aborts the one that answers (`ucp_request_send`, "unexpected error"): over tcp, of five consumers that
    were killed in the middle of a read, while their producer's thread was elsewhere for 20 ms, four took it along.
    """
    names = [lane.partition("/")[0] for lane in lanes.split("+")]
    return any(name.startswith(READING_LANES) for name in names) and all(
        len(key) >= _KEY_HEAD.size and _KEY_HEAD.unpack_from(key)[0] for key in keys
    )


def check_key(key: bytes) -> None:
    """Accept the packed key of host memory whose parts are all inside it.

    Raises:
        RemoteProtocolError: it is cut short, too long, or of another kind of memory.
    """
    if not _KEY_HEAD.size <= len(key) <= MAX_KEY_BYTES:
        raise RemoteProtocolError("a memory key has no such length", nbytes=len(key))
    domains, memory_type = _KEY_HEAD.unpack_from(key)
    if memory_type != _MEMORY_TYPE_HOST:
        raise RemoteProtocolError("a memory key is not one of host memory", kind=memory_type)
    at = _KEY_HEAD.size
    for _ in range(domains.bit_count()):
        if at >= len(key):
            raise RemoteProtocolError("a memory key is cut short", nbytes=len(key))
        at += 1 + key[at]
    if at > len(key):
        raise RemoteProtocolError("a memory key is cut short", nbytes=len(key), needed=at)


class Rma:
    """Registering and reaching memory on one UCX context. One thread, the transport's owner, calls it.

    The context was opened for one-sided access. Regions and keys are let go of before the transport closes.
    """

    def __init__(self, libucp: Libucp, context: int) -> None:
        self._libucp = libucp
        self._library = libucp.library
        self._context = context
        _declare(self._library)

    def register(self, address: int, nbytes: int) -> Region:
        """Let peers read `nbytes` of host memory at `address`.

        Raises:
            TransportError: UCX cannot register it, or its key is too long for a message.
        """
        params = _MapParams(
            field_mask=_FIELD_ADDRESS | _FIELD_LENGTH | _FIELD_PROT | _FIELD_MEMORY_TYPE,
            address=address,
            length=nbytes,
            prot=_PROT_LOCAL_READ | _PROT_REMOTE_READ,
            memory_type=_MEMORY_TYPE_HOST,
        )
        handle = c_void_p()
        self._check(
            self._library.ucp_mem_map(self._context, byref(params), byref(handle)),
            "UCX cannot register memory",
            nbytes=nbytes,
        )
        region = Region(address, nbytes, handle.value or 0, b"")
        try:
            return Region(address, nbytes, region.handle, self._key_of(region))
        except BaseException:
            self.unregister(region)
            raise

    def unregister(self, region: Region) -> None:
        """From now on, no peer reads it by its key.

        Raises:
            TransportError: UCX refuses.
        """
        status = self._library.ucp_mem_unmap(self._context, region.handle)
        self._check(status, "UCX keeps memory registered", nbytes=region.nbytes)

    def unpack(self, endpoint_handle: int, key: bytes) -> int:
        """A peer's key as a `ucp_rkey_h` of an endpoint to it, to be destroyed with `destroy`.

        Raises:
            RemoteProtocolError: see `check_key`. TransportError: UCX cannot use it.
        """
        check_key(key)
        found = c_void_p()
        self._check(
            self._library.ucp_ep_rkey_unpack(endpoint_handle, key + _PADDING, byref(found)),
            "UCX cannot use the producer's memory key",
        )
        return found.value or 0

    def destroy(self, key_handle: int) -> None:
        """Let go of an unpacked key that no operation uses."""
        self._library.ucp_rkey_destroy(key_handle)

    def _key_of(self, region: Region) -> bytes:
        buffer, nbytes = c_void_p(), c_size_t()
        self._check(
            self._library.ucp_rkey_pack(self._context, region.handle, byref(buffer), byref(nbytes)),
            "UCX has no key for memory",
        )
        try:
            if nbytes.value > MAX_KEY_BYTES:
                raise TransportError("a memory key is too long", nbytes=nbytes.value)
            return ctypes.string_at(buffer, nbytes.value)
        finally:
            self._library.ucp_rkey_buffer_release(buffer)

    def _check(self, status: int, message: str, **context: object) -> None:
        if status != OK:
            raise TransportError(message, ucx_status=self._libucp.status_text(status), **context)


def _declare(library: Any) -> None:
    for name, restype, num_arguments in (
        ("ucp_mem_map", c_int8, 3),
        ("ucp_mem_unmap", c_int8, 2),
        ("ucp_rkey_pack", c_int8, 4),
        ("ucp_rkey_buffer_release", None, 1),
        ("ucp_ep_rkey_unpack", c_int8, 3),
        ("ucp_rkey_destroy", None, 1),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = restype, [c_void_p] * num_arguments
