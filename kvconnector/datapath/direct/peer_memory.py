"""Memory that another process on this host shares, mapped here: its file (see `shared_memory`), and CUDA memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from contextlib import ExitStack
from typing import Any, TypeAlias

import numpy as np

from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.datapath.direct.cuda_segments import Area, areas_of, check_num_segments
from kvconnector.datapath.direct.descriptor_socket import (
    MAX_ASKED,
    close_handles,
    fetch_descriptors,
    fetch_segments,
)
from kvconnector.datapath.direct.shared_memory import is_of_this_process
from kvconnector.errors import KVConnectorError, PeerLostError, TransportError
from kvconnector.wire.export import BOARD_OFFSET, BUCKET_BYTES, NONCE_BYTES, PoolExport

_OR_ELSEWHERE = (
    ", or in another container: both sides need paths.shared_folder, or one pid namespace (hostPID)"
)
_ANOTHER = f"the producer's process id is another process here{_OR_ELSEWHERE}"

MAP_LIMIT_S = 5.0
"""The longest time, in seconds, that mapping the segments of one producer may take: the driver does nothing else in
that time, and its other peers give it up after `peer.timeout_s` without a message. 500 segments took 0.12 s.
"""

MappedRange: TypeAlias = tuple[int, int, int]
"""Memory of the producer: its address there, its bytes, and the address here minus the one there."""


def map_file(export: PoolExport, shared_folder: str, opened: ExitStack) -> tuple[int, int]:
    """Map the file that an export names, read-only.

    Args:
        export: A producer's export, checked.
        shared_folder: If not empty, the only place where the file is looked for.
        opened: Gets the callback that unmaps the file.

    Returns:
        The address of the file here, and for CUDA pools a descriptor for `check_alive`, else -1.

    Raises:
        TransportError: Another host or container, no permission, or a file that is not what producers share.
        PeerLostError: The process has ended.
    """
    fd, *others = _descriptors(export, shared_folder)
    for other in others:
        opened.callback(os.close, other)
    try:
        nbytes = _checked_nbytes(fd, export)
        memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise TransportError("a producer's memory cannot be mapped", reason=str(error)) from error
    finally:
        os.close(fd)
    opened.callback(memory.close)
    if memory[:NONCE_BYTES] != export.nonce:
        raise TransportError(_ANOTHER, pid=export.pid)
    return int(np.frombuffer(memory, np.uint8).ctypes.data), others[0] if others else -1


def check_alive(statm: int, pid: int) -> None:
    """Check that CUDA memory of a process is still there, which is freed after its other memory. Its mapped file stays.

    Raises:
        PeerLostError: The process may have ended.
    """
    try:
        num_pages = os.pread(statm, 32, 0)
    except OSError:  # the process has ended and been reaped
        num_pages = b"0 "
    if num_pages.startswith(b"0 "):
        raise PeerLostError("the producer's process is gone", pid=pid)


def map_allocations(export: PoolExport, device: str, opened: ExitStack) -> list[MappedRange]:
    """Map the allocations of an export for kernels on `device`, until `opened` is closed. Allocations of this very
    process are there already.

    Args:
        export: A producer's export of CUDA pools, checked.
        device: The device whose kernels read them, such as "cuda:0".
        opened: Gets the callbacks that unmap them.

    Returns:
        The address here of each allocation.

    Raises:
        TransportError: The GPUs cannot reach each other's memory, the driver refuses, or processes of two containers
            have the same process id.
    """
    import torch

    if not export.allocations:
        return []
    is_own = export.pid == os.getpid()
    if is_own and not is_of_this_process(export.nonce):
        # the driver compares process ids, each from its own namespace; if they are equal, it would use the addresses
        # unchanged
        raise TransportError(
            "the producer's process id in its container is this one's here, by which CUDA takes its memory for this"
            " process's own: give both containers one pid namespace (hostPID), or let one engine start from a"
            " process that has run other programs first",
            pid=export.pid,
        )
    driver, places = CudaDriver(), []
    with torch.cuda.device(device):
        driver.enter(torch.device(device).index)
        if is_own:
            _reach_own(driver, export, device, torch)
            return [(each.address, each.nbytes, 0) for each in export.allocations]
        for each in export.allocations:
            here, nbytes = driver.open_ipc(each.handle)
            opened.callback(_unmap, driver, device, here)
            if each.nbytes > nbytes:
                raise TransportError(
                    "an exported allocation is smaller than it says",
                    nbytes=nbytes,
                    stated=each.nbytes,
                )
            places.append((each.address, each.nbytes, here - each.address))
    return places


def map_segments(
    export: PoolExport, device: str, shared_folder: str, opened: ExitStack
) -> tuple[list[MappedRange], str]:
    """Map the segments of an export for kernels on `device`, until `opened` is closed. They stay mapped for that long,
    no matter what their owner does: memory that it releases is free only once it is unmapped here too.

    Args:
        export: A producer's export of CUDA pools, checked.
        device: The device whose kernels read them, such as "cuda:0".
        shared_folder: If not empty, the only place where the producer's socket is looked for.
        opened: Gets the callbacks that unmap them.

    Returns:
        The address here of each area: of all segments that follow each other. And by which handles, for the log.

    Raises:
        TransportError: The GPUs cannot reach each other's memory, the driver or the producer refuses, there are too
            many segments, or it takes longer than `MAP_LIMIT_S`.
        PeerLostError: The producer has ended.
    """
    check_num_segments(sum(run.count for run in export.segments))
    until_s = time.monotonic() + MAP_LIMIT_S
    place = shared_folder or f"/proc/{export.pid}/fd/{export.socket_fd}"
    driver, found, how = CudaDriver(), [], set[str]()
    device_index = int(device.partition(":")[2] or 0)
    driver.enter(device_index)
    for area in areas_of(export.segments):
        mapped = MappedArea(driver, device_index, area)
        opened.callback(mapped.close)
        for first in range(0, len(area.places), MAX_ASKED):
            if time.monotonic() > until_s:
                raise TransportError(
                    "the producer's GPU memory takes too long to map: it is in too many segments, or its process"
                    " does not answer in time",
                    segments=sum(run.count for run in export.segments),
                    limit_s=MAP_LIMIT_S,
                )
            how |= mapped.map_some(range(first, first + MAX_ASKED), place, export)
        driver.let_read(mapped.address, area.nbytes, device_index)
        found.append((area.address, area.nbytes, mapped.address - area.address))
    return found, f"CUDA {' and '.join(sorted(how))}"


class MappedArea:
    """Addresses in this process for an area of a producer's memory, and the segments that are mapped there so far.
    Raises TransportError: no addresses are left.
    """

    def __init__(self, driver: CudaDriver, device_index: int, area: Area) -> None:
        self._driver, self._device_index, self._area = driver, device_index, area
        self._num_mapped = 0
        self.address = driver.reserve(area.nbytes)

    def map_some(self, which: range, place: str, export: PoolExport) -> set[str]:
        """Map some of the area's segments, the next ones. Returns the kinds of their handles. Raises TransportError,
        PeerLostError: see `map_segments`.
        """
        places = self._area.places[which.start : which.stop]
        numbers = range(places[0].index, places[-1].index + 1)
        handles = fetch_segments(place, export.nonce, export.epoch, numbers)
        try:
            for each, handle in zip(places, handles, strict=True):
                self._driver.map_segment(self.address + each.offset, each.nbytes, handle)
                self._num_mapped += 1
        finally:
            close_handles(handles)
        return {"file descriptors" if isinstance(h, int) else "fabric handles" for h in handles}

    def close(self) -> None:
        """Unmap it, when no kernel reads it. Raises TransportError: the driver refuses; the rest stays mapped."""
        self._driver.enter(self._device_index)
        for each in self._area.places[: self._num_mapped]:
            self._driver.unmap_segment(self.address + each.offset, each.nbytes)
        self._driver.free_reserved(self.address, self._area.nbytes)


def _unmap(driver: CudaDriver, device: str, address: int) -> None:
    import torch

    with torch.cuda.device(device):
        driver.enter(torch.device(device).index)
        driver.close_ipc(address)


def _reach_own(driver: CudaDriver, export: PoolExport, device: str, torch: Any) -> None:
    """Enable peer access to another GPU's memory in this process, which needs no mapping."""
    ours = str(torch.cuda.get_device_properties(device).uuid)
    if export.gpu_uuid == ours:
        return
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == export.gpu_uuid:
            driver.enable_peer_access(index)
            return
    raise TransportError("the producer's GPU is not visible here", gpu_uuid=export.gpu_uuid)


def _descriptors(export: PoolExport, shared_folder: str) -> list[int]:
    """Open the producer's memory and, for pools on a GPU, its statm. The caller closes the descriptors."""
    names = [f"fd/{export.fd}", "statm"][: 2 if export.device == "cuda" else 1]
    if shared_folder:
        return fetch_descriptors(shared_folder, export.nonce, len(names))
    # opening must not wait, no matter what kind of file the peer has put there
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    with ExitStack() as undone:
        fds = []
        for name in names:
            try:
                fds.append(os.open(f"/proc/{export.pid}/{name}", flags))
            except OSError as error:
                raise _refusal(error, export) from error
            undone.callback(os.close, fds[-1])
        undone.pop_all()
    return fds


def _refusal(error: OSError, export: PoolExport) -> KVConnectorError:
    if isinstance(error, PermissionError):
        return TransportError(
            f"this process may not open the producer's memory: it is another user's{_OR_ELSEWHERE}",
            pid=export.pid,
        )
    if not os.path.exists(f"/proc/{export.pid}"):
        return PeerLostError(f"the producer's process is gone{_OR_ELSEWHERE}", pid=export.pid)
    return TransportError(_ANOTHER, pid=export.pid, reason=str(error))


def _checked_nbytes(fd: int, export: PoolExport) -> int:
    """Return a file's size. Raises OSError: it is no sealed memory. ValueError: it may shrink, or is too small."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        # reading a page that no longer exists would end this process
        raise ValueError("it is not sealed against shrinking")
    nbytes = os.fstat(fd).st_size
    stops = [each.offset + each.nbytes for each in export.ranges]
    if max(BOARD_OFFSET + export.num_buckets * BUCKET_BYTES, *stops, 0) > nbytes:
        raise ValueError(f"it has {nbytes} bytes, but the export names more")
    return nbytes
