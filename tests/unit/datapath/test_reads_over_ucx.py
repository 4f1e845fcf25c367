"""Direct reads over UCX's one-sided gets on the CPU, over tcp as between hosts, here in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnector.datapath.base import ReadOrigin
from kvconnector.datapath.pump import getting
from kvconnector.errors import (
    LeaseExpiredError,
    PeerLostError,
    TransferTimeoutError,
    TransportError,
)
from kvconnector.planning import GroupBlocks
from kvconnector.session import events as ev
from kvconnector.wire.export import ExportedRegion
from kvconnector_kernels.pump import gets as g
from kvconnector_kernels.pump import records as r
from tests.unit.datapath.caches import BLOCKS, LARGE, Shape
from tests.unit.datapath.direct_pair import KEY, MANY_TOKENS, both, give_up, origin_of
from tests.unit.datapath.producer_process import OVER_TCP, Producer
from tests.unit.datapath.pump_pair import DEADLINE_S, QUARANTINE_S, TO_P, Pair, Side, pairs_of

pytestmark = pytest.mark.ucx


class OverUcx(Pair):
    """Two workers that share nothing but tcp, the consumer with an endpoint to the producer."""

    KNOBS = OVER_TCP

    def __init__(self, p: Side, d: Side) -> None:
        super().__init__(p, d)
        self.endpoint = d.transport.connect(p.transport.address)

    def open(self, **changed: Any) -> str:
        export = self.p.path.export()
        assert export is not None
        export = msgspec.structs.replace(export, **changed)
        return self.d.path.open_export(TO_P, export, self.endpoint)

    def read(self, read_id: int, tokens: range) -> tuple[list[int], list[int]]:
        """Submit a read; the blocks at both sides."""
        source, destination, program, origin = both(self, tokens)
        self.d.path.submit_receive(read_id, program, origin)
        return source, destination


@pytest.fixture
def make_pair() -> Iterator[Callable[..., OverUcx]]:
    with pairs_of(OverUcx) as make:
        yield make


def test_read_arrives_without_being_asked_for(make_pair: Callable[..., OverUcx]) -> None:
    pair = make_pair()
    assert "rma, ucx" in pair.open()
    tokens = range(5, 40)
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    source, destination = pair.read(1, tokens)
    pair.until(lambda: pair.find(ev.ReceiveFinished, 1) is not None)
    np.testing.assert_array_equal(pair.d.dense(destination, tokens), pair.p.dense(source, tokens))
    (record,) = pair.d.path.take_records()
    assert (record.path, record.nbytes) == ("rma, ucx", 35 * 2 * 2 * 2 * 4 * 2)
    assert pair.find(ev.ReceivePosted) is None
    assert not pair.d.path.machine.is_active


@st.composite
def congruent_sides(draw: st.DrawFn) -> tuple[Shape, Shape, range, range]:
    """Sides whose blocks are of other lengths but stored in the same order; tokens and heads of a read."""
    layers, heads, dim = (draw(st.integers(1, limit)) for limit in (2, 3, 4))
    item, layout = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(["HND", "NHD", "HDN"]))
    lengths = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    source, destination = (
        Shape(layers, heads, dim, item, length, BLOCKS, layout) for length in lengths
    )
    limit = BLOCKS * min(lengths)
    start = draw(st.integers(0, limit - 1))
    tokens = range(start, draw(st.integers(start + 1, limit)))
    edges = draw(st.lists(st.integers(0, heads), min_size=2, max_size=2, unique=True))
    return source, destination, tokens, range(*sorted(edges))


@settings(max_examples=15)
@given(sides=congruent_sides())
def test_any_geometry_arrives_byte_for_byte(sides: tuple[Shape, Shape, range, range]) -> None:
    p_shape, d_shape, tokens, heads = sides
    pair = OverUcx.connect(p_shape, d_shape)
    try:
        pair.open()
        pair.p.path.publish_lease(KEY, MANY_TOKENS)
        source, destination, program, origin = both(pair, tokens, heads)
        pair.d.path.submit_receive(1, program, origin)
        pair.until(lambda: pair.find(ev.ReceiveFinished, 1) is not None)
        pair.check_arrived(source, destination, tokens, heads)
        assert pair.find(ev.ReceivePosted) is None
    finally:
        pair.close()


@pytest.mark.parametrize("published", ["nothing", "another lease", "fewer tokens"])
def test_read_whose_lease_is_not_published_is_asked_for(
    make_pair: Callable[..., OverUcx], published: str
) -> None:
    pair = make_pair()
    pair.open()
    if published != "nothing":
        key = KEY[::-1] if published == "another lease" else KEY
        pair.p.path.publish_lease(key, MANY_TOKENS if published == "another lease" else 39)
    pair.read(1, range(5, 40))
    pair.until(lambda: pair.find(ev.ReceivePosted, 1) is not None)
    give_up(pair, 1)
    assert not pair.d.path.take_records()


def test_lease_that_ends_during_the_read(make_pair: Callable[..., OverUcx]) -> None:
    pair = make_pair(LARGE)
    pair.open()
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    pair.read(1, range(BLOCKS * 64))
    pair.until(lambda: pair.find(ev.ReceiveAdvanced, 1) is not None)
    pair.p.path.retract_lease(KEY)
    pair.until(lambda: pair.find(ev.ReceiveDrained, 1) is not None)
    assert isinstance(pair.find(ev.ReceiveFailed, 1).error, LeaseExpiredError)
    assert pair.find(ev.ReceiveFinished) is None
    assert not pair.d.path.take_records()


def test_read_that_is_stopped_ends_when_nothing_writes_its_blocks(
    make_pair: Callable[..., OverUcx],
) -> None:
    pair = make_pair(LARGE)
    pair.open()
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    source, destination = pair.read(1, range(BLOCKS * 64))
    pair.until(lambda: pair.find(ev.ReceiveAdvanced, 1) is not None)
    pair.d.path.stop_receive(1)
    pair.until(lambda: pair.find(ev.ReceiveDrained, 1) is not None)
    assert pair.find(ev.ReceiveStopped, 1) is not None
    before = pair.d.dense(destination, range(BLOCKS * 64)).copy()
    assert not np.array_equal(before, pair.p.dense(source, range(BLOCKS * 64)))
    for _ in range(50):
        pair.step()
    np.testing.assert_array_equal(pair.d.dense(destination, range(BLOCKS * 64)), before)


def test_many_reads_take_turns(make_pair: Callable[..., OverUcx]) -> None:
    pair = make_pair()
    pair.open()
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    for read_id in range(1, 41):
        pair.read(read_id, range(read_id, 48))
    pair.until(lambda: all(pair.find(ev.ReceiveFinished, i) is not None for i in range(1, 41)))


class Frozen:
    """A consumer in the middle of a read of a producer that has stopped to answer."""

    def __init__(self, producer: Producer, **knobs: Any) -> None:
        self.producer = producer
        self.side = side = Side(LARGE, seed=None, **OVER_TCP, **knobs)
        self.events: list[Any] = []
        producer.warm_up(side.transport.address, *side.path.expect_warm_up(TO_P))
        self.until(lambda: self.find(ev.WarmedUp) is not None)
        self.endpoint = side.transport.connect(producer.address)
        side.path.open_export(TO_P, producer.export, self.endpoint)
        tokens, cut = range(BLOCKS * 64), {"order": "NHD", "chunk_tokens": 64, "chunk_rows": 3}
        program = side.program(list(range(BLOCKS)), tokens, **cut)
        side.path.submit_receive(1, program, origin_of(program, tokens))
        self.until(lambda: self.find(ev.ReceiveAdvanced) is not None)
        producer.freeze()
        (read,) = side.path._gets._active.values()
        num_done = -1
        while num_done != read.get.rows[g.NUM_DONE]:  # what was on its way is here
            num_done = read.get.rows[g.NUM_DONE]
            for _ in range(50):
                self.step()
        assert read.get.rows[g.NUM_UNDER_WAY]

    def step(self) -> None:
        self.side.path.pump(1e-3, ())
        self.events += self.side.path.step()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, self.events
            self.step()

    def find(self, kind: type) -> Any:
        return next((event for event in self.events if isinstance(event, kind)), None)


@pytest.fixture
def freeze() -> Iterator[Callable[..., Frozen]]:
    made: list[Frozen] = []

    def make(**knobs: Any) -> Frozen:
        made.append(Frozen(Producer(LARGE, KEY, MANY_TOKENS), **knobs))
        return made[-1]

    yield make
    for frozen in made:
        # first: it must not see that the consumer closes while it owes it answers, see `reads_memory`
        frozen.producer.kill()
        frozen.side.path.close()


@pytest.mark.integration
def test_producer_that_answers_no_more_is_given_up_some_time_after_a_stop(
    freeze: Callable[..., Frozen],
) -> None:
    skipped_s = [0.0]
    frozen = freeze(clock=lambda: time.monotonic() + skipped_s[0])
    frozen.side.path.stop_receive(1)
    for _ in range(5):
        frozen.step()
    assert frozen.find(ev.ReceiveStopped) is None  # its blocks may yet be written
    skipped_s[0] = QUARANTINE_S
    frozen.until(lambda: frozen.find(ev.ReceiveDrained) is not None)
    lost = frozen.find(ev.LinkLost)
    assert lost.link == TO_P
    assert isinstance(lost.error, TransferTimeoutError)
    frozen.side.path.close_export(TO_P)


@pytest.mark.integration
def test_closing_the_export_ends_its_reads(freeze: Callable[..., Frozen]) -> None:
    frozen = freeze()
    frozen.side.path.close_export(TO_P)
    frozen.side.transport.disconnect(frozen.endpoint)
    frozen.until(lambda: frozen.find(ev.ReceiveDrained) is not None)
    assert isinstance(frozen.find(ev.ReceiveFailed).error, PeerLostError)


@pytest.mark.integration
def test_producer_that_dies_fails_its_reads(freeze: Callable[..., Frozen]) -> None:
    frozen = freeze()
    frozen.producer.kill()
    frozen.until(lambda: frozen.find(ev.ReceiveDrained) is not None)
    assert isinstance(frozen.find(ev.ReceiveFailed).error, PeerLostError)
    frozen.side.transport.progress()
    with pytest.raises(PeerLostError):
        frozen.side.transport.endpoint_handle(frozen.endpoint)


@pytest.mark.integration
def test_worker_closes_with_reads_that_nobody_answers(
    freeze: Callable[..., Frozen], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = freeze()
    monkeypatch.setattr("kvconnector.datapath.pump.gets.RELEASE_S", 0.2)
    frozen.side.path.close()
    assert not frozen.side.path.machine.pulls.rows[:, r.PHASE].any()


def test_read_in_too_many_runs_is_sent(
    make_pair: Callable[..., OverUcx], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getting, "MAX_RUNS", 3)
    pair = make_pair()
    pair.open()
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    pair.read(1, range(5, 40))
    assert any(isinstance(event, ev.ReceivePosted) for event in pair.d.path.step())


def test_reads_are_sent_while_gets_are_timed(
    make_pair: Callable[..., OverUcx], caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(LARGE, always_direct=False)
    assert "being timed" in pair.open()
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    pair.read(1, range(5, 40))
    assert any(isinstance(event, ev.ReceivePosted) for event in pair.d.path.step())
    give_up(pair, 1)
    caplog.set_level("INFO", "kvconnector.datapath.pump.gets")
    pair.until(lambda: "us a run" in caplog.text)
    pair.read(2, range(64))
    pair.until(lambda: pair.find(ev.ReceivePosted, 2) or pair.find(ev.ReceiveFinished, 2))
    if pair.find(ev.ReceivePosted, 2):
        give_up(pair, 2)
    pair.until(lambda: not pair.d.path.machine.is_active)


@pytest.mark.parametrize("key", [bytes(8), bytes(8) + b"\xa3"], ids=["short", "kind 163"])
def test_export_with_a_key_that_is_none_is_refused(
    make_pair: Callable[..., OverUcx], key: bytes
) -> None:
    pair = make_pair()
    export = pair.p.path.export()
    assert export is not None
    regions = (
        *export.regions[:-1],
        ExportedRegion(
            address=export.regions[-1].address, nbytes=export.regions[-1].nbytes, key=key
        ),
    )
    with pytest.raises(TransportError, match="memory key"):
        pair.open(regions=regions)


def test_emulated_reads_are_refused(make_pair: Callable[..., OverUcx]) -> None:
    pair = make_pair(emulated_gets=False)
    with pytest.raises(TransportError, match="only emulate"):
        pair.open()


def test_only_a_watched_endpoint_is_read_over(make_pair: Callable[..., OverUcx]) -> None:
    pair = make_pair(peer_error_handling=False)
    with pytest.raises(TransportError, match="does not watch"):
        pair.open()


def test_nobody_on_this_host_reads_pools_that_are_for_others(
    make_pair: Callable[..., OverUcx],
) -> None:
    pair = make_pair()
    export = pair.p.path.export()
    assert export is not None
    local = Side(Shape(), slot_bytes=1 << 12, num_slots=3, seed=None, direct=True)
    with pytest.raises(TransportError, match="another process"):
        local.path.open_export(TO_P, msgspec.structs.replace(export, regions=()))
    local.path.close()


def test_origin_outside_the_pools_is_left_to_the_producer(
    make_pair: Callable[..., OverUcx],
) -> None:
    pair = make_pair()
    pair.open()
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    _, _, program, origin = both(pair, range(5, 40))
    blocks = (GroupBlocks.of([BLOCKS + 5] * len(origin.blocks[0].block_ids)),)
    outside = ReadOrigin(TO_P, origin.segments, blocks, KEY, origin.token_stop)
    pair.d.path.submit_receive(1, program, outside)
    assert any(isinstance(event, ev.ReceivePosted) for event in pair.d.path.step())
