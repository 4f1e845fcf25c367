"""Direct reads of pools whose memory has no IPC handle: it is mapped segment by segment, and comes and goes."""

import os
from contextlib import ExitStack, closing

import pytest
import torch
from msgspec.structs import replace

from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.datapath.direct.peer_memory import map_segments
from kvconnector.errors import PeerLostError, TransportError
from kvconnector.session import events as ev
from kvconnector.session.link import Link
from tests.support.gpu_segments import ALONE, FABRIC, FILE_DESCRIPTOR
from tests.support.waiting import until
from tests.unit.datapath.caches import Caches, Shape
from tests.unit.datapath.direct_pair import KEY, MANY_TOKENS
from tests.unit.datapath.exporter import CONTAINER, Exporter
from tests.unit.datapath.pump_pair import LINKS
from tests.unit.datapath.test_direct_reads_gpu import Consumer, check, places

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

MiB = 1 << 20
EXPANDABLE = ("env", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
SHAPE = Shape(layers=2, heads=8, dim=128, block=16, blocks=64)
"""Four parts of 2 MiB."""
UNLIKE = {"sizes": [4 * MiB, 2 * MiB, 2 * MiB, 6 * MiB], "lead": MiB + 512}
"""The pools begin and end in the middle of a segment, and so does each part."""
LARGE = Shape(layers=8, heads=8, dim=128, block=16, blocks=512)
"""Sixteen parts of 16 MiB: 256 MiB."""


@pytest.fixture
def start():
    """Start an exporting process with a lease on all of its blocks, and a consumer here. Returns both, unconnected."""
    with ExitStack() as stack:

        def make(place, shape=SHAPE, *, folder="", **options):
            exporter = Exporter(shape, seed=5, device=place, folder=folder, **options)
            stack.callback(exporter.close)
            consumer = Consumer(shape, folder=folder)
            stack.callback(consumer.path.close)  # first: the consumer unmaps before
            consumer.link = LINKS["p"] = Link(1)
            exporter.publish(KEY, MANY_TOKENS)
            return exporter, consumer

        yield make


def open_pools(consumer, export):
    consumer.path.reads.close(consumer.link)
    return consumer.path.reads.open(consumer.link, export)


def tokens_of(shape):
    return range(3, shape.block * shape.blocks - 5)


def is_sent(consumer, read_id, held, tokens):
    """Returns True if a read is left to the producer."""
    consumer.submit(read_id, held, tokens)

    def step():
        consumer.path.pump(1e-2)
        consumer.path.step()
        consumer.events += consumer.path.events
        consumer.path.events.clear()

    kinds = ev.ReceivePosted | ev.ReceiveFinished | ev.ReceiveFailed

    def first():
        found = (each for each in consumer.events if isinstance(each, kinds))
        return next((each for each in found if each.read.read_id == read_id), None)

    found = until(first, step, lambda: consumer.events)
    consumer.events.clear()
    return isinstance(found, ev.ReceivePosted)


@places
def test_expandable_segments(start, place):
    exporter, consumer = start(place, LARGE, prefix=EXPANDABLE)
    assert exporter.export.segments
    assert not exporter.export.allocations
    assert open_pools(consumer, exporter.export) == "CUDA file descriptors"
    held = Caches(LARGE, seed=5)
    check(consumer, held, 1, tokens_of(LARGE))
    check(consumer, held, 2, range(5, 77), heads=range(1, 3))


@places
def test_segments_of_unlike_sizes(start, place):
    exporter, consumer = start(place, segments=UNLIKE)
    export = exporter.export_again()
    assert sum(run.count for run in export.segments) == 4
    open_pools(consumer, export)
    check(consumer, Caches(SHAPE, seed=5), 1, tokens_of(SHAPE))


@places
@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
def test_segments_of_another_container(start, place, tmp_path):
    exporter, consumer = start(place, segments=UNLIKE, folder=str(tmp_path), prefix=CONTAINER)
    open_pools(consumer, exporter.export_again())
    held = Caches(SHAPE, seed=5)
    check(consumer, held, 1, tokens_of(SHAPE))
    exporter.kill()
    consumer.submit(2, held, tokens_of(SHAPE))
    assert is_sent(consumer, 3, held, tokens_of(SHAPE))


@places
def test_an_allocation_of_each_kind(start, place):
    """The pools of one worker, some of which have IPC handles."""
    exporter, consumer = start(place, segments={"sizes": [4 * MiB], "num_tensors": 2})
    export = exporter.export_again()
    assert export.segments
    assert export.allocations
    open_pools(consumer, export)
    check(consumer, Caches(SHAPE, seed=5), 1, tokens_of(SHAPE))


@pytest.mark.gpu
def test_memory_made_for_one_process_stays_packed(start):
    exporter, _ = start("cuda:0", segments=UNLIKE | {"handle_types": ALONE})
    with pytest.raises(TransportError, match="for this process alone"):
        exporter.export_again()


@pytest.mark.gpu
@pytest.mark.parametrize("types", [FABRIC, FABRIC | FILE_DESCRIPTOR])
def test_fabric_handles(start, types):
    """Where the machine has them."""
    try:
        exporter, consumer = start("cuda:0", segments=UNLIKE | {"handle_types": types})
    except TransportError as error:
        pytest.skip(f"no fabric handles here: {error}")
    kind = "fabric handles" if types == FABRIC else "file descriptors"
    assert open_pools(consumer, exporter.export_again()) == f"CUDA {kind}"
    check(consumer, Caches(SHAPE, seed=5), 1, tokens_of(SHAPE))


@pytest.mark.gpu
def test_places_that_share_a_page_stay_packed(start):
    """As in pools whose pages come and go: they hold the same empty page until they are used."""
    sizes = [2 * MiB] * 5
    exporter, _ = start("cuda:0", segments={"sizes": sizes})
    exporter.unmap([3])
    exporter.map([3], other=1)
    with pytest.raises(TransportError, match="same memory is mapped at two places"):
        exporter.export_again()


@places
def test_a_pool_that_grows(start, place):
    """Its last part has memory for half of its blocks, then for all."""
    exporter, consumer = start(place, segments={"sizes": [8 * MiB, 2 * MiB], "lead": MiB})
    held = Caches(SHAPE, seed=5)
    exporter.unmap([1])
    small = exporter.export_again()
    assert small.tables[0].num_blocks == SHAPE.blocks // 2
    open_pools(consumer, small)
    whole = tokens_of(SHAPE)
    assert is_sent(consumer, 1, held, whole)
    exporter.map([1])
    grown = exporter.export_again()
    assert grown.tables[0].num_blocks == SHAPE.blocks
    open_pools(consumer, grown)
    check(consumer, held, 2, whole)


@places
def test_memory_that_is_replaced_is_read_only_after_it_is_exported_again(start, place):
    """An engine sleeps and wakes. The consumer, which nobody has told, still maps the old memory, with old bytes."""
    exporter, consumer = start(place, segments=UNLIKE)
    open_pools(consumer, exporter.export_again())
    held, tokens = Caches(SHAPE, seed=5), tokens_of(SHAPE)
    check(consumer, held, 1, tokens)
    exporter.retract(KEY)
    exporter.withdraw()
    exporter.unmap(range(4))
    exporter.map(range(4))
    exporter.publish(KEY, MANY_TOKENS)
    assert is_sent(consumer, 2, held, tokens)
    with pytest.raises(TransportError, match="withdrawn"):
        open_pools(consumer, exporter.call("message"))
    open_pools(consumer, exporter.export_again())
    check(consumer, held, 3, tokens)


@pytest.mark.gpu
def test_memory_is_free_once_both_sides_have_unmapped_it(start):
    sizes = [32 * MiB] * 8
    exporter, consumer = start("cuda:0", LARGE, segments={"sizes": sizes})
    open_pools(consumer, exporter.export_again())
    held = Caches(LARGE, seed=5)
    check(consumer, held, 1, tokens_of(LARGE))
    exporter.retract(KEY)
    exporter.withdraw()
    before = exporter.free_bytes()
    exporter.unmap(range(8))
    assert exporter.free_bytes() - before < sum(sizes) // 2
    # its kernels may still read what its owner has freed
    consumer.submit(2, held, tokens_of(LARGE))
    consumer.path.reads.close(consumer.link)

    def step():
        consumer.path.pump(1e-2)
        consumer.path.step()

    until(lambda: not consumer.link.maps_pools, step, lambda: consumer.path)
    assert exporter.free_bytes() - before >= sum(sizes)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_segments_that_are_smaller_than_their_export_says(start):
    exporter, consumer = start("cuda:0", segments=UNLIKE)
    export = exporter.export_again()
    first, *others = export.segments
    larger = replace(first, nbytes=first.nbytes + 2 * MiB, address=first.address - 2 * MiB)
    with pytest.raises(TransportError, match="cannot be mapped"):
        consumer.path.reads.open(consumer.link, replace(export, segments=(larger, *others)))
    assert not consumer.link.maps_pools
    open_pools(consumer, export)
    check(consumer, Caches(SHAPE, seed=5), 1, tokens_of(SHAPE))


@pytest.mark.gpu
def test_a_process_reads_its_own_segments():
    """Both engines in one process: nothing tells the driver that it knows this memory already."""
    from tests.unit.datapath.exporter import Exporting

    with closing(Exporting(SHAPE, 5, "cuda:0", "", UNLIKE)) as exporting, ExitStack() as stack:
        export = exporting.export_again()
        ((address, nbytes, offset),), _ = map_segments(export, "cuda:0", "", stack)
        assert nbytes == sum(UNLIKE["sizes"])
        assert offset
        segment = CudaDriver().segment_at(address + offset)
        assert segment.address == address + offset


@places
def test_a_killed_producer_fails_its_reads_but_not_the_gpu(start, place):
    exporter, consumer = start(place, LARGE, prefix=EXPANDABLE)
    open_pools(consumer, exporter.export)
    held = Caches(LARGE, seed=5)
    consumer.submit(1, held, tokens_of(LARGE))
    exporter.kill()
    assert isinstance(consumer.until_over(1).error, PeerLostError)
    consumer.path.reads.close(consumer.link)
    with pytest.raises((PeerLostError, TransportError)):
        consumer.path.reads.open(consumer.link, exporter.export)
    torch.cuda.synchronize()
