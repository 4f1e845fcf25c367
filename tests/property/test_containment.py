"""An unexpected exception in a session ends one request or one link. All others end as if nothing had been."""

import logging
from collections import Counter
from contextlib import contextmanager

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvconnector.errors import TransportError
from kvconnector.ids import new_secret
from kvconnector.layout import GroupBlocks
from kvconnector.session import ConsumerSession, ProducerSession
from kvconnector.session import events as ev
from kvconnector.session.link import kind_of
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
OF_REQUESTS = {
    "consumer": ConsumerSession._HANDLERS.keys() - {ev.Tick},
    "producer": ProducerSession._HANDLERS.keys() - {ev.Tick, m.Heartbeat, m.Probe},
}
OF_LINKS = {
    "consumer": {m.Directory, m.HelloReply, ev.WarmedUp, m.HeartbeatReply, ev.LinkLost},
    "producer": {m.Hello, ev.EndpointOpened, ev.LinkLost, m.Heartbeat},
}
PARTS_OF_REQUESTS = (
    ("consumer", "_take_report"),
    ("consumer", "_load_due"),
    ("consumer", "_engine_changed_for"),
    ("consumer", "_fail_if_lost"),
    ("producer", "_lease_due"),
    ("producer", "_early_due"),
    ("producer", "_renew"),
)
PARTS_OF_LINKS = (
    ("consumer", "_engines._want"),
    ("consumer", "_engines._due"),
    ("consumer", "_engines._end_transfer"),
    ("producer", "_peers._due"),
)
PARTS = {"consumer": "_engines", "producer": "_peers"}
WHEN = ("before", "after")


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
        self.num_raised, self.is_cut = 0, False
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
        for port, names in (
            (driver.ports.links, ("send", "open_link", "send_hello")),
            (driver.ports.engine, ("begun", "finish_load", "release", "log_peer_met")),
        ):
            for name in names:
                setattr(port, name, counting(getattr(port, name)))

    def hurt(self, when):
        self.num_raised += 1
        raise Bug(when)

    def is_of_p0(self, link):
        """Returns True if a link is between the first producer and the consumer."""
        peer = link.peer
        engine = getattr(peer, "engine", peer)
        return link.number < 0 or (engine is not None and engine.name.engine_id == "p0")

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
            if wanted in self.wanted and wanted.has_begun and not wanted.block_ids:
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
        engine, name = self.engines[producer], f"r{next(self.numbers)}"
        blocks = (GroupBlocks.of([0, 1, 2, 3, 4]),)
        offer = Offer(
            engine.shape.engine_id, engine.directory.address, name, new_secret(), blocks, 10
        )
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
        if self.is_cut:
            self.cut()
        self._settle()
        self._turn()  # takes the last reports

    def cut(self):
        """Lose the first producer's links while requests read, and while they wait for it."""
        with self.victim():
            self.reading(0)
            self.world.sever(self.engines[0], self.engines[2])
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
@pytest.mark.parametrize("side, name", PARTS_OF_REQUESTS)
def test_an_exception_in_a_loop_over_requests_ends_one(deployment, caplog, side, name, when):
    """Each of these handles one record of many, that a report, a heartbeat, a tick or a lost engine concerns."""

    def is_hit(deployment, *arguments):
        first = getattr(arguments[0], "load", arguments[0])
        names = names_of(deployment, first) or [first.request_id]
        return bool(deployment.victims.intersection(names))

    deployment.raise_in(side, name, is_hit, when)
    if name in ("_engine_changed_for", "_fail_if_lost"):
        deployment.is_cut = True
    if name == "_load_due":  # otherwise each load ends before
        for worker in deployment.engines[2].workers:
            worker.driver.consumer._timeout_s = HURRIED_S
    spared = deployment.must_load
    check(deployment, caplog, spared)


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

    name = "_handle" if kind is m.Heartbeat else PARTS[side] + "._of_link"
    deployment.raise_in(side, name, is_hit, when)
    deployment.is_cut = kind is ev.LinkLost
    check(deployment, caplog, deployment.from_p1)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("side, name", PARTS_OF_LINKS)
def test_an_exception_in_a_deadline_of_a_peer_ends_that_link(deployment, caplog, side, name, when):
    def is_hit(deployment, first, *_):
        if deployment.num_raised == 3:
            return False  # otherwise it is never idle
        link = getattr(first, "link", None)
        return deployment.is_of_p0(link) if link else first.name.engine_id == "p0"

    deployment.raise_in(side, name, is_hit, when)
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
            for port, names in (
                (driver.ports.links, ("send", "open_link", "send_hello")),
                (driver.ports.engine, ("begun", "finish_load", "release", "log_peer_met")),
            ):
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
