"""Whatever happens to a producer worker: a lease is published while it is granted and not ended, and never longer."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnector.errors import PeerLostError
from kvconnector.planning import GroupBlocks
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.lease import LeaseState, lease_key
from kvconnector.wire import messages as m
from tests.unit.session import harness as h

NAMES = ("a", "b", "c")
LINKS = (-1, -2)
NUM_TOKENS = 12


class Producer(RuleBasedStateMachine):
    """One worker, two consumer ranks, a few requests that come again and again under their names."""

    def __init__(self):
        super().__init__()
        self.consumer = h.engine("d", tp_size=2)
        self.side = h.producer(h.EXPORT)
        self.count = 0
        self.leases = {}
        self.published = set()
        self.sends = []
        for link in LINKS:
            self.greet(link)

    def tell(self, *events):
        for command in self.side.tell(*events):
            match command:
                case cmd.PublishLease(key=key, num_tokens=num_tokens):
                    assert key not in self.published
                    assert num_tokens == NUM_TOKENS
                    self.published.add(key)
                case cmd.RetractLease(key=key):
                    self.published.remove(key)
                case cmd.ReleaseBlocks(request_id=name):
                    _, key = self.leases.pop(name)
                    assert key not in self.published
                case cmd.StartSend():
                    self.sends.append((command.link, command.read.read_id))

    def greet(self, link):
        if link in self.side.session._readers:
            return
        hello = h.hello(self.consumer, tp_rank=-1 - link)
        self.tell(ev.Greeted(link, hello), ev.EndpointOpened(link))

    def key_of(self, name):
        """The transfer of a name's newest lease, or of one that is still to come."""
        granted, _ = self.leases.get(name, (None, b""))
        secret = granted.secret if granted else f"{self.count + 1:032}"
        return m.TransferKey(transfer_id=name, secret=secret)

    @rule(name=st.sampled_from(NAMES))
    def grant(self, name):
        if name in self.leases:
            return
        self.count += 1
        granted = h.granted(name, name, NUM_TOKENS, h.BLOCKS, f"{self.count:032}")
        key = lease_key(name, granted.secret, granted.blocks)
        self.leases[name] = (granted, key)
        self.tell(granted)

    @rule(name=st.sampled_from(NAMES), link=st.sampled_from(LINKS), right=st.booleans())
    def ask(self, name, link, right):
        self.count += 1
        blocks = h.BLOCKS if right else (GroupBlocks.of([1, 2, 3]),)
        asked = h.read(self.count, self.key_of(name), ours=self.consumer)
        if not right:
            ids = m.ReadBlocks(first_block=0, block_ids=blocks[0].block_ids.tobytes())
            asked = h.read(self.count, self.key_of(name), ours=self.consumer, blocks=(ids,))
        self.tell(ev.ReadAsked(link, asked))

    @precondition(lambda self: self.sends)
    @rule(pick=st.integers(0, 99), error=st.booleans(), is_complete=st.booleans())
    def a_send_ends(self, pick, error, is_complete):
        link, read_id = self.sends.pop(pick % len(self.sends))
        if is_complete:
            self.tell(ev.SendFinished(link, read_id))
        else:
            reason = PeerLostError("lost") if error else None
            self.tell(ev.SendStopped(link, read_id, 0, reason))

    @rule(name=st.sampled_from(NAMES), link=st.sampled_from(LINKS))
    def confirm(self, name, link):
        self.tell(h.done(link, self.key_of(name)))

    @rule(name=st.sampled_from(NAMES), link=st.sampled_from(LINKS))
    def give_up(self, name, link):
        self.tell(h.given_up(link, self.key_of(name)))

    @rule(name=st.sampled_from(NAMES))
    def withdraw(self, name):
        self.tell(ev.Withdrawn(name))

    @rule(name=st.sampled_from(NAMES), link=st.sampled_from(LINKS))
    def heartbeat(self, name, link):
        self.tell(h.heartbeat(link, self.key_of(name)))

    @rule(link=st.sampled_from(LINKS))
    def a_link_is_lost_and_found(self, link):
        self.tell(ev.LinkLost(link, PeerLostError("lost")))
        self.greet(link)

    @rule(seconds=st.sampled_from([0.0, 3.0, 7.0, 14.0, 31.0]))
    def time_passes(self, seconds):
        self.side.now += seconds
        self.tell(ev.Tick())
        for link in LINKS:
            self.greet(link)

    @invariant()
    def published_is_exactly_what_may_be_read(self):
        live = {
            lease.key
            for lease in self.side.session._leases.values()
            if lease.state in (LeaseState.HELD, LeaseState.READING)
        }
        assert self.published == live
        assert self.published <= {key for _, key in self.leases.values()}


Producer.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestProducer = Producer.TestCase
