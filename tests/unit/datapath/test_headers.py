"""Structs and numbers that C shares with Python, compared with the headers of the CUDA driver and of the system."""

import ctypes
import fcntl
import mmap

import numpy as np

from kvconnector.control import waker
from kvconnector.datapath.direct import cuda_driver, shared_memory
from kvconnector.datapath.pump import copies_cuda, state
from kvconnector.runtime import cuda_context
from kvconnector.wire.export import FABRIC_HANDLE_BYTES, IPC_HANDLE_BYTES
from tests.support.headers import cuda_headers, needs_compiler, numbers_of, offsets_of

pytestmark = needs_compiler

CUDA_STRUCTS = {
    "CUmemLocation": (cuda_driver._Location, {"type": "type", "id": "id"}),
    "CUmemAllocationProp": (
        cuda_driver._AllocationProp,
        {
            "type": "type",
            "requestedHandleTypes": "requestedHandleTypes",
            "location": "location",
            "win32HandleMetaData": "win32HandleMetaData",
            "allocFlags": "flags",
        },
    ),
    "CUmemAccessDesc": (
        cuda_driver._AccessDesc,
        {"location": "location", "flags": "flags"},
    ),
    "CUipcMemHandle": (cuda_driver.IpcHandle, {"reserved": "reserved"}),
}
CUDA_NUMBERS = {
    "sizeof(CUipcMemHandle)": IPC_HANDLE_BYTES,
    "sizeof(CUmemFabricHandle)": FABRIC_HANDLE_BYTES,
    "sizeof(CUdeviceptr)": 8,
    "sizeof(CUmemGenericAllocationHandle)": 8,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": cuda_driver._FILE_DESCRIPTOR,
    "CU_MEM_HANDLE_TYPE_FABRIC": cuda_driver._FABRIC,
    "CU_MEM_LOCATION_TYPE_DEVICE": cuda_driver._ON_DEVICE,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": cuda_driver._READ_AND_WRITE,
    "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": cuda_driver._IPC_LAZY_ENABLE_PEER_ACCESS,
    "CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP": (
        cuda_driver._HOST_REGISTER_PORTABLE_AND_MAPPED
    ),
    "CUDA_ERROR_INVALID_VALUE": cuda_driver._INVALID_VALUE,
    "CUDA_ERROR_NOT_FOUND": cuda_driver._NOT_FOUND,
    "CUDA_ERROR_NOT_READY": cuda_driver._NOT_READY,
    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED": cuda_driver._PEER_ACCESS_ALREADY_ENABLED,
    "CU_POINTER_ATTRIBUTE_MEMORY_TYPE": shared_memory._CUDA_MEMORY_TYPE,
    "CU_STREAM_CAPTURE_MODE_RELAXED": cuda_context._CAPTURE_MODE_RELAXED,
    "CU_STREAM_NON_BLOCKING": copies_cuda._NON_BLOCKING,
}
_FILES = "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
_FABRICS = "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED"


def test_the_cuda_driver_has_these_structs_and_numbers(tmp_path):
    ours = offsets_of(CUDA_STRUCTS) | CUDA_NUMBERS
    ours |= {f"sizeof({name})": ctypes.sizeof(kind) for name, (kind, _) in CUDA_STRUCTS.items()}
    kinds = {_FILES: cuda_driver._FILE_DESCRIPTOR, _FABRICS: cuda_driver._FABRIC}
    found = numbers_of([*ours, *kinds], ["cuda.h"], tmp_path, [cuda_headers()])
    assert {each: found[each] for each in ours} == ours
    assert {found[each]: kind for each, kind in kinds.items()} == cuda_driver._SUPPORTED


def test_the_system_has_these_structs_and_numbers(tmp_path):
    poll_fd, word = state._POLL_FD, np.dtype(np.int32).itemsize
    places = {f"offsetof(struct pollfd, {name})": poll_fd.fields[name][1] for name in poll_fd.names}
    ours = places | {
        "sizeof(struct pollfd)": poll_fd.itemsize,
        "POLLIN": state._POLLIN,
        "sizeof(struct epoll_event)": waker._WORDS * word,
        "offsetof(struct epoll_event, data)": waker._FD * word,
        "MAP_FIXED": shared_memory._MAP_FIXED,
        "MAP_NORESERVE": shared_memory._MAP_NORESERVE,
        "MREMAP_MAYMOVE | MREMAP_FIXED": shared_memory._MREMAP_TO,
        "(long long)MAP_FAILED": ctypes.c_int64(shared_memory._MAP_FAILED).value,
        "F_SEAL_FUTURE_WRITE": shared_memory._F_SEAL_FUTURE_WRITE,
        "F_ADD_SEALS": fcntl.F_ADD_SEALS,
        "sizeof(off_t)": ctypes.sizeof(ctypes.c_long),
        "PROT_READ | PROT_WRITE": mmap.PROT_READ | mmap.PROT_WRITE,
    }
    headers = ("poll.h", "sys/epoll.h", "sys/mman.h", "fcntl.h")
    assert numbers_of([*ours], headers, tmp_path) == ours
