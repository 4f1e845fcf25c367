"""The part of the CUDA driver that Python calls."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from kvconnector.datapath.device_memory import await_device
from kvconnector.errors import TransportError
from kvconnector.wire.export import IPC_HANDLE_BYTES, IpcAllocation

_SONAME = "libcuda.so.1"
_FUNCTIONS = (
    "cuCtxEnablePeerAccess",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorName",
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetAddressRange_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuStreamQuery",
    "cuStreamWriteValue32_v2",
)
_HOST_REGISTER_PORTABLE_AND_MAPPED = 0x01 | 0x02
_IPC_LAZY_ENABLE_PEER_ACCESS = 0x01
_PEER_ACCESS_ALREADY_ENABLED = 704
_NOT_READY = 600
_UNUSABLE = "a GPU cannot be used"


class IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


def load_libcuda(*functions: str) -> Any:
    """Load libcuda with these functions, which are short and keep the GIL. Raises TransportError: it lacks one."""
    try:
        library = ctypes.PyDLL(_SONAME)
        for name in functions:
            _ = getattr(library, name)
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
        has no IPC handle, as PyTorch's expandable segments.
        """
        base, nbytes = self._range_of(address)
        handle = IpcHandle()
        what = "memory of the caches cannot be shared; PyTorch's expandable segments cannot"
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
        """Make a GPU's context the calling thread's. Raises TransportError: there is no such GPU, or it has failed."""
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

    def close(self) -> None:
        """Wait for writes under way, and unregister the board. Raises TransportError: the device has failed, or a write
        does not end. The memory must then stay.
        """
        self._enter()
        await_device(self._is_idle, "writes of the lease board do not end")
        what = "the lease board cannot be unregistered"
        self._driver.call(what, "cuMemHostUnregister", self._address)

    def _is_idle(self) -> bool:
        status: int = self._driver.library.cuStreamQuery(self._stream)
        if status != _NOT_READY:
            self._driver.check(status, "the GPU's stream failed")
        return status != _NOT_READY

    def _enter(self) -> None:
        self._driver.call("the GPU's context is gone", "cuCtxSetCurrent", self._context)
