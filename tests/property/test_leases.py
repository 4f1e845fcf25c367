"""One producer session's leases under random orders, messages and deadlines."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvconnector.errors import PeerLostError
from kvconnector.session import events as ev
from kvconnector.session.link import FromPeer
from kvconnector.session.orders import HoldRequest, ReclaimRequest, WithdrawRequest
from kvconnector.wire import messages as m
from tests.support.examples import examples
from tests.unit.session import harness

ALL_NAMES = ("a", "b", "c")
NAMES = st.sampled_from(ALL_NAMES)
LINKS = st.sampled_from([-1, -2])
READERS = harness.engine("d", tp_size=2)
ROUTES = {link: harness.routes_of(READERS, tp_rank=-1 - link) for link in (-1, -2)}


class Leases(RuleBasedStateMachine):
    """`held` are the leases not yet released, `sends` those from their blocks, `published` the keys on the board."""

    def __init__(self):
        super().__init__()
        self.side = harness.producer(harness.EXPORT, harness.HEARTBEAT_S)
        self.links = {}
        self.numbers = iter(range(1, 1 << 30))
        self.held, self.sends, self.published = {}, {}, set()
        self.confirmed, self.released = {}, {}
        self.named_at = {}
        self.wanted, self.reclaimed = set(), {}
        for link in (-1, -2):
            self._greet(link)

    def _greet(self, link):
        self.links[link] = next(self.numbers) * -2 + (link == -2)
        segments = ROUTES[link][0].segments
        hello = harness.hello(READERS, tp_rank=-1 - link, segments=segments)
        self._handle(FromPeer(self.links[link], hello))
        self._handle(ev.EndpointOpened(self.links[link]))

    def _handle(self, event):
        for done in self.side.handle(event):
            match done.call:
                case "publish":
                    self.published.add(done.key)
                case "retract":
                    self.published.remove(done.key)
                case "start_send":
                    self.sends[done.send] = done.send.read.transfer_id
                case "stop_send":
                    assert done.send in self.sends, "a send is stopped that does not exist"
                case "release":
                    self._check_release(done.request_id, done.outcome)

    def _check_release(self, name, outcome):
        assert name in self.held, "blocks are released twice"
        assert name not in self.sends.values(), "blocks are released while they are sent"
        until = self.held.pop(name)
        ends = self.confirmed.pop(name)
        if outcome == "released":
            assert ends == {0, 1}, "blocks are released before all ranks have confirmed"
        elif outcome == "expired":
            is_due = self.side.now >= until or self._is_reclaimed(name)
            assert is_due, "a lease ended before its time"
        else:
            assert "abort" in ends, "a lease ended that no engine aborted"

    @rule()
    def grant(self):
        """Grant a lease under every name that is free, so that most of what follows finds one."""
        for name in sorted({*ALL_NAMES} - self.held.keys() - {*self.sends.values()}):
            self.held[name], self.confirmed[name] = self.side.now + harness.LEASE_S, set()
            self.named_at[name] = self.side.now + harness.HEARTBEAT_S
            self.wanted.discard(name)
            self.reclaimed.pop(name, None)
            self.released[name] = f"{next(self.numbers):032}"
            self._handle(HoldRequest(name, name, self.released[name], harness.BLOCKS, 12))

    def _key(self, name, *, is_right=True):
        secret = self.released.get(name, harness.SECRET) if is_right else harness.OTHER_SECRET
        return m.TransferKey(transfer_id=name, secret=secret)

    @rule(link=LINKS, name=NAMES, is_right=st.booleans())
    def read(self, link, name, is_right):
        if self.held:
            name = sorted(self.held)[ALL_NAMES.index(name) % len(self.held)]
        if name in self.held or not is_right:
            key = self._key(name, is_right=is_right)
            asked = harness.read(next(self.numbers), key, routes=ROUTES[link])
            self._wants(name, is_right)
            self._handle(FromPeer(self.links[link], asked))

    @rule(link=LINKS, name=NAMES, is_right=st.booleans())
    def renew(self, link, name, is_right):
        # one that has ended may still drain
        if is_right and self.held.get(name, 0.0) > self.side.now:
            self.held[name] = max(self.held[name], self.side.now + harness.LEASE_S)
        if name in self.held:
            self._wants(name, is_right)
        self._handle(harness.heartbeat(self.links[link], self._key(name, is_right=is_right)))

    @rule(link=LINKS, name=NAMES, is_right=st.booleans(), is_abort=st.booleans())
    def end(self, link, name, is_right, is_abort):
        if name not in self.held:
            return  # an early ending would end the next lease
        self._wants(name, is_right)
        if is_right:
            self.confirmed[name].add("abort" if is_abort else -1 - link)
        event = harness.abort if is_abort else harness.done
        self._handle(event(self.links[link], self._key(name, is_right=is_right)))

    def _wants(self, name, is_right):
        if is_right:
            self.wanted.add(name)

    @rule(name=NAMES)
    def reclaim(self, name):
        """Ends a lease exactly if no consumer has asked for it, once a heartbeat would have named it."""
        if name in self.held and name not in self.wanted:
            self.reclaimed[name] = self.named_at[name]
        self._handle(ReclaimRequest(name))

    def _is_reclaimed(self, name):
        at = self.reclaimed.get(name)
        return at is not None and at <= self.side.now and name not in self.wanted

    @invariant()
    def what_is_taken_back_has_ended(self):
        assert not [name for name in self.held if self._is_reclaimed(name)]

    @rule(name=NAMES)
    def withdraw(self, name):
        if name in self.held:
            self.confirmed[name].add("abort")
        self._handle(WithdrawRequest(name))

    @rule(pick=st.integers(0, 99), is_whole=st.booleans())
    def a_send_ends(self, pick, is_whole):
        if self.sends:
            send = [*self.sends][pick % len(self.sends)]
            del self.sends[send]
            self._handle(ev.SendOver(send) if is_whole else ev.SendOver(send, 1))

    @rule(link=LINKS)
    def a_link_is_lost(self, link):
        self._handle(ev.LinkLost(self.links[link], PeerLostError("gone")))
        self._greet(link)

    @rule(seconds=st.sampled_from([0.5, 5.0, 14.0]))
    def time_passes(self, seconds):
        for link in self.links.values():
            self.side.session.keep_alive(self.side.links[link], self.side.now)
        self.side.now += seconds
        while (at := self.side.session.next_deadline()) is not None and at <= self.side.now:
            self._handle(ev.Tick())

    @invariant()
    def what_is_published_is_held(self):
        assert len(self.published) <= len(self.held)

    def teardown(self):
        """Every lease ends after its deadline and its last send."""
        for _ in range(4):
            while self.sends:
                self.a_send_ends(0, True)
            self.time_passes(14.0)
        assert not self.held
        assert not self.published


Leases.TestCase.settings = examples(60, stateful_step_count=40)
TestLeases = Leases.TestCase
