"""What `kvconnector doctor` tries: a small transfer between two processes, and messages between two UCX workers."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass

import numpy as np

from kvconnector.bench.deployment import Deployment
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.errors import TransferTimeoutError
from kvconnector.transport import Buffer
from kvconnector.transport.base import NO_FILENO
from kvconnector.transport.ucx import UcxTransport

MODEL = ModelShape(name="selftest", num_layers=4, num_kv_heads=2, head_dim=64)
NUM_TOKENS = 1000
SETTINGS = {"staging": {"chunk_bytes": 1 << 18, "budget_bytes": 1 << 23}}


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """What moved, by which data paths, what the workers warned of, and how long the first request took, connections
    included.
    """

    nbytes: int
    seconds: float
    worker_path: str
    transfer_path: str
    warnings: list[str]


def two_processes_transfer(device: str, tls: str, direct: str) -> SelfTestResult:
    """One request from one process to another, with another block size and layout on arrival.

    Raises:
        KVConnectorError: a side failed, what arrived is not what was sent, or it took too long.
    """
    kind, _, index = device.partition(":")
    gpus = (int(index or 0),) if kind == "cuda" else ()
    options = BenchOptions(
        model=MODEL,
        prefill=EngineShape(block=16, layout="HND"),
        decode=EngineShape(block=64, layout="NHD"),
        device=kind,
        gpus=(gpus, gpus),
        tls=tls,
        direct=direct,
    )
    deployment = Deployment.of(options, (NUM_TOKENS,))
    with EnginePair(deployment, SETTINGS) as pair:
        seconds = pair.verify(deployment.transfer(NUM_TOKENS))
        started = [*pair.prefill.started, *pair.decode.started]
        return SelfTestResult(
            nbytes=MODEL.token_bytes * NUM_TOKENS,
            seconds=seconds,
            worker_path=started[-1].data_path,
            transfer_path="+".join(sorted(pair.paths)),
            warnings=list(dict.fromkeys(text for each in started for text in each.warnings)),
        )


def exchange(near: UcxTransport, far: UcxTransport, deadline_s: float) -> tuple[str, bool]:
    """A message there and one back between two idle workers: the lanes that UCX chose, and whether a message makes the
    receiver's descriptor readable.

    Raises:
        TransferTimeoutError: the messages did not arrive in time.
    """
    out, into = np.ones((2, 64), dtype=np.uint8), np.zeros((2, 64), dtype=np.uint8)
    there, back = near.connect(far.address), far.connect(near.address)
    near.recv(1, _buffer(into[0]))
    far.recv(1, _buffer(into[1]))
    for each in (near, far):
        each.progress()
    near.send(there, 1, _buffer(out[0]))
    far.send(back, 1, _buffer(out[1]))
    deadline = time.monotonic() + deadline_s
    is_woken = False
    while not into.all():
        near.progress()
        if far.fileno() != NO_FILENO and select.select([far.fileno()], [], [], 0.01)[0]:
            is_woken = True
        if is_woken or time.monotonic() > deadline - deadline_s / 2:
            far.progress()
        if time.monotonic() > deadline:
            raise TransferTimeoutError("two local workers did not exchange a message in time")
    return near.lanes(there), is_woken


def _buffer(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Buffer:
    return Buffer(address=array.ctypes.data, nbytes=array.nbytes, device="cpu", owner=array)
