"""Two workers with pumped data paths over real UCX, in one process and one thread, and reads between them."""

import time
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import numpy as np

from kvconnector.config import ConnectorConfig, ControlConfig, PeerConfig, StagingConfig
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.export import export_pools
from kvconnector.datapath.pump.copies_cpu import CpuCopies
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.datapath.pump.digests import ROOM_BYTES, Digests
from kvconnector.datapath.staging import SlotPool
from kvconnector.session import events as ev
from kvconnector.session.lease import Send
from kvconnector.session.link import Link
from kvconnector.session.load import RankRead
from kvconnector.transport.ucx import open_ucx_transport
from kvconnector.wire import messages as m
from tests.support.waiting import until
from tests.unit.datapath.caches import BLOCKS, Caches, Shape

QUARANTINE_S = 60.0
SETTINGS = ConnectorConfig(
    engine_id="one of two",
    control=ControlConfig(insecure=True),
    staging=StagingConfig(spin_s=20e-6),
    peer=PeerConfig(timeout_s=QUARANTINE_S),
)


class Side(Caches):
    """A worker's caches and its data path."""

    def __init__(
        self,
        shape,
        *,
        slot_bytes,
        num_slots,
        seed,
        min_streamed_bytes=1 << 20,
        clock=time.monotonic,
        direct=False,
        paths=SETTINGS.paths,
        is_checked=False,
        num_threads=1,
        **transport,
    ):
        super().__init__(shape, seed=seed)
        self.transport = open_ucx_transport(**transport)
        copies = CpuCopies(
            self.pools,
            slot_bytes,
            min_streamed_bytes=min_streamed_bytes,
            num_threads=num_threads,
            min_shared_bytes=0,
        )
        copies.digests = Digests("cpu", slot_bytes) if is_checked else None
        room_bytes = ROOM_BYTES if is_checked else 0
        board = LeaseBoard() if direct else None
        self.path = DataPath(
            msgspec.structs.replace(SETTINGS, paths=paths),
            self.transport,
            copies,
            board=board,
            export=export_pools(self.pools, board) if board else None,
            why_reads_packed="" if direct else "paths.direct is never",
            send_slots=SlotPool(num_slots, slot_bytes + room_bytes, "cpu"),
            recv_slots=SlotPool(num_slots, slot_bytes + room_bytes, "cpu"),
            clock=clock,
        )

    def step(self):
        """Take a step. Returns the events since the last call."""
        self.path.step()
        events = list(self.path.events)
        self.path.events.clear()
        return events


READS = {}  # the newest of each number
LINKS = {"p": Link(1)}  # the newest one


def receive_of(read_id, half, *, transfer="", remote_blocks=()):
    """The consumer's half of a read, which follows the prompt of a transfer without a secret."""
    load = SimpleNamespace(key=m.TransferKey(transfer_id=transfer, secret=""), is_followed=True)
    halves = half.source, half.blocks, remote_blocks
    READS[read_id] = RankRead(read_id, load, SimpleNamespace(link=LINKS["p"]), *halves)
    return READS[read_id]


def _number_of(event):
    """Return the number of the read that an event is about; for a send, that of the consumer's posted read."""
    return (event.send if isinstance(event, ev.SendOver) else event).read.read_id


class Pair:
    """Producer `p` and consumer `d`, connected and warm. `KNOBS` are both sides' default settings."""

    KNOBS: ClassVar = {"slot_bytes": 1 << 12, "num_slots": 3}

    @classmethod
    def connect(cls, source=None, destination=None, **knobs):
        """Connect a producer with data and a consumer with zeros, with the same shape by default."""
        knobs, source = {**cls.KNOBS, **knobs}, source or Shape()
        return cls(Side(source, seed=1, **knobs), Side(destination or source, seed=None, **knobs))

    def __init__(self, p, d):
        self.p, self.d = p, d
        self.events = []
        self.to_d, self.to_p = Link(-1), Link(1)
        LINKS["p"] = self.to_p
        tag, nbytes = d.path.receives.expect_warm_up(self.to_p)
        hello = {"transport_address": d.transport.address, "warm_up_tag": tag}
        p.path.sends.open_endpoint(self.to_d, SimpleNamespace(**hello, warm_up_bytes=nbytes))
        assert self.until(lambda: self.find(ev.WarmedUp)) == ev.WarmedUp(self.to_p)

    def step(self):
        for side in (self.p, self.d):
            side.path.pump(2e-4)
            self.events += side.step()

    def until(self, condition):
        return until(condition, self.step, lambda: self.events)

    def find(self, kind, read_id=None):
        found = (event for event in self.events if isinstance(event, kind))
        return next((e for e in found if read_id is None or read_id == _number_of(e)), None)

    def ask(self, read_id, receive):
        """Submit a receive and wait until it is posted."""
        self.d.path.receives.submit(receive_of(read_id, receive))
        return self.until(lambda: self.find(ev.ReceivePosted, read_id))

    def serve(self, posted, send):
        """Let the producer send a read that the consumer has posted. Returns the send."""
        begun = Send(self.to_d, None, posted.read, send.source, send.blocks, 0.0)
        self.p.path.sends.submit(begun)
        return begun

    def stop(self, read_id):
        """Stop the consumer's read."""
        READS[read_id].is_stopped = True
        self.d.path.reads.stop(READS[read_id])

    def check_arrived(self, source, destination, tokens, heads):
        """Check that the consumer's blocks hold the producer's tokens of these heads, and otherwise zeros."""
        found = self.d.dense(destination, range(len(destination) * self.d.shape.block))
        expected, part = np.zeros_like(found), slice(heads.start, heads.stop)
        expected[:, part, tokens.start : tokens.stop] = self.p.dense(source, tokens)[:, part]
        np.testing.assert_array_equal(found, expected)

    def close(self):
        self.p.path.close()
        self.d.path.close()


def both_programs(pair, tokens, **cut):
    """Return blocks and halves of a read of `tokens` from the producer's blocks, last first, to the consumer's."""
    source = list(range(BLOCKS))[::-1][: -(-tokens.stop // pair.p.shape.block)]
    destination = list(range(BLOCKS))[: -(-tokens.stop // pair.d.shape.block)]
    return (
        source,
        destination,
        pair.p.program(source, tokens, order="NHD", **cut),
        pair.d.program(destination, tokens, order="NHD", **cut),
    )


def slots_are_free(pair):
    halves = [half for side in (pair.p, pair.d) for half in (side.path.sends, side.path.receives)]
    return all(half.slots.num_free == len(half.slots.rows) for half in halves)
