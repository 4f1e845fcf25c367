"""`transfer` and `request`: a request's blocks from one engine's processes to another's, over the real connector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from kvconnector.bench.contract import (
    Benchmark,
    BenchOptions,
    CaseResult,
    Measurement,
    Part,
    Progress,
)
from kvconnector.bench.deployments import Deployment, Transfer
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.peers import (
    PEER_SETTINGS,
    PeerPair,
    PeerSetting,
    refuse_what_peers_cannot,
)
from kvconnector.bench.transfer_limits import INGRESS, limits_of, one_pair
from kvconnector.errors import KVConnectorError

OURS = "kvconnector"
ONE_PAIR = "kvconnector, one rank to one"


class Timed(Protocol):
    """What moves a request's bytes: our engines, a peer's, or a limit."""

    def prepare(self, transfer: Transfer) -> None:
        """Make what arrives distinguishable from what was there before."""

    def run(self, transfer: Transfer) -> tuple[float, ...]:
        """Move it once; seconds, by however many clocks it has."""

    def check(self, transfer: Transfer) -> None:
        """Raises:
        ResultMismatchError: what arrived is not what was sent.
        """

    def pause(self) -> None:
        """Use no processor while others are timed, as far as that is possible."""

    def resume(self) -> None:
        """Undo `pause`."""


@dataclass(frozen=True, slots=True)
class _Contender:
    """Something that is ready to run. `names` are those of the times that `run` returns."""

    timed: Timed
    part: Part
    names: tuple[str, ...]

    def paths(self) -> list[str]:
        """The data paths that our engines' requests have taken so far."""
        return sorted(self.timed.paths) if isinstance(self.timed, EnginePair) else []


def run(
    options: BenchOptions,
    progress: Progress,
    *,
    name: str,
    default_tokens: tuple[int, ...],
    default_iterations: int,
) -> Sequence[CaseResult]:
    """Every request size between our engines, and with a peer between its own.

    The contenders and the limits take turns, one repetition each, so that a machine that is busy for a while is so for
    all of them, and none finds its memory in a cache that the others do not.
    """
    deployment = Deployment.of(options, options.tokens or default_tokens)
    iterations = options.iterations or default_iterations
    refuse_what_peers_cannot(deployment)
    cases = []
    with ExitStack() as exits:
        notes: list[str] = []
        contenders = _start(exits, deployment, notes, lambda text: progress(f"{name}: {text}"))
        for transfer in deployment.transfers():
            case = deployment.case_name(transfer)
            progress(f"{name}: {case}")
            table = _Samples(transfer, deployment.payload_bytes(transfer))
            with ExitStack() as sized:
                limits = [
                    _Contender(sized.enter_context(limit), limit.part, (limit.name,))
                    for limit in limits_of(deployment, transfer)
                ]
                _measure([*contenders, *limits], table, options.warmup, iterations)
            taken = [f"{each.names[0]} by: {path}" for each in contenders for path in each.paths()]
            cases.append(
                CaseResult(case=case, measurements=table.measurements(), notes=(*taken, *notes))
            )
    return cases


def _start(
    exits: ExitStack, deployment: Deployment, notes: list[str], progress: Progress
) -> list[_Contender]:
    """Our engines; on GPUs also one rank to one, where there are more; and the peer's in each of its settings."""
    progress(f"starting {deployment}")
    contenders = [_Contender(exits.enter_context(EnginePair(deployment)), "ours", (OURS,))]
    pair = one_pair(deployment)
    if pair is not None:
        progress(f"starting {pair}")
        contenders.append(_Contender(exits.enter_context(EnginePair(pair)), "variant", (ONE_PAIR,)))
    peer = deployment.options.peer.name
    for setting in PEER_SETTINGS[peer] if peer else ():
        progress(f"starting {setting.name}")
        contenders += _peer_contender(exits, deployment, setting, notes)
    return contenders


def _peer_contender(
    exits: ExitStack, deployment: Deployment, setting: PeerSetting, notes: list[str]
) -> list[_Contender]:
    """A setting that does not run here becomes a note; the default one must run."""
    try:
        pair = PeerPair(deployment, setting)
    except KVConnectorError as error:
        if setting == PEER_SETTINGS[deployment.options.peer.name][0]:
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
            timed = contender.timed
            timed.resume()
            if repetition in (-1, iterations):
                timed.prepare(table.transfer)
                timed.run(table.transfer)
                timed.check(table.transfer)
            if repetition == -1:
                for _ in range(warmup):
                    timed.run(table.transfer)
            elif repetition < iterations:
                for name, seconds in zip(contender.names, timed.run(table.transfer), strict=True):
                    table.add(name, contender.part, [seconds])
            timed.pause()


class _Samples:
    """The times of one request by contender."""

    def __init__(self, transfer: Transfer, nbytes: int) -> None:
        self.transfer = transfer
        self._nbytes = nbytes
        self._samples: dict[tuple[str, Part], list[float]] = {}

    def add(self, contender: str, part: Part, samples_s: Iterable[float]) -> None:
        self._samples.setdefault((contender, part), []).extend(samples_s)

    def measurements(self) -> tuple[Measurement, ...]:
        """All contenders; ours with its ratios to what the same run measured of one pair and one GPU."""
        measured = [
            Measurement(
                contender=contender, part=part, samples_s=tuple(samples), nbytes=self._nbytes
            )
            for (contender, part), samples in self._samples.items()
        ]
        figures = {
            name: each.p50_s / measured[0].p50_s
            for each in measured
            for name in (_FIGURES.get(each.contender),)
            if name is not None
        }
        return (msgspec.structs.replace(measured[0], figures=figures), *measured[1:])


# Our speed as a multiple of the speed of these.
_FIGURES = {ONE_PAIR: "speed_over_one_pair", INGRESS: "speed_over_one_gpus_ingress"}

TRANSFER = Benchmark(
    name="transfer",
    description="long requests between two engines' processes; limits: memcpy and a raw socket, or GPUs' plain copies",
    run=partial(run, name="transfer", default_tokens=(2048,), default_iterations=10),
    has_peers=True,
)
REQUEST = Benchmark(
    name="request",
    description="short requests, from asking to load until the engine sees the end",
    run=partial(run, name="request", default_tokens=(16, 128, 512), default_iterations=100),
    has_peers=True,
)
