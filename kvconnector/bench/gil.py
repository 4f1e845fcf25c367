"""`gil`: transfers beside engines that work, and what either takes from the other.

P and D are processes; each has the connector's driver thread and a main thread that plays the engine: a step's work,
`start_step`, `poll`. On GPUs, D's GPU also runs decode kernels, and P's runs prefill steps back to back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engines import EnginePair, request_seconds
from kvconnector.bench.loads import LoadName
from kvconnector.bench.options import WARMUP, BenchOptions
from kvconnector.bench.rank_process import Driven, RankProcess
from kvconnector.bench.results import CaseResult, Measurement, Progress
from kvconnector.runtime import StepMetadata, WorkerOutput

DEFAULT_TOKENS = (2048,)
DEFAULT_ITERATIONS = 10
ALONE_S = 1.0
"""How long engines work without transfers, to count their steps."""
IDLE: tuple[LoadName, LoadName] = ("idle", "idle")
BESIDE: dict[tuple[LoadName, LoadName], str] = {
    IDLE: "beside idle engines",
    ("torch", "torch"): "beside small torch operations",
    ("python", "python"): "beside pure Python",
    ("idle", "decode"): "beside decode kernels on the consumer's GPU",
}
BUSY = "a request a step of 50 ms on the producer's GPU, back to back"

Request = tuple[str, StepMetadata, StepMetadata]
"""Its id, the producer's step that holds it, and the consumer's that loads it."""


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """A case for each request size and load of the engines."""
    deployment = Deployment.of(options, options.tokens or DEFAULT_TOKENS)
    iterations = options.iterations or DEFAULT_ITERATIONS
    cases = []
    progress(f"starting {deployment}")
    with EnginePair(deployment) as pair:
        for num_tokens in deployment.tokens:
            transfers = deployment.transfers(num_tokens, iterations)
            nbytes = sum(each.num_tokens for each in transfers) // iterations
            nbytes *= options.model.token_bytes
            idle_s = 0.0
            for loads, beside in BESIDE.items():
                if options.device == "cpu" and "decode" in loads:
                    continue
                case = f"{deployment.case_name(num_tokens)}, {beside}"
                progress(case)
                samples, figures = _measure(pair, transfers, loads)
                idle_s = idle_s or float(np.median(samples))
                figures["time_over_idle"] = float(np.median(samples)) / idle_s
                name = f"kvconnector ({'+'.join(sorted(pair.paths))})"
                ours = Measurement(name, "ours", samples, nbytes, figures)
                cases.append(CaseResult(case, (ours,)))
            if options.device != "cpu":
                progress(BUSY)
                case = f"{deployment.case_name(num_tokens)}, {BUSY}"
                cases.append(_beside_steps(case, pair, transfers, nbytes))
    return cases


def _measure(
    pair: EnginePair, transfers: Sequence[Transfer], loads: tuple[LoadName, LoadName]
) -> tuple[tuple[float, ...], dict[str, float]]:
    """Seconds until the engine's thread saw the end, and what the transfers took of the load."""
    longest = max(transfers, key=lambda each: each.num_tokens)
    pair.prepare(longest)
    _drive(pair, [longest] * WARMUP, IDLE)
    alone = _drive(pair, [], loads, ALONE_S) if loads != IDLE else None
    busy = _drive(pair, transfers, loads)
    pair.check(longest)
    pair.paths = {path for each in busy[1] for path in each.paths}
    samples = request_seconds(busy[1])
    figures: dict[str, float] = {}
    for index, side in enumerate(("prefill", "decode")):
        ranks = busy[index]
        if alone and all(each.num_steps for each in alone[index]):
            figures[f"{side}_steps_kept"] = _step_s(alone[index]) / _step_s(ranks)
    return samples, figures


def _drive(
    pair: EnginePair,
    transfers: Sequence[Transfer],
    loads: tuple[LoadName, LoadName],
    min_s: float = 0.0,
) -> tuple[list[Driven], list[Driven]]:
    """Move requests back to back beside both engines' loads, for `min_s` at least: what each rank saw."""
    requests = [_request(pair, each) for each in transfers]
    holds = [(request_id, hold) for request_id, hold, _ in requests]
    steps = [(request_id, load) for request_id, _, load in requests]
    prefill = pair.prefill.ranks.begin(RankProcess.drive, loads[0], holds, False, min_s)
    decode = pair.decode.ranks.call(RankProcess.drive, loads[1], steps, True, min_s)
    driven = prefill(), decode
    _settle(pair, requests)
    return driven


def _beside_steps(
    case: str, pair: EnginePair, transfers: Sequence[Transfer], nbytes: int
) -> CaseResult:
    """In turns while the producer runs the step after the one that computed a request, and while it is idle."""
    longest = max(transfers, key=lambda each: each.num_tokens)
    samples: dict[LoadName, list[float]] = {"prefill": [], "idle": []}
    # a request waits for the steps that use its own blocks, so neighbours have different ones
    others = pair.deployment.unused_by(longest)
    apart = [
        replace(each, prefill_blocks=others[: len(each.prefill_blocks)]) if index % 2 else each
        for index, each in enumerate([*[longest] * WARMUP, *transfers])
    ]
    pair.prepare(replace(longest, prefill_blocks=others))
    pair.prepare(longest)
    for _ in range(2):
        for load in samples:
            samples[load] += _stream(pair, load, apart)[WARMUP:]
    pair.check(longest)
    return CaseResult(
        case,
        (
            Measurement("producer busy", "ours", tuple(samples["prefill"]), nbytes),
            Measurement("producer idle", "variant", tuple(samples["idle"]), nbytes),
        ),
    )


def _stream(pair: EnginePair, load: LoadName, transfers: Sequence[Transfer]) -> list[float]:
    """Seconds of each request, asked for as soon as the step that computed it is over."""
    requests = [_request(pair, each) for each in transfers]
    holds = [hold for _, hold, _ in requests]
    pair.prefill.ranks.call(RankProcess.turn, holds[0], load, 0.0)
    seconds: list[float] = []
    following = [*holds[1:], StepMetadata()]
    for (request_id, _, step), hold in zip(requests, following, strict=True):
        collect = pair.prefill.ranks.begin(RankProcess.turn, hold, load, 0.0)
        load_s = pair.decode.ranks.call(RankProcess.drive, "idle", [(request_id, step)], True, 0.0)
        collect()
        seconds += request_seconds(load_s)
    pair.prefill.ranks.call(RankProcess.ready)
    _settle(pair, requests)
    return seconds


def _request(pair: EnginePair, transfer: Transfer) -> Request:
    request_id = pair.new_request_id()
    pair.offer_and_load(request_id, transfer)
    return request_id, pair.prefill.scheduler.build_step(), pair.decode.scheduler.build_step()


def _settle(pair: EnginePair, requests: Sequence[Request]) -> None:
    for request_id, _, _ in requests:
        pair.decode.loaded(request_id)
    ended = frozenset(request_id for request_id, _, _ in requests)
    pair.prefill.scheduler.update(WorkerOutput(finished_sending=ended))


def _step_s(ranks: Sequence[Driven]) -> float:
    """Seconds of one step of the load, transfers' share included."""
    return sum(each.loop_s for each in ranks) / max(1, sum(each.num_steps for each in ranks))
