"""The same deployments with direct reads: a consumer copies blocks while its producer releases, dies or freezes.

Real drivers and sessions, the real lease board and export; the copies are made here, a chunk a turn, so that everything
that can happen to a lease happens between two of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings

from kvconnector.datapath.base import TransferRecord
from kvconnector.datapath.direct.board import LeaseBoard, bucket_offset, is_valid
from kvconnector.datapath.direct.export import PoolExporter
from kvconnector.errors import LeaseExpiredError, PeerLostError, TransportError
from kvconnector.session import events as ev
from kvconnector.wire.export import BUCKET_BYTES
from kvconnector_kernels.relayout import PagedSide, relayout
from tests.property.test_session_world import Deployment
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

    def __init__(self, sending, pools, neighbours, kernel_turns):
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
        self._kernel_turns = kernel_turns
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
        self._unwritten[key] = (self._kernel_turns, num_tokens)

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
        super().__init__(**options)

    def make_datapath(self, config, pools, transport):
        sending = super().make_datapath(config, pools, transport)
        # at once, in the middle of a read, and not before the consumer has given up waiting
        kernel_turns = self.random.choice([0, 0, 5, 500])
        return DirectPath(sending, pools, self._neighbours, kernel_turns)

    def kill(self, engine, *, silently=False):
        super().kill(engine, silently=silently)
        for worker in engine.workers:
            worker.datapath.is_gone = True


class DirectDeployment(Deployment):
    """Whatever happens: what is loaded is what was granted, and no other block is touched."""

    make_world = DirectWorld


DirectDeployment.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestDirectDeployment = DirectDeployment.TestCase
