"""`gil`: transfers beside busy engines, and how much each slows down the other.

P and D are processes; each has the connector's driver thread and a main thread that plays the engine: a step's work,
`start_step`, `poll`. On GPUs, D's GPU also runs decode kernels, and P's runs prefill steps back to back.

Two rhythms: requests back to back, which is more than any engine needs, and one per 50 ms step of P.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeAlias

import msgspec

from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engine_process import Engine
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.loads import PREFILL_STEP_S, LoadName
from kvconnector.bench.options import WARMUP, BenchOptions
from kvconnector.bench.rank_process import Driven, RankProcess
from kvconnector.bench.results import CaseResult, Measurement, ShowProgress
from kvconnector.runtime import StepMetadata, WorkerOutput

TURN_S = 0.9 * PREFILL_STEP_S
"""Least seconds of a turn at P's pace, which ends with the step under way."""
ALONE_TURNS = 20
"""Turns in which engines work without transfers, to count their steps."""
MAX_OVER_IDLE = 1.3
"""A load beside busy engines may take this many times as long as an idle load and a step of D together."""
Loads: TypeAlias = tuple[LoadName, LoadName]
IDLE: Loads = ("idle", "idle")
BESIDE: dict[Loads, str] = {
    IDLE: "beside idle engines",
    ("torch", "torch"): "beside small torch operations",
    ("python", "python"): "beside pure Python",
    ("idle", "decode"): "beside decode kernels on the consumer's GPU",
    ("prefill", "idle"): "beside prefill steps on the producer's GPU",
    ("prefill", "decode"): "beside prefill steps and decode kernels on their GPUs",
}

RHYTHMS = {"back to back": False, "one in each step of 50 ms": True}
"""True if requests come at the producer's pace."""
Turns: TypeAlias = list[tuple[list[Driven], list[Driven]]]
"""Results of the ranks of both engines, by turn of both at once."""
Steps: TypeAlias = list[tuple[list[str], StepMetadata]]
"""The steps that `RankProcess.drive` takes."""


def run(options: BenchOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Yield a case for each request size, rhythm and load of the engines."""
    deployment = Deployment(options, in_flight=2)
    progress(f"starting {deployment}")
    with EnginePair(deployment) as pair:
        for num_tokens in options.tokens:
            transfers = deployment.transfers(num_tokens, options.iterations)
            for (rhythm, at_pace), (loads, beside) in product(RHYTHMS.items(), BESIDE.items()):
                if options.device == "cpu" and {"decode", "prefill"} & {*loads}:
                    continue
                if not at_pace and "prefill" in loads:
                    continue  # requests would wait for the steps that hold them
                case = f"{deployment.case_name(num_tokens)}, {rhythm}, {beside}"
                progress(case)
                ours, alone, turns = _measure(pair, at_pace, transfers, loads)
                if loads == IDLE:
                    idle = ours
                else:
                    ours = _compare(ours, idle, alone, turns)
                yield CaseResult(case, (ours,))


def _measure(
    pair: EnginePair, at_pace: bool, transfers: Sequence[Transfer], loads: Loads
) -> tuple[Measurement, Turns, Turns]:
    """Return the seconds of each request, and the engines' turns without requests and beside them."""
    longest, apart = prepared(pair, at_pace, transfers)
    alone = drive(pair, at_pace, loads, []) if loads != IDLE else []
    turns = drive(pair, at_pace, loads, apart)
    pair.check(longest)
    samples = tuple(seconds_of(turns))
    paths = sorted({path for _, driven in turns for each in driven for path in each.paths})
    nbytes = pair.request_bytes(sum(each.num_tokens for each in transfers) // len(transfers))
    name = f"kvconnector ({'+'.join(paths)})"
    return Measurement(name, "ours", samples, nbytes), alone, turns


def prepared(
    pair: EnginePair, at_pace: bool, transfers: Sequence[Transfer]
) -> tuple[Transfer, list[Transfer]]:
    """Write what requests move, and let a few move. Returns the longest one, which `EnginePair.check` takes once all
    have moved, and all of them, each in blocks of its own.
    """
    longest = max(transfers, key=lambda each: each.num_tokens)
    for index in (1, 0):
        pair.prepare(_request(pair.deployment, longest, index))
    drive(pair, at_pace, IDLE, [longest] * WARMUP)
    apart = [_request(pair.deployment, each, index) for index, each in enumerate(transfers)]
    return longest, apart


def _request(deployment: Deployment, transfer: Transfer, index: int) -> Transfer:
    """Return request number `index`, in blocks of its own: it waits for steps that use its blocks."""
    other = deployment.transfer(transfer.num_tokens, index % 2)
    return replace(transfer, prefill_blocks=other.prefill_blocks)


def _compare(busy: Measurement, idle: Measurement, alone: Turns, turns: Turns) -> Measurement:
    """Return `busy` with figures that compare loads beside busy engines with those beside idle ones."""
    idle_s, step_s = idle.percentile_s(90), mean_step_s(alone, 1)
    bound_s = MAX_OVER_IDLE * (idle_s + step_s)
    figures = {
        "idle_p50_s": idle.percentile_s(50),
        "idle_p90_s": idle_s,
        "decode_step_s": step_s,
        "p90_bound_s": bound_s,
        "p90_over_bound": busy.percentile_s(90) / bound_s,
    }
    for index, side in enumerate(("prefill", "decode")):
        if mean_step_s(alone, index):
            figures[f"{side}_steps_kept"] = mean_step_s(alone, index) / mean_step_s(turns, index)
    return msgspec.structs.replace(busy, figures=figures)


def drive(pair: EnginePair, at_pace: bool, loads: Loads, transfers: Sequence[Transfer]) -> Turns:
    """Drive both engines with requests back to back in one turn, or at P's pace: each turn holds one request, and asks
    for the previous one, whose step is over. Without requests, drive `ALONE_TURNS` turns of the loads.
    """
    request_ids, holds, asked = list[str](), Steps(), Steps()
    for each in transfers:
        named = pair.named(each)
        pair.offer_and_want(named)
        # at P's pace D asks in the next turn, so no turn waits for P
        request_ids += named
        holds.append(([] if at_pace else [*named], pair.prefill.call(Engine.step)))
        asked.append(([*named], pair.decode.call(Engine.step)))
    if not transfers:
        steps = [(holds, asked)] * ALONE_TURNS
    elif at_pace:
        steps = [
            (holds[now : now + 1], asked[max(0, now - 1) : now]) for now in range(len(holds) + 1)
        ]
    else:
        steps = [(holds, asked)]
    min_s = TURN_S if at_pace or not transfers else 0.0
    turns = []
    for held, loaded in steps:
        prefill = pair.prefill.begin_ranks(RankProcess.drive, loads[0], held, False, min_s)
        decode = pair.decode.call_ranks(RankProcess.drive, loads[1], loaded, True, min_s)
        turns.append((prefill(), decode))
    pair.decode.call(Engine.update, WorkerOutput(finished_recving=set(request_ids)))
    pair.prefill.call(Engine.update, WorkerOutput(finished_sending=set(request_ids)))
    return turns


def seconds_of(turns: Turns) -> list[float]:
    """Return the seconds of each request: from asking the consumer's first rank until its last one saw the end."""
    return [
        max(end for _, end in spans) - min(start for start, _ in spans)
        for _, driven in turns
        for spans in zip(*(each.spans_s for each in driven), strict=True)
    ]


def mean_step_s(turns: Turns, side: int) -> float:
    """Return the seconds of a step of the producer's load (0) or the consumer's (1), with transfers; 0: no steps."""
    ranks = [each for turn in turns for each in turn[side]]
    num_steps = sum(each.num_steps for each in ranks)
    return sum(each.loop_s for each in ranks) / num_steps if num_steps else 0.0
