"""Whether the pump works here: a worker sends a small cache to itself, packed, unpacked and compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import DataEvent, Program, SegmentWindow
from kvconnector.datapath.pools import CacheGroup, Pools
from kvconnector.datapath.pump.copies import ChunkCopies
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.datapath.pump.machine import Pace
from kvconnector.datapath.pump.network import Network
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import TransportError
from kvconnector.layout import KVView
from kvconnector.planning import GroupBlocks
from kvconnector.planning.plan import CHUNK_DTYPE
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.topology import GroupGeometry, PartGeometry
from kvconnector.transport import Transport

_LAYERS, _HEADS, _DIM, _BLOCK, _BLOCKS = 4, 2, 64, 16, 8
_TOKENS = 41
_ITEM_BYTES = 2
SLOT_BYTES = 32 << 10
NUM_SLOTS = 2
_SENDER, _RECEIVER = LinkId(-1), LinkId(1)
_SOURCE, _DESTINATION = [2, 0, 3], [5, 7, 4]
_LIMIT_S = 0.01
TIMEOUT_S = 10.0


class TestCache:
    """A small cache on a device, `[layer, block, head, token, dim]`, whose first half of blocks is filled."""

    def __init__(self, device: str) -> None:
        self._device = device
        host = np.zeros((_LAYERS, _BLOCKS, _HEADS, _BLOCK, _DIM), np.uint16)
        filled = host[:, : _BLOCKS // 2]
        filled[:] = np.random.default_rng(1).integers(1, 1 << 16, filled.shape, np.uint16)
        self._memory: Any = host
        address = host.ctypes.data
        if device != "cpu":
            import torch

            self._memory = torch.from_numpy(host.view(np.int16)).to(device)
            address = self._memory.data_ptr()
        part = PartGeometry(
            name="latent",
            total_heads=_HEADS,
            head_start=0,
            head_stop=_HEADS,
            head_dim=_DIM,
            item_size_bytes=_ITEM_BYTES,
        )
        views = {
            layer: [
                KVView(
                    address + layer * host.strides[0], host.shape[1:], host.strides[1:], _ITEM_BYTES
                )
            ]
            for layer in range(_LAYERS)
        }
        geometry = GroupGeometry(block_size=_BLOCK, layers=tuple(range(_LAYERS)), parts=(part,))
        self.pools = Pools([CacheGroup(geometry, views)], device)

    def tokens(self, block_ids: list[int]) -> npt.NDArray[np.uint16]:
        """`[layer, head, token, dim]`, from the device."""
        memory = self._memory if self._device == "cpu" else self._memory.cpu().numpy()
        layers = memory[:, block_ids].transpose(0, 2, 1, 3, 4)
        found: npt.NDArray[np.uint16] = layers.reshape(_LAYERS, _HEADS, -1, _DIM)[:, :, :_TOKENS]
        return found


def check_pump(
    transport: Transport,
    network: Network,
    device: str,
    make_copies: Callable[[Pools, SlotPool], ChunkCopies],
    pace: Pace,
) -> None:
    """Send a read from a worker to itself. Raises TransportError: it failed, or took long, or brought other bytes."""
    cache = TestCache(device)
    send_slots, recv_slots = (SlotPool(NUM_SLOTS, SLOT_BYTES, device) for _ in range(2))
    path = DataPath(
        transport,
        network,
        make_copies(cache.pools, send_slots),
        device=device,
        send_slots=send_slots,
        recv_slots=recv_slots,
        window=NUM_SLOTS,
        quarantine_s=0.0,
        pace=pace,
    )
    try:
        # the first entry compiles the loop, which takes seconds and is no part of the test
        path.machine.run(0.0, wants_slots=False)
        _send_to_itself(path, transport, time.monotonic() + TIMEOUT_S)
    finally:
        path.abandon()
    if not np.array_equal(cache.tokens(_SOURCE), cache.tokens(_DESTINATION)):
        raise TransportError("the pump brought other bytes than were sent")


def _send_to_itself(path: DataPath, transport: Transport, deadline_s: float) -> None:
    events: list[DataEvent] = []

    def until(kind: type) -> Any:
        """Go on until an event of a kind has come."""
        while time.monotonic() < deadline_s:
            for event in events:
                if isinstance(event, kind):
                    return event
            path.pump(_LIMIT_S, ())
            events.extend(path.step())
        raise TransportError(
            "the pump's own transfer did not come to its end", awaited=kind.__name__
        )

    tag, nbytes = path.expect_warm_up(_RECEIVER)
    path.open_endpoint(_SENDER, transport.address, tag, nbytes)
    until(ev.WarmedUp)
    path.submit_receive(1, _program(_DESTINATION))
    posted = until(ev.ReceivePosted)
    path.submit_send(
        _SENDER, 1, _program(_SOURCE), first_tag=posted.first_tag, window=posted.window
    )
    until(ev.ReceiveFinished)
    until(ev.SendFinished)


def _program(block_ids: list[int]) -> Program:
    segment = SegmentWindow(
        group=0,
        family=0,
        first_row=0,
        head_start=0,
        num_heads=_HEADS,
        part_token_bytes=_HEADS * _DIM * _ITEM_BYTES,
        order="NHD",
    )
    chunks = [
        (0, row, 2, start, min(24, _TOKENS - start))
        for row in range(0, _LAYERS, 2)
        for start in range(0, _TOKENS, 24)
    ]
    return Program((segment,), np.array(chunks, CHUNK_DTYPE), (GroupBlocks.of(block_ids),))
