"""An unexpected exception in a session ends one request or one link. All others end as if nothing had been.

What raises is every event that a session's tables know, every message that a peer may send, every step that the code
guards and every call of a port. The lists come from the tables and from the code, so what is added there raises, too.
"""

import ast
import inspect
import logging
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvconnector.errors import TransportError
from kvconnector.ids import new_secret
from kvconnector.layout import GroupBlocks
from kvconnector.session import ConsumerSession, ProducerSession, containment
from kvconnector.session import events as ev
from kvconnector.session.consumer import LOAD_TABLE
from kvconnector.session.engines import ENGINE_TABLE
from kvconnector.session.link import Link, kind_of
from kvconnector.session.machine import Table
from kvconnector.session.peers import PEER_TABLE
from kvconnector.session.port import EnginePort, LinkPort
from kvconnector.session.producer import LEASE_TABLE
from kvconnector.wire import messages as m
from tests.property import test_session_world as session_world
from tests.property.deployments import Held
from tests.support.examples import examples
from tests.support.fakes import FakeEngine
from tests.support.world import Offer

SETTINGS = {
    "peer": {
        "hello_timeout_s": 4.0,
        "heartbeat_interval_s": 1.0,
        "timeout_s": 5.0,
        "idle_timeout_s": 6.0,
        "transfer_timeout_s": 10.0,
        "progress_timeout_s": 20.0,
    },
    "lease": {"duration_s": 8.0, "early_follow_s": 6.0},
    "staging": {"chunk_bytes": 16, "budget_bytes": 64 * 1024, "window": 2},
    "control": {"insecure": True},
}
NUM_BLOCKS = 96
HURRIED_S = 4.0
"""A consumer that waits no longer for a transfer gives up one that its producer would refuse later."""
HANDLERS = {"consumer": ConsumerSession._HANDLERS, "producer": ProducerSession._HANDLERS}
TABLES: dict[str, tuple[Table[Any], ...]] = {
    "consumer": (LOAD_TABLE, ENGINE_TABLE),
    "producer": (LEASE_TABLE, PEER_TABLE),
}
MESSAGES = {"consumer": ev.FROM_PRODUCER, "producer": ev.FROM_CONSUMER}
OF_EACH_RECORD = {ev.Tick, ev.EngineReady, ev.EngineLost}
"""What concerns many records: the steps for each of them raise instead."""
OF_A_LINK = {m.Heartbeat, m.Probe}
"""What a session handles itself although it is about a link."""
OF_REQUESTS = {side: HANDLERS[side].keys() - OF_EACH_RECORD - OF_A_LINK for side in HANDLERS}
OF_LINKS = {
    side: {
        *MESSAGES[side],
        *(kind for table in TABLES[side] for row in table.rows.values() for kind in row),
    }
    - OF_REQUESTS[side]
    - OF_EACH_RECORD
    for side in HANDLERS
}
PARTS = {"consumer": "_engines", "producer": "_peers"}
OWNERS = {
    "ConsumerSession": ("consumer", ""),
    "RemoteEngines": ("consumer", "_engines."),
    "ProducerSession": ("producer", ""),
    "Peers": ("producer", "_peers."),
}
WHEN = ("before", "after")


def guarded_steps():
    """Return what the sessions' code guards: the side, and the path of the method from the session."""
    steps = set()
    for path in Path(inspect.getfile(containment)).parent.glob("*.py"):
        for owner in ast.parse(path.read_text(encoding="utf-8")).body:
            for node in ast.walk(owner):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "guarded":
                    side, prefix = OWNERS[owner.name]
                    steps.add((side, prefix + ast.unparse(node.args[1]).removeprefix("self.")))
    return sorted(steps)


# the events of these two raise, each kind by itself
STEPS = [
    each for each in guarded_steps() if each[1].rpartition(".")[2] not in ("_handle", "_of_link")
]
STEPS_OF_LINKS = [each for each in STEPS if each[1].startswith(("_engines.", "_peers."))]
STEPS_OF_REQUESTS = [each for each in STEPS if each not in STEPS_OF_LINKS]
OF_THE_LINK_TOO = ("_read_due", "_reads.stop", "_notify_followers")
"""Steps of a request after whose failure the peer would wait: it loses the link, and with it all requests."""
OF_CONTAINMENT = {"close_link", "fail_load", "note_contained"}
"""Calls by which failures are contained. If they fail, the worker ends."""
CALLS = {
    room: [name for name in vars(port) if not name.startswith("_") and name not in OF_CONTAINMENT]
    for room, port in (("links", LinkPort), ("engine", EnginePort))
}


class Bug(Exception):
    """What no handler expects."""


class Names:
    """Numbers of requests. Those that are drawn while `is_victim` are victims."""

    def __init__(self):
        self.number = 0
        self.is_victim = False
        self.victims = set()

    def __next__(self):
        self.number += 1
        if self.is_victim:
            self.victims |= {f"r{self.number}", f"w{self.number}"}
        return self.number


class Deployment(session_world.Deployment):
    """The deployment of the session world: its checks of bytes, of ends and of what is left; and handlers that raise.

    They raise at the first producer and at one of the consumer's ranks, for the events that `is_hit` names.
    """

    def begin(self):
        shapes = [
            FakeEngine(name, session_world.MODEL, tp_size, 1, (size,), (NUM_BLOCKS,))
            for name, tp_size, size in (("p0", 1, 3), ("p1", 2, 2), ("d", 2, 4))
        ]
        self.start(1, tuple(shapes), (SETTINGS,) * 3)
        self.numbers = Names()
        self.failed, self.must_load, self.from_p1 = set(), set(), set()
        self.num_raised = 0
        self.is_cut = self.is_probed = self.is_unmapped = self.is_ending_lost = False
        self.is_paused = False
        self.contained, self.unusable = Counter(), []
        for engine in self.engines:
            for worker in engine.workers:
                worker.poll = self._counting(worker.poll)
                copies = worker.datapath.copies
                copies.make_jobs = self._failing(copies.make_jobs)

    def _counting(self, poll):
        def counted():
            output = poll()
            self.contained.update(output.stats.contained)
            return output

        return counted

    def _failing(self, make_jobs):
        def fail(source, blocks, **how):
            ids = blocks[0].block_ids.tolist()
            if any(each.block_ids == ids and each in self.wanted for each in self.unusable):
                raise TransportError("a copy is not possible")
            return make_jobs(source, blocks, **how)

        return fail

    def _loaded(self, worker, name, is_failed):
        if is_failed:
            self.failed.add(name)
        super()._loaded(worker, name, is_failed)

    def _serves(self, producer):
        if producer:  # the first one keeps raising
            super()._serves(producer)

    @property
    def victims(self):
        return self.numbers.victims

    @contextmanager
    def victim(self):
        self.numbers.is_victim = True
        yield
        self.numbers.is_victim = False

    # -- raising --

    def session(self, side):
        driver = self.engines[2 if side == "consumer" else 0].workers[0].driver
        return driver, driver.consumer if side == "consumer" else driver.producer

    def raise_in(self, side, path, is_hit, when):
        """Raise in a method of a session, or of a part of it, if `is_hit` of its arguments."""
        owner = self.session(side)[1]
        *parts, name = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        handler = getattr(owner, name)

        def handle(*arguments):
            is_victim = is_hit(self, *arguments)
            if is_victim and when == "before":
                self.hurt(when)
            handler(*arguments)
            if is_victim and when == "after":
                self.hurt(when)

        setattr(owner, name, handle)

    def raise_at_call(self, side, number):
        """Raise once, in the call with this number that a session makes for victims, of links or of the engine."""
        driver, session = self.session(side)
        handle, is_within, calls = session._handle, [False], [0]

        def handling(event, now):
            is_within[0] = bool(self.victims.intersection(names_of(self, event)))
            try:
                handle(event, now)
            finally:
                is_within[0] = False

        def counting(call):
            def counted(*arguments):
                if is_within[0]:
                    calls[0] += 1
                    if calls[0] == number + 1:
                        self.hurt(f"at call {number}")
                call(*arguments)

            return counted

        session._handle = handling
        for room, names in CALLS.items():
            port = getattr(driver.ports, room)
            for name in names:
                setattr(port, name, counting(getattr(port, name)))

    def hurt(self, when):
        self.num_raised += 1
        raise Bug(when)

    def is_of_p0(self, link):
        """Returns True if a link is between the first producer and the consumer."""
        peer = link.peer
        engine = getattr(peer, "engine", peer)
        address = self.engines[0].directory.address
        return link.number < 0 or (engine is not None and engine.name.address == address)

    # -- requests --

    def plain(self, producer):
        held = self._hold(producer, 14, is_computed=True)
        wanted = self._want(held)
        self.turns(2)
        self._load(wanted, 1)
        return held, wanted

    def streamed(self, producer):
        held = self._hold(producer, 14, is_computed=False)
        held.report()
        wanted = self._want(held, is_followed=True)
        while not held.is_complete:
            self.turns(3)
            held.step(4)
            if wanted in self.wanted and wanted.producer_started and not wanted.block_ids:
                self._load(wanted, 1)
        return held, wanted

    def reading(self, producer):
        """Return a request of which a rank at least has asked for a part, unless its producer cannot be reached."""
        held, wanted = self.plain(producer)
        for _ in range(40):
            if wanted in self.wanted and not self.is_asked(wanted):
                self._turn()
        return held, wanted

    def is_asked(self, wanted):
        loads = [
            worker.driver.consumer._loads.get(wanted.name) for worker in self.engines[2].workers
        ]
        return any(read.is_asked for load in loads if load for read in load.reads.values())

    def dropped(self, producer):
        """Drop a load whose producer gets a read and its end at once, so that the end finds the read under way."""
        held = self._hold(producer, 14, is_computed=True)
        wanted = self._want(held)
        self.turns(2)
        self.world.freeze(self.engines[producer])
        self._load(wanted, 1)
        for _ in range(40):
            if wanted in self.wanted and not self.is_asked(wanted):
                self._turn()
        self.drop_one(wanted)
        self._turn()
        self.world.freeze(self.engines[producer], frozen=False)

    def damaged(self, producer):
        """Load into blocks into which the data path cannot copy."""
        _, wanted = self.plain(producer)
        self.unusable.append(wanted)

    def dropped_early(self, producer):
        self.drop_one(self._want(self._hold(producer, 5, is_computed=True)))

    def drop_one(self, wanted):
        self.engines[2].drop(wanted.name)
        if not wanted.block_ids and wanted in self.wanted:
            self.wanted.remove(wanted)

    def withdrawn(self, producer):
        held, _ = self.reading(producer)
        if held in self.held:
            self._take_back(held)

    def reclaimed(self, producer):
        """Take back what no consumer has asked for."""
        held = self._hold(producer, 5, is_computed=True)
        self.turns(2)
        held.engine.reclaim(held.name)

    def unknown(self, producer):
        """Load what no lease is ever granted for, so the read comes early and is refused late."""
        self.load_from_engine_named(self.engines[producer].shape.engine_id, producer)

    def misnamed(self, producer):
        """Load from an engine that is not at this address, so its directory service refuses to look it up."""
        self.load_from_engine_named("nobody", producer)

    def load_from_engine_named(self, engine_id, producer):
        engine, name = self.engines[producer], f"r{next(self.numbers)}"
        blocks = (GroupBlocks.of([0, 1, 2, 3, 4]),)
        offer = Offer(engine_id, engine.directory.address, name, new_secret(), blocks, 10)
        self._load(self._want(Held(engine, name, [], 10, offer, {}, set())), 0)

    def all_kinds(self, producer):
        for kind in (self.plain, self.streamed):
            _, wanted = kind(producer)
            if not self.numbers.is_victim:
                self.must_load.add(wanted.name)
                if producer:
                    self.from_p1.add(wanted.name)
        self._hold(producer, 5, is_computed=True)  # nobody reads it
        for kind in (
            self.dropped,
            self.dropped_early,
            self.damaged,
            self.withdrawn,
            self.reclaimed,
            self.unknown,
            self.misnamed,
        ):
            kind(producer)

    def run_all(self):
        """Run requests of all kinds, from both producers at once, and wait until nothing is left of them."""
        with self.victim():
            self.all_kinds(0)
        self.all_kinds(0)
        self.all_kinds(1)
        with self.victim():
            self.plain(0)
            self.streamed(0)
        if self.is_ending_lost:
            self.lose_endings()
        if self.is_probed:
            self.probe()
        if self.is_unmapped:
            self.unmap()
        if self.is_cut:
            self.cut()
        if self.is_paused:
            self.pause()
        self._settle()
        self._turn()  # takes the last reports

    def probe(self):
        """Ask the first producer for bytes, as `kvconnector doctor` does."""
        with self.victim():
            self.reading(0)
        driver = self.session("consumer")[0]
        (link,) = [each for each in driver.links if self.is_of_p0(each)]
        driver.ports.links.send(link, m.Probe(first_tag=1 << 40, nbytes=8, count=1))

    def unmap(self):
        """Report that the first producer's pools are unmapped, which it asks for before it takes memory away."""
        with self.victim():
            self.reading(0)
        driver = self.session("consumer")[0]
        driver._events += [ev.PoolsUnmapped(link) for link in driver.links if self.is_of_p0(link)]

    def lose_endings(self):
        """Let the first producer not say that a read which was cancelled is over."""
        links = self.session("producer")[0].ports.links
        send = links.send
        links.send = lambda link, message: isinstance(message, m.ReadEnded) or send(link, message)
        with self.victim():
            self.dropped(0)

    def cut(self):
        """Lose the first producer's links while requests read, and while they wait for it."""
        with self.victim():
            self.reading(0)
            self.world.sever(self.engines[0], self.engines[2])
            self.plain(0)

    def pause(self):
        """Let a request of the first producer be the first event after a pause of all processes."""
        while any(wanted.name in self.from_p1 for wanted in self.wanted):
            self._turn()
        self.world.clock.advance(SETTINGS["peer"]["timeout_s"])
        with self.victim():
            self.plain(0)


@pytest.fixture
def deployment(monkeypatch):
    monkeypatch.setattr(session_world, "NUM_BLOCKS", NUM_BLOCKS)
    deployment = Deployment()
    deployment.begin()
    yield deployment
    deployment.patch.undo()
    deployment.world.close()


def names_of(deployment, event):
    """Return the names of the requests that an event concerns."""
    message = getattr(event, "message", None)
    if isinstance(event, ev.OfReceive):
        return [event.read.load.request_id]
    if isinstance(event, ev.SendOver):
        return [event.send.lease.request_id]
    if isinstance(message, m.TransferKey | m.Read | m.Progress):
        return [message.transfer_id]
    if isinstance(message, m.CancelRead):
        peer = deployment.session("producer")[1]._peers.ready(event.link)
        found = peer and (peer.sends.get(message.read_id) or peer.early.get(message.read_id))
        return [getattr(found, "lease", found).request_id] if hasattr(found, "lease") else []
    if isinstance(message, m.ReadRefused | m.ReadEnded):
        read = deployment.session("consumer")[1]._read_named(event)
        return [read.load.request_id] if read is not None else []
    return [event.request_id] if hasattr(event, "request_id") else []


def is_of_a_victim(kind):
    def is_hit(deployment, event, now):
        return kind_of(event) is kind and bool(
            deployment.victims.intersection(names_of(deployment, event))
        )

    return is_hit


def check(deployment, caplog, spared):
    """Run all requests. Those that must load and that are `spared` do, and each exception is noted once."""
    with caplog.at_level(logging.WARNING):
        deployment.run_all()
    assert deployment.num_raised
    assert not spared & deployment.failed
    assert deployment.contained["Bug"] == deployment.num_raised
    texts = [record.getMessage() for record in caplog.records]
    logged = [text for text in texts if "this is a bug" in text]
    assert 1 <= len(logged) <= deployment.num_raised
    assert all("Traceback" in text and "Bug" in text for text in logged)


def named(each):
    return getattr(each, "__name__", str(each))


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(
    "side, kind",
    [(side, kind) for side in OF_REQUESTS for kind in sorted(OF_REQUESTS[side], key=repr)],
    ids=named,
)
def test_an_exception_in_a_request_ends_that_request(deployment, caplog, side, kind, when):
    deployment.raise_in(side, "_handle", is_of_a_victim(kind), when)
    check(deployment, caplog, deployment.must_load)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("side, name", STEPS_OF_REQUESTS)
def test_an_exception_in_a_loop_over_requests_ends_one(deployment, caplog, side, name, when):
    """Each of these handles one record of many, that a report, a heartbeat, a tick or a lost engine concerns."""

    stopped = []

    def is_hit(deployment, *arguments):
        if name == "_reads.stop":  # if it failed again, nothing could keep the read from its blocks
            if arguments[0] in stopped:
                return False
            stopped.append(arguments[0])
        first = getattr(arguments[0], "load", arguments[0])
        names = names_of(deployment, first) or [first.request_id]
        return bool(deployment.victims.intersection(names))

    deployment.raise_in(side, name, is_hit, when)
    deployment.is_cut = name in ("_engine_changed_for", "_fail_if_lost")
    deployment.is_ending_lost = name == "_read_due"
    if name == "_load_due":  # otherwise each load ends before
        for worker in deployment.engines[2].workers:
            worker.driver.consumer._timeout_s = HURRIED_S
    is_of_link = name in OF_THE_LINK_TOO
    check(deployment, caplog, deployment.from_p1 if is_of_link else deployment.must_load)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(
    "side, kind",
    [(side, kind) for side in OF_LINKS for kind in sorted(OF_LINKS[side], key=repr)],
    ids=named,
)
def test_an_exception_in_a_greeting_or_a_heartbeat_ends_that_link(
    deployment, caplog, side, kind, when
):
    def is_hit(deployment, *arguments):
        event = arguments[-2]  # the time comes last
        return kind_of(event) is kind and deployment.is_of_p0(event.link)

    name = "_handle" if kind in HANDLERS[side] else PARTS[side] + "._of_link"
    deployment.raise_in(side, name, is_hit, when)
    deployment.is_cut = kind is ev.LinkLost
    deployment.is_probed = kind is m.Probe
    deployment.is_unmapped = kind is ev.PoolsUnmapped
    check(deployment, caplog, deployment.from_p1)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("side, name", STEPS_OF_LINKS)
def test_an_exception_in_a_deadline_or_a_goodbye_ends_that_link(
    deployment, caplog, side, name, when
):
    def is_hit(deployment, first, *others):
        if deployment.num_raised == 3:
            return False  # otherwise it is never idle
        if isinstance(first, Link):
            return isinstance(others[0], m.Bye)
        link = getattr(first, "link", None)
        return deployment.is_of_p0(link) if link else first.name.engine_id == "p0"

    deployment.raise_in(side, name, is_hit, when)
    deployment.is_cut = name == "_peers._links.send"
    deployment.is_paused = name == "_engines._lose"
    check(deployment, caplog, deployment.from_p1)


@pytest.mark.parametrize("number", range(24))
@pytest.mark.parametrize("side", ["consumer", "producer"])
def test_an_exception_between_two_calls_of_a_handler_ends_that_request(
    deployment, caplog, side, number
):
    """So what a handler has done is half of what it does."""
    deployment.raise_at_call(side, number)
    check(deployment, caplog, deployment.must_load)


class RandomBugs(session_world.Deployment):
    """The session world, in which any event, or any call that a session makes of links or the engine, may raise."""

    left = None

    def _start(self, index):
        super()._start(index)
        for worker in self.engines[index].workers:
            driver = worker.driver
            for session in (driver.producer, driver.consumer):
                if session is not None:
                    session._handle = self._surrounded(session._handle)
            for room, names in CALLS.items():
                port = getattr(driver.ports, room)
                for name in names:
                    setattr(port, name, self._preceded(getattr(port, name)))

    def _raise_if_due(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Bug("at random")

    def _preceded(self, call):
        def called(*arguments):
            self._raise_if_due()
            call(*arguments)

        return called

    def _surrounded(self, handle):
        def handled(event, now):
            if not isinstance(event, ev.Tick):
                self._raise_if_due()
            handle(event, now)
            if not isinstance(event, ev.Tick):
                self._raise_if_due()

        return handled

    @rule(number=st.integers(0, 40))
    def strike(self, number):
        self.left = number

    def _settle(self):
        self.left = None
        super()._settle()


def _bugs(number):
    case = type(f"Bugs{number}", (RandomBugs,), {}).TestCase
    case.settings = examples(15, stateful_step_count=30)
    return case


TestBugs1, TestBugs2 = map(_bugs, (1, 2))
