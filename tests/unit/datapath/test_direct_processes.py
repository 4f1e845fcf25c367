"""Direct reads on the CPU from another process: its bytes, its death, and exports that are not what they say."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from kvconnector.datapath.direct.process_memory import read_memory
from kvconnector.errors import PeerLostError, TransportError
from kvconnector.session import events as ev
from kvconnector_kernels.pump import records as r
from tests.unit.datapath.caches import BLOCKS, LARGE, Caches, Shape
from tests.unit.datapath.direct_pair import KEY, MANY_TOKENS, origin_of
from tests.unit.datapath.exporter import Exporter
from tests.unit.datapath.pump_pair import TO_P, Side

pytestmark = [pytest.mark.ucx, pytest.mark.integration]


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Exporter, Side]]]:
    """An exporting process with a lease on all of its blocks, and a consumer here."""
    started: list[tuple[Exporter, Side]] = []

    def make(shape: Shape, ours: Shape | None = None) -> tuple[Exporter, Side]:
        exporter = Exporter(shape, seed=5)
        side = Side(ours or shape, slot_bytes=1 << 12, num_slots=2, seed=None, direct=True)
        started.append((exporter, side))
        exporter.publish(KEY, MANY_TOKENS)
        return exporter, side

    yield make
    for exporter, side in started:
        exporter.close()
        side.path.close()


def submit(side: Side, theirs: Caches, tokens: range) -> tuple[list[int], list[int]]:
    """Read tokens of all blocks, last first there; the blocks there and here."""
    source, destination = list(range(BLOCKS))[::-1], list(range(BLOCKS))
    cut = {"order": "HND", "chunk_tokens": 64, "chunk_rows": 2}
    there = theirs.program(source, tokens, **cut)
    program = side.program(destination, tokens, **cut)
    side.path.submit_receive(1, program, origin_of(there, tokens))
    return source, destination


def run(side: Side) -> list[object]:
    """Until the read is over."""
    events: list[object] = []
    for _ in range(10_000):
        side.path.pump(1e-2, ())
        events += side.path.step()
        if any(isinstance(event, ev.ReceiveFinished | ev.ReceiveDrained) for event in events):
            return events
    raise AssertionError(f"the read does not end: {events}")


@pytest.mark.parametrize(
    "ours",
    [LARGE, Shape(layers=40, dim=64, block=32, blocks=24, layout="NHD")],
    ids=["alike", "another layout"],
)
def test_bytes_of_another_process(start: Callable[..., tuple[Exporter, Side]], ours: Shape) -> None:
    exporter, side = start(LARGE, ours)
    assert side.path.open_export(TO_P, exporter.export) == "rma"
    theirs, tokens = Caches(LARGE, seed=5), range(30, BLOCKS * 32)
    source, destination = submit(side, theirs, tokens)
    assert ev.ReceiveFinished(1) in run(side)
    np.testing.assert_array_equal(side.dense(destination, tokens), theirs.dense(source, tokens))


def test_process_that_dies_in_the_middle(start: Callable[..., tuple[Exporter, Side]]) -> None:
    exporter, side = start(LARGE)
    side.path.open_export(TO_P, exporter.export)
    submit(side, Caches(LARGE, seed=5), range(BLOCKS * 64))
    side.path.pump(0.0, ())
    assert side.path.machine.is_active  # some batches are here, others are not
    exporter.kill()
    failed = next(event for event in run(side) if isinstance(event, ev.ReceiveFailed))
    assert isinstance(failed.error, PeerLostError)
    side.path.close_export(TO_P)


def test_process_that_dies_before_its_lease_is_looked_up_again(
    start: Callable[..., tuple[Exporter, Side]], monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, side = start(Shape())
    side.path.open_export(TO_P, exporter.export)
    submit(side, Caches(Shape(), seed=5), range(8))
    while (side.path.machine.reads.rows["phase"] == r.RUNNING).any():
        side.path.pump(1e-3, ())
    exporter.kill()
    failed = next(event for event in run(side) if isinstance(event, ev.ReceiveFailed))
    assert isinstance(failed.error, PeerLostError)


def test_process_that_died_before_a_read_leaves_it_to_be_sent(
    start: Callable[..., tuple[Exporter, Side]],
) -> None:
    exporter, side = start(Shape())
    side.path.open_export(TO_P, exporter.export)
    exporter.kill()
    submit(side, Caches(Shape(), seed=5), range(8))
    assert any(isinstance(event, ev.ReceivePosted) for event in side.path.step())
    side.path.stop_receive(1)
    side.path.drain_receive(1, None)


def test_process_that_dies_while_a_read_waits_for_its_lease(
    start: Callable[..., tuple[Exporter, Side]],
) -> None:
    exporter, side = start(Shape())
    side.path.open_export(TO_P, exporter.export)
    exporter.retract(KEY)
    submit(side, Caches(Shape(), seed=5), range(8))
    exporter.kill()
    events: list[object] = []
    for _ in range(10_000):
        side.path.pump(1e-3, ())
        events += side.path.step()
        if events:
            break
    assert isinstance(events[0], ev.ReceivePosted)
    side.path.stop_receive(1)
    side.path.drain_receive(1, None)


def test_exports_that_are_not_what_they_say(start: Callable[..., tuple[Exporter, Side]]) -> None:
    exporter, side = start(Shape())
    for change, error, text in (
        ({"nonce": bytes(16)}, TransportError, "another process"),
        ({"pid": os.getpid()}, TransportError, "another process|no memory"),
        ({"nonce_address": 4096}, TransportError, "no memory there"),
        ({"device": "cuda"}, TransportError, "another kind of device"),
    ):
        with pytest.raises(error, match=text):
            side.path.open_export(TO_P, msgspec.structs.replace(exporter.export, **change))
    exporter.kill()
    with pytest.raises(PeerLostError):
        side.path.open_export(TO_P, exporter.export)


def test_memory_that_may_not_be_read() -> None:
    """Process 1 is another user's, or, where we may read it, has nothing at this address."""
    with pytest.raises(TransportError, match=r"does not let|no memory there"):
        read_memory(1, 4096, 8)
