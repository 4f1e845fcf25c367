from __future__ import annotations

import numpy as np
import pytest

from kvconnector.datapath import CacheGroup, Pools
from kvconnector.datapath.base import Program, SegmentWindow
from kvconnector.datapath.pump.choice import PathOptions, open_datapath
from kvconnector.datapath.staging import SlotPool, slots_within
from kvconnector.errors import ConfigError, GeometryError, PeerLostError, TransportError
from kvconnector.ids import Rank
from kvconnector.planning import CHUNK_DTYPE, GroupBlocks
from kvconnector.session import events as ev
from kvconnector_kernels.pump import records as r
from tests.support.fakes import FakeCaches, FakeClock, FakeEngine, attention_model
from tests.support.loopback import LoopbackFaults, LoopbackNetwork

LINK, NUM_CHUNKS, SLOT_BYTES, QUARANTINE_S = -1, 6, 64, 15.0
SHAPE = FakeEngine("e", attention_model(num_layers=3), block_sizes=(4,), num_blocks=(8,))


class End:
    """A data path of its own, with what it reported so far."""

    def __init__(self, network, clock, *, num_slots=4, slot_bytes=SLOT_BYTES, seed=0):
        rng = np.random.default_rng(seed)
        self.caches = FakeCaches(SHAPE, SHAPE.geometry().rank_geometry(Rank(0, 0)), rng)
        self.transport = network.transport()
        self.path = open_datapath(
            Pools(self.caches.groups(), "cpu"),
            self.transport,
            send_slots=SlotPool(num_slots, slot_bytes, "cpu"),
            recv_slots=SlotPool(num_slots, slot_bytes, "cpu"),
            options=PathOptions(
                window=2, quarantine_s=QUARANTINE_S, max_programs=0, spin_s=0.0, direct="never"
            ),
            clock=clock,
        )
        self.events = []

    def step(self):
        self.path.pump(0.0, ())
        while new := self.path.step():
            self.events += new
            self.path.pump(0.0, ())

    def kinds(self):
        return [type(event).__name__ for event in self.events]

    def content(self):
        return np.concatenate(
            [
                self.caches.tokens(0, layer, part, [1, 2]).ravel()
                for layer in range(3)
                for part in range(2)
            ]
        )


def program():
    """Each of 6 (layer, part) rows of blocks 1 and 2 in a chunk of its own: 2 heads x 8 tokens x 4 x 2 bytes."""
    chunks = np.array([(0, row, 1, 0, 4) for row in range(NUM_CHUNKS)], CHUNK_DTYPE)
    segment = SegmentWindow(0, 0, 0, 0, 2, 16, "HND")
    return Program((segment,), chunks, (GroupBlocks.of([1, 2]),))


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def network():
    return LoopbackNetwork(eager_limit_bytes=0)


@pytest.fixture
def ends(network, clock):
    sender, receiver = End(network, clock), End(network, clock, seed=1)
    tag, nbytes = receiver.path.expect_warm_up(1)
    sender.path.open_endpoint(LINK, receiver.transport.address, tag, nbytes)
    _step(sender, receiver)
    assert sender.kinds() == ["EndpointOpened"]
    assert receiver.events == [ev.WarmedUp(1)]
    sender.events.clear()
    receiver.events.clear()
    yield sender, receiver
    for end in (sender, receiver):
        end.path.close()


def _step(*ends):
    for _ in range(20):
        for end in ends:
            end.step()


def _post(sender, receiver):
    receiver.path.submit_receive(7, program())
    receiver.step()
    (posted,) = receiver.events
    sender.path.submit_send(LINK, 7, program(), first_tag=posted.first_tag, window=posted.window)


def _chunks_arrive(sender, receiver, count):
    """Step until the receiver has unpacked `count` chunks."""
    while receiver.kinds().count("ReceiveAdvanced") < count:
        for end in (sender, receiver):
            end.path.pump(0.0, ())
            end.events += end.path.step()


def test_a_read_arrives_in_order_of_events_and_frees_its_slots(ends):
    sender, receiver = ends
    _post(sender, receiver)
    _step(sender, receiver)
    (sent,) = sender.events
    assert (type(sent), sent.link, sent.read_id) == (ev.SendFinished, LINK, 7)
    assert [phase.name for phase in sent.phases] == ["pack", "wire"]
    kinds = receiver.kinds()
    assert list(dict.fromkeys(kinds)) == ["ReceivePosted", "ReceiveAdvanced", "ReceiveFinished"]
    assert kinds.count("ReceiveFinished") == 1
    np.testing.assert_array_equal(_first_tokens(sender), _first_tokens(receiver))
    assert sender.path.num_busy_slots == receiver.path.num_busy_slots == 0
    (record,) = receiver.path.take_records()
    assert (record.read_id, record.chunks, record.nbytes) == (7, NUM_CHUNKS, 6 * SLOT_BYTES)
    assert [phase.name for phase in record.phases] == ["wire", "unpack"]


def _first_tokens(end):
    return np.stack(
        [end.caches.tokens(0, layer, part, [1]) for layer in range(3) for part in range(2)]
    )


def test_a_stopped_read_writes_nothing_more_and_drains_what_was_sent(ends):
    sender, receiver = ends
    _post(sender, receiver)
    _chunks_arrive(sender, receiver, 1)
    receiver.path.stop_receive(7)
    before = receiver.content()
    _step(sender, receiver)  # the sender has not heard of it: everything still comes
    np.testing.assert_array_equal(receiver.content(), before)
    assert receiver.kinds()[-2:] == ["ReceiveStopped", "ReceiveDrained"]
    assert sender.path.num_busy_slots == receiver.path.num_busy_slots == 0


@pytest.mark.parametrize("sent", ["told", "gone"])
def test_a_drained_read_waits_for_what_was_sent_alone(ends, sent):
    sender, receiver = ends
    _post(sender, receiver)
    _chunks_arrive(sender, receiver, 1)
    receiver.path.stop_receive(7)
    sender.path.stop_send(LINK, 7)
    sender.step()
    (stopped,) = sender.events
    assert stopped.sent_chunks < NUM_CHUNKS
    if sent == "gone":
        sender.path.close_endpoint(LINK)
    receiver.path.drain_receive(7, stopped.sent_chunks if sent == "told" else None)
    _step(sender, receiver)
    assert receiver.kinds().count("ReceiveDrained") == 1
    assert receiver.path.num_busy_slots == 0
    assert sender.path.num_busy_slots == 0


def test_slots_of_cancelled_sends_are_in_quarantine_while_others_take_their_place(ends, clock):
    sender, receiver = ends
    receiver.path.submit_receive(7, program())
    receiver.step()
    sender.path.submit_send(LINK, 7, program(), first_tag=99 << 20, window=2)
    sender.step()  # under way, to receives that nobody posts
    slots = sender.path.machine.send_slots
    posted = slots.rows[slots.rows["state"] == r.POSTED]
    quarantined = set(posted["address"].tolist())
    assert len(quarantined) == 2
    sender.path.close_endpoint(LINK)
    sender.step()
    assert slots.num_free == 4
    assert quarantined.isdisjoint(slots.rows["address"].tolist())
    clock.advance(QUARANTINE_S)
    sender.step()
    assert quarantined == {address for _, address in slots.pool._spare}


def test_a_lost_consumer_is_reported_with_the_read_and_its_slots_are_in_quarantine(ends, network):
    sender, receiver = ends
    _post(sender, receiver)
    sender.path.pump(0.0, ())
    slots = sender.path.machine.send_slots
    posted = slots.rows["address"][slots.rows["state"] == r.POSTED].tolist()
    assert posted
    network.lose(receiver.transport.address)
    _step(sender)
    assert sorted(sender.kinds())[:1] == ["EndpointFailed"]
    (stopped,) = [event for event in sender.events if isinstance(event, ev.SendStopped)]
    assert isinstance(stopped.error, PeerLostError)
    # a library may still read what it has reported as failed
    assert set(posted).isdisjoint(slots.rows["address"].tolist())
    assert slots.num_free == 4


def test_a_lost_chunk_keeps_the_read_open_until_it_is_drained(ends, network):
    sender, receiver = ends
    network.set_faults(LoopbackFaults(drop_probability=1.0))
    _post(sender, receiver)
    _step(sender, receiver)
    assert receiver.kinds() == ["ReceivePosted"]
    receiver.path.stop_receive(7)
    receiver.path.drain_receive(7, None)
    _step(receiver)
    assert receiver.kinds()[1:] == ["ReceiveStopped", "ReceiveDrained"]
    assert receiver.path.num_busy_slots == 0


def test_a_queued_read_that_is_stopped_never_starts(ends):
    _, receiver = ends
    for read_id in range(4):  # the first two take all slots
        receiver.path.submit_receive(read_id, program())
    receiver.step()
    assert receiver.kinds() == ["ReceivePosted"] * 2
    receiver.path.stop_receive(3)
    receiver.step()
    assert receiver.events[2:] == [ev.ReceiveStopped(3), ev.ReceiveDrained(3)]


def test_a_block_outside_the_pool_fails_the_read_on_either_side(ends):
    sender, receiver = ends
    wrong = Program(program().segments, program().chunks, (GroupBlocks.of([1, 99]),))
    receiver.path.submit_receive(7, wrong)
    receiver.step()
    assert receiver.kinds() == ["ReceivePosted", "ReceiveFailed"]
    receiver.path.drain_receive(7, 0)
    receiver.step()
    assert receiver.kinds()[2:] == ["ReceiveDrained"]
    sender.path.submit_send(LINK, 7, wrong, first_tag=1, window=1)
    sender.step()
    assert sender.kinds() == ["SendStopped"]
    assert "99" in str(sender.events[0].error)


def test_a_producer_with_smaller_slots_warms_up_as_well(network, clock):
    sender, receiver = End(network, clock, slot_bytes=64), End(network, clock, slot_bytes=256)
    tag, nbytes = receiver.path.expect_warm_up(1)
    sender.path.open_endpoint(LINK, receiver.transport.address, tag, nbytes)
    _step(sender, receiver)
    assert receiver.events == [ev.WarmedUp(1)]
    for end in (sender, receiver):
        end.path.close()


def test_a_forgotten_warm_up_is_not_taken_for_the_next_one(network, clock):
    end = End(network, clock)
    end.path.expect_warm_up(1)
    end.path.forget_warm_up(1)
    end.path.expect_warm_up(1)
    _step(end)
    assert end.events == []
    end.path.close()


def test_staging_within_its_budget():
    assert slots_within(1000, 100, 1) == 9
    assert slots_within(1000, 100, 2) == 4
    assert slots_within(1, 100, 2) == 1
    assert slots_within(1 << 40, 1, 1) == 16
    with pytest.raises(ConfigError, match="staging needs slots"):
        SlotPool(0, 10, "cpu")
    with pytest.raises(TransportError, match="no memory for staging"):
        SlotPool(1, 1 << 60, "cpu")


def test_caches_that_do_not_fit_their_geometry_are_refused():
    caches = FakeCaches(SHAPE, SHAPE.geometry().rank_geometry(Rank(0, 0)), np.random.default_rng(0))
    (group,) = caches.groups()
    with pytest.raises(GeometryError, match="exactly the layers"):
        Pools([CacheGroup(group.geometry, {0: group.views[0]})], "cpu")
    with pytest.raises(GeometryError, match="one view per part"):
        Pools([CacheGroup(group.geometry, {**group.views, 1: group.views[1][:1]})], "cpu")
    other = FakeEngine("e", attention_model(3, head_dim=8)).geometry().rank_geometry(Rank(0, 0))
    with pytest.raises(GeometryError, match="does not have its part's"):
        Pools([CacheGroup(other.groups[0], group.views)], "cpu")
