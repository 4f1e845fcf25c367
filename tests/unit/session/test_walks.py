"""Long random walks of one session among its engine, its peers and its data plane.

Whatever comes, invariants hold (`harness.Side` checks them after every event), and everything ends once the peers are
gone. Together the walks take every transition of the tables: a row that none takes is untested or impossible.
"""

from __future__ import annotations

import random
from contextlib import suppress
from functools import cache

import pytest
from msgspec.structs import replace

from kvconnector.errors import LocalError, PeerLostError
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session import load, machine
from kvconnector.session.diagrams import TABLES
from kvconnector.session.lease import LeaseState
from kvconnector.session.watermark import Watermark
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal
from tests.support.fakes import attention_model
from tests.unit.session import harness as h

NUM_WALKS, NUM_STEPS = 100, 500
PRODUCER, CONSUMER = h.engine(tp_size=2), h.engine("d", tp_size=2)
STRANGER = h.engine(model=attention_model(item_size_bytes=4))
LOST = PeerLostError("gone")


def key(name):
    return m.TransferKey(transfer_id=name, secret=h.SECRET)


@cache
def read_of(name, read_id, is_streamed, stop):
    blocks = {"blocks": ()} if is_streamed else {}
    return h.read(read_id, key(name), range(stop), ours=CONSUMER, **blocks)


WRONG_READ = h.read(4, key("a"), segments=())


class ProducerWalk:
    """An engine with two requests at a time, of which some are granted bit by bit; three links, the sends that the data
    plane has under way, and the leases that it has published.
    """

    def __init__(self, rng):
        self.rng, self.side, self.sends, self.published = rng, h.producer(h.EXPORT), [], {}
        self.granted, self.held, self.count = {}, set(), 0

    def tell(self, *events):
        for event in events:
            self.side.session.heard(getattr(event, "link", 0), self.side.now)
        for command in self.side.tell(*events):
            match command:
                case cmd.StartSend():
                    self.sends.append((command.link, command.read.read_id))
                case cmd.PublishLease():
                    assert command.watermark >= self.published.get(command.key, Watermark())
                    self.published[command.key] = command.watermark
                case cmd.RetractLease():
                    del self.published[command.key]
                case cmd.ReleaseBlocks():  # which the engine waits for
                    self.held.remove(command.request_id)
                    self.granted.pop(command.request_id)
        readable = [
            lease
            for lease in self.side.session._leases.values()
            if lease.state is not LeaseState.DRAINING
        ]
        # whose blocks the engine has, consumers on this host must not read any more
        assert set(self.published) == {name for lease in readable for name in lease.names()}

    def step(self):
        rng, link = self.rng, -self.rng.randint(1, 3)
        if len(self.granted) < 2:
            self.count += 1
            self.granted[f"r{self.count}"] = 0
        name = rng.choice(list(self.granted))
        read_id, is_rare = rng.randint(1, 3), rng.random() < 0.06
        is_streamed = int(name[1:]) % 2 == 0
        self.side.now += rng.choice([0.0] * 60 + [4.0] * 4 + [20.0])
        events = [
            *[ev.Greeted(link, h.hello(CONSUMER, tp_rank=-link % 2)), ev.EndpointOpened(link)] * 2,
            *[ev.ReadAsked(link, read_of(name, read_id, is_streamed, rng.choice([4, 12])))] * 4,
            ev.ReadCancelled(link, read_id),
            *[h.done(link, key(name))] * 2,
            h.heartbeat(link, key(name)),
            *[h.followed(link, key(name))] * 2,
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
        if name not in self.held:
            events += [self._grant(name, is_streamed, is_rare)] * 4
        if self.sends:
            send = rng.choice(self.sends)
            events += [ev.SendFinished(*send), ev.SendStopped(*send, 0)] * 2
        event = rng.choice(events)
        if isinstance(event, (ev.SendFinished, ev.SendStopped)):
            self.sends.remove(send)
        if isinstance(event, ev.Granted):
            self.granted[name] = event.num_tokens
            self.held |= {name} if event.is_complete else set()
        self.tell(event)
        if rng.random() < 0.01:
            self._wait()

    def _wait(self):
        """Longer than a lease lasts that nobody renews, while the consumers live."""
        self.side.now += h.LEASE_S
        for link in (-1, -2, -3):
            self.side.session.heard(link, self.side.now)
        self.tell(ev.Tick())

    def _grant(self, name, is_streamed, is_wrong):
        """What the engine says next of a request; rarely that it is elsewhere now, or cannot be read."""
        num_tokens = 12 if not is_streamed else min(12, self.granted[name] + 4)
        is_complete = num_tokens == 12 and (not is_streamed or self.rng.random() < 0.5)
        ids = [3, 1, 2] if not is_wrong else [9, 1, 2]
        error = LOST if is_wrong and self.rng.random() < 0.5 else None
        blocks = (h.GroupBlocks.of(ids[: num_tokens // 4]),)
        ahead = (0, 0)
        before = self.granted[name]
        if before < num_tokens and is_streamed and not is_complete and self.rng.random() < 0.5:
            num_tokens, ahead = before, (num_tokens, 1)  # a layer of these tokens only
        return ev.Granted(name, name, h.SECRET, blocks, num_tokens, 0.0, error, is_complete, *ahead)

    def end(self):
        self.tell(*[ev.LinkLost(-link, LOST) for link in (1, 2, 3)])
        self.tell(*[ev.SendStopped(*send, 0) for send in self.sends])
        self.tell(*[ev.Withdrawn(name) for name in set(self.granted) - self.held])
        self.side.tick(1e6)
        assert self.side.num_leases == 0
        assert self.side.session.next_deadline() is None


class ConsumerWalk:
    """Four requests of one producer engine, of which two are followed, and a data plane that keeps its promises.

    Some ranks hold nothing.
    """

    def __init__(self, rng):
        side = h.consumer(h.EMPTY_STAGE if rng.random() < 0.2 else None, peer=h.SOON_IDLE)
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
        rng, name = self.rng, self.rng.choice("abfg")
        self.side.now += rng.choice([0.0] * 60 + [4.0] * 4 + [20.0])
        asked = h.load_asked(name, rng.choice([range(12), range(12), range(0)]))
        wanted = h.wanted(name, key=key(name), is_followed=name in "fg")
        events = [ev.Tick(), wanted, asked, asked]
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
            ev.DirectoryArrived(link, replace(h.directory(PRODUCER), workers=())),
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
            *[self._progress(link, name) for name in "affgg"],
        ]

    def _progress(self, link, name):
        """Some of it, in any order; rarely the last of it, or nothing ever."""
        told = {"transfer_id": name}
        if self.rng.random() < 0.02:
            refusal = self.rng.choice([Refusal.ABORTED, Refusal.LEASE_EXPIRED])
            return ev.Progressed(link, m.Progress(**told, refusal=refusal))
        num_blocks = self.rng.randint(0, 3)
        blocks = (m.ReadBlocks(first_block=0, block_ids=bytes(4 * num_blocks)),)
        is_complete = self.rng.random() < 0.3
        told |= {"num_tokens": 4 * num_blocks, "is_complete": is_complete}
        if num_blocks and self.rng.random() < 0.3:  # some layers of its last step
            told |= {"num_tokens": 4 * (num_blocks - 1), "ahead_tokens": 4 * num_blocks}
            told |= {"is_complete": False, "ahead_layers": self.rng.randint(1, 2)}
        return ev.Progressed(link, m.Progress(**told, blocks=blocks))

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
        self.tell(*[ev.LoadWithdrawn(name) for name in "abfg"])
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
    monkeypatch.setattr(load, "MIN_PIECE_BYTES", 1)
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
