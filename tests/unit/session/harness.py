"""One session alone: its engine, its peers' words, and a look at every transition it makes."""

from msgspec import structs

from kvconnector.config import LeaseConfig, PeerConfig
from kvconnector.ids import EngineAddress, EngineId, Rank
from kvconnector.planning import GroupBlocks, plan_reads, plan_routes
from kvconnector.session import ConsumerSession, ProducerSession
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.load import Load
from kvconnector.session.orders import HoldRequest, LoadRequest, WantRequest
from kvconnector.session.reads import read_message
from kvconnector.session.remote_engine import RemoteEngine, RemoteWorker
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


ROUTES = plan_routes(TpKVTopology(engine("d"), Rank(0, 0)), engine())
"""Of rank 0 of the consumer, which is like the producer."""
WORKER = RemoteWorker(1, None, 0.0, 0.0, incarnation="one")


class Side:
    """A session at a time of the test's choice."""

    def __init__(self, session):
        self.session = session
        self.now = 0.0

    @property
    def num_leases(self):
        return len(self.session._leases)

    @property
    def num_loads(self):
        return len(self.session._loads)

    @property
    def num_reads(self):
        return len(self.session._reads)

    def tell(self, *events):
        """What the session commands after these events."""
        commands = []
        for event in events:
            commands += self.session.handle(event, self.now)
        return commands

    def receive(self, link, message):
        """What the session commands after a peer's message."""
        return self.tell(ev.FromPeer(link, message))

    def tick(self, after_s=0.0):
        self.now += after_s
        return self.tell(ev.Tick())


def messages(commands, kind):
    """The messages of one kind among the commands."""
    return [
        c.message
        for c in commands
        if isinstance(c, cmd.SendMessage) and isinstance(c.message, kind)
    ]


def of(commands, kind):
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


OK = [("w", type(None))]


def finished(commands):
    """The loads that ended, and the kinds of their errors."""
    return [(command.request_id, type(command.error)) for command in of(commands, cmd.FinishLoad)]


def released(commands):
    """The leases that ended, and how."""
    return [(command.request_id, command.outcome) for command in of(commands, cmd.ReleaseBlocks)]


def failed(error):
    """What `finished` says of one failed load."""
    return [("w", error)]


EXPORT = PoolExport(pid=1, fd=3, nonce=bytes(16), num_buckets=1, device="cpu", tables=())


def producer(export=None, **shape):
    """A producer worker of rank 0."""
    reply = m.HelloReply(
        incarnation="one",
        max_chunk_bytes=CHUNK_BYTES,
        export=export,
        timeout_ms=m.stated_timeout_ms(PEER.timeout_s),
    )
    session = ProducerSession(engine(**shape), Rank(0, 0), reply, LEASE, PEER.timeout_s)
    return Side(session)


def granted(request_id="r", transfer_id="t", num_tokens=12, blocks=BLOCKS, secret=SECRET):
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
    """A consumer worker is greeted on `link`."""
    greeted = ev.FromPeer(link, hello(geometry or engine("d"), tp_rank, **changes))
    return side.tell(greeted, ev.EndpointOpened(link))


def read(read_id=1, key=KEY, tokens=range(12), **changes):
    """A correct read of rank 0 of the consumer at rank 0 of the producer, with some fields changed."""
    (source,) = plan_reads(ROUTES, [tokens], chunk_bytes=CHUNK_BYTES)
    load = Load(wanted(key=key), RemoteEngine(ADDRESS), 0.0)
    asked = cmd.StartReceive(read_id, load, WORKER, 1, source, BLOCKS, BLOCKS)
    message = read_message(asked, ev.ReceivePosted(read_id, 2, 1 << 20))
    return structs.replace(message, **changes)


def done(link=-1, key=KEY):
    return ev.FromPeer(link, m.Done(transfer_id=key.transfer_id, secret=key.secret))


def followed(link=-1, key=KEY):
    follow = m.Follow(transfer_id=key.transfer_id, secret=key.secret)
    return ev.FromPeer(link, m.Heartbeat(transfers=(), followed=(follow,)))


def given_up(link=-1, key=KEY):
    return ev.FromPeer(link, m.Abort(transfer_id=key.transfer_id, secret=key.secret))


def heartbeat(link=-1, *keys):
    return ev.FromPeer(link, m.Heartbeat(transfers=keys or (KEY,)))


def beat(link, number=0):
    """A producer worker answers a heartbeat."""
    return ev.FromPeer(link, m.HeartbeatReply(number=number))


def cancel(link, read_id):
    return ev.FromPeer(link, m.CancelRead(read_id=read_id))


def cut_short(link, read_id, sent_chunks=0, refusal=m.Refusal.LEASE_EXPIRED):
    """The producer ends a read after some of its chunks."""
    ended = m.ReadEnded(read_id=read_id, sent_chunks=sent_chunks, refusal=refusal, text="no")
    return ev.FromPeer(link, ended)


def consumer(geometry=None, peer=PEER):
    """A consumer worker of rank 0."""
    settings = {"chunk_bytes": CHUNK_BYTES, "orders": {(0, 0): "HND"}}
    return Side(ConsumerSession(geometry or engine("d"), Rank(0, 0), peer, **settings))


def wanted(request_id="w", address=ADDRESS, key=KEY, is_followed=False):
    return WantRequest(request_id, key.transfer_id, key.secret, address, is_followed)


def load_asked(request_id="w", tokens=(0, 12)):
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


def taken(link, **changes):
    """A producer worker takes us as a consumer."""
    return ev.FromPeer(link, m.HelloReply(incarnation="one", **changes)), ev.WarmedUp(link)


def resolve(side, geometry=None, request_id="w", is_followed=False):
    """Want a request and answer the look-up; the links to the workers."""
    links = of(side.tell(wanted(request_id, is_followed=is_followed)), cmd.OpenLink)
    return of(side.receive(links[0].link, directory(geometry)), cmd.OpenLink)


def connect(side, geometry=None, request_id="w", is_followed=False, **changes):
    """Make the engine of a wanted request ready; the links to its workers."""
    links = [command.link for command in resolve(side, geometry, request_id, is_followed)]
    for link in links:
        side.tell(*taken(link, **changes))
    return links


def start_load(side, geometry=None):
    """A load that is reading: the links, and the ids of its reads."""
    links = connect(side, geometry)
    reads = [command.read_id for command in of(side.tell(load_asked()), cmd.StartReceive)]
    for read_id in reads:
        side.tell(ev.ReceivePosted(read_id, 2, read_id << 20))
    return links, reads
