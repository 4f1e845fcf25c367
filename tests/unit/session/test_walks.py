"""Long random walks of one session among its engine, its peers and its data plane.

Whatever comes, invariants hold (`harness.Side` checks them after every event), and everything ends once the peers are
gone. Together the walks take every transition of the tables: a row that none takes is untested or impossible.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from kvconnector.errors import LocalError, PeerLostError
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session import machine
from kvconnector.session.diagrams import TABLES
from kvconnector.session.lease import LeaseState, lease_key
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal
from tests.support.fakes import attention_model
from tests.unit.session import harness as h

NUM_WALKS, NUM_STEPS = 40, 400
PRODUCER, CONSUMER = h.engine(tp_size=2), h.engine("d", tp_size=2)
STRANGER = h.engine(model=attention_model(item_size_bytes=4))
LOST = PeerLostError("gone")


def key(name):
    return m.TransferKey(transfer_id=name, secret=h.SECRET)


READS = {
    (name, read_id): h.read(read_id, key(name), ours=CONSUMER)
    for name in "ab"
    for read_id in (1, 2, 3)
}
KEYS = {name: lease_key(name, h.SECRET, h.BLOCKS) for name in "ab"}
WRONG_READ = h.read(4, key("a"), segments=())


class ProducerWalk:
    """Two requests, three links, the sends that the data plane has under way, and the leases that it has published."""

    def __init__(self, rng):
        self.rng, self.side, self.sends, self.published = rng, h.producer(h.EXPORT), [], set()

    def tell(self, *events):
        for event in events:
            self.side.session.heard(getattr(event, "link", 0), self.side.now)
        for command in self.side.tell(*events):
            match command:
                case cmd.StartSend():
                    self.sends.append((command.link, command.read.read_id))
                case cmd.PublishLease():
                    assert command.key not in self.published
                    self.published.add(command.key)
                case cmd.RetractLease():
                    self.published.remove(command.key)
                case cmd.ReleaseBlocks():  # which consumers on this host must not read any more
                    assert KEYS[command.request_id] not in self.published
        readable = {
            KEYS[lease.request_id]
            for lease in self.side.session._leases.values()
            if lease.state in (LeaseState.HELD, LeaseState.READING)
        }
        assert self.published == readable

    def step(self):
        rng, link, name = self.rng, -self.rng.randint(1, 3), self.rng.choice("ab")
        read_id, is_rare = rng.randint(1, 3), rng.random() < 0.06
        self.side.now += rng.choice([0.0] * 60 + [4.0] * 4 + [20.0])
        events = [
            *[h.granted(name, name)] * 2,
            *[ev.Greeted(link, h.hello(CONSUMER, tp_rank=-link % 2)), ev.EndpointOpened(link)] * 2,
            *[ev.ReadAsked(link, READS[name, read_id])] * 4,
            ev.ReadCancelled(link, read_id),
            *[h.done(link, key(name))] * 2,
            h.heartbeat(link, key(name)),
            ev.Tick(),
        ]
        if is_rare:
            events = [
                ev.Withdrawn(name),
                ev.EndpointFailed(link, LOST),
                ev.LinkLost(link, LOST),
                ev.Greeted(link, h.hello(STRANGER)),
                ev.ReadAsked(link, WRONG_READ),
                h.given_up(link, key(name)),
            ]
        if self.sends:
            send = rng.choice(self.sends)
            events += [ev.SendFinished(*send), ev.SendStopped(*send, 0)] * 2
        event = rng.choice(events)
        if isinstance(event, (ev.SendFinished, ev.SendStopped)):
            self.sends.remove(send)
        self.tell(event)

    def end(self):
        self.tell(*[ev.LinkLost(-link, LOST) for link in (1, 2, 3)])
        self.tell(*[ev.SendStopped(*send, 0) for send in self.sends])
        self.side.tick(1e6)
        assert self.side.num_leases == 0
        assert self.side.session.next_deadline() is None


class ConsumerWalk:
    """Three requests of one producer engine, and a data plane that keeps its promises.

    Some ranks hold nothing.
    """

    def __init__(self, rng):
        side = h.consumer(h.EMPTY_STAGE if rng.random() < 0.2 else None)
        self.rng, self.side, self.links, self.reads = rng, side, {}, {}

    def tell(self, *events):
        for command in self.side.tell(*events):
            if isinstance(command, cmd.OpenLink):
                self.links[command.link] = command.address == h.ADDRESS.address
            elif isinstance(command, cmd.CloseLink):
                del self.links[command.link]
            elif isinstance(command, cmd.StartReceive):
                self.reads[command.read_id] = ("waiting", command.link)
            elif isinstance(command, cmd.StopReceive):
                state, link = self.reads.get(command.read_id, (None, 0))
                if state in ("waiting", "posted"):
                    self.reads[command.read_id] = ("stopping", link)

    def step(self):
        rng, name = self.rng, self.rng.choice("abc")
        self.side.now += rng.choice([0.0] * 60 + [4.0] * 4 + [20.0])
        asked = h.load_asked(name, rng.choice([range(12), range(12), range(0)]))
        events = [ev.Tick(), h.wanted(name, key=key(name)), asked, asked]
        if self._rarely():
            events += [ev.LoadAsked(name, (), (), (), error) for error in (None, LOST)]
        if self._rarely():
            events += [ev.LoadWithdrawn(name)] * 4
        for link, is_directory in self.links.items():
            events += self._of_directory(link) if is_directory else self._of_worker(link)
            events += [ev.LinkLost(link, LOST)] * self._rarely()
        for read_id in self.reads:
            events += self._of_read(read_id)
        self._tell_of_data_plane(rng.choice(events))
        if rng.random() < 0.01:
            self._wait()

    def _wait(self):
        """Longer than a read may make no progress, while the producer lives."""
        for _ in range(14):
            self.side.now += h.HEARTBEAT_S
            self.tell(ev.Tick(), *[ev.HeartbeatAnswered(link) for link in self.workers()])

    def workers(self):
        return [link for link, is_directory in self.links.items() if not is_directory]

    def _rarely(self):
        return self.rng.random() < 0.1

    def _of_directory(self, link):
        odd = [
            ev.DirectoryArrived(link, h.directory(STRANGER)),
            ev.DirectoryDenied(link, m.DirectoryRefused(refusal=Refusal.INTERNAL, text="no")),
        ]
        return [ev.DirectoryArrived(link, h.directory(PRODUCER))] * 4 + odd

    def _of_worker(self, link):
        refused = m.HelloReply(incarnation="one", refusal=Refusal.INTERNAL)
        odd = [ev.HelloAnswered(link, refused), ev.WarmedUp(link, LOST)]
        return [
            *[ev.HelloAnswered(link, m.HelloReply(incarnation="one")), ev.WarmedUp(link)] * 3,
            ev.HeartbeatAnswered(link),
            *odd * self._rarely(),
        ]

    def _of_read(self, read_id):
        state, link = self.reads[read_id]
        finished = ev.ReceiveFinished(read_id)
        failed = [ev.ReceiveFailed(read_id, LOST)] * self._rarely()
        cut_short = [ev.ReadCutShort(link, read_id, 0, LOST)] * self._rarely()
        return {
            "waiting": [*[ev.ReceivePosted(read_id, 2, read_id << 20)] * 2, finished, *failed],
            "posted": [*[ev.ReceiveAdvanced(read_id), finished] * 2, *failed, *cut_short],
            "stopping": [
                ev.ReceiveStopped(read_id),
                finished,
                ev.ReceiveFailed(read_id, LOST),
            ],
            "stopped": [ev.ReceiveDrained(read_id)],
        }[state]

    def _tell_of_data_plane(self, event):
        """Tell an event, and remember how far the data plane is with a read."""
        after = {
            ev.ReceivePosted: "posted",
            ev.ReceiveStopped: "stopped",
            ev.ReceiveFailed: "stopped",
            ev.ReceiveFinished: None,
            ev.ReceiveDrained: None,
        }
        if type(event) in after:
            _, link = self.reads.pop(event.read_id)
            if after[type(event)]:
                self.reads[event.read_id] = (after[type(event)], link)
        self.tell(event)

    def end(self):
        self.tell(*[ev.LoadWithdrawn(name) for name in "abc"])
        for link in list(self.links):
            self.tell(*[ev.LinkLost(link, LOST)] * (link in self.links))
        while self.reads:
            read_id = next(iter(self.reads))
            state = self.reads[read_id][0]
            event = ev.ReceiveDrained if state == "stopped" else ev.ReceiveStopped
            self._tell_of_data_plane(event(read_id))
        self.side.tick(1e6)
        assert (self.side.num_loads, self.side.num_reads) == (0, 0)


def walk(make, seed):
    one = make(random.Random(seed))
    for _ in range(NUM_STEPS):
        with suppress(LocalError):  # at the wrong time: refused, and nothing changed
            one.step()
    one.end()


def test_every_transition_of_the_tables_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set()
    move = machine.Tracked.move

    def recorded(self, event, target, now):
        before = self.state
        move(self, event, target, now)
        taken.add((self._table.name, before.value, type(event).__name__, target.value))

    monkeypatch.setattr(machine.Tracked, "move", recorded)
    for seed in range(NUM_WALKS):
        walk(ProducerWalk, seed)
        walk(ConsumerWalk, seed)
    listed = {
        (table.name, state.value, event.__name__, target.value)
        for table in TABLES
        for state, row in table.rows.items()
        for event, targets in row.items()
        for target in targets
    }
    assert not listed - taken, sorted(listed - taken)
