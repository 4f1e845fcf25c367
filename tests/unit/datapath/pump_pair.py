"""Two workers with pumped data paths over real UCX, in one process and one thread, and reads between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvconnector.cache.views import KVView
from kvconnector.datapath.base import DataEvent, Program, SegmentWindow
from kvconnector.datapath.direct.share import PoolShare
from kvconnector.datapath.pools import CacheGroup, Pools
from kvconnector.datapath.pump.copying_cpu import CpuCopies
from kvconnector.datapath.pump.datapath import PumpDataPath
from kvconnector.datapath.pump.machine import Pace
from kvconnector.datapath.pump.pulling_cpu import CpuReads
from kvconnector.datapath.staging import SlotPool
from kvconnector.planning import GroupBlocks
from kvconnector.planning.plan import CHUNK_DTYPE
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.topology import GroupGeometry, PartGeometry
from kvconnector.transport.ucx import open_ucx_transport

DEADLINE_S = 30.0
PACE = Pace(spin_s=20e-6, look_s=20e-6, pause_s=0.0)
TO_D, TO_P = LinkId(-1), LinkId(1)


@dataclass(frozen=True)
class Shape:
    """A cache of one worker: `layers` layers of K and V."""

    layers: int = 2
    heads: int = 2
    dim: int = 4
    item: int = 2
    block: int = 4
    blocks: int = 12
    layout: str = "HND"


class Side:
    """A worker's caches and its data path."""

    def __init__(
        self,
        shape: Shape,
        *,
        slot_bytes: int,
        num_slots: int,
        seed: int | None,
        min_streamed_bytes: int = 1 << 20,
        direct: bool = False,
        **transport: Any,
    ) -> None:
        self.shape = shape
        self.arrays = [
            _allocate(shape, None if seed is None else seed + row)
            for row in range(2 * shape.layers)
        ]
        parts = tuple(
            PartGeometry(
                name=name,
                total_heads=shape.heads,
                head_start=0,
                head_stop=shape.heads,
                head_dim=shape.dim,
                item_size_bytes=shape.item,
            )
            for name in "kv"
        )
        geometry = GroupGeometry(
            block_size=shape.block, layers=tuple(range(shape.layers)), parts=parts
        )
        views = {
            layer: [_view_of(array) for array in self.arrays[2 * layer : 2 * layer + 2]]
            for layer in range(shape.layers)
        }
        self.pools = Pools([CacheGroup(geometry, views)], "cpu")
        self.transport = open_ucx_transport(**transport)
        self.path = PumpDataPath(
            self.transport,
            CpuCopies(self.pools, slot_bytes, min_streamed_bytes=min_streamed_bytes),
            share=PoolShare(self.pools, None) if direct else None,
            reads=CpuReads(self.pools) if direct else None,
            always_direct=True,
            device="cpu",
            send_slots=SlotPool(num_slots, slot_bytes, "cpu"),
            recv_slots=SlotPool(num_slots, slot_bytes, "cpu"),
            window=4,
            quarantine_s=60.0,
            pace=PACE,
        )

    def dense(self, block_ids: list[int], tokens: range) -> np.ndarray[Any, Any]:
        """A request's tokens, `[row, head, token, dim]`."""
        rows = [
            array[block_ids].transpose(1, 0, 2, 3).reshape(self.shape.heads, -1, self.shape.dim)
            for array in self.arrays
        ]
        return np.stack(rows)[:, :, tokens.start : tokens.stop]

    def program(
        self,
        block_ids: list[int],
        tokens: range,
        *,
        order: str,
        chunk_tokens: int,
        chunk_rows: int,
        heads: range | None = None,
    ) -> Program:
        """A read of `tokens`, cut without regard for anything."""
        heads = heads or range(self.shape.heads)
        per_token = len(heads) * self.shape.dim * self.shape.item
        chunks = [
            (
                0,
                row,
                min(chunk_rows, len(self.arrays) - row),
                start,
                min(chunk_tokens, tokens.stop - start),
            )
            for row in range(0, len(self.arrays), chunk_rows)
            for start in range(tokens.start, tokens.stop, chunk_tokens)
        ]
        return Program(
            segments=(SegmentWindow(0, 0, 0, heads.start, len(heads), per_token, order),),
            chunks=np.array(chunks, CHUNK_DTYPE),
            blocks=(GroupBlocks.of(block_ids),),
        )


class Pair:
    """Producer `p` and consumer `d`, connected and warm."""

    def __init__(self, p: Side, d: Side) -> None:
        self.p, self.d = p, d
        self.events: list[DataEvent] = []
        tag, nbytes = d.path.expect_warm_up(TO_P)
        p.path.open_endpoint(TO_D, d.transport.address, tag, nbytes)
        self.until(lambda: self.find(ev.WarmedUp) is not None)
        assert self.find(ev.WarmedUp) == ev.WarmedUp(TO_P)

    def step(self) -> None:
        for side in (self.p, self.d):
            side.path.pump(2e-4, ())
            self.events += side.path.step()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"events so far: {self.events}"
            self.step()

    def find(self, kind: type, read_id: int | None = None) -> Any:
        for event in self.events:
            if isinstance(event, kind) and read_id in (None, getattr(event, "read_id", None)):
                return event
        return None

    def ask(self, read_id: int, receive: Program) -> ev.ReceivePosted:
        """Submit a receive and wait until it is posted."""
        self.d.path.submit_receive(read_id, receive)
        self.until(lambda: self.find(ev.ReceivePosted, read_id) is not None)
        posted = self.find(ev.ReceivePosted, read_id)
        assert isinstance(posted, ev.ReceivePosted)
        return posted

    def serve(self, posted: ev.ReceivePosted, send: Program) -> None:
        """Let the producer stream a read that was asked for."""
        self.p.path.submit_send(
            TO_D, posted.read_id, send, first_tag=posted.first_tag, window=posted.window
        )

    def close(self) -> None:
        self.p.path.close()
        self.d.path.close()


def _allocate(shape: Shape, seed: int | None) -> np.ndarray[Any, Any]:
    """One part, `[block, head, token, dim]`; zeros without a seed."""
    dtype = np.dtype(f"u{shape.item}")
    sizes = {"b": shape.blocks, "h": shape.heads, "t": shape.block, "d": shape.dim}
    stored = {"HND": "bhtd", "NHD": "bthd", "HDN": "bhdt"}[shape.layout]
    array = np.zeros([sizes[axis] for axis in stored], dtype)
    if seed is not None:
        rng = np.random.default_rng(seed)
        array[...] = rng.integers(1, np.iinfo(dtype).max, array.shape, dtype, endpoint=True)
    return array.transpose([stored.index(axis) for axis in "bhtd"])


def _view_of(array: np.ndarray[Any, Any]) -> KVView:
    return KVView.from_strides(array.ctypes.data, array.shape, array.strides, array.itemsize)
