"""Pack and unpack: the re-layout kernel between pools and slots, and when it is through."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program
from kvconnector.datapath.pools import Pools
from kvconnector_kernels.relayout import PackedSide, PagedSide, relayout, upload_block_ids


class Fence(Protocol):
    """Something that is over at some time."""

    def query(self) -> bool:
        """Whether it is over; never waits."""


class _Over:
    """What ran synchronously."""

    def query(self) -> bool:
        return True


OVER = _Over()


class BoundProgram:
    """A program whose block ids are where the kernels read them: uploaded once, used by every chunk."""

    __slots__ = ("block_ids", "program")

    def __init__(self, program: Program, block_ids: list[Any]) -> None:
        self.program = program
        self.block_ids = block_ids


class Copier:
    """Copies chunks between a worker's pools and its slots. On a GPU, on a stream of its own.

    `max_programs` caps the Triton kernel's programs; 0 is no cap.
    What an engine enqueued on its GPU before it spoke of a request may still write the request's blocks, or read them
    for their former owner: `order_after` keeps the copies behind it. On the CPU the engine's kernels are through when
    they return.
    """

    def __init__(self, pools: Pools, *, max_programs: int) -> None:
        self._pools = pools
        self._max_programs = max_programs or None
        self._stream: Any = None
        if pools.device == "cpu":
            from kvconnector_kernels.relayout import warm_up

            warm_up()
        else:
            import torch

            self._stream = torch.cuda.Stream(device=pools.device)

    def order_after(self, event: Any) -> None:
        """Run the copies that are called for from now on after a CUDA event of the engine's. No effect on the CPU."""
        if self._stream is not None:
            self._stream.wait_event(event)

    def bind(self, program: Program) -> BoundProgram:
        """Bring the program's block ids to the device.

        Raises:
            BlockIdsError: an id outside its pool.
        """
        with self._on_stream():
            ids = [
                upload_block_ids(blocks.block_ids, num_blocks=limit, device=self._pools.device)
                for blocks, limit in zip(program.blocks, self._pools.num_blocks, strict=True)
            ]
        return BoundProgram(program, ids)

    def pack(self, bound: BoundProgram, index: int, address: int, nbytes: int) -> Fence:
        """Chunk `index` from the pools into a slot."""
        paged, packed, counts = self._sides(bound, index, address, nbytes)
        return self._copy(paged, packed, counts)

    def unpack(self, bound: BoundProgram, index: int, address: int, nbytes: int) -> Fence:
        """Chunk `index` from a slot into the pools."""
        paged, packed, counts = self._sides(bound, index, address, nbytes)
        return self._copy(packed, paged, counts)

    def _sides(
        self, bound: BoundProgram, index: int, address: int, nbytes: int
    ) -> tuple[PagedSide, PackedSide, tuple[int, int, int]]:
        chunk: npt.NDArray[np.void] = bound.program.chunks[index]
        segment = bound.program.segments[int(chunk["segment"])]
        table = self._pools.tables[segment.group, segment.family]
        blocks = bound.program.blocks[segment.group]
        token_start, runs = segment.paged_tokens(
            int(chunk["token_start"]), blocks, table.block_size
        )
        paged = PagedSide(
            table=table,
            block_ids=bound.block_ids[segment.group],
            part_start=segment.first_row + int(chunk["part_start"]),
            head_start=segment.head_start,
            token_start=token_start,
            runs=runs,
        )
        packed = PackedSide(
            address=address,
            nbytes=nbytes,
            order=segment.order,  # type: ignore[arg-type]  # the wire admits the three orders only
            device=self._pools.device,
        )
        return paged, packed, (int(chunk["num_parts"]), segment.num_heads, int(chunk["num_tokens"]))

    def _copy(
        self, src: PagedSide | PackedSide, dst: PagedSide | PackedSide, counts: tuple[int, int, int]
    ) -> Fence:
        with self._on_stream():
            relayout(
                src,
                dst,
                num_parts=counts[0],
                num_heads=counts[1],
                num_tokens=counts[2],
                max_programs=self._max_programs,
            )
            if self._stream is None:
                return OVER
            import torch

            event = torch.cuda.Event()
            event.record(self._stream)
            return event

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        import torch

        return torch.cuda.stream(self._stream)
