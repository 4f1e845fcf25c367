"""Host memory for encoders' outputs, which a scheduler shares with its workers, and the outputs that it holds.

An output is rows of the model's width, a wider one (DeepStack) several rows for each embedding, in blocks of
`BLOCK_ROWS`. So it is the cache of a sequence with one layer and one head, and moves between engines like one. vLLM's
workers copy outputs in and out, and a worker of ours in the scheduler's process moves them.

Ranks report through the memory's file, not through vLLM's outputs, since a runner that only encodes returns none: which
step each has executed, and in the place of an output's first block the number of the order by which it was saved. These
are system calls, so that they are not seen before the rows that they report.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from kvconnector.errors import ConfigError, TransportError

BLOCK_ROWS = 16
_STAMP = struct.Struct("<Q")
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class PoolShape:
    """Blocks of `BLOCK_ROWS` rows of `row_elements` numbers each, and the ranks that copy in and out."""

    num_blocks: int
    row_elements: int
    item_bytes: int
    num_ranks: int

    @classmethod
    def within(cls, nbytes: int, row_elements: int, item_bytes: int, num_ranks: int) -> PoolShape:
        """Return the largest pool of at most `nbytes`. Raises ConfigError: it would hold nothing."""
        block_bytes = BLOCK_ROWS * row_elements * item_bytes
        if nbytes < block_bytes:
            raise ConfigError(
                "the memory for encoder outputs is smaller than one block: raise ec_cpu_bytes",
                ec_cpu_bytes=nbytes,
                block_bytes=block_bytes,
            )
        return cls(nbytes // block_bytes, row_elements, item_bytes, num_ranks)

    @property
    def rows_at(self) -> int:
        """Where the rows begin in the file, after the reports: a number of each rank, then one of each block."""
        return -(-(self.num_ranks + self.num_blocks) * _STAMP.size // _PAGE) * _PAGE

    def blocks_for(self, shape: tuple[int, int]) -> int:
        """Return how many blocks an output of `[embeddings, width]` takes."""
        return -(-self.rows_for(shape) // BLOCK_ROWS)

    def rows_for(self, shape: tuple[int, int]) -> int:
        """Return how many rows an output of `[embeddings, width]` takes."""
        return -(-shape[0] * shape[1] // self.row_elements)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.rows_at + self.num_blocks * BLOCK_ROWS * self.row_elements * self.item_bytes


class EncoderMemory:
    """The memory, mapped here. `rows`: [num_blocks, 1, BLOCK_ROWS, row_elements]."""

    def __init__(self, fd: int, shape: PoolShape, dtype: torch.dtype) -> None:
        self.shape, self._fd = shape, fd
        self._memory = mmap.mmap(fd, shape.nbytes)
        flat = torch.frombuffer(self._memory, dtype=dtype, offset=shape.rows_at)
        self.rows = flat.view(shape.num_blocks, 1, BLOCK_ROWS, shape.row_elements)

    @classmethod
    def make(cls, shape: PoolShape, dtype: torch.dtype) -> EncoderMemory:
        """Make the memory. Raises TransportError: there is not enough."""
        try:
            # of another name than memory that a worker of ours may move to another file
            fd = os.memfd_create("kvconnector-encoder", os.MFD_CLOEXEC)
            os.ftruncate(fd, shape.nbytes)
            return cls(fd, shape, dtype)
        except OSError as error:
            raise TransportError(
                "no memory for encoder outputs", nbytes=shape.nbytes, reason=str(error)
            ) from error

    @property
    def path(self) -> str:
        """Where other processes of this host, user and pid namespace open it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @classmethod
    def open(cls, path: str, shape: PoolShape, dtype: torch.dtype) -> EncoderMemory:
        """Map the memory that the scheduler made. Raises ConfigError: this process cannot see it."""
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), shape, dtype)
        except OSError as error:
            raise ConfigError(
                "encoder outputs are in memory of the scheduler's process, which this worker does not see: both must"
                " run on one host, as one user and in one pid namespace",
                path=path,
                reason=str(error),
            ) from error

    def report_step(self, rank: int, number: int) -> None:
        """Report that this rank has executed a step, with its copies."""
        self._write(rank, number)

    @property
    def executed(self) -> int:
        """The number of the last step that all ranks have executed."""
        return min(map(self._read, range(self.shape.num_ranks)))

    def report_saved(self, block: int, number: int) -> None:
        """Report that the output whose first block this is has been saved, by order `number`."""
        self._write(self.shape.num_ranks + block, number)

    def saved(self, block: int) -> int:
        """Return the number of the order that saved the output whose first block this is."""
        return self._read(self.shape.num_ranks + block)

    def _write(self, place: int, number: int) -> None:
        os.pwrite(self._fd, _STAMP.pack(number), place * _STAMP.size)

    def _read(self, place: int) -> int:
        return int(_STAMP.unpack(os.pread(self._fd, _STAMP.size, place * _STAMP.size))[0])

    def save(self, blocks: list[int], output: torch.Tensor) -> None:
        """Copy an output in: [embeddings, width] of any device. Returns once it is there."""
        flat = output.detach().to(device="cpu", dtype=self.rows.dtype).reshape(-1)
        width = self.shape.row_elements * BLOCK_ROWS
        for number, block in enumerate(blocks):
            piece = flat[number * width : (number + 1) * width]
            self.rows[block].view(-1)[: len(piece)] = piece

    def load(self, blocks: list[int], shape: tuple[int, int], device: str) -> torch.Tensor:
        """Return a copy of an output on a device. Returns once the blocks are no longer read."""
        flat = self.rows[torch.tensor(blocks, dtype=torch.long)].reshape(-1)
        return flat[: shape[0] * shape[1]].view(shape).to(device)

    def close(self) -> None:
        """Close the file. The mapping stays as long as `rows` is used."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(eq=False)
class Output:
    """An encoder's output: its blocks and shape. It `is_ready` once they hold it. It stays while anything `uses` it."""

    blocks: list[int]
    shape: tuple[int, int]
    is_ready: bool = False
    uses: set[object] = field(default_factory=set)


class Outputs:
    """The outputs in a pool, by their identifier. Those that nothing uses make room for others, the longest idle one
    first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._held: OrderedDict[str, Output] = OrderedDict()

    def get(self, identifier: str) -> Output | None:
        """Return an output, which is then the most recent one."""
        output = self._held.get(identifier)
        if output is not None:
            self._held.move_to_end(identifier)
        return output

    def add(self, identifier: str, num_blocks: int, shape: tuple[int, int]) -> Output | None:
        """Return a new output that is not ready, or None: others in use leave no room."""
        idle = [name for name, each in self._held.items() if each.is_ready and not each.uses]
        room = len(self._free) + sum(len(self._held[name].blocks) for name in idle)
        if num_blocks > room:
            return None
        for name in idle:
            if len(self._free) >= num_blocks:
                break
            self.drop(name)
        output = Output([self._free.pop() for _ in range(num_blocks)], shape)
        self._held[identifier] = output
        return output

    def drop(self, identifier: str) -> None:
        """Forget an output, whose blocks nothing reads or writes."""
        output = self._held.pop(identifier, None)
        if output is not None:
            self._free += output.blocks
