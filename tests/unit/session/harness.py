"""A session by itself: its engine's orders, its peers' messages, and the calls that it makes."""

import inspect
from functools import partial
from types import SimpleNamespace

from msgspec import structs

from kvconnector.agenda import MAX_AT_ONCE
from kvconnector.config import LeaseConfig, PeerConfig
from kvconnector.ids import EngineAddress, EngineId, Rank
from kvconnector.planning import GroupBlocks, plan_reads, plan_routes
from kvconnector.session import ConsumerSession, ProducerSession
from kvconnector.session import events as ev
from kvconnector.session.consumer import LOAD_TABLE
from kvconnector.session.engines import ENGINE_TABLE
from kvconnector.session.link import FromPeer, Link
from kvconnector.session.load import Load, RankRead, RemoteEngine, RemoteWorker
from kvconnector.session.orders import HoldRequest, LoadRequest, WantRequest
from kvconnector.session.port import DataPathPort, EnginePort, LinkPort, Ports
from kvconnector.topology import TpKVTopology
from kvconnector.wire import messages as m
from kvconnector.wire.export import PoolExport
from kvconnector.wire.packed_geometry import PackedGeometry
from tests.support.fakes import FakeEngine, attention_model

MODEL = attention_model()
SECRET = "5" * 32
OTHER_SECRET = "6" * 32
ADDRESS = EngineAddress(EngineId("p"), "tcp://127.0.0.1:1")
LEASE, PEER = LeaseConfig(), PeerConfig()
LEASE_S, EARLY_S, PEER_S = LEASE.duration_s, LEASE.early_read_s, PEER.timeout_s
SOON_IDLE = PeerConfig(idle_timeout_s=20.0)
HELLO_S, HEARTBEAT_S = PEER.hello_timeout_s, PEER.heartbeat_interval_s
CHUNK_BYTES = 64
BLOCKS = (GroupBlocks.of([3, 1, 2]),)
KEY = m.TransferKey(transfer_id="t", secret=SECRET)


def engine(engine_id="p", model=MODEL, **shape):
    return FakeEngine(engine_id, model, **shape).geometry()


def routes_of(consumer, tp_rank=0):
    """Return the routes of a consumer's rank to a producer of one rank."""
    return plan_routes(TpKVTopology(consumer, Rank(0, tp_rank)), engine())


ROUTES = routes_of(engine("d"))
"""The routes of consumer rank 0 to a producer of the same shape."""
WORKER = RemoteWorker(None, Link(1), None, 0.0, 0.0, incarnation="one")


def call(name, *arguments):
    """Return a call that a session made: the name of a port's method, and its arguments by name."""
    _, *names = inspect.signature(_METHODS[name]).parameters
    return SimpleNamespace(call=name, **dict(zip(names, arguments, strict=False)))


_METHODS = {
    name: method
    for port in (LinkPort, DataPathPort, EnginePort)
    for name, method in vars(port).items()
    if not name.startswith("_")
}


class Recorder:
    """All ports of a session, which records their calls. Links that peers opened are recorded by number."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(call(name, *map(_named, arguments)))


def _named(argument):
    is_incoming = isinstance(argument, Link) and argument.number < 0
    return argument.number if is_incoming else argument


class Side:
    """A session with a recording port and a clock that the test sets."""

    def __init__(self, make_session):
        self._port = Recorder()
        self.session = make_session(ports=Ports(self._port, self._port, self._port))
        self.links = {number: Link(number) for number in range(-999, 0)}
        self.now = 0.0

    def break_next(self, name, call):
        """Let the next call of a port's method be this one."""

        def broken(*arguments):
            delattr(self._port, name)
            call(*arguments)

        setattr(self._port, name, broken)

    @property
    def num_leases(self):
        return len(self.session._leases)

    @property
    def num_loads(self):
        return len(self.session._loads)

    @property
    def num_reads(self):
        return sum(len(each.reads) for each in self.session._engines._engines.values())

    def handle(self, *events):
        """Return the calls that the session makes after these events."""
        for event in events:
            if isinstance(getattr(event, "link", None), int):
                event = structs.replace(event, link=self.links[event.link])  # noqa: PLW2901
            self.session.handle(event, self.now)
        calls, self._port.calls = self._port.calls, []
        return calls

    def receive(self, link, message):
        """Return the calls that the session makes after a peer's message."""
        return self.handle(FromPeer(link, message))

    def tick(self, after_s=0.0):
        self.now += after_s
        return self.handle(ev.Tick())

    def settle(self):
        """Return the calls until nothing is due at this time. No tick begins or ends more than a batch."""
        calls = []
        while self.session.next_deadline() <= self.now:
            batch = self.tick()
            for limited in ("finish_load", "start_receive", "release"):
                assert len(of(batch, limited)) <= MAX_AT_ONCE
            calls += batch
        return calls


def messages(calls, kind):
    """Return the sent messages of one kind."""
    return [each.message for each in of(calls, "send") if isinstance(each.message, kind)]


def refusals(calls):
    """Return the refusals of reads."""
    return [each.refusal for each in messages(calls, m.ReadRefused)]


def of(calls, *names):
    """Return the calls of the methods with these names."""
    assert _METHODS.keys() >= {*names}
    return [each for each in calls if each.call in names]


OK = [("w", type(None))]


def finished(calls):
    """Return the loads that ended, with the types of their errors."""
    return [(each.load.request_id, type(each.error)) for each in of(calls, "finish_load")]


def released(calls):
    """Return the leases that ended, with their outcomes."""
    return [(each.request_id, each.outcome) for each in of(calls, "release")]


def failed(error):
    """Return the value of `finished` for one failed load."""
    return [("w", error)]


EXPORT = PoolExport(pid=1, fd=3, nonce=bytes(16), num_buckets=1, device="cpu", tables=())


def producer(export=None, named_within_s=0.0, **shape):
    """Make a producer worker of rank 0."""
    reply = m.HelloReply(
        incarnation="one",
        max_chunk_bytes=CHUNK_BYTES,
        export=export,
        timeout_ms=m.stated_timeout_ms(PEER.timeout_s),
    )
    settings = engine(**shape), Rank(0, 0), reply, LEASE, PEER.timeout_s
    return Side(partial(ProducerSession, *settings, named_within_s=named_within_s))


def hold(request_id="r", transfer_id="t", num_tokens=12, blocks=BLOCKS, secret=SECRET):
    return HoldRequest(request_id, transfer_id, secret, blocks, num_tokens)


def hello(geometry, tp_rank=0, **changes):
    return m.Hello(
        geometry=PackedGeometry.of(geometry),
        pp_rank=0,
        tp_rank=tp_rank,
        incarnation="d-one",
        transport_address=b"d",
        warm_up_tag=1,
        warm_up_bytes=8,
        **{"segments": ROUTES[0].segments, **changes},
    )


def welcome(side, link=-1, geometry=None, tp_rank=0, **changes):
    """Greet a consumer worker on `link`."""
    greeted = FromPeer(link, hello(geometry or engine("d"), tp_rank, **changes))
    return side.handle(greeted, ev.EndpointOpened(link))


def read(read_id=1, key=KEY, tokens=range(12), routes=ROUTES, **changes):
    """Return a correct read from producer rank 0, by consumer rank 0 unless it has other `routes`, with some fields
    changed.
    """
    (source,) = plan_reads(routes, [tokens], chunk_bytes=CHUNK_BYTES)
    load = Load(LOAD_TABLE, want(key=key), RemoteEngine(ENGINE_TABLE, ADDRESS), 0.0)
    asked = posted(RankRead(read_id, load, WORKER, source, BLOCKS, BLOCKS)).read
    return structs.replace(asked.message(), **changes)


def posted(read):
    """Return the event that the data path has slots for a read."""
    read.window, read.first_tag = 2, read.read_id << 20
    return ev.ReceivePosted(read)


def done(link=-1, key=KEY):
    return FromPeer(link, m.Done(transfer_id=key.transfer_id, secret=key.secret))


def follow(link=-1, key=KEY):
    follow = m.Follow(transfer_id=key.transfer_id, secret=key.secret)
    return FromPeer(link, m.Heartbeat(transfers=(), followed=(follow,)))


def abort(link=-1, key=KEY):
    return FromPeer(link, m.Abort(transfer_id=key.transfer_id, secret=key.secret))


def heartbeat(link=-1, *keys):
    return FromPeer(link, m.Heartbeat(transfers=keys or (KEY,)))


def heartbeat_reply(link, number=0):
    """Return a producer worker's reply to a heartbeat."""
    return FromPeer(link, m.HeartbeatReply(number=number))


def cancel(link, read_id):
    return FromPeer(link, m.CancelRead(read_id=read_id))


def read_ended(link, read_id, sent_chunks=0, refusal=m.Refusal.LEASE_EXPIRED):
    """Return the producer's message that a read ended after some of its chunks."""
    ended = m.ReadEnded(read_id=read_id, sent_chunks=sent_chunks, refusal=refusal, text="no")
    return FromPeer(link, ended)


def consumer(geometry=None, peer=PEER, **settings):
    """Make a consumer worker of rank 0."""
    settings = {"chunk_bytes": CHUNK_BYTES, "element_orders": {(0, 0): "HND"}} | settings
    return Side(partial(ConsumerSession, geometry or engine("d"), Rank(0, 0), peer, **settings))


def want(request_id="w", address=ADDRESS, key=KEY, is_followed=False):
    return WantRequest(request_id, key.transfer_id, key.secret, address, is_followed)


def load_request(request_id="w", tokens=(0, 12)):
    return LoadRequest(request_id, (tokens,), BLOCKS, BLOCKS)


def directory(geometry=None):
    geometry = geometry or engine()
    entries = tuple(
        m.WorkerEntry(
            pp_rank=rank.pp_rank,
            tp_rank=rank.tp_rank,
            control_address=f"tcp://127.0.0.1:{2 + index}",
            public_key="",
            incarnation="one",
        )
        for index, rank in enumerate(geometry.ranks)
    )
    return m.Directory(geometry=PackedGeometry.of(geometry), workers=entries)


def accepted(link, **changes):
    """Return the events of a producer worker that accepts us as a consumer."""
    return FromPeer(link, m.HelloReply(incarnation="one", **changes)), ev.WarmedUp(link)


def resolve(side, geometry=None, request_id="w", is_followed=False):
    """Want a request, and answer the look-up. Returns the calls that open links to the workers."""
    links = of(side.handle(want(request_id, is_followed=is_followed)), "open_link")
    return of(side.receive(links[0].link, directory(geometry)), "open_link")


def connect(side, geometry=None, request_id="w", is_followed=False, **changes):
    """Connect to the engine of a wanted request. Returns the links to its workers."""
    links = [opened.link for opened in resolve(side, geometry, request_id, is_followed)]
    for link in links:
        side.handle(*accepted(link, **changes))
    return links


def start_load(side, geometry=None):
    """Start a load. Returns the links and the load's reads."""
    links = connect(side, geometry)
    reads = [each.read for each in of(side.handle(load_request()), "start_receive")]
    for each in reads:
        side.handle(posted(each))
    return links, reads
