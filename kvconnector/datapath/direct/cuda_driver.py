"""The part of the CUDA driver that Python calls."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvconnector.agenda import NEVER
from kvconnector.datapath.device_memory import await_device
from kvconnector.datapath.direct.cuda_segments import Mapping
from kvconnector.errors import TransportError
from kvconnector.wire.export import FABRIC_HANDLE_BYTES, IPC_HANDLE_BYTES, IpcAllocation

_SONAME = "libcuda.so.1"
_FUNCTIONS = (
    "cuCtxEnablePeerAccess",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorName",
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemExportToShareableHandle",
    "cuMemFree_v2",
    "cuMemGetAddressRange_v2",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemRetainAllocationHandle",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuStreamQuery",
    "cuStreamWriteValue32_v2",
)
_MAY_WAIT = frozenset(
    {
        "cuCtxEnablePeerAccess",
        "cuIpcCloseMemHandle",
        "cuIpcOpenMemHandle_v2",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
        "cuMemSetAccess",
    }
)
"""Functions that may wait for running kernels or for another process. They are called a few times for each peer, and
without the GIL, because otherwise a GPU that hangs would stop every thread of the engine. Functions that are called for
each of thousands of segments keep the GIL, because a busy engine returns it only after up to 5 ms.
"""
_HOST_REGISTER_PORTABLE_AND_MAPPED = 0x01 | 0x02
_IPC_LAZY_ENABLE_PEER_ACCESS = 0x01
_PEER_ACCESS_ALREADY_ENABLED = 704
_NOT_READY = 600
_INVALID_VALUE = 1
_NOT_FOUND = 500
_ON_DEVICE = 1
_READ_AND_WRITE = 3
_FILE_DESCRIPTOR = 1
_FABRIC = 8
_KINDS = {_FILE_DESCRIPTOR: "file descriptors", _FABRIC: "fabric handles"}
_SUPPORTED = {103: _FILE_DESCRIPTOR, 128: _FABRIC}
"""A device's attributes, by number, and the handle types that it supports if they are not 0."""
_UNUSABLE = "a GPU cannot be used"


class IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class _Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProp(ctypes.Structure):
    """`CUmemAllocationProp`. `flags` stands for four fields that are not used here."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", _Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _AccessDesc(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def load_libcuda(*functions: str) -> Any:
    """Load libcuda with these functions, which are short and keep the GIL, except for those in `_MAY_WAIT`. Raises
    TransportError: it lacks one.
    """
    try:
        library, releasing = ctypes.PyDLL(_SONAME), ctypes.CDLL(_SONAME)
        for name in functions:
            setattr(library, name, getattr(releasing if name in _MAY_WAIT else library, name))
    except (OSError, AttributeError) as exc:
        raise TransportError(f"the CUDA driver is missing or too old: {exc}") from exc
    return library


class CudaDriver:
    """libcuda, with statuses as exceptions. Raises TransportError: the driver is missing or too old."""

    def __init__(self) -> None:
        self.library = load_libcuda(*_FUNCTIONS)

    def call(self, what: str, name: str, *arguments: Any, **context: object) -> None:
        """Call a function. Raises TransportError with the text `what` if it fails."""
        self.check(getattr(self.library, name)(*arguments), what, **context)

    def check(self, status: int, what: str, **context: object) -> None:
        """Raise TransportError unless a call succeeded."""
        if status:
            name = ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(name))
            reason = name.value.decode() if name.value else str(status)
            raise TransportError(what, status=reason, **context)

    def allocation_of(self, address: int) -> IpcAllocation:
        """Return the whole allocation around an address, for another process to open. Raises TransportError: the memory
        has no IPC handle, since it was mapped segment by segment, or comes from a stream's memory pool.
        """
        base, nbytes = self._range_of(address)
        handle = IpcHandle()
        what = "memory of the caches has no IPC handle"
        place = {"address": hex(address), "nbytes": nbytes}
        self.call(what, "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base), **place)
        return IpcAllocation(handle=bytes(handle), address=base, nbytes=nbytes)

    def open_ipc(self, handle: bytes) -> tuple[int, int]:
        """Map another process's allocation into the current context. Returns its address there and its bytes. Raises
        TransportError: the handle is stale, or the GPUs cannot reach each other's memory.
        """
        address = ctypes.c_uint64()
        how = IpcHandle.from_buffer_copy(handle), ctypes.c_uint(_IPC_LAZY_ENABLE_PEER_ACCESS)
        what = "the producer's GPU memory cannot be mapped"
        self.call(what, "cuIpcOpenMemHandle_v2", ctypes.byref(address), *how)
        return address.value, self._range_of(address.value)[1]

    def close_ipc(self, address: int) -> None:
        """Unmap an allocation that `open_ipc` mapped into the current context. Raises TransportError: the driver
        refuses.
        """
        what = "the producer's GPU memory cannot be unmapped"
        self.call(what, "cuIpcCloseMemHandle", ctypes.c_uint64(address))

    # -- memory that is mapped segment by segment --

    def segment_at(self, address: int) -> Mapping | None:
        """Return the physical segment that is mapped around an address; None if none is. Raises TransportError: the GPU
        has failed.
        """
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        found = ctypes.byref(base), ctypes.byref(nbytes)
        status = self.library.cuMemGetAddressRange_v2(*found, ctypes.c_uint64(address))
        if status in (_INVALID_VALUE, _NOT_FOUND):
            return None
        self.check(status, "the GPU's driver does not know an address", address=hex(address))
        return Mapping(base.value, nbytes.value)

    def handle_kinds(self, device_index: int) -> list[str]:
        """Return in words which handles let other processes map a GPU's segments, if the segments' allocator asks for
        them.
        """
        device, found = ctypes.c_int(), ctypes.c_int()
        unknown = "the GPU's driver does not know a GPU"
        self.call(unknown, "cuDeviceGet", ctypes.byref(device), device_index, device=device_index)
        kinds = []
        for attribute, kind in _SUPPORTED.items():
            status = self.library.cuDeviceGetAttribute(ctypes.byref(found), attribute, device)
            if not status and found.value:  # drivers do not know attributes that are newer
                kinds.append(_KINDS[kind])
        return kinds

    def check_shareable(self, segments: Iterable[Mapping]) -> list[str]:
        """Check that other processes may map these segments. Returns in words by which handles.

        Raises:
            TransportError: one was created without a handle type that another process can take, or is mapped twice, as
                by allocators that let the pages of a pool come and go.
        """
        known: dict[int, int] = {}
        kinds = set()
        for each in segments:
            address = each.address
            with self._retained(address) as handle:
                kinds.add(_KINDS[self._handle_type(handle, address)])
                # a segment's handle does not change for as long as the segment is mapped
                other = known.setdefault(handle.value, address)
            if other != address:
                raise TransportError(
                    "the same memory is mapped at two places in the caches, so its allocator may replace it",
                    address=hex(address),
                    other=hex(other),
                    nbytes=each.nbytes,
                )
        return sorted(kinds)

    def export_segment(self, address: int) -> int | bytes:
        """Return a handle of the segment that is mapped around an address, by which another process maps it: a file
        descriptor, which the caller closes, or the bytes of a fabric handle. Raises TransportError: there is none.
        """
        what = "a segment of the caches cannot be exported"
        with self._retained(address) as handle:
            kind = self._handle_type(handle, address)
            fd, fabric = ctypes.c_int(-1), ctypes.create_string_buffer(FABRIC_HANDLE_BYTES)
            out = ctypes.byref(fd if kind == _FILE_DESCRIPTOR else fabric)
            self.call(what, "cuMemExportToShareableHandle", out, handle, kind, ctypes.c_uint64(0))
        return fd.value if kind == _FILE_DESCRIPTOR else fabric.raw

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses, for segments to be mapped to. Raises TransportError: none are left."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t(nbytes)
        anywhere = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        what = "no addresses for the producer's GPU memory"
        self.call(
            what, "cuMemAddressReserve", ctypes.byref(address), size, *anywhere, nbytes=nbytes
        )
        return address.value

    def free_reserved(self, address: int, nbytes: int) -> None:
        """Give back addresses of `reserve` that have no memory. Raises TransportError: the driver refuses."""
        what = "addresses of the producer's GPU memory cannot be freed"
        self.call(what, "cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def map_segment(self, address: int, nbytes: int, shared: int | bytes) -> None:
        """Map another process's segment to reserved addresses. It stays mapped until it is unmapped here, no matter
        what its owner does.

        Args:
            address: Where to map it.
            nbytes: Its size.
            shared: A file descriptor, which stays the caller's, or a fabric handle.

        Raises:
            TransportError: the handle is not one of a segment of this size, or its GPU cannot be reached.
        """
        handle = ctypes.c_uint64()
        if isinstance(shared, int):
            source, kind = ctypes.c_void_p(shared), _FILE_DESCRIPTOR
        else:
            source, kind = ctypes.cast(ctypes.c_char_p(shared), ctypes.c_void_p), _FABRIC
        what = "a segment of the producer's GPU memory cannot be mapped"
        self.call(what, "cuMemImportFromShareableHandle", ctypes.byref(handle), source, kind)
        try:
            place = ctypes.c_uint64(address), ctypes.c_size_t(nbytes), ctypes.c_size_t(0)
            self.call(what, "cuMemMap", *place, handle, ctypes.c_uint64(0), nbytes=nbytes)
        finally:
            self.library.cuMemRelease(handle)  # what is mapped keeps it

    def let_read(self, address: int, nbytes: int, device_index: int) -> None:
        """Let a GPU reach mapped segments. Raises TransportError: it cannot reach the GPU that they are on."""
        access = _AccessDesc(_Location(_ON_DEVICE, device_index), _READ_AND_WRITE)
        place = ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        what = "one GPU cannot reach another's memory"
        self.call(
            what, "cuMemSetAccess", *place, ctypes.byref(access), ctypes.c_size_t(1), nbytes=nbytes
        )

    def unmap_segment(self, address: int, nbytes: int) -> None:
        """Unmap a segment. Raises TransportError: the driver refuses."""
        what = "the producer's GPU memory cannot be unmapped"
        self.call(what, "cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    @contextmanager
    def _retained(self, address: int) -> Iterator[ctypes.c_uint64]:
        """Yield the handle of the segment at an address, which is retained within the block."""
        handle, what = ctypes.c_uint64(), "memory of the caches cannot be shared"
        place = ctypes.byref(handle), ctypes.c_void_p(address)
        self.call(what, "cuMemRetainAllocationHandle", *place, address=hex(address))
        try:
            yield handle
        finally:
            self.library.cuMemRelease(handle)

    def _handle_type(self, handle: ctypes.c_uint64, address: int) -> int:
        """Return the type of handle by which another process can map a segment. Raises TransportError: none."""
        prop, what = _AllocationProp(), "the GPU's driver does not know a segment of the caches"
        self.call(what, "cuMemGetAllocationPropertiesFromHandle", ctypes.byref(prop), handle)
        # a fabric handle needs a service of the system, which may be gone: only where there is nothing else
        for kind in (_FILE_DESCRIPTOR, _FABRIC):
            if prop.requestedHandleTypes & kind:
                return kind
        raise TransportError(
            "memory of the caches was created for this process alone (cuMemCreate without a file descriptor or fabric"
            " handle among requestedHandleTypes)",
            address=hex(address),
        )

    def allocate(self, device_index: int, nbytes: int) -> CudaMemory:
        """Allocate GPU memory from the driver, which any process may map, however PyTorch's allocator is configured.
        Raises TransportError: there is no such GPU, or too little of its memory is free.
        """
        context, address = self._context_of(device_index), ctypes.c_uint64()
        self.call(_UNUSABLE, "cuCtxPushCurrent_v2", context)
        try:
            status = self.library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        finally:
            self.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        self.check(status, "no GPU memory", device=device_index, nbytes=nbytes)
        memory = CudaMemory(address.value)
        weakref.finalize(memory, _free, self.library, context, address)
        return memory

    def enter(self, device_index: int) -> None:
        """Make a GPU's context current in the calling thread. Raises TransportError: there is no such GPU, or it has
        failed.
        """
        context = self._context_of(device_index)
        self.call(_UNUSABLE, "cuCtxSetCurrent", context, device=device_index)

    def enable_peer_access(self, device_index: int) -> None:
        """Let kernels of the current context reach another GPU's memory. Raises TransportError: they cannot."""
        status = self.library.cuCtxEnablePeerAccess(
            self._context_of(device_index), ctypes.c_uint(0)
        )
        if status != _PEER_ACCESS_ALREADY_ENABLED:
            self.check(status, "one GPU cannot reach another's memory", device=device_index)

    def _range_of(self, address: int) -> tuple[int, int]:
        """Return the first address and the bytes of the allocation around an address."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        found = ctypes.byref(base), ctypes.byref(nbytes)
        what = "the GPU's driver does not know an address of the caches"
        asked = ctypes.c_uint64(address)
        self.call(what, "cuMemGetAddressRange_v2", *found, asked, address=hex(address))
        return base.value, nbytes.value

    def _context_of(self, device_index: int) -> ctypes.c_void_p:
        """Return a GPU's primary context, which PyTorch uses."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        which = {"device": device_index}
        unknown = "the GPU's driver does not know a GPU"
        self.call(unknown, "cuDeviceGet", ctypes.byref(device), device_index, **which)
        # never released: PyTorch needs it for as long as the process lives
        self.call(_UNUSABLE, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device, **which)
        return context


class CudaMemory:
    """GPU memory from `address` on, freed with this object. Nothing on the GPU may use it then."""

    def __init__(self, address: int) -> None:
        self.address = address


def _free(library: Any, context: ctypes.c_void_p, address: ctypes.c_uint64) -> None:
    if not library.cuCtxPushCurrent_v2(context):
        library.cuMemFree_v2(address)
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class StreamWriter:
    """Writes words of a lease board after the work queued on a stream, which fills the blocks.

    `context` is the CUDA context of `stream`. The board is `nbytes` of host memory at `address`.

    Raises:
        TransportError: the driver is too old, or does not take the memory.
    """

    def __init__(self, stream: int, context: int, address: int, nbytes: int) -> None:
        self._driver = CudaDriver()
        self._stream = ctypes.c_void_p(stream)
        self._context = ctypes.c_void_p(context)
        self._address = ctypes.c_void_p(address)
        self._enter()
        memory = self._address, ctypes.c_size_t(nbytes), _HOST_REGISTER_PORTABLE_AND_MAPPED
        what = "the lease board cannot be registered with the GPU"
        self._driver.call(what, "cuMemHostRegister_v2", *memory, nbytes=nbytes)

    def write(self, address: int, value: int) -> None:
        """Set the aligned int32 at `address`, which is inside the board."""
        self._enter()
        # with unified addressing, registered host memory has one address
        written = ctypes.c_uint64(address), ctypes.c_uint32(value), 0
        what = "the GPU does not take a write of the lease board"
        self._driver.call(what, "cuStreamWriteValue32_v2", self._stream, *written)

    def close(self, until_s: float = NEVER) -> None:
        """Wait for writes under way, and unregister the board. Raises TransportError: the device has failed, or a write
        does not end, by `until_s` at the latest. The memory must then stay.
        """
        self._enter()
        await_device(self._is_idle, "writes of the lease board do not end", until_s)
        what = "the lease board cannot be unregistered"
        self._driver.call(what, "cuMemHostUnregister", self._address)

    def _is_idle(self) -> bool:
        status: int = self._driver.library.cuStreamQuery(self._stream)
        if status != _NOT_READY:
            self._driver.check(status, "the GPU's stream failed")
        return status != _NOT_READY

    def _enter(self) -> None:
        self._driver.call("the GPU's context is gone", "cuCtxSetCurrent", self._context)
