"""What a user reads of each error: which engine and rank, what was expected and what came, and what to do."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import kvconnector as kvc
from kvconnector import errors as e
from kvconnector.cache.specs import merge_specs
from kvconnector.control.security import check_server, generate_keys
from kvconnector.datapath.direct.process_memory import read_memory
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.ids import new_secret
from kvconnector.runtime.driver import Driver
from kvconnector.runtime.steps import BlockList
from kvconnector.session import events as ev
from kvconnector.transport.base import Buffer
from tests.integration import runtime_pair as rp
from tests.support.fakes import FakeEngine, attention_model
from tests.support.loopback import LoopbackFaults, LoopbackNetwork
from tests.support.world import Offer, World
from tests.unit.session import harness as h

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

    def __init__(self, verify: tuple[str, str] = ("none", "none")) -> None:
        self.world = World(settings=QUICK)
        start = self.world.start
        self.p = start(FakeEngine("p", MODEL), role="producer", verify=verify[0])
        self.d = start(FakeEngine("d", MODEL), role="consumer", verify=verify[1])
        self.offer = self.p.grant("r", [[0, 1, 2]], 12)

    def failure(
        self,
        offer: Offer,
        *,
        before: Callable[[], object] = bool,
        after: Callable[[], object] = bool,
    ) -> str:
        """Why a load fails, as the consumer's engine is told. `before` the load is asked for, or `after`."""
        try:
            self.d.want("r", offer)
            self.pass_time(0.0)
            before()
            self.d.load("r", offer, [[7, 6, 5]], [range(12)])
            self.world.run(lambda: False, max_turns=5)
            after()
            (worker,) = self.d.workers
            assert self.world.run(worker.outbox.is_filled, seconds_per_turn=0.05)
            return worker.poll().failed_recving["r"]
        finally:
            self.world.close()

    def pass_time(self, seconds: float) -> None:
        self.world.run(lambda: False, max_turns=50, seconds_per_turn=seconds / 50)


def raised(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(e.KVConnectorError) as found:
        call(*args, **kwargs)
    return f"{type(found.value).__name__}: {found.value}"


@contextmanager
def consumer() -> Iterator[rp.Engine]:
    engine = rp.Engine("d", "consumer")
    try:
        yield engine
    finally:
        engine.close()


PARAMS = {
    "remote_engine_id": "p",
    "remote_request_id": "r",
    "remote_block_ids": [[1, 2, 3]],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_num_tokens": 12,
    "transfer_secret": "0" * 32,
    "do_remote_prefill": True,
}


def a_failed_driver(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    def turn(*_: object) -> None:
        raise ValueError("a bug")

    with consumer() as d:
        monkeypatch.setattr(Driver, "turn", turn)
        d.load("r", PARAMS, [1, 2, 3], 12)
        rp.until(lambda: "r" in d.received, d)
        return str(d.failed["r"])


def memory_in_use(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    close = DataPath.close

    def fails(path: DataPath) -> None:
        close(path)
        raise e.TransportError("a copy does not end")

    p = rp.Engine("p", "producer")
    try:
        p.offer("r", [1, 2], 8)
        monkeypatch.setattr(DataPath, "close", fails)
        text = raised(p.workers.pop().close)
    finally:
        p.close()
    return text


def asking(method: str, **arguments: Any) -> Callable[[pytest.MonkeyPatch, Path], str]:
    """A call of a consumer's scheduler."""

    def trigger(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
        with consumer() as d:
            return raised(getattr(d.scheduler, method), "r", **arguments)

    return trigger


def blocks_that_no_pool_has(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    p = rp.Engine("p", "producer")
    try:
        p.offer("r", [100, 101], 8)
        rp.until(lambda: "r" in p.sent, p)
        return str(p.unsent["r"])
    finally:
        p.close()


def a_cancelled_receive(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    transport = LoopbackNetwork().transport()
    try:
        memory = bytearray(8)
        view = torch.frombuffer(memory, dtype=torch.uint8)
        transport.cancel(transport.recv(1, Buffer(view.data_ptr(), 8, "cpu", view)))
        (completion,) = transport.progress()
        return f"{type(completion.error).__name__}: {completion.error}"
    finally:
        transport.close()


def a_foreign_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    keys = generate_keys(tmp_path / "ours")
    other = generate_keys(tmp_path / "theirs").public_key
    return raised(check_server, keys, "tcp://192.0.2.1:5600", other)


def an_event_out_of_order(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    side = h.producer()
    h.welcome(side)
    return raised(side.session.handle, ev.EndpointOpened(-1), 0.0)


def a_load(
    before: Callable[[Pair, pytest.MonkeyPatch], object] = lambda pair, monkeypatch: None,
    *,
    after: Callable[[Pair], object] = lambda pair: None,
    verify: tuple[str, str] = ("none", "none"),
    **changes: Any,
) -> Callable[[pytest.MonkeyPatch, Path], str]:
    """A load that fails, of an offer that a router may have changed. See `Pair.failure`."""

    def trigger(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
        pair = Pair(verify)
        return pair.failure(
            pair.offer.changed(**changes),
            before=lambda: before(pair, monkeypatch),
            after=lambda: after(pair),
        )

    return trigger


def freeze(pair: Pair, _: pytest.MonkeyPatch) -> None:
    pair.world.freeze(pair.p)


def damage(pair: Pair, _: pytest.MonkeyPatch) -> None:
    pair.world.network.set_faults(LoopbackFaults(corrupt_probability=1.0))


def restart(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.p.workers[0].driver.producer, "_incarnation", "another")


def no_way_back(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    def connect(address: bytes) -> int:
        raise e.TransportError("no route to the consumer")

    pair = Pair()
    monkeypatch.setattr(pair.p.workers[0].transport, "connect", connect)
    return pair.failure(pair.offer)


def a_silent_address(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    pair = Pair()
    pair.world.freeze(pair.p)
    return pair.failure(pair.offer, before=lambda: pair.pass_time(2.0))


def a_late_reader(monkeypatch: pytest.MonkeyPatch, _: Path) -> str:
    pair = Pair()
    pair.pass_time(10.0)
    return pair.failure(pair.offer)


def calling(call: Callable[..., object], *args: Any) -> Callable[[pytest.MonkeyPatch, Path], str]:
    return lambda monkeypatch, _: raised(call, *args)


PEER = ["engine='p'", "rank='pp0tp0'"]
"""What names the producer's rank."""
TABLE: dict[type[e.KVConnectorError], tuple[Callable[[pytest.MonkeyPatch, Path], str], list[str]]]
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
    e.TransportError: (calling(read_memory, os.getpid(), 8, 8), ["no memory there", "pid="]),
    e.CorruptionError: (
        a_load(damage, verify=("checksum", "checksum")),
        ["not what its producer sent", "chunk=0", *PEER],
    ),
    e.OperationCancelledError: (a_cancelled_receive, ["cancelled"]),
    e.MemoryInUseError: (memory_in_use, ["keep their memory", "a copy does not end"]),
    e.RemoteError: (no_way_back, ["no route to the consumer", *PEER]),
    e.RemoteProtocolError: (
        asking("on_new_request", kv_transfer_params={**PARAMS, "remote_port": 70000}),
        ["kv_transfer_params", "<= 65535", "70000", "remote_engine_id='p'"],
    ),
    e.IncompatiblePeerError: (
        a_load(verify=("checksum", "none")),
        ["verify={'d': 'none', 'p': 'checksum'}", "engine='p'"],
    ),
    e.AuthenticationError: (a_foreign_key, ["tcp://192.0.2.1:5600", "public_key="]),
    e.PeerUnreachableError: (
        a_silent_address,
        ["did not complete the handshake in time", "address='tcp://", "waited_s=3", "engine='p'"],
    ),
    e.PeerLostError: (a_load(freeze, after=lambda pair: pair.world.kill(pair.p)), PEER),
    e.TransferTimeoutError: (
        a_load(freeze),
        ["engine='p'", "waiting_for=['pp0tp0']", "peer.transfer_timeout_s"],
    ),
    e.ReadRefusedError: (
        a_load(blocks=(BlockList.of([3, 4, 5]),)),
        ["the read's block ids are not", *PEER],
    ),
    e.UnknownTransferError: (a_load(secret=new_secret()), ["no such transfer", *PEER]),
    e.LeaseExpiredError: (a_late_reader, [*PEER, "lease.duration_s"]),
    e.TransferAbortedError: (
        a_load(lambda pair, _: pair.p.withdraw("r")),
        ["the request was aborted", *PEER],
    ),
    e.StaleIncarnationError: (a_load(restart), ["this engine was restarted", *PEER]),
}


@pytest.mark.ucx
@pytest.mark.parametrize("error", TABLE, ids=lambda error: error.__name__)
def test_an_error_says_what_happened_where_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[e.KVConnectorError]
) -> None:
    trigger, words = TABLE[error]
    text = trigger(monkeypatch, tmp_path)
    assert text.startswith(f"{error.__name__}: ")
    for word in (*words, error.remedy):
        assert word in text
    assert text.count(error.remedy) == 1 or not error.remedy


def test_no_error_is_left_out() -> None:
    public = {
        each for _, each in inspect.getmembers(e, inspect.isclass) if each.__module__ == e.__name__
    }
    assert set(TABLE) == public
