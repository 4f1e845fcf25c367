"""`transfer` and `request`: a request's blocks from one engine's processes to another's, over the real connector."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvconnector.bench.contract import (
    WARMUP,
    Benchmark,
    BenchOptions,
    CaseResult,
    ContenderKind,
    Measurement,
    Progress,
)
from kvconnector.bench.engines import (
    Deployment,
    EnginePair,
    NixlPair,
    Transfer,
    one_pair,
    refuse_what_nixl_cannot,
)
from kvconnector.bench.limits import INGRESS, Limit, limits_of
from kvconnector.bench.nixl import NIXL_SETTINGS
from kvconnector.errors import KVConnectorError

OURS = "kvconnector"
ONE_PAIR = "kvconnector, one rank to one"
FIGURES = {ONE_PAIR: "speed_over_one_pair", INGRESS: "speed_over_one_gpus_ingress"}
"""Our speed as a multiple of the speed of these."""
BACK_TO_BACK = 2
"""Requests of a contender's turn that follow its first one at once."""


@dataclass(frozen=True, slots=True)
class _Contender:
    """Something that is ready to run. `names` are those of the times that `run` returns."""

    runner: EnginePair | NixlPair | Limit
    kind: ContenderKind
    names: tuple[str, ...]
    in_turns_s: list[tuple[float, ...]] = field(default_factory=list)
    back_to_back_s: list[tuple[float, ...]] = field(default_factory=list)

    def resume(self) -> None:
        if not isinstance(self.runner, Limit):
            self.runner.resume()

    def pause(self) -> None:
        if not isinstance(self.runner, Limit):
            self.runner.pause()

    def check(self, transfer: Transfer) -> None:
        """One transfer onto poisoned memory. Raises ResultMismatchError if what arrives is not what was sent."""
        if not isinstance(self.runner, Limit):
            self.runner.prepare(transfer)
            self.runner.run(transfer)
            self.runner.check(transfer)

    def measurements(self, samples: list[tuple[float, ...]], nbytes: int) -> list[Measurement]:
        return [
            Measurement(contender=name, kind=self.kind, samples_s=times, nbytes=nbytes)
            for name, times in zip(self.names, zip(*samples, strict=True), strict=True)
        ]


def run(
    options: BenchOptions,
    progress: Progress,
    *,
    name: str,
    default_tokens: tuple[int, ...],
    default_iterations: int,
) -> Sequence[CaseResult]:
    """Every request size between our engines, and with a peer between its own.

    The contenders and the limits take turns, so that a machine that is busy for a while is so for all of them, and none
    finds its memory in a cache that the others do not. The processes of all but one are stopped: idle threads differ.
    A turn's first request is one case, those that follow it at once another.
    """
    deployment = Deployment.of(options, options.tokens or default_tokens)
    iterations = options.iterations or default_iterations
    if options.peer:
        refuse_what_nixl_cannot(deployment)
    cases = []
    with ExitStack() as exits:
        notes: list[str] = []
        contenders = _start(exits, deployment, notes, lambda text: progress(f"{name}: {text}"))
        for num_tokens in deployment.tokens:
            case = deployment.case_name(num_tokens)
            progress(f"{name}: {case}")
            lengths = deployment.lengths(num_tokens, iterations)
            transfers = [deployment.transfer(each) for each in lengths]
            with limits_of(deployment, max(lengths)) as limits:
                turns = [_Contender(each.runner, each.kind, each.names) for each in contenders]
                turns += [_Contender(each, each.kind, (each.name,)) for each in limits]
                _take_turns(turns, transfers)
            mean_bytes = options.model.token_bytes * sum(lengths) // len(lengths)
            cases += _cases(case, turns, mean_bytes, notes)
    return cases


def _start(
    exits: ExitStack, deployment: Deployment, notes: list[str], progress: Progress
) -> list[_Contender]:
    """Our engines; on GPUs also one rank to one, where there are more; and NIXL's in each of its settings."""
    progress(f"starting {deployment}")
    contenders = [_Contender(exits.enter_context(EnginePair(deployment)), "ours", (OURS,))]
    pair = one_pair(deployment)
    if pair is not None:
        contenders[0].pause()
        progress(f"starting {pair}")
        contenders.append(_Contender(exits.enter_context(EnginePair(pair)), "variant", (ONE_PAIR,)))
    for setting in NIXL_SETTINGS if deployment.options.peer else ():
        contenders[-1].pause()
        progress(f"starting {setting.name}")
        try:
            nixl = exits.enter_context(NixlPair(deployment, setting))
        except KVConnectorError as error:
            if setting == NIXL_SETTINGS[0]:
                raise
            notes.append(f"{setting.name} does not run here: {str(error).splitlines()[-1]}")
            continue
        names = (setting.name, f"{setting.name}, transfer only")
        contenders.append(_Contender(nixl, "peer", names))
    contenders[-1].pause()
    return contenders


def _take_turns(contenders: Sequence[_Contender], transfers: Sequence[Transfer]) -> None:
    """A length each turn, and `BACK_TO_BACK` of the next ones after it. Results are checked before and after."""
    longest = max(transfers, key=lambda each: each.num_tokens)
    for turn in range(-1, len(transfers) + 1):
        for contender in contenders:
            contender.resume()
            if turn in (-1, len(transfers)):
                contender.check(longest)
            if turn == -1:
                for _ in range(WARMUP):
                    contender.runner.run(longest)
            elif turn < len(transfers):
                contender.in_turns_s.append(contender.runner.run(transfers[turn]))
                for following in range(turn + 1, turn + 1 + BACK_TO_BACK):
                    transfer = transfers[following % len(transfers)]
                    contender.back_to_back_s.append(contender.runner.run(transfer))
            contender.pause()


def _cases(
    case: str, contenders: Sequence[_Contender], nbytes: int, notes: Sequence[str]
) -> list[CaseResult]:
    """In turns and back to back."""
    taken = [
        f"{each.names[0]} by: {path}"
        for each in contenders
        if isinstance(each.runner, EnginePair)
        for path in sorted(each.runner.paths)
    ]
    found = []
    for how, samples in (
        ("in turns", [each.in_turns_s for each in contenders]),
        ("back to back", [each.back_to_back_s for each in contenders]),
    ):
        ours, *others = (
            measurement
            for contender, times in zip(contenders, samples, strict=True)
            for measurement in contender.measurements(times, nbytes)
        )
        figures = {
            FIGURES[each.contender]: each.p50_s / ours.p50_s
            for each in others
            if each.contender in FIGURES
        }
        measurements = (msgspec.structs.replace(ours, figures=figures), *others)
        found.append(
            CaseResult(case=f"{case}, {how}", measurements=measurements, notes=(*taken, *notes))
        )
    return found


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
