"""A producer worker in a process of its own that shares its pools, publishes leases, and can be killed."""

import ctypes

from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.cuda_driver import StreamWriter
from kvconnector.datapath.direct.export import export_pools
from kvconnector.layout import Watermark
from tests.support.remote import RemoteObject
from tests.unit.datapath.caches import Caches

CONTAINER = [
    "unshare",
    "--pid",
    "--ipc",
    "--net",
    "--mount",
    "--fork",
    "--kill-child",
    "--mount-proc",
]


class Exporter(RemoteObject):
    """An `Exporting` in an interpreter of its own, as CUDA requires, started by the command `prefix`. `segments` are
    arguments of `SegmentedMemory`, in which its caches then are.
    """

    def __init__(self, shape, *, seed, device="cpu", folder="", prefix=("env",), segments=None):
        maker = "tests.unit.datapath.exporter:Exporting"
        super().__init__(maker, shape, seed, device, folder, segments, prefix=prefix)
        self.export = self.call("message")

    def close(self):
        """End it in good order, if it still lives."""
        if self.child.poll() is None:
            self.call("close")
        self.release()


class Exporting:
    """A worker whose caches have the content of `Caches(shape, seed=seed)`."""

    def __init__(self, shape, seed, device, folder, segments=None):
        self._memory, place = None, None
        if segments is not None:
            from tests.support.gpu_segments import SegmentedMemory

            self._memory = SegmentedMemory(device, **segments)
            place = self._memory.place
        self._caches = Caches(shape, seed=seed, device=device, place=place)
        self._device, self._folder = device, folder
        self._board = LeaseBoard(None if device == "cpu" else writer_on(device))
        self.message = None
        if segments is None:
            self.export_again()

    def export_again(self):
        """Export the pools' memory as it is now. Returns the export."""
        self.message = export_pools(self._caches.pools, self._board, self._folder)
        return self.message

    def withdraw(self):
        """See `SharedMemory.withdraw`."""
        self._board.memory.withdraw()

    def unmap(self, indices):
        """Take memory away from the pools."""
        for index in indices:
            self._memory.unmap(index)

    def map(self, indices, *, other=None):
        """Give the pools new memory, with the content that they had; or at all places the same, segment `other`."""
        for index in indices:
            if other is None:
                self._memory.map(index)
            else:
                self._memory.map_again(index, other)
        if other is None:
            self._caches.restore()

    def free_bytes(self):
        """Return how much of the GPU's memory is free."""
        import torch

        return torch.cuda.mem_get_info(self._device)[0]

    def publish(self, key, num_tokens):
        self._board.publish(key, Watermark(num_tokens))
        self._synchronize()

    def retract(self, key):
        self._board.retract(key)
        self._synchronize()

    def close(self):
        self._board.close()

    def _synchronize(self):
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize(self._device)


def writer_on(device, stream=None):
    """Return a factory of lease board writers that use a stream of this thread's current device."""
    import torch

    torch.cuda.set_device(device)
    handle, context = (stream or torch.cuda.Stream()).cuda_stream, ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return lambda *place: StreamWriter(handle, context.value or 0, *place)
