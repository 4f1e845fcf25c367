"""What `kvconnector doctor` tries: a small transfer between two processes."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnector.bench.deployment import Deployment
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.shapes import EngineShape, ModelShape

MODEL = ModelShape(name="selftest", num_layers=4, num_kv_heads=2, head_dim=64)
NUM_TOKENS = 1000
SETTINGS = {"staging": {"chunk_bytes": 1 << 18, "budget_bytes": 1 << 23}}


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """What moved, by which data paths and lanes of UCX's, what the workers warned of, and how long the first request
    took, connections included.
    """

    nbytes: int
    seconds: float
    worker_path: str
    transfer_path: str
    lanes: str
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
            lanes="+".join(text.rpartition(" ")[2] for text in pair.lanes),
            warnings=list(dict.fromkeys(text for each in started for text in each.warnings)),
        )
