"""Whether the pump works here: a worker sends a small cache to itself, packed, unpacked and compared."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnector.cache.views import KVView
from kvconnector.datapath.base import DataEvent, Program, SegmentWindow
from kvconnector.datapath.pools import CacheGroup, Pools
from kvconnector.datapath.pump.copies import ChunkCopies
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.datapath.pump.machine import Pace
from kvconnector.datapath.pump.network import Network
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import TransportError
from kvconnector.planning import GroupBlocks
from kvconnector.planning.plan import CHUNK_DTYPE
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.topology import GroupGeometry, PartGeometry
from kvconnector.transport import Transport

_LAYERS, _HEADS, _DIM, _BLOCK, _BLOCKS = 4, 2, 64, 16, 4
_TOKENS = 41
_ITEM_BYTES = 2
SLOT_BYTES = 32 << 10
NUM_SLOTS = 2
_SENDER, _RECEIVER = LinkId(-1), LinkId(1)
_LIMIT_S = 0.01


class TestCaches:
    """Two small caches of one layout on a device, the first filled: `[block, head, token, dim]` in two groups."""

    def __init__(self, device: str) -> None:
        self._device = device
        shape = (2, _LAYERS, _BLOCKS, _HEADS, _BLOCK, _DIM)
        host = np.zeros(shape, np.uint16)
        host[0] = np.random.default_rng(1).integers(1, 1 << 16, shape[1:], np.uint16)
        self._memory: Any = host
        address = host.ctypes.data
        if device != "cpu":
            import torch

            self._memory = torch.from_numpy(host.view(np.int16)).to(device)
            address = self._memory.data_ptr()
        self.pools = Pools(
            [_group(address + half * host[0].nbytes, host.strides) for half in range(2)], device
        )

    def tokens(self, half: int, block_ids: list[int]) -> npt.NDArray[np.uint16]:
        """`[layer, head, token, dim]` of one of the caches, from the device."""
        memory = self._memory if self._device == "cpu" else self._memory.cpu().numpy()
        layers = memory[half][:, block_ids].transpose(0, 2, 1, 3, 4)
        found: npt.NDArray[np.uint16] = layers.reshape(_LAYERS, _HEADS, -1, _DIM)[:, :, :_TOKENS]
        return found


def _group(address: int, strides: tuple[int, ...]) -> CacheGroup:
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
            KVView.from_strides(
                address + layer * strides[1],
                (_BLOCKS, _HEADS, _BLOCK, _DIM),
                strides[2:],
                _ITEM_BYTES,
            )
        ]
        for layer in range(_LAYERS)
    }
    return CacheGroup(
        GroupGeometry(block_size=_BLOCK, layers=tuple(range(_LAYERS)), parts=(part,)), views
    )


def check_pump(
    transport: Transport,
    network: Network,
    caches: TestCaches,
    copies: ChunkCopies,
    slots: tuple[SlotPool, SlotPool],
    *,
    pace: Pace,
    deadline_s: float,
) -> None:
    """Send a read from a worker to itself. `copies` are those of `caches`, `slots` for sending and receiving.

    Raises:
        TransportError: it failed, took longer than `deadline_s`, or brought other bytes.
    """
    path = DataPath(
        transport,
        network,
        copies,
        device=caches.pools.device,
        send_slots=slots[0],
        recv_slots=slots[1],
        window=NUM_SLOTS,
        quarantine_s=0.0,
        pace=pace,
    )
    source, destination = [2, 0, 3], [1, 3, 0]
    try:
        # the first entry compiles the loop, which takes seconds and is no part of the test
        path.machine.run(0.0, wants_slots=False)
        _send_to_itself(path, transport, source, destination, time.monotonic() + deadline_s)
    finally:
        path.abandon()
    if not np.array_equal(caches.tokens(0, source), caches.tokens(1, destination)):
        raise TransportError("the pump brought other bytes than were sent")


def _send_to_itself(
    path: DataPath,
    transport: Transport,
    source: list[int],
    destination: list[int],
    deadline_s: float,
) -> None:
    until = _Stepper(path, deadline_s)
    tag, nbytes = path.expect_warm_up(_RECEIVER)
    path.open_endpoint(_SENDER, transport.address, tag, nbytes)
    until.event(ev.WarmedUp)
    path.submit_receive(1, _program(1, destination))
    posted = until.event(ev.ReceivePosted)
    path.submit_send(
        _SENDER, 1, _program(0, source), first_tag=posted.first_tag, window=posted.window
    )
    until.event(ev.ReceiveFinished)
    until.event(ev.SendFinished)


def _program(group: int, block_ids: list[int]) -> Program:
    segment = SegmentWindow(
        group=group,
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
    empty = GroupBlocks.of([])
    blocks = (
        (GroupBlocks.of(block_ids), empty) if group == 0 else (empty, GroupBlocks.of(block_ids))
    )
    return Program(segments=(segment,), chunks=np.array(chunks, CHUNK_DTYPE), blocks=blocks)


class _Stepper:
    """Steps a data path until something happens."""

    def __init__(self, path: DataPath, deadline_s: float) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._events: list[DataEvent] = []

    def event(self, kind: type) -> Any:
        """The first event of a kind."""
        while time.monotonic() < self._deadline_s:
            for event in self._events:
                if isinstance(event, kind):
                    return event
            self._path.pump(_LIMIT_S, ())
            self._events += self._path.step()
        raise TransportError(
            "the pump's own transfer did not come to its end", awaited=kind.__name__
        )
