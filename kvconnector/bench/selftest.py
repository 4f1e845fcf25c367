"""A small transfer inside one process, over the real transport and control channel, compared byte for byte."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvconnector.bench.pools import RankPools, choose_blocks
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.config import ConnectorConfig
from kvconnector.errors import KVConnectorError, TransferTimeoutError
from kvconnector.ids import Rank
from kvconnector.runtime import (
    KVConsumerScheduler,
    KVConsumerWorker,
    KVProducerScheduler,
    KVProducerWorker,
)
from kvconnector.transport import Buffer, Transport
from kvconnector.transport.base import NO_FILENO

MODEL = ModelShape(name="selftest", num_layers=4, num_kv_heads=2, head_dim=64)
PREFILL = EngineShape(block=16, layout="HND")
DECODE = EngineShape(block=64, layout="NHD")
NUM_TOKENS = 1000
NUM_BLOCKS = 80
SEED = 1
_REQUEST = "selftest"


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """What moved, and how long it took from asking to being told, connection set-up included."""

    nbytes: int
    seconds: float


def loopback_transfer(*, device: str, tls: str, deadline_s: float) -> SelfTestResult:
    """Two workers in this process: one request, other block size and layout on arrival.

    Raises:
        KVConnectorError: a side failed, what arrived is not what was sent, or the deadline passed.
    """
    rng = np.random.default_rng(SEED)
    rank = Rank(0, 0)
    pools = [
        RankPools(MODEL, shape, rank, num_blocks=NUM_BLOCKS, device=device)
        for shape in (PREFILL, DECODE)
    ]
    blocks = [
        choose_blocks(shape.num_blocks(NUM_TOKENS), NUM_BLOCKS, scattered=True, rng=rng)
        for shape in (PREFILL, DECODE)
    ]
    pools[0].write(SEED, blocks[0], NUM_TOKENS)
    configs = [
        ConnectorConfig.from_mapping(
            {
                "engine_id": f"selftest-{role}",
                "role": role,
                "control": {"insecure": True},
                "staging": {"chunk_bytes": 1 << 18, "budget_bytes": 1 << 23},
                "ucx": {"tls": tls},
            }
        )
        for role in ("producer", "consumer")
    ]
    producer = KVProducerWorker(configs[0], rank=rank, model=MODEL.description(), device=device)
    consumer = KVConsumerWorker(configs[1], rank=rank, model=MODEL.description(), device=device)
    prefill, decode = KVProducerScheduler(configs[0]), KVConsumerScheduler(configs[1])
    try:
        for worker, pool in zip((producer, consumer), pools, strict=True):
            worker.register_kv_caches([pool.cache_group()])
        prefill.set_worker_metadata([producer.handshake_metadata()], tp_size=1, pp_size=1)
        decode.set_worker_metadata([consumer.handshake_metadata()], tp_size=1, pp_size=1)
        _, params = prefill.request_finished(
            _REQUEST,
            block_ids=[blocks[0]],
            num_tokens=NUM_TOKENS,
            kv_transfer_params={"do_remote_decode": True},
        )
        producer.start_step(prefill.build_step())
        started = time.perf_counter()
        _load(decode, consumer, params or {}, blocks[1])
        deadline = time.monotonic() + deadline_s
        _wait(consumer, lambda: _received(consumer), deadline, "the load")
        seconds = time.perf_counter() - started
        _wait(
            producer, lambda: _REQUEST in producer.poll().finished_sending, deadline, "the release"
        )
    finally:
        for each in (consumer, producer, decode, prefill):
            each.close()
    if wrong := pools[1].mismatch(SEED, blocks[1], NUM_TOKENS):
        raise KVConnectorError(f"what arrived is not what was sent: {wrong}")
    return SelfTestResult(MODEL.token_bytes * NUM_TOKENS, seconds)


def _load(
    scheduler: KVConsumerScheduler,
    worker: KVConsumerWorker,
    params: dict[str, object],
    block_ids: list[int],
) -> None:
    scheduler.on_new_request(_REQUEST, params)
    external, _ = scheduler.get_num_new_matched_tokens(
        _REQUEST, num_prompt_tokens=NUM_TOKENS + 1, num_computed_tokens=0
    )
    scheduler.update_state_after_alloc(
        _REQUEST, block_ids=[block_ids], num_external_tokens=external
    )
    worker.start_step(scheduler.build_step())


def _received(worker: KVConsumerWorker) -> bool:
    output = worker.poll()
    if reason := output.failed_recving.get(_REQUEST):
        raise KVConnectorError(f"the load failed: {reason}")
    return _REQUEST in output.finished_recving


def _wait(
    worker: KVProducerWorker | KVConsumerWorker,
    is_over: Callable[[], bool],
    deadline: float,
    what: str,
) -> None:
    while not is_over():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TransferTimeoutError(f"{what} did not end in time")
        worker.wait(left_s)


def message_wakes_sleeper(sender: Transport, receiver: Transport, *, deadline_s: float) -> bool:
    """Whether a message makes the receiver's descriptor readable. Both are this thread's and idle."""
    if receiver.fileno() == NO_FILENO:
        return False
    out, into = np.ones(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    endpoint = sender.connect(receiver.address)
    receiver.recv(1, _buffer(into))
    receiver.progress()
    sender.send(endpoint, 1, _buffer(out))
    deadline = time.monotonic() + deadline_s
    woken = False
    while not into.all() and time.monotonic() < deadline:
        sender.progress()
        readable, _, _ = select.select([receiver.fileno()], [], [], 0.01)
        if readable:
            woken = True
            receiver.progress()
    return woken and bool(into.all())


def _buffer(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Buffer:
    return Buffer(address=array.ctypes.data, nbytes=array.nbytes, device="cpu", owner=array)
