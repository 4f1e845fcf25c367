"""`gil`: transfers back to back beside engines that work, and what either takes from the other.

P and D are processes; each has the connector's driver thread and a main thread that plays the engine: a step's work,
`start_step`, `poll`. With `decode_caps` D's GPU works instead, at several caps on the copy kernels' programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

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
from kvconnector.bench.messages import Driven, LoadName
from kvconnector.errors import ConfigError

DEFAULT_TOKENS = (2048,)
DEFAULT_ITERATIONS = 10
DEFAULT_CAPS = (0, 16, 32, 64, 128)
ALONE_S = 1.0
"""How long engines work without transfers, to count their steps."""

MAIN_THREADS: Mapping[LoadName, str] = MappingProxyType(
    {
        "idle": "beside idle engines",
        "torch": "beside small torch operations",
        "python": "beside pure Python",
    }
)
DECODE_KERNELS = "beside decode kernels on the consumer's GPU"


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """A case for each request size and load; with `decode_caps` a case for each request size.

    Raises:
        ConfigError: the decode load is asked for without a GPU.
    """
    deployment = Deployment.of(options, options.tokens or DEFAULT_TOKENS)
    if options.decode_caps is None:
        return _beside_main_threads(deployment, progress)
    if options.device == "cpu":
        raise ConfigError("the decode load is made of GPU kernels", device=options.device)
    return _beside_decode_kernels(deployment, progress)


@dataclass(frozen=True, slots=True)
class _Contender:
    """Engines that are running."""

    name: str
    part: Part
    pair: EnginePair


def _beside_main_threads(deployment: Deployment, progress: Progress) -> list[CaseResult]:
    """The pump and the plain data path, each beside every load of the engines' main threads."""
    cases = []
    with ExitStack() as exits:
        contenders = []
        parts: tuple[tuple[str, Part, bool], ...] = (
            ("pump", "ours", True),
            ("plain", "variant", False),
        )
        for name, part, pump in parts:
            progress(f"gil: starting {deployment}, {name}")
            pair = exits.enter_context(EnginePair(deployment, {"pump": pump}))
            contenders.append(_Contender(name, part, pair))
        for transfer in deployment.transfers():
            idle_s: dict[str, float] = {}
            for load, beside in MAIN_THREADS.items():
                case = f"{deployment.case_name(transfer)}, {beside}"
                progress(f"gil: {case}")
                measurements: list[Measurement] = []
                for contender in contenders:
                    measured = _Run(deployment, contender, transfer, (load, load))
                    idle_s.setdefault(contender.name, measured.request_s)
                    measurements += measured.measurements(idle_s[contender.name])
                cases.append(CaseResult(case=case, measurements=tuple(measurements)))
    return cases


def _beside_decode_kernels(deployment: Deployment, progress: Progress) -> list[CaseResult]:
    """Every cap in engines of its own, one after the other."""
    measurements: dict[Transfer, list[Measurement]] = {}
    for cap in deployment.options.decode_caps or DEFAULT_CAPS:
        name = f"at most {cap} programs" if cap else "no cap on programs"
        progress(f"gil: starting {deployment}, {name}")
        with EnginePair(deployment, {"max_programs": cap}) as pair:
            contender = _Contender(name, "variant" if measurements else "ours", pair)
            for transfer in deployment.transfers():
                progress(f"gil: {deployment.case_name(transfer)}, {name}")
                idle = _Run(deployment, contender, transfer, ("idle", "idle"))
                busy = _Run(deployment, contender, transfer, ("idle", "decode"))
                measurements.setdefault(transfer, []).extend(busy.measurements(idle.request_s))
    return [
        CaseResult(
            case=f"{deployment.case_name(transfer)}, {DECODE_KERNELS}",
            measurements=tuple(measured),
        )
        for transfer, measured in measurements.items()
    ]


class _Run:
    """Requests back to back between one contender's engines, whose main threads carry `loads` of P and D."""

    def __init__(
        self,
        deployment: Deployment,
        contender: _Contender,
        transfer: Transfer,
        loads: tuple[LoadName, LoadName],
    ) -> None:
        options = deployment.options
        self._contender = contender
        self._nbytes = deployment.payload_bytes(transfer)
        pair = contender.pair
        pair.prepare(transfer)
        pair.drive(transfer, ("idle", "idle"), options.warmup)
        self._alone = pair.drive(transfer, loads, 0, ALONE_S) if loads != ("idle", "idle") else None
        self._busy = pair.drive(transfer, loads, options.iterations or DEFAULT_ITERATIONS)
        pair.check(transfer)

    @property
    def request_s(self) -> float:
        """The median time of a request."""
        return float(np.median(self._samples()))

    def measurements(self, idle_s: float) -> list[Measurement]:
        """Until the engine's thread saw the end, and what the data path took of it. `idle_s`: beside idle engines."""
        name, part = self._contender.name, self._contender.part
        paths = "+".join(sorted({each.path for each in self._busy[1]}))
        figures = {"time_over_idle": self.request_s / idle_s}
        for index, side in enumerate(("prefill", "decode")):
            figures |= self._figures(side, index)
        return [
            Measurement(
                contender=f"{name} ({paths})",
                part=part,
                samples_s=self._samples(),
                nbytes=self._nbytes,
                figures=figures,
            ),
            Measurement(
                contender=f"{name}, chunks only",
                part="variant",
                samples_s=_slowest([each.chunks_s for each in self._busy[1]]),
                nbytes=self._nbytes,
            ),
        ]

    def _samples(self) -> tuple[float, ...]:
        return _slowest([each.request_s for each in self._busy[1]])

    def _figures(self, side: str, index: int) -> dict[str, float]:
        """One engine's: a step's time alone and beside transfers, its thread's time in the connector for a request."""
        busy = self._busy[index]
        figures = {
            f"{side}_start_step_s": _mean([each.start_step_s for each in busy]),
            f"{side}_poll_s": _mean([each.poll_s for each in busy]),
        }
        num_requests = len(self._samples())
        figures = {name: seconds / num_requests for name, seconds in figures.items()}
        if self._alone is None or not all(each.num_steps for each in self._alone[index]):
            return figures
        alone_s, busy_s = _step_s(self._alone[index]), _step_s(busy)
        return figures | {
            f"{side}_step_alone_s": alone_s,
            f"{side}_step_s": busy_s,
            f"{side}_steps_kept": alone_s / busy_s,
        }


def _slowest(ranks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Request by request, the rank that took longest."""
    return tuple(max(times) for times in zip(*ranks, strict=True))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _step_s(ranks: Sequence[Driven]) -> float:
    """Seconds of one step of the load, transfers' share included."""
    return sum(each.loop_s for each in ranks) / max(1, sum(each.num_steps for each in ranks))


def headline(cases: Sequence[CaseResult]) -> str:
    """What a load costs the transfers, and what the transfers cost the load."""
    told = []
    for case in cases:
        found = []
        for each in case.measurements:
            kept = [
                f"{each.figures[name]:.2f} of {side}'s steps kept"
                for side, name in (("P", "prefill_steps_kept"), ("D", "decode_steps_kept"))
                if name in each.figures
            ]
            if kept:
                time = f"{each.figures['time_over_idle']:.2f} x the idle time"
                found.append(f"{each.contender} {time}, {', '.join(kept)}")
        if found:
            told.append(f"{case.case[case.case.rindex('beside') :]}: {'; '.join(found)}")
    return " | ".join(told)


BENCHMARK = Benchmark(
    name="gil",
    description="transfers beside engines at work: idle, torch, pure Python; --decode-load: a GPU's decode kernels",
    run=run,
    headline=headline,
)
