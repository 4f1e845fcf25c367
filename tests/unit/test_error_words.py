"""The text of each error: the engine and rank, the expected and the actual values, and what to do."""

import copy
import dataclasses
import inspect
from contextlib import closing

import msgspec
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
from kvconnector.integrations.identity import Identity, PromptEnd, check_identity
from kvconnector.planning import GroupBlocks
from kvconnector.runtime.driver import Driver
from kvconnector.runtime.driver_thread import DriverThread
from kvconnector.session.orders import LoadRequest
from kvconnector.wire import messages as m
from tests.integration.runtime_pair import Engine, until
from tests.support.control_suite import new_keys
from tests.support.fakes import FakeEngine, attention_model, metadata_of
from tests.support.loopback import LoopbackFaults, LoopbackNetwork
from tests.support.transport_suite import HostMemory
from tests.support.world import World
from tests.unit.runtime.test_scheduler import PARAMS, consumer_scheduler
from tests.unit.session import harness

CONTROL_CHARACTERS = [chr(code) for code in (*range(32), *range(127, 160), 0x2028, 0x2029)]
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


def failed_load(first=bool, before=bool, after=bool, verify=("none", "none"), **changes):
    """Makes a load of a changed offer fail, and returns the error text. Callbacks run before and after its orders."""

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


def reclaim(pair):
    """Take the offer back, and wait until a consumer would have asked for it."""
    pair.p.reclaim("r")
    pair.pass_time(1.5)


def freeze(pair):
    pair.world.freeze(pair.p)


def damage(pair):
    pair.world.network.faults = LoopbackFaults(corrupt_probability=1.0)


def restart(pair):
    producer = pair.p.workers[0].driver.producer
    producer._reply = replace(producer._reply, incarnation="another")


def cut_the_route_back(pair):
    def connect(address):
        raise e.TransportError("no route to the consumer")

    pair.p.workers[0].transport.connect = connect


def raised_by(call, *args, **kwargs):
    """Return the error of a call."""

    def trigger():
        with pytest.raises(e.KVConnectorError) as found:
            call(*args, **kwargs)
        return f"{type(found.value).__name__}: {found.value}"

    return trigger


def raised_by_scheduler(method, **arguments):
    """Return the error of a call to a consumer's scheduler."""
    return raised_by(lambda: getattr(consumer_scheduler(), method)("r", **arguments))


def engine(name, role):
    return closing(Engine(name, role))


def failed_driver():
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
        return raised_by(p.workers.pop().close)()


class Stuck(DriverThread):
    """The engine's side of a driver that does not return from a call."""

    def __init__(self, worker):
        self._driver, self._datapath, self._outbox = worker.driver, worker.datapath, worker.outbox
        self._thread, self._is_stopping, self._stuck_after_s = None, False, 1.0
        self._seen_turns, self._seen_at_s, self._silent_s = worker.driver.num_turns, 0.0, 0.0


def call_that_does_not_return():
    with closing(World(settings=QUICK)) as world:
        (worker,) = world.start(FakeEngine("d", MODEL), role="consumer").workers
        Stuck(worker).look_for_stuck(1.0)
        worker.outbox.expect([LoadRequest("r", (), (), ())])
        return worker.poll().failed_recving["r"]


def blocks_outside_the_pool():
    with closing(World(settings=QUICK)) as world:
        p = world.start(FakeEngine("p", MODEL), role="producer")
        p.grant("r", [[100, 101]], 8)
        (worker,) = p.workers
        assert world.run(lambda: worker.outbox.is_filled)
        return worker.poll().failed_sending["r"]


def cancelled_receive():
    with closing(LoopbackNetwork().transport()) as transport:
        transport.cancel(transport.recv(1, HostMemory(8).buffer))
        (completion,) = transport.progress()
        return f"{type(completion.error).__name__}: {completion.error}"


def event_out_of_order():
    side = harness.consumer()
    harness.start_load(side)
    return raised_by(side.handle, harness.load_request())()


def bug_in_a_session():
    def fails(load):
        def handle(event, now):
            if isinstance(event, LoadRequest):
                raise KeyError("a bug")
            load(event, now)

        return handle

    def arm(pair):
        consumer = pair.d.workers[0].driver.consumer
        consumer._handle = fails(consumer._handle)

    return failed_load(before=arm)()


PEER = ["engine='p'", "rank='pp0tp0'"]
"""Words that name the producer's rank."""


def another_prompt():
    theirs = PromptEnd(identity=Identity(9, "a", {"salt": "1"}))
    extra = msgspec.msgpack.encode(theirs)
    return raised_by(check_identity, extra, [Identity(9, "b", {})])()


def producer_not_listed():
    control = {"insecure": True, "allowed_producers": "192.0.2.0/24"}
    config = kvc.Config.from_mapping({"engine_id": "d", "role": "consumer", "control": control})
    return raised_by(kvc.Scheduler(config, metadata_of()).on_new_request, "w", PARAMS)()


TABLE = {
    e.KVConnectorError: (failed_driver, ["driver failed", "a bug", "restart this engine"]),
    e.LocalError: (
        raised_by_scheduler("offer", blocks=[[1]], num_tokens=1),
        ["an engine with the role consumer cannot offer requests", "request='r'"],
    ),
    e.ConfigError: (
        raised_by(kvc.Config.from_mapping, {"engine_id": "d", "lease": {"duration": 5}}),
        ["unknown setting lease.duration", "did you mean 'duration_s'"],
    ),
    e.GeometryError: (
        raised_by(kvc.view_of, torch.zeros(2, 3, 4)),
        ["four axes: block, head, token, dim", "shape=(2, 3, 4)"],
    ),
    e.BlockIdError: (
        blocks_outside_the_pool,
        ["request r", "outside the pool", "highest=101", "num_blocks=32"],
    ),
    e.CacheSpecError: (raised_by(merge_specs, []), ["no spec to merge"]),
    e.UnknownRequestError: (
        raised_by_scheduler("load", blocks=[[1]], num_tokens=1),
        ["request='r'"],
    ),
    e.ProducerNotAllowedError: (
        producer_not_listed,
        ["does not list", "request='w'", "engine='p'", "host='::1', port=5", "strip"],
    ),
    e.LocalProtocolError: (
        event_out_of_order,
        ["LoadRequest is not possible for a load that is reading", "request w", "story="],
    ),
    e.InternalError: (bug_in_a_session, ["unexpected KeyError", "a bug", "the traceback"]),
    e.TransportError: (
        raised_by(SharedMemory(0).share, [(4097, 4098)]),
        ["share pages", "address="],
    ),
    e.CorruptionError: (
        failed_load(before=damage, verify=("checksum", "checksum")),
        ["differs from what its producer sent", "chunk=0", *PEER],
    ),
    e.OperationCancelledError: (cancelled_receive, ["cancelled"]),
    e.WorkerStuckError: (
        call_that_does_not_return,
        ["does not return from a call", "place=", "stuck_after_s=1.0", "restart this engine"],
    ),
    e.MemoryInUseError: (memory_in_use, ["keep their memory", "a copy does not end"]),
    e.RemoteError: (failed_load(cut_the_route_back), ["no route to the consumer", *PEER]),
    e.RemoteProtocolError: (
        raised_by_scheduler("on_new_request", kv_transfer_params={**PARAMS, "remote_port": 70000}),
        ["kv_transfer_params", "<= 65535", "70000", "remote_engine_id='p'"],
    ),
    e.IncompatiblePeerError: (
        failed_load(verify=("checksum", "none")),
        ["verify={'d': 'none', 'p': 'checksum'}", "engine='p'"],
    ),
    e.AuthenticationError: (
        raised_by(check_server, new_keys(), "tcp://192.0.2.1:5600", new_keys().public_key),
        ["tcp://192.0.2.1:5600", "public_key="],
    ),
    e.PeerUnreachableError: (
        failed_load(freeze, before=lambda pair: pair.pass_time(2.0)),
        ["did not complete the greeting in time", "address='tcp://", "waited_s=3", "engine='p'"],
    ),
    e.PeerLostError: (failed_load(before=freeze, after=lambda pair: pair.world.kill(pair.p)), PEER),
    e.OtherPromptError: (
        another_prompt,
        ["a different prompt", "differs_in='tokens and cache salt'", "same request"],
    ),
    e.TransferTimeoutError: (
        failed_load(before=freeze),
        ["engine='p'", "waiting_for=['pp0tp0']", "peer.transfer_timeout_s"],
    ),
    e.ReadRefusedError: (
        failed_load(blocks=(GroupBlocks.of([3, 4, 5]),)),
        ["the read's block ids are not", *PEER],
    ),
    e.UnknownTransferError: (failed_load(secret=new_secret()), ["no such transfer", *PEER]),
    e.LeaseExpiredError: (
        failed_load(lambda pair: pair.pass_time(10.0)),
        [*PEER, "lease.duration_s"],
    ),
    e.OfferReclaimedError: (
        failed_load(reclaim),
        ["took the blocks back", "its cache was full", *PEER],
    ),
    e.TransferAbortedError: (
        failed_load(before=lambda pair: pair.p.withdraw("r")),
        ["the request was aborted", *PEER],
    ),
    e.StaleIncarnationError: (failed_load(before=restart), ["this engine was restarted", *PEER]),
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
    assert str(raised) == raised.statement + (
        f"; {error.remedy} (retry: {error.retry})" if error.remedy else ""
    )
    assert raised.context == {"request": "r", "deadline_s": 1.5}
    assert error("plain").statement == "plain"
    assert str(copy.copy(raised)) == str(raised)


def test_every_error_is_in_the_table():
    public = {
        each
        for _, each in inspect.getmembers(e, inspect.isclass)
        if each.__module__ == e.__name__ and issubclass(each, e.KVConnectorError)
    }
    assert set(TABLE) == public


@pytest.mark.parametrize("character", CONTROL_CHARACTERS)
def test_an_error_is_one_line_whatever_a_peer_or_client_wrote(character):
    error = e.RemoteError(f"no engine {character} é", engine=f"p{character}")
    for text in (str(error), error.statement):
        assert character not in text
        assert "é" in text
    m.Bye(text=error.statement)
