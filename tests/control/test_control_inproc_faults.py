from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnector.control.base import ControlEvent, Disconnected, Received
from kvconnector.errors import PeerLostError
from tests.support.control_recorder import small_limits
from tests.support.inproc_control import ControlFaults, ControlHub, InprocControlChannel


@contextmanager
def new_hub(faults: ControlFaults | None = None, seed: int = 1) -> Iterator[ControlHub]:
    hub = ControlHub(seed=seed, faults=faults or ControlFaults())
    try:
        yield hub
    finally:
        hub.close()


def open_in(hub: ControlHub) -> InprocControlChannel:
    return hub.open(limits=small_limits(), server_key="")


def run(faults: ControlFaults, seed: int, counts: list[int]) -> list[ControlEvent]:
    """Send `counts[i]` messages over the i-th connection to one channel; what it reports."""
    with new_hub(faults, seed) as hub:
        far = open_in(hub)
        nears = [open_in(hub) for _ in counts]
        handles = [near.connect(far.address) for near in nears]
        for number in range(max(counts)):
            for index, count in enumerate(counts):
                if number < count:
                    nears[index].send(handles[index], bytes([index, number]))
        return [event for _ in range(faults.max_delay_polls + 1) for event in far.poll(0.0)]


def by_connection(events: list[ControlEvent], index: int) -> list[int]:
    return [e.payload[1] for e in events if isinstance(e, Received) and e.payload[0] == index]


counts_strategy = st.lists(st.integers(1, 20), min_size=1, max_size=4)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), counts=counts_strategy, delay=st.integers(0, 5))
def test_delay_and_reorder_keep_each_connection_in_order(
    seed: int, counts: list[int], delay: int
) -> None:
    events = run(ControlFaults(max_delay_polls=delay, reorder_connections=True), seed, counts)
    for index, count in enumerate(counts):
        assert by_connection(events, index) == list(range(count))


def test_drop_and_duplicate() -> None:
    assert run(ControlFaults(drop_probability=1.0), 1, [5]) == []
    twice = run(ControlFaults(duplicate_probability=1.0), 1, [3])
    assert by_connection(twice, 0) == [0, 0, 1, 1, 2, 2]
    some = by_connection(run(ControlFaults(drop_probability=0.5), 1, [20]), 0)
    assert 0 < len(some) < 20
    assert some == sorted(set(some))


def test_sever_loses_messages_and_tells_both_sides() -> None:
    with new_hub() as hub:
        near, far, other = open_in(hub), open_in(hub), open_in(hub)
        handle = near.connect(far.address)
        near.send(handle, b"arrives")
        (received,) = far.poll(0.0)
        bystander = other.connect(far.address)
        near.send(handle, b"lost")
        assert hub.sever(near, far) == 1
        assert hub.sever(near, far) == 0
        (near_event,) = near.poll(0.0)
        (far_event,) = far.poll(0.0)
        for event, expected in ((near_event, handle), (far_event, received.handle)):
            assert isinstance(event, Disconnected)
            assert event.handle == expected
            assert isinstance(event.error, PeerLostError)
        other.send(bystander, b"unharmed")
        assert [e.payload for e in far.poll(0.0) if isinstance(e, Received)] == [b"unharmed"]
