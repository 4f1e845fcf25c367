"""A CUDA driver without a GPU: the part that maps memory segment by segment, with the errors that driver 580 gave on an
H200 for each mistake.

Handles are numbers that stay the same for as long as their segment lives; a segment lives while it is mapped or a
handle of it is retained. Exported descriptors are of real, unnamed files, so they can be passed through sockets. Memory
has no content. All processes of a test share one driver.
"""

import ctypes
import os
from collections import Counter

OK, INVALID_VALUE, OUT_OF_MEMORY, NOT_FOUND, NOT_SUPPORTED, UNKNOWN = 0, 1, 2, 500, 801, 999
NAMES = {
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    NOT_FOUND: b"CUDA_ERROR_NOT_FOUND",
    NOT_SUPPORTED: b"CUDA_ERROR_NOT_SUPPORTED",
    UNKNOWN: b"CUDA_ERROR_UNKNOWN",
}
GRANULARITY = 2 << 20
FIRST_ADDRESS = 1 << 40


class Allocation:
    """A physical segment, and how many handles of it are retained."""

    def __init__(self, nbytes, types):
        self.nbytes, self.types = nbytes, types
        self.num_retained = 1


class FakeCuda:
    """Functions of libcuda, called as through ctypes."""

    def __init__(self):
        self.reserved = {}
        self.mapped = {}
        self.allocations = {}
        self.access = {}
        self.readable = set()
        self.files = {}
        self.legacy = {}
        self.calls = Counter()
        self._next_address, self._next_handle = FIRST_ADDRESS, 100

    # -- what a test's allocator does --

    def create(self, nbytes, types=1):
        """Make a segment. Returns its handle, which is retained once."""
        self._next_handle += 1
        self.allocations[self._next_handle] = Allocation(nbytes, types)
        return self._next_handle

    def allocate_legacy(self, nbytes):
        """Make memory that has an IPC handle. Returns its address."""
        address = self._reserve(nbytes)
        self.legacy[address] = nbytes
        return address

    def lay_out(self, sizes, types=1):
        """Map new segments, one after another; a negative size leaves a gap. Returns the first address."""
        first = address = self._reserve(sum(map(abs, sizes)))
        for size in sizes:
            if size > 0:
                handle = self.create(size, types)
                self.mapped[address] = handle, size
                self.readable.add(address)
                self.drop(handle)
            address += abs(size)
        return first

    def drop(self, handle):
        """Release a handle."""
        assert self.cuMemRelease(ctypes.c_uint64(handle)) == OK

    def is_clean(self):
        """Returns True if no handle is retained that nobody will release."""
        return not any(each.num_retained for each in self.allocations.values())

    def _reserve(self, nbytes):
        address = self._next_address
        self._next_address += nbytes + GRANULARITY
        self.reserved[address] = nbytes
        return address

    def _mapping_at(self, address):
        for start, (handle, nbytes) in self.mapped.items():
            if start <= address < start + nbytes:
                return start, handle, nbytes
        return None

    def _free_if_unused(self, handle):
        is_mapped = any(handle == other for other, _ in self.mapped.values())
        if not is_mapped and not self.allocations[handle].num_retained:
            del self.allocations[handle]

    # -- the driver's functions --

    def __getattr__(self, name):
        if name.startswith("cu"):
            return lambda *arguments: OK
        raise AttributeError(name)

    def cuGetErrorName(self, status, name):
        name._obj.value = NAMES[status]
        return OK

    def cuMemGetAddressRange_v2(self, base, nbytes, address):
        found = self._mapping_at(address.value)
        places = [(start, size) for start, size in self.legacy.items()]
        if found is not None and found[0] in self.readable:
            places.append((found[0], found[2]))
        for start, size in places:
            if start <= address.value < start + size:
                base._obj.value, nbytes._obj.value = start, size
                return OK
        return NOT_FOUND

    def cuIpcGetMemHandle(self, handle, address):
        return OK if address.value in self.legacy else INVALID_VALUE

    def cuMemRetainAllocationHandle(self, handle, address):
        found = self._mapping_at(address.value or 0)
        if found is None:
            return INVALID_VALUE
        handle._obj.value = found[1]
        self.allocations[found[1]].num_retained += 1
        return OK

    def cuMemGetAllocationPropertiesFromHandle(self, prop, handle):
        if handle.value not in self.allocations:
            return INVALID_VALUE
        prop._obj.requestedHandleTypes = self.allocations[handle.value].types
        return OK

    def cuMemExportToShareableHandle(self, shared, handle, kind, flags):
        self.calls["export"] += 1
        allocation = self.allocations.get(handle.value)
        if allocation is None or not allocation.types & kind:
            return INVALID_VALUE
        if kind == 8:
            ctypes.memmove(shared, handle.value.to_bytes(64, "little"), 64)
            return OK
        fd = os.memfd_create("segment")
        self.files[os.fstat(fd).st_ino] = handle.value
        shared._obj.value = fd
        return OK

    def cuMemImportFromShareableHandle(self, handle, shared, kind):
        if kind == 8:
            number = int.from_bytes(ctypes.string_at(shared, 64), "little")
        else:
            number = self.files.get(os.fstat(shared.value or 0).st_ino, 0)
        if number not in self.allocations:
            return UNKNOWN
        self.allocations[number].num_retained += 1
        handle._obj.value = number
        return OK

    def cuMemRelease(self, handle):
        allocation = self.allocations.get(handle.value)
        if allocation is None or not allocation.num_retained:
            return INVALID_VALUE
        allocation.num_retained -= 1
        self._free_if_unused(handle.value)
        return OK

    def cuMemAddressReserve(self, address, nbytes, alignment, wanted, flags):
        if nbytes.value % GRANULARITY:
            return INVALID_VALUE
        address._obj.value = self._reserve(nbytes.value)
        return OK

    def cuMemAddressFree(self, address, nbytes):
        start, stop = address.value, address.value + nbytes.value
        if self.reserved.get(start) != nbytes.value or any(start <= a < stop for a in self.mapped):
            return INVALID_VALUE
        del self.reserved[start]
        return OK

    def cuMemMap(self, address, nbytes, offset, handle, flags):
        start, stop = address.value, address.value + nbytes.value
        allocation = self.allocations.get(handle.value)
        is_reserved = any(a <= start and stop <= a + n for a, n in self.reserved.items())
        is_taken = any(a < stop and start < a + n for a, (_, n) in self.mapped.items())
        if allocation is None or not is_reserved or is_taken:
            return INVALID_VALUE
        if nbytes.value != allocation.nbytes:
            return NOT_SUPPORTED
        self.mapped[start] = handle.value, nbytes.value
        return OK

    def cuMemSetAccess(self, address, nbytes, descriptor, count):
        start, stop = address.value, address.value + nbytes.value
        covered = sum(n for a, (_, n) in self.mapped.items() if start <= a and a + n <= stop)
        if covered != nbytes.value:
            return INVALID_VALUE
        self.access[start, stop] = descriptor._obj.location.id
        self.readable |= {at for at in self.mapped if start <= at < stop}
        return OK

    def cuMemUnmap(self, address, nbytes):
        handle, size = self.mapped.get(address.value, (None, None))
        if size != nbytes.value:
            return INVALID_VALUE
        del self.mapped[address.value]
        self.readable.discard(address.value)
        self._free_if_unused(handle)
        return OK
