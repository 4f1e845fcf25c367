"""The work that a driver leaves for its thread after inline progress, and the events that its sessions get."""

import logging
from contextlib import closing

import pytest

from kvconnector.config import LeaseConfig
from kvconnector.control.base import Received
from kvconnector.datapath.pump.pacing import WORK_S
from kvconnector.errors import KVConnectorError, PeerLostError
from kvconnector.ids import EngineAddress, EngineId
from kvconnector.runtime.driver import MAX_QUEUED_EVENTS, MAX_TAKEN_BYTES
from kvconnector.session import events as ev
from kvconnector.session.link import FromPeer
from kvconnector.session.orders import (
    HoldRequest,
    LoadRequest,
    StepMetadata,
    WantRequest,
    WithdrawRequest,
)
from kvconnector.wire import encode, encode_batch
from kvconnector.wire import messages as m
from tests.support.fakes import FakeClock, FakeEngine, attention_model
from tests.support.world import World

MODEL = attention_model(num_layers=2, total_heads=2, head_dim=2)
ADDRESS = EngineAddress(EngineId("p"), "tcp://127.0.0.1:9")


def test_an_ended_read_is_cleaned_up_even_if_another_request_ends_first(monkeypatch):
    world = World()
    (worker,) = world.start(FakeEngine("d", MODEL), role="consumer").workers
    driver, ended = worker.driver, [ev.ReceiveFinished(1, seconds=1.0)]

    def step(**_):
        while ended:
            driver.datapath.events.append(ended.pop())

    monkeypatch.setattr(driver.datapath, "step", step)
    # the load was never wanted, so it fails at once; another request's peer waits for a message
    want, load = WantRequest("w", "w", "5" * 32, ADDRESS), LoadRequest("unknown", (), (), ())
    driver.put([want, load])
    driver.progress_inline(WORK_S, orders_only=True)
    assert worker.poll().failed_recving.keys() == {"unknown"}
    assert not driver.links.with_unsent
    assert not ended
    assert driver.num_queued  # the driver's thread does not sleep until then
    world.close()


def test_a_session_that_refuses_a_tick_does_not_keep_it_from_the_other(monkeypatch):
    world = World()
    (worker,) = world.start(FakeEngine("e", MODEL), role="both").workers
    driver, heard = worker.driver, []

    def refuse(event, now):
        raise KVConnectorError("a bug")

    monkeypatch.setattr(driver.producer, "handle", refuse)
    monkeypatch.setattr(driver.consumer, "handle", lambda event, now: heard.append(event) or [])
    driver.put([ev.Tick()])
    driver.turn(0.0)
    assert ev.Tick() in heard
    world.close()


@pytest.fixture
def deployment():
    """A producer and a consumer that have greeted each other, in a world."""
    world = World(seed=3)
    p = world.start(FakeEngine("p", MODEL), role="producer")
    d = world.start(FakeEngine("d", MODEL), role="consumer")
    d.load_from(p, "warm", [1], [1], 4)
    assert world.run(world.is_quiet)
    for engine in (p, d):
        engine.workers[0].poll()
    yield world, p.workers[0], d.workers[0], d
    world.close()


def test_a_consumer_learns_at_once_why_the_producer_drops_its_link(deployment, caplog):
    world, p, d, consumer = deployment
    (link,) = p.driver.links
    offer = world.engines[0].grant("r", [[1, 2]], 8)
    # no part of it reaches the producer's lease, so the load would wait for its deadline
    send, p.driver.producer.handle = p.driver.producer.handle, lambda event, now: []
    consumer.want("r", offer)
    consumer.load("r", offer, [[3, 4]], [range(8)])
    for _ in range(5):
        world.turn()
    p.driver.producer.handle = send
    with caplog.at_level(logging.WARNING):
        lost = PeerLostError("control messages were lost", expected=3, found=5)
        p.driver.links.lose(link, lost)
    output = d.poll()
    assert not output.finished_recving
    failed = {}

    def has_failed():
        failed.update(d.poll().failed_recving)
        return bool(failed)

    assert world.run(has_failed, max_turns=10)
    assert "control messages were lost [expected=3, found=5]" in failed["r"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "control messages were lost" in caplog.text


def test_a_refused_lease_ends_at_once(deployment):
    """No one else reports its end, and its engine keeps the blocks until then."""
    world, p, _, _ = deployment
    producer = world.engines[0]
    held = producer.grant("r", [[1, 2]], 8)
    world.run(lambda: not p.driver.num_queued)
    producer.grant("other", [[3]], 4)
    world.run(lambda: not p.driver.num_queued)
    # another request with the transfer's name
    order = HoldRequest("s", held.transfer_id, held.secret, held.blocks, 8)
    p.start_step(StepMetadata(orders=(order,)))
    world.turn()
    assert p.poll().finished_sending == {"s"}
    # the same request once more: the end of its lease counts for both
    p.start_step(StepMetadata(orders=(HoldRequest("r", "r", "0" * 32, held.blocks, 8),)))
    world.turn()
    assert not p.poll().finished_sending
    producer.withdraw("r")
    world.turn()
    assert p.poll().finished_sending == {"r"}


class Slow(FakeClock):
    """A clock that takes `tick_s` to read."""

    tick_s = 1e-4

    def __call__(self):
        self.advance(self.tick_s)
        return super().__call__()


@pytest.mark.parametrize("is_inline", [True, False])
def test_a_turn_leaves_what_does_not_fit_into_its_time_for_the_next_one(is_inline):
    with closing(World()) as world:
        driver = world.start(FakeEngine("d", MODEL), role="consumer").workers[0].driver
        driver.clock = Slow()
        driver.put([WantRequest(f"w{i}", f"w{i}", "5" * 32, ADDRESS) for i in range(1000)])
        if is_inline:
            driver.progress_inline(WORK_S)
        else:
            driver.turn(0.0)
        assert 900 < driver.num_queued < 1000
        while driver.num_queued:
            driver.turn(0.0)
        assert len(driver.consumer._loads) == 1000


BEATS = encode_batch([encode(m.Heartbeat(transfers=(), number=1))] * m.MAX_BATCH_MESSAGES)


def flood(world, worker, *, polls):
    """Let a peer send the longest batches, one for each of `polls` of the worker's control channel."""
    flooder = world.hub.open()
    handle = flooder.connect(worker.control.address)
    for _ in range(polls):
        flooder.send(handle, BEATS)


def test_deadlines_pass_and_queues_stay_bounded_while_a_peer_floods():
    with closing(World()) as world:
        producer = world.start(FakeEngine("p", MODEL), role="producer")
        (worker,) = producer.workers
        driver = worker.driver
        producer.grant("r", [[1, 2]], 8)
        driver.turn(0.0)
        driver.clock = Slow(driver.clock())
        flood(world, worker, polls=700)
        most = 0
        for _ in range(100):
            driver.turn(0.0)
            most = max(most, driver.num_queued)
        assert most <= MAX_QUEUED_EVENTS + 2  # and a tick
        assert driver.links.has_arrived
        driver.clock.advance(LeaseConfig().duration_s)
        for _ in range(500):
            driver.turn(0.0)
        assert driver.links.has_arrived
        assert worker.poll().finished_sending == {"r"}


@pytest.mark.parametrize("what", ["order", "peer"])
def test_a_flooding_peer_delays_others_by_a_bounded_number_of_its_messages(monkeypatch, what):
    with closing(World()) as world:
        (worker,) = world.start(FakeEngine("p", MODEL), role="producer").workers
        driver, handled = worker.driver, []
        monkeypatch.setattr(driver.producer, "handle", lambda event, now: handled.append(event))
        flood(world, worker, polls=50)
        for _ in range(5):
            driver.turn(0.0)
        before = len(handled)
        if what == "order":
            driver.put([WithdrawRequest("mine")])
        else:
            quiet = world.hub.open()
            mine = m.Heartbeat(transfers=(), number=2)
            quiet.send(quiet.connect(worker.control.address), encode(mine))

        def is_mine(event):
            return (
                isinstance(event, WithdrawRequest)
                if what == "order"
                else isinstance(event, FromPeer) and event.message.number == 2
            )

        for _ in range(50 * m.MAX_BATCH_MESSAGES):
            if any(map(is_mine, handled[before:])):
                break
            driver.turn(0.0)
        # what was queued already, and what one turn takes at most
        assert [*map(is_mine, handled[before:])].index(True) <= 256
        assert driver.links.has_arrived  # the flood goes on


def test_a_full_queue_of_events_takes_no_message_more(monkeypatch):
    with closing(World()) as world:
        (worker,) = world.start(FakeEngine("p", MODEL), role="producer").workers
        driver = worker.driver
        peer = world.hub.open()
        handle = peer.connect(worker.control.address)
        for number in range(3):
            peer.send(handle, encode(m.Heartbeat(transfers=(), number=number)))
        monkeypatch.setattr(driver, "_work", lambda **_: True)  # it is late
        events = driver.datapath.events
        for queued, taken in ((MAX_QUEUED_EVENTS, 0), (MAX_QUEUED_EVENTS - 1, 1)):
            events.extend([ev.Tick()] * (queued - len(events)))
            while len(events) > queued:
                events.pop()
            driver.turn(0.0)
            assert sum(isinstance(event, FromPeer) for event in events) == taken


def test_few_bytes_are_decoded_before_what_was_taken_is_handled(monkeypatch):
    """Messages may be long, and an order waits while they are decoded."""
    with closing(World()) as world:
        (worker,) = world.start(FakeEngine("p", MODEL), role="producer").workers
        driver, most, waiting = worker.driver, 0, 0
        named = m.TransferKey(transfer_id="x" * 512, secret="5" * 32)
        beat = encode(m.Heartbeat(transfers=(named,) * m.MAX_NAMED, number=1))
        peer = world.hub.open()
        handle = peer.connect(worker.control.address)
        for _ in range(MAX_QUEUED_EVENTS):
            peer.send(handle, beat)
        take = driver._take_message

        def taken(link, payload):
            nonlocal waiting, most
            waiting += len(payload)
            most = max(most, waiting)
            return take(link, payload)

        def handled(event, now):
            nonlocal waiting
            waiting -= len(beat)

        monkeypatch.setattr(driver, "_take_message", taken)
        monkeypatch.setattr(driver.producer, "handle", handled)
        while driver.links.has_arrived or driver.num_queued or not most:
            driver.turn(0.0)
        assert waiting == 0
        assert most <= 2 * MAX_TAKEN_BYTES + len(beat)


def test_a_peer_that_says_goodbye_is_not_told_off(deployment, caplog):
    world, p, _, _ = deployment
    peer = world.hub.open()
    peer.send(peer.connect(p.control.address), encode(m.Bye(text="leaving")))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            world.turn()
        assert len([*p.driver.links]) == 1
    assert peer.poll(0.0) == []
    assert not caplog.records


@pytest.mark.parametrize("is_inline", [True, False])
@pytest.mark.parametrize("sent", [250, 20000])
def test_a_turn_decodes_only_messages_that_fit_into_its_time_and_loses_none(
    monkeypatch, deployment, is_inline, sent
):
    _, p, _, _ = deployment
    driver = p.driver
    (link,) = driver.links
    batch = encode_batch([encode(m.Heartbeat(transfers=(), number=1))] * (sent // 250))
    arrived = [Received(driver.links._connections[link].handle, batch)] * 250

    def poll(timeout_s):
        taken, arrived[:] = [*arrived], []
        return taken

    handled = []
    monkeypatch.setattr(driver.links.control, "poll", poll)
    monkeypatch.setattr(driver.producer, "handle", lambda event, now: handled.append(event) or [])
    driver.clock = Slow(driver.clock())
    while driver.links.has_arrived or driver.num_queued or not handled:
        before = driver.num_queued + len(handled)
        if is_inline:
            driver.progress_inline(WORK_S)
        else:
            driver.turn(0.0)
        # the clock is read before and after each message
        decoded = driver.num_queued + len(handled) - before
        assert decoded <= max(1, WORK_S / Slow.tick_s) * (sent // 250)
        assert driver.num_queued < MAX_QUEUED_EVENTS + sent // 250
    assert sum(isinstance(event, FromPeer) for event in handled) == sent


def test_the_loop_posts_what_a_read_packs_before_the_driver_looks_at_anything_else(
    deployment, monkeypatch
):
    world, p, _, consumer = deployment
    done, datapath, links = [], p.driver.datapath, p.driver.links
    submit, pump, poll = datapath.sends.submit, datapath.pump, links.poll
    monkeypatch.setattr(
        datapath.sends, "submit", lambda send: done.append("submit") or submit(send)
    )
    monkeypatch.setattr(datapath, "pump", lambda timeout_s: done.append("pump") or pump(timeout_s))
    monkeypatch.setattr(links, "poll", lambda: done.append("poll") or poll())
    consumer.load_from(world.engines[0], "r", [1, 2], [3, 4], 8)
    assert world.run(world.is_quiet)
    assert done.count("submit") == 1
    assert done[done.index("submit") + 1] == "pump"


def test_a_read_in_every_turn_does_not_keep_the_driver_from_everything_else(
    deployment, monkeypatch
):
    _, p, _, _ = deployment
    driver, polls = p.driver, []
    take, poll = driver.links.poll_transport, driver.links.poll

    def begin_a_send():
        driver.datapath.sends.num_begun += 1
        return take()

    monkeypatch.setattr(driver.links, "poll_transport", begin_a_send)
    monkeypatch.setattr(driver.links, "poll", lambda: polls.append(driver.num_turns) or poll())
    for _ in range(8):
        driver.turn(0.0)
    assert len(polls) == 4
