"""`gil`: transfers back to back beside engines that work, and what either takes from the other.

P and D are processes; each has the connector's driver thread and a main thread that plays the engine: a step's work,
`start_step`, `poll`. With `--decode-load` D's GPU works instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType

import numpy as np

from kvconnector.bench.contract import (
    WARMUP,
    Benchmark,
    BenchOptions,
    CaseResult,
    ContenderKind,
    Measurement,
    Progress,
)
from kvconnector.bench.engine_loop import Driven, LoadName
from kvconnector.bench.engines import Deployment, EnginePair
from kvconnector.errors import ConfigError

DEFAULT_TOKENS = (2048,)
DEFAULT_ITERATIONS = 10
ALONE_S = 1.0
"""How long engines work without transfers, to count their steps."""
IDLE: tuple[LoadName, LoadName] = ("idle", "idle")
BESIDE: Mapping[tuple[LoadName, LoadName], str] = MappingProxyType(
    {
        IDLE: "beside idle engines",
        ("torch", "torch"): "beside small torch operations",
        ("python", "python"): "beside pure Python",
    }
)
DECODE_KERNELS: Mapping[tuple[LoadName, LoadName], str] = MappingProxyType(
    {IDLE: BESIDE[IDLE], ("idle", "decode"): "beside decode kernels on the consumer's GPU"}
)


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """The pump and the plain data path, a case for each request size and load of the engines.

    Raises:
        ConfigError: the decode load is asked for without a GPU.
    """
    if options.decode_load and options.device == "cpu":
        raise ConfigError("the decode load is made of GPU kernels", device=options.device)
    deployment = Deployment.of(options, options.tokens or DEFAULT_TOKENS)
    cases = []
    with ExitStack() as exits:
        pairs: dict[str, EnginePair] = {}
        for name, pump in (("pump", True), ("plain", False))[: 1 if options.decode_load else 2]:
            progress(f"gil: starting {deployment}, {name}")
            pairs[name] = exits.enter_context(EnginePair(deployment, {"staging": {"pump": pump}}))
            pairs[name].pause()
        for num_tokens in deployment.tokens:
            idle_s: dict[str, float] = {}
            for loads, beside in (DECODE_KERNELS if options.decode_load else BESIDE).items():
                case = f"{deployment.case_name(num_tokens)}, {beside}"
                progress(f"gil: {case}")
                measured: list[Measurement] = []
                for name, pair in pairs.items():
                    measured += _measure(name, pair, num_tokens, loads, idle_s)
                cases.append(CaseResult(case=case, measurements=tuple(measured)))
    return cases


def _measure(
    name: str,
    pair: EnginePair,
    num_tokens: int,
    loads: tuple[LoadName, LoadName],
    idle_s: dict[str, float],
) -> list[Measurement]:
    """Until the engine's thread saw the end, and what the data path took of it. `idle_s`: medians without a load."""
    deployment = pair.deployment
    lengths = deployment.lengths(num_tokens, deployment.options.iterations or DEFAULT_ITERATIONS)
    transfers = [deployment.transfer(each) for each in lengths]
    longest = max(transfers, key=lambda each: each.num_tokens)
    pair.resume()
    pair.prepare(longest)
    pair.drive([longest] * WARMUP, IDLE)
    alone = pair.drive([], loads, ALONE_S) if loads != IDLE else None
    busy = pair.drive(transfers, loads)
    pair.check(longest)
    pair.pause()
    samples = _slowest([each.request_s for each in busy[1]])
    median_s = float(np.median(samples))
    figures = {"time_over_idle": median_s / idle_s.setdefault(name, median_s)}
    for index, side in enumerate(("prefill", "decode")):
        ranks = busy[index]
        for what in ("start_step_s", "poll_s"):
            seconds = [getattr(each, what) for each in ranks]
            figures[f"{side}_{what}"] = float(np.mean(seconds)) / len(samples)
        if alone and all(each.num_steps for each in alone[index]):
            steps_s = _step_s(alone[index]), _step_s(ranks)
            figures |= {
                f"{side}_step_alone_s": steps_s[0],
                f"{side}_step_s": steps_s[1],
                f"{side}_steps_kept": steps_s[0] / steps_s[1],
            }
    kind: ContenderKind = "ours" if name == "pump" else "variant"
    paths = "+".join(sorted({path for each in busy[1] for path in each.paths}))
    nbytes = deployment.options.model.token_bytes * sum(lengths) // len(lengths)
    return [
        Measurement(
            contender=f"{name} ({paths})",
            kind=kind,
            samples_s=samples,
            nbytes=nbytes,
            figures=figures,
        ),
        Measurement(
            contender=f"{name}, chunks only",
            kind="variant",
            samples_s=_slowest([each.chunks_s for each in busy[1]]),
            nbytes=nbytes,
        ),
    ]


def _slowest(ranks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Request by request, the rank that took longest."""
    return tuple(max(times) for times in zip(*ranks, strict=True))


def _step_s(ranks: Sequence[Driven]) -> float:
    """Seconds of one step of the load, transfers' share included."""
    return sum(each.loop_s for each in ranks) / max(1, sum(each.num_steps for each in ranks))


def headline(cases: Sequence[CaseResult]) -> str:
    """What a load costs the transfers, and what the transfers cost the load."""
    told = []
    for case in cases:
        for each in case.measurements:
            kept = [
                f"{each.figures[name]:.2f} of {side}'s steps kept"
                for side, name in (("P", "prefill_steps_kept"), ("D", "decode_steps_kept"))
                if name in each.figures
            ]
            if kept:
                beside = case.case[case.case.rindex("beside") :]
                time = f"{each.figures['time_over_idle']:.2f} x the idle time"
                told.append(f"{beside}: {each.contender} {time}, {', '.join(kept)}")
    return "; ".join(told)


BENCHMARK = Benchmark(
    name="gil",
    description="transfers beside engines at work: idle, torch, pure Python; --decode-load: a GPU's decode kernels",
    run=run,
    headline=headline,
)
