"""Direct reads between GPUs' pools: of another process on this GPU or on another, and of this process."""

import os

import numpy as np
import pytest
from msgspec.structs import replace

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.pump.opening import open_datapath
from kvconnector.errors import PeerLostError, TransportError
from kvconnector.planning import GroupBlocks
from kvconnector.session import events as ev
from kvconnector.session.link import Link
from kvconnector.transport.ucx import open_ucx_transport
from tests.support.waiting import until
from tests.unit.datapath.caches import BLOCKS, Caches, Shape
from tests.unit.datapath.direct_pair import KEY, MANY_TOKENS, direct_read
from tests.unit.datapath.exporter import CONTAINER, Exporter
from tests.unit.datapath.pump_pair import LINKS

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

SLOT_BYTES = 1 << 20
OURS = "cuda:0"

on_one_gpu = pytest.param("cuda:0", id="same GPU", marks=pytest.mark.gpu)
on_another_gpu = pytest.param("cuda:1", id="other GPU", marks=pytest.mark.multi_gpu)
places = pytest.mark.parametrize("place", [on_one_gpu, on_another_gpu])


class Consumer(Caches):
    """Zeroed caches on a GPU, and a pump that reads directly whatever it can."""

    def __init__(self, shape, *, max_programs=0, folder=""):
        super().__init__(shape, seed=None, device=OURS)
        settings = {
            "engine_id": "d",
            "role": "consumer",
            "control": {"insecure": True},
            "staging": {"chunk_bytes": SLOT_BYTES, "max_programs": max_programs},
            "paths": {"direct": "always", "shared_folder": folder},
        }
        config = ConnectorConfig.from_mapping(settings)
        transport = open_ucx_transport()
        self.path = open_datapath(config, self.pools, transport)
        self.events = []

    def submit(self, read_id, theirs, tokens, heads=None, first_block=0):
        """Read tokens, from the last block of `theirs` downwards. Returns the blocks there and here."""
        source = list(range(theirs.shape.blocks))[::-1]
        destination = list(range(self.shape.blocks))
        cut = {"order": "HND", "chunk_tokens": 64, "chunk_rows": 3, "heads": heads}
        there = theirs.program(source, tokens, **cut)
        blocks = (GroupBlocks.of(source[first_block:], first_block),)
        here = self.program(destination, tokens, **cut)
        self.path.reads.submit(direct_read(read_id, there, here, tokens, remote_blocks=blocks))
        return source, destination

    def until_over(self, read_id):
        """Step until a read is over. Returns the event that ends it."""
        kinds = ev.ReceiveFinished | ev.ReceiveFailed | ev.ReceiveStopped

        def step():
            self.path.pump(1e-2)
            self.path.step()
            self.events += self.path.events
            self.path.events.clear()

        def end():
            assert not any(isinstance(each, ev.ReceivePosted) for each in self.events), "it is sent"
            ends = (each for each in self.events if isinstance(each, kinds))
            return next((each for each in ends if each.read.read_id == read_id), None)

        return until(end, step, lambda: self.events)


@pytest.fixture
def start():
    """Start an exporting process with a lease on all of its blocks, and a consumer here that has opened its export."""
    to_close = []

    def make(place, theirs, ours=None, *, max_programs=0, folder="", prefix=("env",)):
        exporter = Exporter(theirs, seed=5, device=place, folder=folder, prefix=prefix)
        to_close.append(exporter.close)
        consumer = Consumer(ours or theirs, max_programs=max_programs, folder=folder)
        consumer.link = LINKS["p"] = Link(1)
        # the consumer unmaps first
        to_close.insert(0, consumer.path.close)
        exporter.publish(KEY, MANY_TOKENS)
        assert consumer.path.reads.open(consumer.link, exporter.export) == "CUDA IPC"
        return exporter, consumer

    yield make
    for close in to_close:
        close()


def check(consumer, theirs, read_id, tokens, **window):
    """Read, and compare the whole pool: only the blocks of the read have changed."""
    before = consumer.dense(list(range(consumer.shape.blocks)), range(1 << 20))
    source, destination = consumer.submit(read_id, theirs, tokens, **window)
    ended = consumer.until_over(read_id)
    assert isinstance(ended, ev.ReceiveFinished), ended
    assert ended.path == "direct"
    assert ended.seconds > 0
    heads = window.get("heads") or range(theirs.shape.heads)
    expected = before.copy()
    expected[:, heads.start : heads.stop, tokens.start : tokens.stop] = theirs.dense(
        source, tokens
    )[:, heads.start : heads.stop]
    np.testing.assert_array_equal(consumer.dense(destination, range(1 << 20)), expected)


@places
@pytest.mark.parametrize(
    "theirs,ours",
    [("HND", "HND"), ("HND", "NHD"), ("NHD", "K-transposed"), ("K-transposed", "HND")],
)
def test_layouts_block_sizes_and_windows(start, place, theirs, ours):
    there = Shape(layers=2, heads=4, dim=16, block=16, blocks=BLOCKS, layout=theirs)
    here = Shape(layers=2, heads=4, dim=16, block=8, blocks=2 * BLOCKS, layout=ours)
    _, consumer = start(place, there, here)
    held = Caches(there, seed=5)
    check(consumer, held, 1, range(16 * BLOCKS))
    check(consumer, held, 2, range(5, 77), heads=range(1, 3))
    check(consumer, held, 3, range(37, 38), heads=range(3, 4), first_block=2)


@places
@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
def test_producer_in_another_container_is_read_by_a_folder_of_both(start, place, tmp_path):
    shape = Shape(layers=8, heads=8, dim=128, block=16, blocks=64)
    exporter, consumer = start(place, shape, folder=str(tmp_path), prefix=CONTAINER)
    held = Caches(shape, seed=5)
    check(consumer, held, 1, range(3, 1024))
    consumer.submit(2, held, range(1024))
    exporter.kill()
    assert isinstance(consumer.until_over(2).error, PeerLostError)


@places
def test_capped_programs_and_large_blocks(start, place):
    shape = Shape(layers=8, heads=8, dim=128, block=16, blocks=64)
    _, consumer = start(place, shape, max_programs=8)
    check(consumer, Caches(shape, seed=5), 1, range(3, 1024))


@places
def test_allocation_that_is_smaller_than_its_export_says_is_not_read(start, place):
    exporter, consumer = start(place, Shape(layers=1))
    consumer.path.reads.close(consumer.link)
    first, *others = exporter.export.allocations
    longer = replace(first, nbytes=first.nbytes + 1)
    with pytest.raises(TransportError, match="smaller than it says"):
        consumer.path.reads.open(
            consumer.link, replace(exporter.export, allocations=(longer, *others))
        )


@places
def test_a_killed_producer_fails_its_reads_but_not_the_gpu(start, place):
    shape = Shape(layers=8, heads=8, dim=128, block=16, blocks=64)
    exporter, consumer = start(place, shape)
    held = Caches(shape, seed=5)
    consumer.submit(1, held, range(1024))
    exporter.kill()
    ended = consumer.until_over(1)
    assert isinstance(ended.error, PeerLostError)
    consumer.path.reads.close(consumer.link)
    second = Exporter(shape, seed=5, device=place)
    try:
        second.publish(KEY, MANY_TOKENS)
        consumer.path.reads.open(consumer.link, second.export)
        check(consumer, held, 2, range(1024))
        consumer.path.reads.close(consumer.link)
    finally:
        second.close()
