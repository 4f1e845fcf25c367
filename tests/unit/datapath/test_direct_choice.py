"""Which reads on one host are made directly: those whose lease is published in time."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pump.reads import MAX_PATIENCE_S
from kvconnector.errors import PeerLostError, TransportError
from kvconnector.session import events as ev
from tests.support.fakes import FakeClock
from tests.unit.datapath.direct_pair import (
    KEY,
    MANY_TOKENS,
    DirectPair,
    both,
    give_up,
    only_consumer_steps,
)
from tests.unit.datapath.pump_pair import TO_P

pytestmark = pytest.mark.ucx

TOKENS = range(20)
MANY_STEPS = 20


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pair(clock: FakeClock) -> Iterator[DirectPair]:
    """A consumer whose time stands still, and that reads whatever it can."""
    opened = DirectPair.connect(clock=clock)
    yield opened
    opened.close()


def ask(pair: DirectPair, read_id: int) -> tuple[list[int], list[int]]:
    source, destination, program, origin = both(pair, TOKENS)
    pair.d.path.submit_receive(read_id, program, origin)
    return source, destination


def pump_on(pair: DirectPair) -> None:
    for _ in range(MANY_STEPS):
        pair.d.path.pump(1.0, ())
        pair.events += pair.d.path.step()


def test_read_that_comes_before_its_lease_is_made_once_that_is_published(pair: DirectPair) -> None:
    source, destination = ask(pair, 1)
    pump_on(pair)
    assert pair.find(ev.ReceivePosted, 1) is None
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    only_consumer_steps(pair, 1, ev.ReceiveFinished)
    np.testing.assert_array_equal(pair.d.dense(destination, TOKENS), pair.p.dense(source, TOKENS))
    assert [record.path for record in pair.d.path.take_records()] == ["rma"]


def test_lease_that_does_not_come_is_not_waited_for_any_longer(
    pair: DirectPair, clock: FakeClock
) -> None:
    ask(pair, 1)
    pump_on(pair)
    clock.advance(MAX_PATIENCE_S)
    only_consumer_steps(pair, 1, ev.ReceivePosted)
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    pump_on(pair)
    assert pair.find(ev.ReceiveFinished, 1) is None  # the producer has been asked
    give_up(pair, 1)


def test_read_that_is_stopped_while_it_waits_writes_nothing(pair: DirectPair) -> None:
    _, destination = ask(pair, 1)
    ask(pair, 2)
    pair.d.path.stop_receive(1)
    pair.events += pair.d.path.step()
    assert pair.events[-2:] == [ev.ReceiveStopped(1), ev.ReceiveDrained(1)]
    pair.d.path.stop_receive(2)
    pair.p.path.publish_lease(KEY, MANY_TOKENS)
    only_consumer_steps(pair, 2, ev.ReceiveDrained)
    assert not pair.d.dense(destination, TOKENS).any()


def test_reads_that_wait_are_sent_once_the_producer_is_forgotten(pair: DirectPair) -> None:
    ask(pair, 1)
    ask(pair, 2)
    pair.d.path.close_export(TO_P)
    for read_id in (1, 2):
        only_consumer_steps(pair, read_id, ev.ReceivePosted)
        give_up(pair, read_id)


def test_worker_closes_while_a_read_waits(pair: DirectPair) -> None:
    ask(pair, 1)
    pair.d.path.close()


def test_a_read_that_waits_is_sent_once_the_producer_has_died(
    pair: DirectPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(pair, 1)

    def look(*arguments: object) -> bool:
        raise PeerLostError("gone")

    monkeypatch.setattr(RemotePools, "is_published", look)
    only_consumer_steps(pair, 1, ev.ReceivePosted)
    give_up(pair, 1)


def test_exports_that_are_not_what_they_say(pair: DirectPair) -> None:
    pair.d.path.close_export(TO_P)
    process = subprocess.Popen(["sleep", "100"])
    for change, error, text in (
        ({"nonce": bytes(16)}, TransportError, "another process"),
        ({"pid": process.pid}, TransportError, "another process|no memory"),
        # another user's, or, where we may read it, with nothing there
        ({"pid": 1, "nonce_address": 4096}, TransportError, "does not let|no memory there"),
        ({"device": "cuda"}, TransportError, "another kind of device"),
    ):
        with pytest.raises(error, match=text):
            pair.d.path.open_export(TO_P, msgspec.structs.replace(pair.export, **change))
    process.kill()
    process.wait()
    gone = msgspec.structs.replace(pair.export, pid=process.pid)
    with pytest.raises(PeerLostError):
        pair.d.path.open_export(TO_P, gone)


def test_pools_that_cannot_be_read_are_a_warning_if_they_always_should_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = DirectPair.connect(always_direct=True)
    try:
        pair.d.path.close_export(TO_P)
        elsewhere = msgspec.structs.replace(pair.export, nonce=bytes(16))
        with pytest.raises(TransportError, match="another process"):
            pair.d.path.open_export(TO_P, elsewhere)
    finally:
        pair.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "paths.direct is always" in caplog.text
