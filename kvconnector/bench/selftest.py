"""A small transfer inside one process, over the real transport and control channel, compared byte for byte."""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvconnector.bench.loopback import LoopbackPair
from kvconnector.bench.pools import choose_blocks
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.datapath.direct.export import allow_reads
from kvconnector.errors import KVConnectorError, TransferTimeoutError, TransportError
from kvconnector.transport import Buffer, Transport
from kvconnector.transport.base import NO_FILENO
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire.export import NONCE_BYTES

MODEL = ModelShape(name="selftest", num_layers=4, num_kv_heads=2, head_dim=64)
PREFILL = EngineShape(block=16, layout="HND")
DECODE = EngineShape(block=64, layout="NHD")
NUM_TOKENS = 1000
NUM_BLOCKS = 80
SEED = 1


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """What moved, by which data paths, and how long it took from asking to being told, connection set-up included."""

    nbytes: int
    seconds: float
    worker_path: str
    transfer_path: str


def loopback_transfer(
    *,
    device: str,
    deadline_s: float,
    settings: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> SelfTestResult:
    """Two workers in this process: one request, other block size and layout on arrival. `settings`: configuration by
    section.

    Raises:
        KVConnectorError: a side failed, what arrived is not what was sent, or the deadline passed.
    """
    rng = np.random.default_rng(SEED)
    shapes = (PREFILL, DECODE)
    blocks = [
        choose_blocks(shape.num_blocks(NUM_TOKENS), NUM_BLOCKS, scattered=True, rng=rng)
        for shape in shapes
    ]
    staging = {**settings.get("staging", {}), "chunk_bytes": 1 << 18, "budget_bytes": 1 << 23}
    with LoopbackPair(
        MODEL,
        shapes,
        (NUM_BLOCKS, NUM_BLOCKS),
        device=device,
        settings={**settings, "staging": staging},
    ) as pair:
        pair.pools[0].write(SEED, blocks[0], NUM_TOKENS)
        output, seconds = pair.transfer(
            "selftest", blocks, NUM_TOKENS, time.monotonic() + deadline_s
        )
        worker_path = pair.consumer.data_path
    if wrong := pair.pools[1].mismatch(SEED, blocks[1], NUM_TOKENS):
        raise KVConnectorError(f"what arrived is not what was sent: {wrong}")
    return SelfTestResult(
        nbytes=MODEL.token_bytes * NUM_TOKENS,
        seconds=seconds,
        worker_path=worker_path,
        transfer_path="+".join(sorted({each.path for each in output.stats.transfers})),
    )


def another_process_reads_us(deadline_s: float) -> None:
    """Have a child process read some bytes of this one, as a consumer on this host would.

    Raises:
        TransportError: it cannot, or not before the deadline; why.
    """
    secret = np.frombuffer(secrets.token_bytes(NONCE_BYTES), np.uint8)
    allow_reads()
    place = (os.getpid(), secret.ctypes.data, len(secret))
    try:
        child = subprocess.run(
            [sys.executable, "-c", _READER, *map(str, place)],
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired as exc:
        raise TransportError("a child process did not answer", timeout_s=deadline_s) from exc
    if child.stdout != secret.tobytes().hex():
        reason = child.stderr.strip().splitlines()[-1:] or ["other bytes"]
        raise TransportError(f"another process cannot read this one: {reason[0]}")


_READER = """
import sys
from kvconnector.datapath.direct.process_memory import read_memory
sys.stdout.write(read_memory(*map(int, sys.argv[1:])).hex())
"""


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


def lanes_between(near: UcxTransport, far: UcxTransport, *, deadline_s: float) -> str:
    """The lanes that UCX chose from one worker to another, once a message went there and one came back.

    Raises:
        TransferTimeoutError: the messages did not arrive in time.
    """
    endpoint, way_back = near.connect(far.address), far.connect(near.address)
    out, into = np.ones((2, 64), dtype=np.uint8), np.zeros((2, 64), dtype=np.uint8)
    near.recv(1, _buffer(into[0]))
    far.recv(1, _buffer(into[1]))
    near.send(endpoint, 1, _buffer(out[0]))
    far.send(way_back, 1, _buffer(out[1]))
    deadline = time.monotonic() + deadline_s
    while not into.all():
        near.progress()
        far.progress()
        if time.monotonic() > deadline:
            raise TransferTimeoutError("two local workers did not exchange a message in time")
    return near.lanes(endpoint)


def _buffer(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Buffer:
    return Buffer(address=array.ctypes.data, nbytes=array.nbytes, device="cpu", owner=array)
