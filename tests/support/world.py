"""A whole deployment in one thread: real drivers, sessions and data paths over in-memory links and a fake clock.

A `World` runs any number of engines turn by turn, in an order that its seed draws. Everything between the engines'
calls and the copied bytes is the real code; only sockets, threads and time are replaced. Faults come from the links
(`world.hub.faults`, `world.network.faults`) and from `kill`, `freeze` and `sever`.
"""

import random
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from kvconnector.config import ConnectorConfig, PathsConfig
from kvconnector.datapath import Pools
from kvconnector.datapath.pump.opening import open_datapath
from kvconnector.ids import EngineAddress, new_incarnation, new_secret
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.runtime.directory import DirectoryService
from kvconnector.runtime.driver import Driver
from kvconnector.runtime.engine import WorkerMetadata, directory_of
from kvconnector.runtime.intake import checked_orders
from kvconnector.runtime.outbox import Outbox
from kvconnector.runtime.step_layers import StepLayers
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LoadRequest,
    ReclaimRequest,
    StepMetadata,
    WantRequest,
    WithdrawRequest,
)
from kvconnector.transport.ucx import UcxTransport
from tests.support.fakes import FakeCaches, FakeClock, equalise_replicas
from tests.support.inproc_control import ControlHub
from tests.support.loopback import LoopbackNetwork
from tests.support.python_network import PythonNetwork

PASSES = 8
"""Passes of the loop in one turn of a driver. Time does not pass meanwhile."""
TURNS_IN_A_ROW = 8
"""Most turns of a driver while messages wait, of which each takes few. Time does not pass meanwhile."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The content of a producer's answer: where a request's blocks are, and the secret to read them."""

    engine_id: str
    address: str
    transfer_id: str
    secret: str
    blocks: tuple[GroupBlocks, ...]
    num_tokens: int


class WorldWorker:
    """One rank: its caches and its driver."""

    def __init__(self, world, config, shape, geometry, rank):
        self.config = config
        self.incarnation = new_incarnation()
        self.caches = world.make_caches(shape, geometry.rank_geometry(rank), world.numbers)
        self.pools = Pools(self.caches.groups(), self.caches.device)
        self.outbox = Outbox()
        self._layers = {}
        self.control = world.hub.open()
        self.transport = world.network.transport()
        self.datapath = world.make_datapath(config, self.pools, self.transport)
        self.datapath.pump = partial(self._pump, self.datapath.pump)
        self.driver = Driver(
            config,
            engine=geometry,
            rank=rank,
            incarnation=self.incarnation,
            pools=self.pools,
            control=self.control,
            transport=self.transport,
            datapath=self.datapath,
            outbox=self.outbox,
        )
        self.metadata = WorkerMetadata(
            engine_id=geometry.engine_id,
            geometry=self.caches.rank,
            model=geometry.model,
            control_address=self.control.address,
            public_key="",
            incarnation=self.incarnation,
            role=config.role,
            num_blocks=tuple(self.pools.num_blocks),
        )

    def start_step(self, step):
        """Take a step as `Worker.start_step` does. The driver takes the orders in its next turn."""
        orders = checked_orders(step, self.pools, self.config.role, self.outbox.note_contained)
        names = (order.request_id for order in step.orders)
        self._layers.update(dict.fromkeys(names, StepLayers(orders, self.pools)))
        self.outbox.expect(orders)
        for order in orders:
            self.driver.put([order])

    def layer_written(self, request_id, layer):
        """Report a layer as `Worker.layer_written` does, for the last step that had an order for the request."""
        for event in self._layers[request_id].written(layer):
            self.driver.put([event])

    def poll(self):
        return self.outbox.take()

    def _pump(self, pump, timeout_s):
        """Run the loop without a time, in which it makes a single pass, as often as it would in a moment."""
        for _ in range(PASSES):
            pump(timeout_s)

    def is_quiet(self):
        """Returns True if it has no requests and no busy slots."""
        producer, consumer = self.driver.producer, self.driver.consumer
        slots = self.datapath.sends.slots, self.datapath.receives.slots
        return (
            not self.driver.num_queued
            and (producer is None or not producer._leases)
            and (consumer is None or not consumer._loads)
            and not any(each.num_busy for each in slots)
        )

    def close(self):
        self.datapath.close()
        self.control.close()


class WorldEngine:
    """An engine: its workers, and the directory that names them."""

    def __init__(self, world, config, shape):
        self.shape = shape
        geometry = msgspec.structs.replace(shape.geometry(), verify=config.verify)
        self.workers = [
            WorldWorker(world, config, shape, geometry, rank.rank) for rank in geometry.ranks
        ]
        equalise_replicas([worker.caches for worker in self.workers])
        self.directory = world.hub.open()
        self.directory.max_message_bytes = config.control.max_message_bytes
        metadata = [worker.metadata for worker in self.workers]
        self.responder = DirectoryService(self.directory, directory_of(geometry, metadata))
        self.is_frozen = False

    def grant(self, request_id, block_ids, num_tokens, *, grown_from=None, **how):
        """Hold a finished request's blocks for a consumer, or let it read what is complete of them."""
        blocks = tuple(GroupBlocks.of(ids) for ids in block_ids)
        secret = grown_from.secret if grown_from is not None else new_secret()
        lease = request_id, request_id, secret, blocks
        is_grown = not how.get("is_complete", True)
        watermark = Watermark(num_tokens, how.get("step_stop", 0))
        self._order(GrowRequest(*lease, watermark) if is_grown else HoldRequest(*lease, num_tokens))
        engine_id = self.shape.engine_id
        return Offer(engine_id, self.directory.address, request_id, secret, blocks, num_tokens)

    def withdraw(self, request_id):
        """Abort a request at the producer."""
        self._order(WithdrawRequest(request_id))

    def reclaim(self, request_id):
        """Take a request's blocks back unless a consumer has asked for them."""
        self._order(ReclaimRequest(request_id))

    def want(self, request_id, offer, *, is_followed=False):
        """Queue a request whose blocks another engine has, or will have."""
        engine = EngineAddress(offer.engine_id, offer.address)
        names = (offer.transfer_id, offer.secret)
        self._order(WantRequest(request_id, *names, engine, is_followed))

    def load(self, request_id, offer, block_ids, token_ranges):
        """Load token ranges of a wanted request into blocks that hold the sequence from its start."""
        ranges = tuple((tokens.start, tokens.stop) for tokens in token_ranges)
        blocks = tuple(GroupBlocks.of(ids) for ids in block_ids)
        self._order(LoadRequest(request_id, ranges, blocks, offer.blocks))

    def load_from(self, producer, request_id, block_ids, into, num_tokens):
        """Load all tokens of one group into blocks `into`; from now on `producer` holds them in `block_ids`."""
        offer = producer.grant(request_id, [block_ids], num_tokens)
        self.want(request_id, offer)
        self.load(request_id, offer, [into], [range(num_tokens)])

    def drop(self, request_id):
        """Give up a request at the consumer."""
        self._order(DropRequest(request_id))

    def _order(self, order):
        for worker in self.workers:
            worker.start_step(StepMetadata(orders=(order,)))

    def is_quiet(self):
        """Returns True if nothing is under way in any worker."""
        return all(worker.is_quiet() for worker in self.workers)


class World:
    """All engines, the links between them, and time.

    Args:
        seed: Seed of the order of turns, the links' faults and the caches' bytes.
        settings: Connector settings for all engines, as `ConnectorConfig.from_mapping` takes them.
        network: Makes the workers' transports.
        make_caches: Makes a worker's caches, like `FakeCaches`.
    """

    def __init__(self, *, seed=0, settings=None, network=None, make_caches=FakeCaches):
        self.clock = FakeClock()
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.hub = ControlHub(seed=seed)
        self.network = network or LoopbackNetwork(seed=seed)
        self.make_caches = make_caches
        self.engines = []
        self._gone = []
        self._networks = []
        self._settings = {"control": {"insecure": True}, **(settings or {})}

    def start(self, shape, role="both", **settings):
        """Start an engine; `settings` override the world's."""
        merged = {**self._settings, **settings, "engine_id": shape.engine_id, "role": role}
        engine = WorldEngine(self, ConnectorConfig.from_mapping(merged), shape)
        self.engines.append(engine)
        return engine

    def make_datapath(self, config, pools, transport):
        """Make the data path of a worker; subclasses may override this."""
        if isinstance(transport, UcxTransport):
            return open_datapath(config, pools, transport, self.clock)
        # all bytes pass the links, with their faults
        config = msgspec.structs.replace(config, paths=PathsConfig(direct="never"))
        network = PythonNetwork(transport, self.clock)
        self._networks.append(network)
        return network.attach(open_datapath(config, pools, network, self.clock))

    def kill(self, engine, *, silently=False):
        """End an engine as SIGKILL would, or with `silently` as a power cut would: peers then get no message."""
        self.engines.remove(engine)
        for worker in engine.workers:
            self.network.lose(worker.transport.address, silently=silently)
            self._gone.append(worker)
            if not silently:
                worker.control.close()
        if not silently:
            engine.directory.close()

    def freeze(self, engine, frozen=True):
        """Let an engine take no turns, as after SIGSTOP, or let it continue."""
        engine.is_frozen = frozen

    def sever(self, first, second):
        for mine in first.workers:
            for other in [*(worker.control for worker in second.workers), second.directory]:
                self.hub.sever(mine.control, other)

    def turn(self):
        """Let every engine that runs take one turn, in a random order."""
        running = [engine for engine in self.engines if not engine.is_frozen]
        members = [engine.responder for engine in running]
        members += [worker.driver for engine in running for worker in engine.workers]
        self.random.shuffle(members)
        for member in members:
            member.turn(0.0)
            for _ in range(1, TURNS_IN_A_ROW):
                if not isinstance(member, Driver) or not member.links.has_arrived:
                    break
                member.turn(0.0)
        for network in self._networks:
            network.check()

    def run(self, until, *, max_turns=500, seconds_per_turn=0.0):
        """Take turns until `until()` holds. Returns False if it never did. Time passes by `seconds_per_turn`."""
        for _ in range(max_turns):
            if until():
                return True
            self.turn()
            self.clock.advance(seconds_per_turn)
        return until()

    def is_quiet(self):
        """Returns True if nothing is under way anywhere."""
        return all(engine.is_quiet() for engine in self.engines)

    def close(self):
        workers = [worker for engine in self.engines for worker in engine.workers]
        for worker in [*workers, *self._gone]:
            worker.close()
        self.hub.close()
