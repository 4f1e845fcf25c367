"""The same deployments with direct reads: a consumer copies blocks while its producer releases, dies or freezes.

Real drivers and sessions, the real lease board and export; the copies are made here, a chunk a turn, so that everything
that can happen to a lease happens between two of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnector.datapath.base import TransferRecord
from kvconnector.datapath.direct.board import LeaseBoard, bucket_offset, is_valid
from kvconnector.datapath.direct.export import PoolExporter
from kvconnector.errors import LeaseExpiredError, PeerLostError, TransportError
from kvconnector.session import events as ev
from kvconnector.wire.export import BUCKET_BYTES
from kvconnector_kernels.relayout import PagedSide, relayout
from tests.property.test_session_world import Deployment
from tests.support.fakes import FakeEngine, attention_model, dense_of
from tests.support.world import World


@dataclass
class Read:
    """A direct read and how many of its chunks are here."""

    read_id: int
    program: object
    origin: object
    source: DirectPath
    num_copied: int = 0
    num_looks: int = 0


MAX_LOOKS = 20


class DirectPath:
    """A data path that also reads the pools of other workers of its world; all else is `sending`'s. A read whose lease
    is not published looks for it a few times, and is sent then.
    """

    def __init__(self, sending, pools, neighbours):
        self._sending = sending
        self.pools = pools
        self.board = LeaseBoard(num_buckets=1)
        self._exporter = PoolExporter(pools, self.board)
        self._neighbours = neighbours
        self._sources = {}
        self._reads = {}
        self._waiting = {}
        self._closing = {}
        self._unwritten = {}
        self.kernel_turns = 0
        self._events = []
        self._records = []
        self.is_gone = False
        neighbours[self.board.address] = self

    def __getattr__(self, name):
        return getattr(self._sending, name)

    def export(self):
        return self._exporter.message

    def publish_lease(self, key, num_tokens):
        """Once the kernels that fill the blocks are through."""
        self._unwritten[key] = (self.kernel_turns, num_tokens)

    def retract_lease(self, key):
        self._unwritten.pop(key, None)
        self.board.retract(key)

    def open_export(self, link, export):
        source = self._neighbours[export.board_address]
        if source.is_gone:
            raise TransportError("the producer's process is gone")
        self._sources[link] = source
        return "a chunk a turn"

    def close_export(self, link, then):
        del self._sources[link]
        self._closing[link] = then
        self._close_unread()
        for read in list(self._waiting.values()):
            if read.origin.link == link:
                self._send(read)

    def submit_receive(self, read_id, program, origin=None):
        if origin is None:
            self._sending.submit_receive(read_id, program)
        else:
            source = self._sources[origin.link]
            self._waiting[read_id] = Read(read_id, program, origin, source)
            self._look(self._waiting[read_id])

    def stop_receive(self, read_id):
        if not (self._reads.pop(read_id, None) or self._waiting.pop(read_id, None)):
            self._sending.stop_receive(read_id)
        else:
            self._events += [ev.ReceiveStopped(read_id), ev.ReceiveDrained(read_id)]

    def step(self):
        events, self._events = self._events, []
        self._write_ready()
        for read in list(self._waiting.values()):
            self._look(read)
        for read in list(self._reads.values()):
            events += self._go_on(read)
        self._close_unread()
        return events + self._sending.step()

    def take_records(self):
        records, self._records = self._records, []
        return records + self._sending.take_records()

    @property
    def num_busy_slots(self):
        return len(self._reads) + len(self._waiting) + self._sending.num_busy_slots

    def holds(self, origin):
        """What a consumer reads of this worker's board."""
        at = bucket_offset(origin.lease_key, self.board.num_buckets)
        bucket = memoryview(self.board._memory)[at : at + BUCKET_BYTES].tobytes()
        return is_valid(bucket, origin.lease_key, origin.token_stop)

    def _write_ready(self):
        for key, (turns, num_tokens) in list(self._unwritten.items()):
            self._unwritten[key] = (turns - 1, num_tokens)
            if turns <= 0:
                del self._unwritten[key]
                self.board.publish(key, num_tokens)

    def _look(self, read):
        read.num_looks += 1
        if read.source.is_gone or read.num_looks > MAX_LOOKS:
            self._send(read)
        elif read.source.holds(read.origin):
            self._reads[read.read_id] = self._waiting.pop(read.read_id)

    def _send(self, read):
        self._sending.submit_receive(read.read_id, self._waiting.pop(read.read_id).program)

    def _go_on(self, read):
        chunks = read.program.chunks
        if read.source.is_gone:
            return self._fail(read, PeerLostError("the process that is read is gone"))
        if read.num_copied < len(chunks):
            self._copy(read, chunks[read.num_copied])
            read.num_copied += 1
            return []
        if not read.source.holds(read.origin):
            return self._fail(read, LeaseExpiredError("the lease ended during the read"))
        del self._reads[read.read_id]
        nbytes = read.program.total_bytes
        self._records.append(TransferRecord(read.read_id, nbytes, 0.0, len(chunks), "rma"))
        return [ev.ReceiveFinished(read.read_id)]

    def _close_unread(self):
        for link in self._closing.keys() - {read.origin.link for read in self._reads.values()}:
            self._closing.pop(link)()

    def _fail(self, read, error):
        del self._reads[read.read_id]
        return [ev.ReceiveFailed(read.read_id, error), ev.ReceiveDrained(read.read_id)]

    def _copy(self, read, chunk):
        index = int(chunk["segment"])
        sides = [
            _side(pools, holder.segments[index], holder.blocks, chunk)
            for pools, holder in ((read.source.pools, read.origin), (self.pools, read.program))
        ]
        relayout(
            *sides,
            num_parts=int(chunk["num_parts"]),
            num_heads=read.program.segments[index].num_heads,
            num_tokens=int(chunk["num_tokens"]),
        )


def _side(pools, window, blocks, chunk):
    table, held = pools.tables[window.group, window.family], blocks[window.group]
    token_start, runs = window.paged_tokens(int(chunk["token_start"]), held, table.block_size)
    part_start = window.first_row + int(chunk["part_start"])
    return PagedSide(table, held.block_ids, part_start, window.head_start, token_start, runs)


class DirectWorld(World):
    """A world whose workers share a host."""

    def __init__(self, **options):
        self._neighbours = {}
        self.paths = []
        super().__init__(**options)

    def make_datapath(self, config, pools, transport):
        sending = super().make_datapath(config, pools, transport)
        self.paths.append(DirectPath(sending, pools, self._neighbours))
        return self.paths[-1]

    def kill(self, engine, *, silently=False):
        super().kill(engine, silently=silently)
        for worker in engine.workers:
            worker.datapath.is_gone = True


class DirectDeployment(Deployment):
    """Whatever happens: what is loaded is what was granted, and no other block is touched."""

    make_world = DirectWorld


DirectDeployment.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestDirectDeployment = DirectDeployment.TestCase


NEVER_TURNS = 1 << 30
MODEL = attention_model()
BLOCKS, NUM_TOKENS = [0, 1, 2], 12
FAULTS = {
    "nothing": lambda world, p, d: None,
    "withdrawn": lambda world, p, d: p.withdraw("r"),
    "expired": lambda world, p, d: world.clock.advance(40.0),
    "killed": lambda world, p, d: world.kill(p),
    "power cut": lambda world, p, d: world.kill(p, silently=True),
    "severed": lambda world, p, d: world.sever(p, d),
    "dropped": lambda world, p, d: d.drop("w"),
}


class Reading:
    """A consumer that begins to read a request's blocks, of a producer that gives them to others once they are free."""

    def __init__(self, seed=0, kernel_turns=0):
        staging = {"chunk_bytes": 16, "budget_bytes": 64 * 1024}
        self.world = DirectWorld(seed=seed, settings={"staging": staging})
        self.p = self.world.start(FakeEngine("p", MODEL), role="producer")
        self.d = self.world.start(FakeEngine("d", MODEL, block_sizes=(3,)), role="consumer")
        self.p.workers[0].datapath.kernel_turns = kernel_turns
        self.granted = self._dense(self.p, BLOCKS)
        offer = self.p.grant("r", [BLOCKS], NUM_TOKENS)
        self.path = self.d.workers[0].datapath
        self.d.want("w", offer)
        assert self.world.run(lambda: bool(self.path._sources), max_turns=50)
        self.d.load("w", offer, [[3, 4, 5, 6]], [range(NUM_TOKENS)])
        assert self.world.run(lambda: bool(self.path._reads or self.path._waiting), max_turns=50)
        self.output = None

    @property
    def is_waiting(self):
        """Whether it looks for the lease."""
        return bool(self.path._waiting)

    def turn(self):
        self.world.turn()
        if self.p.workers[0].poll().finished_sending:
            self.p.workers[0].caches.scribble(0, BLOCKS)
        output = self.d.workers[0].poll()
        if output.finished_recving:
            assert self.output is None
            self.output = output

    def end(self):
        """Turns until the load is over."""
        for _ in range(400):
            if self.output is not None:
                return self.output
            self.turn()
            self.world.clock.advance(0.3)
        raise AssertionError("the load did not end")

    @property
    def is_right(self):
        """Whether the consumer has what was granted."""
        loaded = self._dense(self.d, [3, 4, 5, 6])
        return all(np.array_equal(loaded[key], self.granted[key]) for key in self.granted)

    def _dense(self, engine, block_ids):
        return dense_of([worker.caches for worker in engine.workers], [block_ids], NUM_TOKENS)


@given(
    turns=st.integers(0, 60),
    fault=st.sampled_from(sorted(FAULTS)),
    seed=st.integers(0, 99),
    kernel_turns=st.integers(0, 200),
)
def test_whatever_happens_between_two_steps_a_load_that_succeeds_is_right(
    turns, fault, seed, kernel_turns
):
    reading = Reading(seed, kernel_turns)
    try:
        for _ in range(turns):
            reading.turn()
        FAULTS[fault](reading.world, reading.p, reading.d)
        output = reading.end()
        assert output.failed_recving or reading.is_right
        if fault == "nothing":
            assert [transfer.path for transfer in output.stats.transfers] in (["rma"], ["packed"])
    finally:
        reading.world.close()


def test_a_read_that_is_early_is_made_directly_once_its_lease_is_there():
    reading = Reading(kernel_turns=NEVER_TURNS)
    assert reading.is_waiting
    producer = reading.p.workers[0].datapath
    for _ in range(3):
        reading.turn()
    producer._unwritten = {key: (0, tokens) for key, (_, tokens) in producer._unwritten.items()}
    (transfer,) = reading.end().stats.transfers
    assert transfer.path == "rma"
    assert reading.is_right
    reading.world.close()


def test_a_read_whose_lease_is_not_there_in_time_is_sent():
    reading = Reading(kernel_turns=NEVER_TURNS)
    (transfer,) = reading.end().stats.transfers
    assert transfer.path == "packed"
    assert reading.is_right
    reading.world.close()


@pytest.mark.parametrize("fault", ["dropped", "killed", "power cut", "severed"])
def test_a_load_that_ends_while_its_read_waits_leaves_nothing_behind(fault):
    reading = Reading(kernel_turns=NEVER_TURNS)
    FAULTS[fault](reading.world, reading.p, reading.d)
    assert reading.end().failed_recving
    for _ in range(MAX_LOOKS):
        reading.turn()
    assert not reading.is_waiting
    assert reading.path.num_busy_slots == 0
    reading.world.close()


def test_a_lease_that_ends_between_two_copies_fails_the_load():
    reading = Reading()
    reading.p.withdraw("r")
    (reason,) = reading.end().failed_recving.values()
    assert reason.startswith("LeaseExpiredError")
    reading.world.close()
