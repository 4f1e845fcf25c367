"""Direct reads on the CPU: a consumer's data path reads the pools of a producer's, here in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnector.datapath.base import ReadOrigin
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.errors import LeaseExpiredError
from kvconnector.planning import GroupBlocks
from kvconnector.session import events as ev
from kvconnector.topology import Stripe
from tests.unit.datapath.caches import BLOCKS, unlike_sides
from tests.unit.datapath.direct_pair import (
    KEY,
    MANY_TOKENS,
    DirectPair,
    both,
    give_up,
    only_consumer_steps,
    origin_of,
)
from tests.unit.datapath.pump_pair import STRIPES, TO_P, Striped, pairs_of

pytestmark = pytest.mark.ucx


@pytest.fixture
def make_pair() -> Iterator[Callable[..., DirectPair]]:
    with pairs_of(DirectPair) as make:
        yield make


@settings(max_examples=30)
@given(data=st.data())
def test_any_geometry_arrives_byte_for_byte(data: st.DataObject) -> None:
    p_shape, d_shape, tokens, window = data.draw(unlike_sides())
    cut = {"order": "NHD", "chunk_tokens": 7, "chunk_rows": 2, "heads": window}
    source, destination = (data.draw(st.permutations(range(BLOCKS))) for _ in range(2))
    # the producer's list begins with the first block that is needed
    first = tokens.start // p_shape.block if data.draw(st.booleans()) else 0
    pair = DirectPair.connect(p_shape, d_shape)
    try:
        program = pair.d.program(list(destination), tokens, **cut)
        theirs = pair.p.program(list(source), tokens, **cut)
        blocks = (GroupBlocks.of(list(source)[first:], first),)
        origin = ReadOrigin(TO_P, theirs.segments, blocks, KEY, tokens.stop)
        pair.p.path.publish_lease(KEY, MANY_TOKENS)
        pair.d.path.submit_receive(1, program, origin)
        only_consumer_steps(pair, 1, ev.ReceiveFinished)
        pair.check_arrived(list(source), list(destination), tokens, window)
    finally:
        pair.close()


@pytest.mark.parametrize("stripe", STRIPES)
@pytest.mark.parametrize("strided", ["source", "destination"])
def test_evenly_spaced_tokens_are_read(
    make_pair: Callable[..., DirectPair], strided: str, stripe: Stripe
) -> None:
    pair = make_pair(*Striped.SHAPES)
    read = Striped(pair, strided, stripe, order="NHD")
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    pair.d.path.submit_receive(1, read.receive, origin_of(read.send, read.members))
    only_consumer_steps(pair, 1, ev.ReceiveFinished)
    read.check_arrived()


@pytest.mark.parametrize("case", ["none", "retracted", "other blocks", "fewer tokens"])
def test_read_without_a_valid_lease_is_sent(
    make_pair: Callable[..., DirectPair], case: str
) -> None:
    pair = make_pair()
    tokens = range(20)
    _, _, program, origin = both(pair, tokens)
    if case == "fewer tokens":
        pair.p.path.publish_lease(KEY, 19)
    elif case != "none":
        pair.p.path.publish_lease(KEY, MANY_TOKENS)
    if case == "retracted":
        pair.p.path.retract_lease(KEY)
    if case == "other blocks":
        origin = ReadOrigin(TO_P, origin.segments, origin.blocks, KEY[::-1], 20)
    pair.d.path.submit_receive(1, program, origin)
    pair.until(lambda: pair.find(ev.ReceivePosted, 1) is not None)
    give_up(pair, 1)


def test_lease_that_ends_in_the_middle_fails_the_read(make_pair: Callable[..., DirectPair]) -> None:
    pair = make_pair()
    _, _, program, origin = both(pair, range(20))
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    pair.d.path.submit_receive(1, program, origin)
    pair.p.path.retract_lease(KEY)
    only_consumer_steps(pair, 1, ev.ReceiveDrained)
    assert isinstance(pair.find(ev.ReceiveFailed, 1).error, LeaseExpiredError)
    assert pair.d.path.take_records() == []


def test_stopped_read_writes_nothing_more(make_pair: Callable[..., DirectPair]) -> None:
    pair = make_pair()
    _, destination, program, origin = both(pair, range(20))
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    pair.d.path.submit_receive(1, program, origin)
    pair.d.path.stop_receive(1)
    only_consumer_steps(pair, 1, ev.ReceiveDrained)
    assert pair.events[-2:] == [ev.ReceiveStopped(1), ev.ReceiveDrained(1)]
    assert not pair.d.dense(destination, range(20)).any()
    # the row is as good as new
    pair.d.path.submit_receive(2, program, origin)
    only_consumer_steps(pair, 2, ev.ReceiveFinished)


def test_closed_export_ends_when_its_reads_do(
    make_pair: Callable[..., DirectPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, ended = make_pair(), []
    monkeypatch.setattr(RemotePools, "close", lambda pools: ended.append("unmapped"))
    source, destination, program, origin = both(pair, range(20))
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    pair.d.path.submit_receive(1, program, origin)
    pair.d.path.close_export(TO_P, lambda: ended.append("then"))
    assert ended == []
    pair.d.path.submit_receive(2, program, origin)
    only_consumer_steps(pair, 1, ev.ReceiveFinished)
    assert ended == ["unmapped", "then"]
    np.testing.assert_array_equal(
        pair.d.dense(destination, range(20)), pair.p.dense(source, range(20))
    )
    assert pair.find(ev.ReceivePosted, 2) is not None  # sent
    give_up(pair, 2)
