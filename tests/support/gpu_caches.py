"""Caches in GPU memory, and kernels that delay a worker's copies."""

import random

import torch

from kvconnector.layout import GroupBlocks
from tests.support.fakes import FakeCaches

MAX_SLEEP_CYCLES = 1_000_000
"""Clock cycles of about half a millisecond."""


class GpuCaches(FakeCaches):
    """Caches in GPU memory; `arrays` are host copies. Writes use a stream of their own and wait for nothing."""

    def __init__(self, shape, rank, rng, device):
        super().__init__(shape, rank, rng)
        self.device = device
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            self._memory = {key: self._upload(array) for key, array in self.arrays.items()}
        self._stream.synchronize()

    def move(self, place):
        """Move to other memory: `place` copies a tensor there, and returns the copy."""
        with torch.cuda.stream(self._stream):
            self._memory = {key: place(tensor) for key, tensor in self._memory.items()}
        self._stream.synchronize()

    def restore(self):
        """Write all of the memory anew."""
        with torch.cuda.stream(self._stream):
            for key, array in self.arrays.items():
                self._memory[key].copy_(self._upload(array))
        self._stream.synchronize()

    def _upload(self, array):
        return torch.from_numpy(array.view(f"i{array.itemsize}")).to(self.device)

    def _address(self, key):
        return self._memory[key].data_ptr()

    def scribble(self, group, block_ids):
        super().scribble(group, block_ids)
        ids = list(block_ids)
        with torch.cuda.stream(self._stream):
            where = torch.tensor(ids, device=self.device)
            for key, array in self.arrays.items():
                self._memory[key].index_copy_(0, where, self._upload(array[ids]))
        self._stream.synchronize()

    def tokens(self, group, layer, part, block_ids):
        array = self.arrays[group, layer, part]
        with torch.cuda.stream(self._stream):
            array[...] = self._memory[group, layer, part].cpu().numpy().view(array.dtype)
        return super().tokens(group, layer, part, block_ids)


class Sleeper:
    """Delays a worker's next copies by a kernel that sleeps for a random time."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._stream = torch.cuda.Stream("cuda:0")

    def delay(self, worker):
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._random.randrange(MAX_SLEEP_CYCLES))
            event = torch.cuda.Event()
            event.record(self._stream)
        copies = worker.datapath.copies
        counts = [min(count, 1 << 16) for count in copies.pools.num_blocks]
        every_block = tuple(GroupBlocks.of(range(count)) for count in counts)
        copies.order_after(event, [every_block])
