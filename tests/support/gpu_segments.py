"""GPU memory that is mapped segment by segment, as allocators with sleep or growth do it, and tensors in it."""

import ctypes

import torch

from kvconnector.datapath.direct import cuda_driver

ALONE, FILE_DESCRIPTOR, FABRIC = 0, 1, 8
"""Handle types with which segments are created."""


class SegmentedMemory:
    """Segments of `sizes` bytes, one after another from `address` on, all mapped.

    `handle_types` are those that other processes may ask for. Sizes are multiples of the driver's granularity, 2 MiB.
    The first tensor begins `lead` bytes after `address`. `num_tensors` at most are placed here.
    """

    def __init__(self, device, sizes, *, handle_types=FILE_DESCRIPTOR, lead=0, num_tensors=1 << 30):
        self._driver = cuda_driver.CudaDriver()
        self._create = cuda_driver.load_libcuda("cuMemCreate").cuMemCreate
        self._index, self._device = int(device.partition(":")[2] or 0), device
        self._sizes, self._types, self._lead = sizes, handle_types, lead
        self._room = num_tensors
        self._driver.enter(self._index)
        self.address = self._driver.reserve(sum(sizes))
        for index in range(len(sizes)):
            self.map(index)

    def place(self, tensor):
        """Copy a tensor to here, unless there are enough. Returns the copy, of the same shape and strides."""
        self._room -= 1
        if self._room < 0:
            return tensor
        nbytes = tensor.untyped_storage().nbytes()
        view = _View(self.address + self._lead, tensor)
        assert self._lead + nbytes <= sum(self._sizes)
        self._lead += nbytes + -nbytes % 512
        copy = torch.as_tensor(view, device=self._device)
        assert copy.data_ptr() == view.__cuda_array_interface__["data"][0]
        return copy.copy_(tensor)

    def map(self, index):
        """Map a new segment there."""
        place = cuda_driver._Location(cuda_driver._ON_DEVICE, self._index)
        prop = cuda_driver._AllocationProp(1, self._types, place)
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(self._sizes[index])
        status = self._create(ctypes.byref(handle), size, ctypes.byref(prop), ctypes.c_uint64(0))
        self._driver.check(status, "no segment", handle_types=self._types)
        self.map_handle(index, handle)
        self._driver.library.cuMemRelease(handle)

    def map_handle(self, index, handle):
        """Map a segment of which the caller has a handle."""
        address = self.address + sum(self._sizes[:index])
        place = ctypes.c_uint64(address), ctypes.c_size_t(self._sizes[index]), ctypes.c_size_t(0)
        self._driver.call("no mapping", "cuMemMap", *place, handle, ctypes.c_uint64(0))
        self._driver.let_read(address, self._sizes[index], self._index)

    def map_again(self, index, other):
        """Map segment `other` at the place of segment `index`, too."""
        there = self.address + sum(self._sizes[:other])
        with self._driver._retained(there) as handle:
            self.map_handle(index, handle)

    def unmap(self, index):
        """Unmap a segment, and give its memory back."""
        torch.cuda.synchronize(self._index)
        address = self.address + sum(self._sizes[:index])
        self._driver.unmap_segment(address, self._sizes[index])


class _View:
    """What `torch.as_tensor` needs to know of memory that it does not own."""

    def __init__(self, address, tensor):
        item = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * item for stride in tensor.stride()),
            "typestr": f"<i{item}",
            "version": 3,
        }
