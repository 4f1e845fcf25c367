"""Exceptions that nobody expects, where a worker takes orders and messages: each ends one request or one link."""

import ast
import inspect
import logging
import textwrap
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from kvconnector.errors import InternalError
from kvconnector.planning import GroupBlocks
from kvconnector.runtime import driver as driver_module
from kvconnector.runtime import intake, links
from kvconnector.runtime.intake import checked_orders, orders_with_blocks
from kvconnector.runtime.outbox import Outbox
from kvconnector.session import events as ev
from kvconnector.session.containment import WorkerFault
from kvconnector.session.link import FromPeer
from kvconnector.session.orders import HoldRequest, LoadRequest, StepMetadata
from kvconnector.wire import encode, encode_batch
from kvconnector.wire import messages as m
from kvconnector.wire.codec import KINDS
from kvconnector.wire.packed_geometry import PackedGeometry
from tests.support.fakes import FakeEngine, attention_model
from tests.support.world import World
from tests.unit.datapath.caches import Caches, Shape

MODEL = attention_model(num_layers=2, total_heads=2, head_dim=2)
BLOCKS = (GroupBlocks.of([1, 2]),)
GREETING = m.Hello(
    geometry=PackedGeometry.of(FakeEngine("d", MODEL).geometry()),
    pp_rank=0,
    tp_rank=0,
    incarnation="d",
    transport_address=b"d",
    warm_up_tag=1,
    warm_up_bytes=8,
)


class Bug(Exception):
    """What nobody expects."""


def fail(*_, **__):
    raise Bug("an accident")


def guarded_calls(source):
    """Return the functions of its own that some code calls where it catches any exception."""
    tries = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Try)]
    bodies = [
        statement
        for each in tries
        if "Exception" in [ast.unparse(handler.type) for handler in each.handlers if handler.type]
        for statement in each.body
    ]
    calls = [node for each in bodies for node in ast.walk(each) if isinstance(node, ast.Call)]
    return sorted({ast.unparse(node.func) for node in calls})


def test_every_check_of_an_order_raises_in_these_tests():
    assert guarded_calls(inspect.getsource(intake)) == ["_check_blocks", "blocks_of"]


@pytest.fixture
def deployment():
    """A producer and a consumer that have greeted each other."""
    with closing(World(seed=3)) as world:
        p = world.start(FakeEngine("p", MODEL), role="producer")
        d = world.start(FakeEngine("d", MODEL), role="consumer")
        d.load_from(p, "warm", [1], [1], 4)
        assert world.run(world.is_quiet)
        for engine in (p, d):
            engine.workers[0].poll()
        yield world, p, d


@pytest.mark.parametrize("border", ["_check_blocks", "blocks_of"])
@pytest.mark.parametrize(
    "victim",
    [LoadRequest("bad", ((0, 8),), BLOCKS, BLOCKS), HoldRequest("bad", "t", "5" * 32, BLOCKS, 8)],
)
def test_an_exception_in_the_check_of_an_order_refuses_that_order(
    monkeypatch, caplog, border, victim
):
    original, outbox = getattr(intake, border), Outbox()

    def checked(order, *others):
        given = order if border == "_check_blocks" else order[0]
        return fail() if given.request_id == "bad" else original(order, *others)

    monkeypatch.setattr(intake, border, checked)
    good = HoldRequest("good", "u", "5" * 32, BLOCKS, 8)
    step = StepMetadata(orders=(victim, good))
    pools = Caches(Shape(block=4, blocks=10), seed=None).pools
    orders = checked_orders(step, pools, "both", outbox.note_contained)
    orders, blocks = orders_with_blocks(orders, outbox.note_contained)
    assert [type(order.error) for order in orders] == [InternalError, type(None)]
    assert blocks == [BLOCKS]
    assert outbox.take().stats.contained == {"Bug": 1}
    assert caplog.text.count("Traceback") == 1
    assert "request bad was ended" in caplog.text


STEPS = ("_greet", "decode", "event_of", "keep_alive", "messages_of", "note_mapping", "put_back")
"""What a driver does with a peer's message before a session has it."""


def test_every_step_with_a_peers_message_raises_in_these_tests():
    assert guarded_calls(inspect.getsource(driver_module)) == ["self._queue_message"]
    source = textwrap.dedent(inspect.getsource(driver_module.Driver._queue_message))
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    called = {ast.unparse(each).rpartition(".")[2] for each in calls}
    harmless = {"PeerLostError", "append", "clock", "isinstance", "lose", "type"}
    assert sorted(called - harmless | {"_greet"}) == [*STEPS]


def test_a_worker_takes_every_message_of_the_wire_but_requests_to_directories():
    """Those that a worker takes raise in `tests/property/test_containment.py`."""
    of_links = ev.FROM_CONSUMER | ev.FROM_PRODUCER | {m.Bye, m.Batch}
    assert of_links | {m.DirectoryRequest} == {*KINDS.values()}


@pytest.mark.parametrize("step", STEPS)
def test_an_exception_in_a_peers_message_ends_its_link(monkeypatch, caplog, deployment, step):
    world, p, d = deployment
    worker = p.workers[0]
    driver = worker.driver
    owner = {
        "decode": driver_module,
        "event_of": ev,
        "_greet": driver,
        "keep_alive": driver.producer,
        "messages_of": driver_module,
        "note_mapping": driver.links,
        "put_back": driver.links,
    }[step]
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(owner, step, fail)
        stranger = world.hub.open()
        message = GREETING if step == "_greet" else m.Heartbeat(transfers=())
        payload = encode_batch([encode(message)] * 2)
        stranger.send(stranger.connect(worker.control.address, ""), payload)
        assert world.run(lambda: worker.poll().stats.contained == {"Bug": 1}, max_turns=20)
        stranger.close()
    assert caplog.text.count("Traceback") == 1
    d.load_from(p, "r", [1, 2], [3, 4], 8)
    ended = set()

    def has_ended():
        output = d.workers[0].poll()
        assert not output.failed_recving
        ended.update(output.finished_recving)
        return "r" in ended

    assert world.run(has_ended)


@pytest.mark.parametrize("room", ["data", "links"])
def test_a_fault_of_the_data_path_ends_the_worker(monkeypatch, deployment, room):
    """What it shares with the network and the loop may be torn, so no request may go on."""
    world, p, d = deployment
    driver = d.workers[0].driver
    if room == "data":
        monkeypatch.setattr(driver.datapath.receives, "submit", fail)
        d.load_from(p, "r", [1, 2], [3, 4], 8)
    else:
        monkeypatch.setattr(driver.datapath.reads, "close", fail)
        (link,) = driver.links
        world.clock.advance(1.0)
        driver.put([])
        driver._events.append(ev.LinkLost(link, InternalError("lost")))
    with pytest.raises(WorkerFault, match="Bug"):
        world.run(lambda: False, max_turns=50)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_an_exception_in_a_tick_is_noted_and_the_next_one_is_handled(monkeypatch, deployment, side):
    world, p, d = deployment
    worker = (p if side == "producer" else d).workers[0]
    session = getattr(worker.driver, side)
    with monkeypatch.context() as patch:
        patch.setattr(session._agenda, "due", fail)
        worker.driver.put([ev.Tick()])
        worker.driver.turn(0.0)
    assert worker.poll().stats.contained == {"Bug": 1}
    if side == "producer":
        p.grant("r", [[1, 2]], 8)
        released = []
        assert world.run(
            lambda: released.extend(worker.poll().finished_sending) or released,
            max_turns=100,
            seconds_per_turn=1.0,
        )
        assert released == ["r"]


def test_an_exception_for_a_probe_ends_the_consumers_link(monkeypatch, deployment):
    world, p, _ = deployment
    worker = p.workers[0]
    (link,) = worker.driver.links
    monkeypatch.setattr(worker.driver.producer, "_probed", fail)
    monkeypatch.setitem(worker.driver.producer._HANDLERS, m.Probe, fail)
    probe = m.Probe(first_tag=1 << 20, nbytes=8, count=1)
    worker.driver.producer.handle(FromPeer(link, probe), world.clock())
    assert worker.poll().stats.contained == {"Bug": 1}
    assert not list(worker.driver.links)


def _loaded(deployment, name, ids, into, *, is_followed):
    """Load a request. Returns the reason of its failure, or None."""
    world, p, d = deployment
    num_tokens, ended = 4 * len(ids), {}
    (worker,) = d.workers
    offer = p.grant(name, [ids], num_tokens, is_complete=not is_followed)
    d.want(name, offer, is_followed=is_followed)
    producer_started = [not is_followed]

    def has_ended():
        output = worker.poll()
        if name in output.producer_started:
            producer_started[0] = True
        ended.update({each: output.failed_recving.get(each) for each in output.finished_recving})
        return name in ended

    if is_followed:
        world.run(lambda: has_ended() or producer_started[0])
        offer = replace(offer, blocks=())
    d.load(name, offer, [into], [range(num_tokens)])
    if is_followed:
        p.grant(name, [ids], num_tokens, grown_from=offer)
    assert world.run(has_ended)
    return ended[name]


@pytest.mark.parametrize("side", ["consumer", "producer"])
def test_a_message_that_is_too_long_for_the_peer_fails_its_request(monkeypatch, deployment, side):
    """A peer would end the connection over it, and with it all other requests."""
    world, p, d = deployment
    lengths = []

    def measured(message, version):
        payload = encode(message, version)
        lengths.append(len(payload))
        return payload

    monkeypatch.setattr(links, "encode", measured)
    is_followed = side == "producer"
    load = partial(_loaded, deployment, is_followed=is_followed)
    assert load("short", [1, 2], [3, 4]) is None
    driver = (p if is_followed else d).workers[0].driver
    (link,) = driver.links
    driver.links.limit_messages(link, max(lengths) + 60)
    failed = load("long", [*range(31)], [*range(31)])
    assert "message is too long" in failed
    assert load("short again", [1, 2], [3, 4]) is None
    (producer,) = d.workers[0].driver.consumer._engines._engines.values()
    assert producer.loss is None
    for engine in (p, d):
        assert not engine.workers[0].poll().stats.contained
    assert world.run(world.is_quiet)


def test_a_burst_of_one_bug_is_counted_and_logged_once(caplog):
    outbox = Outbox()
    for index in range(100):
        try:
            fail()
        except Bug as error:
            outbox.note_contained(f"request {index}", error)
    assert outbox.take().stats.contained == {"Bug": 100}
    assert len(caplog.records) == 1
