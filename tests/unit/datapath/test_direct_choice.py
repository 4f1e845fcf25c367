"""Which reads on one host are made directly: those whose lease is published in time, and those that are worth it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvconnector.datapath.pump.pulling_cpu import CpuReads
from kvconnector.datapath.pump.pulls import MAX_PATIENCE_S
from kvconnector.planning.cost import PathCost
from kvconnector.planning.paths import FIRST_TRIAL, PathChooser
from kvconnector.session import events as ev
from tests.support.fakes import FakeClock
from tests.unit.datapath.direct_pair import (
    CUT,
    KEY,
    MANY_TOKENS,
    DirectPair,
    both,
    give_up,
    only_consumer_steps,
    origin_of,
)
from tests.unit.datapath.pump_pair import TO_P, Pair, both_programs

pytestmark = pytest.mark.ucx

TOKENS = range(20)
MANY_STEPS = 20


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pair(clock: FakeClock) -> Iterator[Pair]:
    """A consumer whose time stands still, and that reads whatever it can."""
    opened = DirectPair.connect(clock=clock)
    yield opened
    opened.close()


def ask(pair: Pair, read_id: int) -> tuple[list[int], list[int]]:
    source, destination, program, origin = both(pair, TOKENS)
    pair.d.path.submit_receive(read_id, program, origin)
    return source, destination


def pump_on(pair: Pair) -> None:
    for _ in range(MANY_STEPS):
        assert pair.d.path.is_pumping
        pair.d.path.pump(1.0, ())
        pair.events += pair.d.path.step()


def test_read_that_comes_before_its_lease_is_made_once_that_is_published(pair: Pair) -> None:
    source, destination = ask(pair, 1)
    pump_on(pair)
    assert pair.find(ev.ReceivePosted, 1) is None
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    only_consumer_steps(pair, 1, ev.ReceiveFinished)
    np.testing.assert_array_equal(pair.d.dense(destination, TOKENS), pair.p.dense(source, TOKENS))
    assert [record.path for record in pair.d.path.take_records()] == ["rma"]


def test_lease_that_does_not_come_is_not_waited_for_any_longer(
    pair: Pair, clock: FakeClock
) -> None:
    ask(pair, 1)
    pump_on(pair)
    clock.advance(MAX_PATIENCE_S)
    only_consumer_steps(pair, 1, ev.ReceivePosted)
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    pump_on(pair)
    assert pair.find(ev.ReceiveFinished, 1) is None  # the producer has been asked
    give_up(pair, 1)


def test_read_that_is_stopped_while_it_waits_writes_nothing(pair: Pair) -> None:
    _, destination = ask(pair, 1)
    ask(pair, 2)
    pair.d.path.stop_receive(1)
    pair.events += pair.d.path.step()
    assert pair.events[-2:] == [ev.ReceiveStopped(1), ev.ReceiveDrained(1)]
    pair.d.path.stop_receive(2)
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    only_consumer_steps(pair, 2, ev.ReceiveDrained)
    assert not pair.d.dense(destination, TOKENS).any()


def test_reads_that_wait_are_sent_once_the_producer_is_forgotten(pair: Pair) -> None:
    ask(pair, 1)
    ask(pair, 2)
    pair.d.path.close_export(TO_P)
    for read_id in (1, 2):
        only_consumer_steps(pair, read_id, ev.ReceivePosted)
        give_up(pair, read_id)


def test_one_read_may_wait_while_another_is_made(pair: Pair) -> None:
    source, destination, program, origin = both(pair, range(20, 40))
    ask(pair, 1)
    other = KEY[::-1]
    pair.p.path.publish_lease(other, MANY_TOKENS)
    origin = type(origin)(TO_P, origin.segments, origin.blocks, other, origin.token_stop)
    pair.d.path.submit_receive(2, program, origin)
    only_consumer_steps(pair, 2, ev.ReceiveFinished)
    tokens = range(20, 40)
    np.testing.assert_array_equal(pair.d.dense(destination, tokens), pair.p.dense(source, tokens))
    assert not pair.d.dense(destination, TOKENS).any()
    pair.d.path.stop_receive(1)


def test_worker_closes_while_a_read_waits(pair: Pair) -> None:
    ask(pair, 1)
    pair.d.path.close()


def sent(pair: Pair, read_id: int) -> bool:
    """Make a read either way; whether the producer sent it."""
    _, _, theirs, program = both_programs(pair, TOKENS, **CUT)
    pair.d.path.submit_receive(read_id, program, origin_of(theirs, TOKENS))
    pair.until(
        lambda: any(pair.find(kind, read_id) for kind in (ev.ReceivePosted, ev.ReceiveFinished))
    )
    posted = pair.find(ev.ReceivePosted, read_id)
    if posted is not None:
        pair.serve(posted, theirs)
    pair.until(lambda: pair.find(ev.ReceiveFinished, read_id) is not None)
    return posted is not None


def test_reads_tell_the_choice_what_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that met the worst of moments: reads are sent, but for one that is tried."""
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(CpuReads, "prepare", lambda self, remote: PathCost(0.0, 0.0, 1e3))
    monkeypatch.setattr(
        PathChooser, "observe", lambda self, path, size, seconds: told.append((path, seconds))
    )
    pair = DirectPair.connect(always_direct=False)
    try:
        pair.p.path.publish_lease(KEY, MANY_TOKENS)
        ways = [sent(pair, read_id) for read_id in range(1, FIRST_TRIAL["direct"] + 2)]
    finally:
        pair.close()
    assert ways == [True] * (FIRST_TRIAL["direct"] - 1) + [False, True]
    assert [path for path, _ in told] == ["packed" if way else "direct" for way in ways]
    assert all(0 < seconds < 1e3 for _, seconds in told)


def test_read_whose_lease_is_awaited_at_the_producer_says_nothing_of_its_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuReads, "prepare", lambda self, remote: PathCost(0.0, 0.0, 1e3))
    monkeypatch.setattr(PathChooser, "observe", lambda *arguments: pytest.fail(str(arguments)))
    pair = DirectPair.connect(always_direct=False)
    try:
        assert sent(pair, 1)
    finally:
        pair.close()


def test_pools_that_seem_slow_to_read_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a moment that was busy would keep every read to come packed."""
    monkeypatch.setattr(CpuReads, "prepare", lambda self, remote: PathCost(1.0, 1.0, 1.0))
    pair = DirectPair.connect(always_direct=False)
    try:
        pair.d.path.close_export(TO_P)
        assert "us a run" in pair.d.path.open_export(TO_P, pair.export)
    finally:
        pair.close()
