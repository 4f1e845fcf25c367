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
    """An `Exporting` in an interpreter of its own, as CUDA requires, started by the command `prefix`."""

    def __init__(self, shape, *, seed, device="cpu", folder="", prefix=("env",)):
        maker = "tests.unit.datapath.exporter:Exporting"
        super().__init__(maker, shape, seed, device, folder, prefix=prefix)
        self.export = self.call("message")

    def close(self):
        """End it in good order, if it still lives."""
        if self.child.poll() is None:
            self.call("close")
        self.release()


class Exporting:
    """A worker whose caches have the content of `Caches(shape, seed=seed)`."""

    def __init__(self, shape, seed, device, folder):
        self._caches = Caches(shape, seed=seed, device=device)
        self._device = device
        self._board = LeaseBoard(None if device == "cpu" else writer_on(device))
        self.message = export_pools(self._caches.pools, self._board, folder)

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
