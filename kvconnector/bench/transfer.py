"""`transfer` and `request`: a request's blocks from one engine's processes to another's, over the real connector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

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
from kvconnector.bench.engines import Deployment, EnginePair, Transfer, devices_for
from kvconnector.bench.peers import (
    PEER_SETTINGS,
    PeerPair,
    PeerSetting,
    refuse_what_peers_cannot,
)
from kvconnector.bench.pools import choose_blocks
from kvconnector.bench.shapes import EngineShape
from kvconnector.bench.units import format_bytes
from kvconnector.errors import KVConnectorError

SPARE_FACTOR = 2
"""Blocks of a pool for each block of the longest request."""


def run(
    options: BenchOptions,
    progress: Progress,
    *,
    name: str,
    default_tokens: tuple[int, ...],
    default_iterations: int,
) -> Sequence[CaseResult]:
    """Every request size between our engines, and with a peer between its own.

    The contenders take turns, one repetition each, so that a machine that is busy for a while is so for all of them.
    """
    tokens = options.tokens or default_tokens
    iterations = options.iterations or default_iterations
    deployment = _deployment(options, max(tokens))
    refuse_what_peers_cannot(deployment)
    cases = []
    with ExitStack() as exits:
        progress(f"{name}: starting {deployment.prefill} to {deployment.decode}")
        contenders = [
            _Contender(exits.enter_context(EnginePair(deployment)), "ours", ("kvconnector",))
        ]
        notes: list[str] = []
        for setting in PEER_SETTINGS[options.peer] if options.peer else ():
            progress(f"{name}: starting {setting.name}")
            contenders += _peer_contender(exits, deployment, setting, notes)
        for transfer in _transfers(deployment, tokens):
            case = _case_name(deployment, transfer)
            progress(f"{name}: {case}")
            table = _Samples(transfer)
            _measure(contenders, table, options.warmup, iterations)
            for measured in _limits(deployment, _nbytes(options, transfer), iterations):
                table.add(measured.contender, measured.part, measured.samples_s)
            cases.append(
                CaseResult(case=case, measurements=table.measurements(options), notes=tuple(notes))
            )
    return cases


@dataclass(frozen=True, slots=True)
class _Contender:
    """Engines that are running. `names` are those of the times that `pair.run` returns."""

    pair: EnginePair | PeerPair
    part: Part
    names: tuple[str, ...]


def _peer_contender(
    exits: ExitStack, deployment: Deployment, setting: PeerSetting, notes: list[str]
) -> list[_Contender]:
    """A setting that does not run here becomes a note; the default one must run."""
    try:
        pair = PeerPair(deployment, setting)
    except KVConnectorError as error:
        if setting == PEER_SETTINGS[deployment.options.peer][0]:
            raise
        notes.append(f"{setting.name} does not run here: {str(error).splitlines()[-1]}")
        return []
    exits.enter_context(pair)
    pair.pause()
    return [_Contender(pair, "peer", (setting.name, f"{setting.name}, transfer only"))]


def _measure(
    contenders: Sequence[_Contender], table: _Samples, warmup: int, iterations: int
) -> None:
    """Checked before the timed repetitions and after them, each time on poisoned memory."""
    for repetition in range(-1, iterations + 1):
        for contender in contenders:
            pair = contender.pair
            pair.resume()
            if repetition in (-1, iterations):
                pair.prepare(table.transfer)
                pair.run(table.transfer)
                pair.check(table.transfer)
            if repetition == -1:
                for _ in range(warmup):
                    pair.run(table.transfer)
            elif repetition < iterations:
                for name, seconds in zip(contender.names, pair.run(table.transfer), strict=True):
                    table.add(name, contender.part, [seconds])
            pair.pause()


class _Samples:
    """The times of one request by contender."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._samples: dict[tuple[str, Part], list[float]] = {}

    def add(self, contender: str, part: Part, samples_s: Iterable[float]) -> None:
        self._samples.setdefault((contender, part), []).extend(samples_s)

    def measurements(self, options: BenchOptions) -> tuple[Measurement, ...]:
        nbytes = _nbytes(options, self.transfer)
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


def _nbytes(options: BenchOptions, transfer: Transfer) -> int:
    return options.model.token_bytes * transfer.num_tokens


def _case_name(deployment: Deployment, transfer: Transfer) -> str:
    options = deployment.options
    size = format_bytes(_nbytes(options, transfer))
    return (
        f"{options.model.name}, {transfer.num_tokens} tokens, {size}"
        f" {'scattered' if options.scattered else 'contiguous'}, {deployment.prefill} to {deployment.decode}"
    )


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
