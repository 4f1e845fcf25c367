"""What a user reads of each error: which engine and rank, what was expected and what came, and what to do."""

import copy
import dataclasses
import inspect
from contextlib import closing

import pytest
import torch
from msgspec.structs import replace

import kvconnector as kvc
from kvconnector import errors as e
from kvconnector.cache.specs import merge_specs
from kvconnector.control.security import check_server
from kvconnector.datapath.direct.shared_memory import SharedMemory
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.ids import new_secret
from kvconnector.planning import GroupBlocks
from kvconnector.runtime.driver import Driver
from kvconnector.session import events as ev
from tests.integration.runtime_pair import Engine, until
from tests.support.control_suite import new_keys
from tests.support.fakes import FakeEngine, attention_model
from tests.support.loopback import LoopbackFaults, LoopbackNetwork
from tests.support.transport_suite import HostMemory
from tests.support.world import World
from tests.unit.runtime.test_scheduler import PARAMS, consumer_scheduler
from tests.unit.session import harness

MODEL = attention_model()
QUICK = {
    "peer": {
        "hello_timeout_s": 1,
        "heartbeat_interval_s": 1,
        "timeout_s": 60,
        "transfer_timeout_s": 3,
    },
    "lease": {"duration_s": 2, "early_read_s": 1},
    "staging": {"chunk_bytes": 64, "budget_bytes": 1 << 16},
}


class Pair:
    """A producer "p" and a consumer "d" in virtual time."""

    def __init__(self, verify):
        self.world = World(settings=QUICK)
        self.p, self.d = (
            self.world.start(FakeEngine(name, MODEL), role=role, verify=each)
            for name, role, each in zip("pd", ("producer", "consumer"), verify, strict=True)
        )
        self.offer = self.p.grant("r", [[0, 1, 2]], 12)

    def pass_time(self, seconds):
        self.world.run(lambda: False, max_turns=50, seconds_per_turn=seconds / 50)


def a_load(first=bool, before=bool, after=bool, verify=("none", "none"), **changes):
    """Why a load of an offer that a router may have changed fails, as the consumer's engine is told. What happens first
    of all, `before` the load is asked for, or `after`.
    """

    def trigger():
        pair = Pair(verify)
        with closing(pair.world):
            first(pair)
            offer = dataclasses.replace(pair.offer, **changes)
            pair.d.want("r", offer)
            pair.pass_time(0.0)
            before(pair)
            pair.d.load("r", offer, [[7, 6, 5]], [range(12)])
            pair.world.run(lambda: False, max_turns=5)
            after(pair)
            (worker,) = pair.d.workers
            assert pair.world.run(lambda: worker.outbox.is_filled, seconds_per_turn=0.05)
            return worker.poll().failed_recving["r"]

    return trigger


def freeze(pair):
    pair.world.freeze(pair.p)


def damage(pair):
    pair.world.network.faults = LoopbackFaults(corrupt_probability=1.0)


def restart(pair):
    producer = pair.p.workers[0].driver.producer
    producer._reply = replace(producer._reply, incarnation="another")


def lose_the_way_back(pair):
    def connect(address):
        raise e.TransportError("no route to the consumer")

    pair.p.workers[0].transport.connect = connect


def calling(call, *args, **kwargs):
    """What a call raises."""

    def trigger():
        with pytest.raises(e.KVConnectorError) as found:
            call(*args, **kwargs)
        return f"{type(found.value).__name__}: {found.value}"

    return trigger


def asking(method, **arguments):
    """What a consumer's scheduler raises."""
    return calling(lambda: getattr(consumer_scheduler(), method)("r", **arguments))


def engine(name, role):
    return closing(Engine(name, role))


def a_failed_driver():
    def turn(*_):
        raise ValueError("a bug")

    with engine("d", "consumer") as d, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "turn", turn)
        d.load("r", PARAMS, [1, 2, 3], 12)
        until(lambda: "r" in d.received, d)
        return str(d.failed["r"])


def memory_in_use():
    close = DataPath.close

    def fails(path):
        close(path)
        raise e.TransportError("a copy does not end")

    with engine("p", "producer") as p, pytest.MonkeyPatch.context() as patch:
        p.offer("r", [1, 2], 8)
        patch.setattr(DataPath, "close", fails)
        return calling(p.workers.pop().close)()


def blocks_that_no_pool_has():
    with engine("p", "producer") as p:
        return calling(p.offer, "r", [100, 101], 8)()


def a_cancelled_receive():
    with closing(LoopbackNetwork().transport()) as transport:
        transport.cancel(transport.recv(1, HostMemory(8).buffer))
        (completion,) = transport.progress()
        return f"{type(completion.error).__name__}: {completion.error}"


def an_event_out_of_order():
    side = harness.producer()
    harness.welcome(side)
    return calling(side.handle, ev.EndpointOpened(-1))()


PEER = ["engine='p'", "rank='pp0tp0'"]
"""What names the producer's rank."""
TABLE = {
    e.KVConnectorError: (a_failed_driver, ["driver failed", "a bug", "restart this engine"]),
    e.LocalError: (
        asking("offer", blocks=[[1]], num_tokens=1),
        ["a consumer holds no requests", "request='r'"],
    ),
    e.ConfigError: (
        calling(kvc.Config.from_mapping, {"engine_id": "d", "lease": {"duration": 5}}),
        ["unknown setting lease.duration", "did you mean 'duration_s'"],
    ),
    e.GeometryError: (
        calling(kvc.view_of, torch.zeros(2, 3, 4)),
        ["four axes: block, head, token, dim", "shape=(2, 3, 4)"],
    ),
    e.BlockIdError: (
        blocks_that_no_pool_has,
        ["request r", "outside the pool", "highest=101", "num_blocks=64"],
    ),
    e.CacheSpecError: (calling(merge_specs, []), ["no spec to merge"]),
    e.UnknownRequestError: (asking("load", blocks=[[1]], num_tokens=1), ["request='r'"]),
    e.LocalProtocolError: (
        an_event_out_of_order,
        ["EndpointOpened is not possible for a peer that is ready", "link -1", "story="],
    ),
    e.TransportError: (calling(SharedMemory(0).share, [(4097, 4098)]), ["share pages", "address="]),
    e.CorruptionError: (
        a_load(before=damage, verify=("checksum", "checksum")),
        ["not what its producer sent", "chunk=0", *PEER],
    ),
    e.OperationCancelledError: (a_cancelled_receive, ["cancelled"]),
    e.MemoryInUseError: (memory_in_use, ["keep their memory", "a copy does not end"]),
    e.RemoteError: (a_load(lose_the_way_back), ["no route to the consumer", *PEER]),
    e.RemoteProtocolError: (
        asking("on_new_request", kv_transfer_params={**PARAMS, "remote_port": 70000}),
        ["kv_transfer_params", "<= 65535", "70000", "remote_engine_id='p'"],
    ),
    e.IncompatiblePeerError: (
        a_load(verify=("checksum", "none")),
        ["verify={'d': 'none', 'p': 'checksum'}", "engine='p'"],
    ),
    e.AuthenticationError: (
        calling(check_server, new_keys(), "tcp://192.0.2.1:5600", new_keys().public_key),
        ["tcp://192.0.2.1:5600", "public_key="],
    ),
    e.PeerUnreachableError: (
        a_load(freeze, before=lambda pair: pair.pass_time(2.0)),
        ["did not complete the handshake in time", "address='tcp://", "waited_s=3", "engine='p'"],
    ),
    e.PeerLostError: (a_load(before=freeze, after=lambda pair: pair.world.kill(pair.p)), PEER),
    e.TransferTimeoutError: (
        a_load(before=freeze),
        ["engine='p'", "waiting_for=['pp0tp0']", "peer.transfer_timeout_s"],
    ),
    e.ReadRefusedError: (
        a_load(blocks=(GroupBlocks.of([3, 4, 5]),)),
        ["the read's block ids are not", *PEER],
    ),
    e.UnknownTransferError: (a_load(secret=new_secret()), ["no such transfer", *PEER]),
    e.LeaseExpiredError: (a_load(lambda pair: pair.pass_time(10.0)), [*PEER, "lease.duration_s"]),
    e.TransferAbortedError: (
        a_load(before=lambda pair: pair.p.withdraw("r")),
        ["the request was aborted", *PEER],
    ),
    e.StaleIncarnationError: (a_load(before=restart), ["this engine was restarted", *PEER]),
}


@pytest.mark.ucx
@pytest.mark.parametrize("error", TABLE, ids=lambda error: error.__name__)
def test_errors_name_the_cause_the_place_and_the_remedy(error):
    trigger, words = TABLE[error]
    text = trigger()
    assert text.startswith(f"{error.__name__}: ")
    for word in (*words, error.remedy):
        assert word in text
    assert text.count(error.remedy) == 1 or not error.remedy


@pytest.mark.parametrize("error", TABLE)
def test_errors_print_and_keep_their_context(error):
    raised = error("too late", request="r", deadline_s=1.5)
    assert raised.statement == "too late [request='r', deadline_s=1.5]"
    assert str(raised) == raised.statement + (f"; {error.remedy}" if error.remedy else "")
    assert raised.context == {"request": "r", "deadline_s": 1.5}
    assert error("plain").statement == "plain"
    assert str(copy.copy(raised)) == str(raised)


def test_every_error_is_in_the_table():
    public = {
        each for _, each in inspect.getmembers(e, inspect.isclass) if each.__module__ == e.__name__
    }
    assert set(TABLE) == public
