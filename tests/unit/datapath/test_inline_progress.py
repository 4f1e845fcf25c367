"""One thread makes progress in place of the one that runs a pump."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvconnector.session import events as ev
from kvconnector_kernels.pump import records as r
from tests.unit.datapath.pump_pair import DEADLINE_S, TO_D, Pair, Side, both_programs

pytestmark = pytest.mark.ucx

ACQUIRE_S = 1.0
NUM_READS = 20
"""More than there are rows for at first."""
CUT = {"chunk_tokens": 8, "chunk_rows": 2}


class Owner:
    """A thread that runs a side's pump and takes what it tells, until it is told to end."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.events: list[object] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            self.side.path.clear_pending()
            self.side.path.pump(DEADLINE_S, ())
            self.events += self.side.path.step()

    def end(self) -> None:
        self._ending.set()
        self.side.path.notify()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def owned(make_pair: Callable[..., Pair]) -> Iterator[tuple[Pair, Owner]]:
    pair = make_pair()
    owner = Owner(pair.d)
    yield pair, owner
    owner.end()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_a_read_moves_inline_while_the_owner_sleeps(owned: tuple[Pair, Owner]) -> None:
    pair, owner = owned
    source, destination, send, receive = both_programs(pair, range(30), **CUT)
    path = pair.d.path
    assert path.try_acquire(ACQUIRE_S)
    path.submit_receive(1, receive)
    events: list[object] = []
    while not any(isinstance(event, ev.ReceiveFinished) for event in events):
        for event in events:
            if isinstance(event, ev.ReceivePosted):
                pair.serve(event, send)
                events.remove(event)
                break
        pair.p.path.pump(0.0, ())
        pair.p.path.step()
        path.pump(1e-3, ())
        events += path.step()
    path.release(time.monotonic() + DEADLINE_S)
    np.testing.assert_array_equal(
        pair.d.dense(destination, range(30)), pair.p.dense(source, range(30))
    )
    assert owner.events == []


def test_the_owner_goes_on_with_what_was_begun_inline(owned: tuple[Pair, Owner]) -> None:
    pair, owner = owned
    source, destination, send, receive = both_programs(pair, range(30), **CUT)
    path = pair.d.path
    assert path.try_acquire(ACQUIRE_S)
    path.submit_receive(1, receive)
    posted: list[object] = []
    while not posted:
        posted = [event for event in path.step() if isinstance(event, ev.ReceivePosted)]
    path.release(time.monotonic() + DEADLINE_S)
    assert isinstance(posted[0], ev.ReceivePosted)
    pair.serve(posted[0], send)

    def has_finished() -> bool:
        pair.p.path.pump(0.0, ())
        pair.p.path.step()
        return any(isinstance(event, ev.ReceiveFinished) for event in owner.events)

    until(has_finished)
    np.testing.assert_array_equal(
        pair.d.dense(destination, range(30)), pair.p.dense(source, range(30))
    )


def test_rows_that_are_made_anew_inline_are_those_the_owner_uses(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(num_slots=NUM_READS)
    tokens = {read: range(read, read + 1) for read in range(1, NUM_READS + 1)}
    programs = {
        read: both_programs(pair, one, chunk_tokens=1, chunk_rows=8) for read, one in tokens.items()
    }
    posted = [pair.ask(read, receive) for read, (_, _, _, receive) in programs.items()]
    owner = Owner(pair.p)
    path = pair.p.path
    try:
        assert path.try_acquire(ACQUIRE_S)
        rows = path.machine.sends.rows
        for one in posted:
            send = programs[one.read_id][2]
            path.submit_send(TO_D, one.read_id, send, first_tag=one.first_tag, window=one.window)
        assert path.machine.sends.rows is not rows
        path.release(time.monotonic() + DEADLINE_S)

        def have_come() -> bool:
            pair.d.path.pump(1e-3, ())
            pair.events += pair.d.path.step()
            return all(pair.find(ev.ReceiveFinished, read) is not None for read in tokens)

        until(have_come)
    finally:
        owner.end()
    source, destination, _, _ = both_programs(
        pair, range(1, NUM_READS + 1), chunk_tokens=1, chunk_rows=8
    )
    np.testing.assert_array_equal(
        pair.d.dense(destination, range(1, NUM_READS + 1)),
        pair.p.dense(source, range(1, NUM_READS + 1)),
    )


def test_the_lock_has_one_owner(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair()
    # whoever made the pump has not run it yet, or not let it go
    assert not pair.d.path.try_acquire(1e-4)
    owner = Owner(pair.d)
    try:
        assert pair.d.path.try_acquire(ACQUIRE_S)
        assert not pair.d.path.try_acquire(1e-4)
        pair.d.path.release(time.monotonic() + DEADLINE_S)
        assert pair.d.path.try_acquire(ACQUIRE_S)
        pair.d.path.release(time.monotonic() + DEADLINE_S)
    finally:
        owner.end()


def test_an_owner_is_back_when_it_is_to_be(owned: tuple[Pair, Owner]) -> None:
    pair, _ = owned
    before = pair.d.path.machine.num_runs
    assert pair.d.path.try_acquire(ACQUIRE_S)
    pair.d.path.release(time.monotonic())
    until(lambda: pair.d.path.machine.num_runs > before)


def test_what_is_pending_wakes_a_sleeping_owner(owned: tuple[Pair, Owner]) -> None:
    pair, _ = owned
    until(lambda: pair.d.path.machine.num_sleeps > 0)
    before = pair.d.path.machine.num_runs
    assert pair.d.path.notify()
    until(lambda: pair.d.path.machine.num_runs > before)
    until(lambda: not pair.d.path.has_pending())


def test_what_is_pending_during_inline_progress_is_done_inline(owned: tuple[Pair, Owner]) -> None:
    pair, _ = owned
    path = pair.d.path
    assert path.try_acquire(ACQUIRE_S)
    path.clear_pending()
    assert not path.notify()
    assert path.has_pending()
    # so a thread that waits does not wait for long
    assert path.machine.run(DEADLINE_S, wants_slots=False) == r.READABLE
    path.clear_pending()
    path.release(time.monotonic() + DEADLINE_S)
