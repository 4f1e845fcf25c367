"""Two workers with pumped data paths over real UCX, in one process and one thread, and reads between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvconnector.datapath.base import DataEvent, Program
from kvconnector.datapath.direct.share import PoolShare
from kvconnector.datapath.pump.copying_cpu import CpuCopies
from kvconnector.datapath.pump.datapath import PumpDataPath
from kvconnector.datapath.pump.getting import Gets
from kvconnector.datapath.pump.machine import Pace
from kvconnector.datapath.pump.pulling_cpu import CpuReads
from kvconnector.datapath.staging import SlotPool
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.topology import Stripe
from kvconnector.transport.ucx import open_ucx_transport
from tests.unit.datapath.caches import Caches, Shape

DEADLINE_S = 30.0
QUARANTINE_S = 60.0
PACE = Pace(spin_s=20e-6, look_s=20e-6, pause_s=0.0)
TO_D, TO_P = LinkId(-1), LinkId(1)


class Side(Caches):
    """A worker's caches and its data path."""

    def __init__(
        self,
        shape: Shape,
        *,
        slot_bytes: int,
        num_slots: int,
        seed: int | None,
        min_streamed_bytes: int = 1 << 20,
        min_in_place_bytes: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
        direct: bool = False,
        always_direct: bool = True,
        one_sided: bool = False,
        emulated_gets: bool = True,
        copy_threads: int = 1,
        **transport: Any,
    ) -> None:
        super().__init__(shape, seed=seed)
        self.transport = open_ucx_transport(one_sided=one_sided, **transport)
        self.path = PumpDataPath(
            self.transport,
            CpuCopies(
                self.pools,
                slot_bytes,
                min_streamed_bytes=min_streamed_bytes,
                min_in_place_bytes=min_in_place_bytes,
            ),
            share=PoolShare(self.pools, None, on_host=direct, rma=self.transport.rma)
            if direct or one_sided
            else None,
            reads=CpuReads(self.pools, num_threads=copy_threads) if direct else None,
            always_direct=always_direct,
            gets=Gets(self.transport, self.pools) if one_sided else None,
            always_one_sided=always_direct,
            emulated_gets=emulated_gets,
            device="cpu",
            send_slots=SlotPool(num_slots, slot_bytes, "cpu"),
            recv_slots=SlotPool(num_slots, slot_bytes, "cpu"),
            window=4,
            quarantine_s=QUARANTINE_S,
            pace=PACE,
            clock=clock,
        )


def along(program: Program, stripe: Stripe) -> Program:
    """The program of a side that has the tokens of a read evenly spaced."""
    segments = tuple(replace(s, stripe=stripe) for s in program.segments)
    return Program(segments, program.chunks, program.blocks)


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
