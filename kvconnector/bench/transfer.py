"""`transfer` and `request`: a request's blocks from one engine's processes to another's, over the real connector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from kvconnector.bench import limits
from kvconnector.bench.contract import (
    Benchmark,
    BenchOptions,
    CaseResult,
    Measurement,
    Part,
    Progress,
)
from kvconnector.bench.engines import Deployment, EnginePair, NixlPair, Transfer, devices_for
from kvconnector.bench.pools import choose_blocks
from kvconnector.bench.shapes import EngineShape
from kvconnector.bench.units import format_bytes
from kvconnector.errors import ConfigError, KVConnectorError

SPARE_FACTOR = 2
"""Blocks of a pool for each block of the longest request."""


class NixlSetting(NamedTuple):
    """How NIXL is run."""

    name: str
    environment: dict[str, str]
    num_threads: int


# Scatter-gather lists are off by default; more threads share long descriptor lists.
NIXL_SETTINGS = (
    NixlSetting("nixl", {}, 0),
    NixlSetting("nixl, scatter-gather", {"NIXL_UCX_SGL_ENABLE": "1"}, 0),
    NixlSetting("nixl, 4 threads", {}, 4),
)


def run(
    options: BenchOptions,
    progress: Progress,
    *,
    name: str,
    default_tokens: tuple[int, ...],
    default_iterations: int,
) -> Sequence[CaseResult]:
    """Every request size on one pair of engines, then on the peer's, then the limits.

    All that `options.rounds` times, so that a machine that is busy for a while is so for everybody.
    """
    tokens = options.tokens or default_tokens
    iterations = options.iterations or default_iterations
    deployment = _deployment(options, max(tokens))
    tables = [_Samples(transfer) for transfer in _transfers(deployment, tokens)]
    settings = NIXL_SETTINGS if options.peer else ()
    if settings:
        _refuse_unlike_engines(deployment)
    notes: list[str] = []
    for number in range(options.rounds):
        turn = f"{name}, round {number + 1} of {options.rounds}"
        progress(f"{turn}: kvconnector, {deployment.prefill} to {deployment.decode}")
        _run_ours(deployment, tables, iterations)
        for setting in settings:
            progress(f"{turn}: {setting.name}")
            notes += _run_nixl(deployment, setting, tables, iterations)
        progress(f"{turn}: limits")
        for table in tables:
            nbytes = options.model.token_bytes * table.transfer.num_tokens
            for measured in _limits(deployment, nbytes, iterations):
                table.add(measured.contender, measured.part, measured.samples_s)
    return [
        CaseResult(
            case=_case_name(deployment, table.transfer),
            measurements=table.measurements(options),
            notes=tuple(dict.fromkeys(notes)),
        )
        for table in tables
    ]


class _Samples:
    """The times of one request by contender, over all rounds."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._samples: dict[tuple[str, Part], list[float]] = {}

    def add(self, contender: str, part: Part, samples_s: Iterable[float]) -> None:
        self._samples.setdefault((contender, part), []).extend(samples_s)

    def measurements(self, options: BenchOptions) -> tuple[Measurement, ...]:
        nbytes = options.model.token_bytes * self.transfer.num_tokens
        return tuple(
            Measurement(contender=contender, part=part, samples_s=tuple(samples), nbytes=nbytes)
            for (contender, part), samples in self._samples.items()
        )


def _deployment(options: BenchOptions, max_tokens: int) -> Deployment:
    prefill = options.prefill or EngineShape()
    decode = options.decode or EngineShape()
    return Deployment(
        options=options,
        prefill=prefill,
        decode=decode,
        prefill_num_blocks=SPARE_FACTOR * prefill.num_blocks(max_tokens),
        decode_num_blocks=SPARE_FACTOR * decode.num_blocks(max_tokens),
    )


def _transfers(deployment: Deployment, tokens: Sequence[int]) -> list[Transfer]:
    options = deployment.options
    rng = np.random.default_rng(options.seed)
    choose = partial(choose_blocks, scattered=options.scattered, rng=rng)
    return [
        Transfer(
            num_tokens=count,
            prefill_blocks=tuple(
                choose(deployment.prefill.num_blocks(count), deployment.prefill_num_blocks)
            ),
            decode_blocks=tuple(
                choose(deployment.decode.num_blocks(count), deployment.decode_num_blocks)
            ),
        )
        for count in tokens
    ]


def _case_name(deployment: Deployment, transfer: Transfer) -> str:
    options = deployment.options
    size = format_bytes(options.model.token_bytes * transfer.num_tokens)
    return (
        f"{options.model.name}, {transfer.num_tokens} tokens, {size}"
        f" {'scattered' if options.scattered else 'contiguous'}, {deployment.prefill} to {deployment.decode}"
    )


def _run_ours(deployment: Deployment, tables: Sequence[_Samples], iterations: int) -> None:
    """Checked before the timed repetitions and after them, each time on poisoned memory."""
    with EnginePair(deployment) as pair:
        for table in tables:
            transfer = table.transfer
            _run_checked(pair, transfer)
            for _ in range(deployment.options.warmup):
                pair.run(transfer)
            samples = [pair.run(transfer) for _ in range(iterations)]
            _run_checked(pair, transfer)
            table.add("kvconnector", "ours", samples)


def _run_checked(pair: EnginePair | NixlPair, transfer: Transfer) -> None:
    pair.prepare(transfer)
    pair.run(transfer)
    pair.check(transfer)


def _refuse_unlike_engines(deployment: Deployment) -> None:
    if deployment.prefill != deployment.decode:
        raise ConfigError(
            "the peer reads whole blocks: both engines need the same tp, pp, block and layout",
            prefill=str(deployment.prefill),
            decode=str(deployment.decode),
        )


def _run_nixl(
    deployment: Deployment, setting: NixlSetting, tables: Sequence[_Samples], iterations: int
) -> list[str]:
    """As `_run_ours`; returns notes. A setting that does not run here is a note, the default one an error."""
    options = deployment.options
    tls = {"UCX_TLS": options.tls} if options.tls else {}
    try:
        pair = NixlPair(
            deployment,
            environment={**setting.environment, **tls},
            num_threads=setting.num_threads,
            site=options.peer_site,
        )
    except KVConnectorError as error:
        if setting == NIXL_SETTINGS[0]:
            raise
        return [f"{setting.name} does not run here: {str(error).splitlines()[-1]}"]
    with pair:
        for table in tables:
            transfer = table.transfer
            _run_checked(pair, transfer)
            for _ in range(options.warmup):
                pair.run(transfer)
            samples = [pair.run(transfer) for _ in range(iterations)]
            _run_checked(pair, transfer)
            table.add(setting.name, "peer", (request_s for request_s, _ in samples))
            table.add(f"{setting.name}, transfer only", "peer", (only_s for _, only_s in samples))
    return []


def _limits(deployment: Deployment, nbytes: int, iterations: int) -> list[Measurement]:
    options = deployment.options
    counts = {"iterations": iterations, "warmup": options.warmup}
    if options.device != "cpu":
        producers, consumers = devices_for(
            options.device, len(deployment.prefill.ranks), len(deployment.decode.ranks)
        )
        return [limits.device_copy(nbytes, source=producers[0], target=consumers[0], **counts)]
    socket_time = limits.raw_socket(nbytes, timeout_s=options.timeout_s, **counts)
    copy_time = limits.memcpy(nbytes, **counts)
    if not _may_share_memory(options.tls):
        copy_time = msgspec.structs.replace(copy_time, part="variant")
    return [copy_time, socket_time]


def _may_share_memory(tls: str) -> bool:
    """Whether a choice of UCX's transports lets host memory go from process to process without a socket."""
    return not tls or not set(tls.split(",")) <= {"tcp", "self"}


TRANSFER = Benchmark(
    name="transfer",
    description="long requests between two engines' processes; limits: memcpy and a raw socket, or a GPU's copy",
    run=partial(run, name="transfer", default_tokens=(2048,), default_iterations=10),
)
REQUEST = Benchmark(
    name="request",
    description="short requests, from asking to load until the engine sees the end",
    run=partial(run, name="request", default_tokens=(16, 128, 512), default_iterations=100),
)
