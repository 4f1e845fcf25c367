"""`pacing`: transfers beside busy engines, as in `gil`, with each constant of the pacing switched off in turn.

All variants take turns in the same processes, so what a host adds to one it adds to all. One of them switches nothing
off: by how much it differs from the first is what a difference must exceed to mean something.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import product

from kvconnector.bench.deployment import Deployment
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.results import CaseResult, ContenderKind, Measurement, ShowProgress
from kvconnector.datapath.pump import pacing
from scripts.benchmarks import gil

AGAIN = "nothing, again"
OFF: Mapping[str, dict[str, float]] = {
    "nothing": {},
    "WORK_S": {"WORK_S": 1e3},
    "YIELD_GIL_US": {"YIELD_GIL_US": 0},
    "ASK_FOR_LOCK_NS": {"ASK_FOR_LOCK_NS": 0},
    "LONG_GIL_WAIT_NS": {"LONG_GIL_WAIT_NS": 1 << 62},
    "LONG_STEP_NS": {"LONG_STEP_NS": 1 << 62},
    "YIELD_S": {"YIELD_S": 0.0},
    AGAIN: {},
    "LOOK_AT_LEASE_S": {"LOOK_AT_LEASE_S": pacing.MAX_SLEEP_S},
    "LOOK_AGAIN_S": {"LOOK_AGAIN_S": pacing.MAX_SLEEP_S},
    "CHECK_PEERS_S": {"CHECK_PEERS_S": 1e3},
    "MAX_SLEEP_S": {"MAX_SLEEP_S": 1e3},
}
"""What is switched off, and how: a limit or a pause of 0, or a time that does not come."""
LOADS: tuple[gil.Loads, ...] = (
    gil.IDLE,
    ("torch", "torch"),
    ("python", "python"),
    ("idle", "decode"),
)
Found = dict[str, tuple[list[float], gil.Turns]]
"""By variant the seconds of each request, and the engines' turns."""


class PacingOptions(BenchOptions, frozen=True, kw_only=True):
    """Options of `pacing`. No round begins that would end after `seconds`, except for the first."""

    seconds: float = 120.0


def run(options: PacingOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Yield a case for each request size, rhythm and load, with a measurement for each constant."""
    deployment = Deployment(options, in_flight=2)
    cases = [
        (num_tokens, rhythm, loads)
        for num_tokens, rhythm, loads in product(options.tokens, gil.RHYTHMS, LOADS)
        if options.device != "cpu" or "decode" not in loads
        if loads != gil.IDLE or not gil.RHYTHMS[rhythm]
    ]
    found: dict[tuple[int, str, gil.Loads], Found] = {
        case: {name: ([], []) for name in OFF} for case in cases
    }
    progress(f"starting {deployment}")
    with EnginePair(deployment) as pair:
        until_s, longest_s, number = time.monotonic() + options.seconds, 0.0, 0
        while not number or time.monotonic() + longest_s < until_s:
            began_s, number = time.monotonic(), number + 1
            for case in cases:
                num_tokens, rhythm, loads = case
                transfers = deployment.transfers(num_tokens, options.iterations)
                beside = gil.BESIDE[loads]
                progress(f"round {number}, {num_tokens} tokens, {rhythm}, {beside}")
                longest, apart = gil.prepared(pair, False, transfers)
                # backwards in every other round, so that no variant always follows the same one
                for name in list(OFF)[:: 1 if number % 2 else -1]:
                    _pace(pair, _DEFAULTS | OFF[name])
                    turns = gil.drive(pair, gil.RHYTHMS[rhythm], loads, apart)
                    seconds, all_turns = found[case][name]
                    seconds += gil.seconds_of(turns)
                    all_turns += turns
                _pace(pair, _DEFAULTS)
                pair.check(longest)
            longest_s = max(longest_s, time.monotonic() - began_s)
    for (num_tokens, rhythm, loads), by_variant in found.items():
        name = f"{deployment.case_name(num_tokens)}, {rhythm}, {gil.BESIDE[loads]}"
        yield CaseResult(name, tuple(_measurements(by_variant)), (f"{number} rounds",))


_DEFAULTS: dict[str, float] = {
    name: getattr(pacing, name) for values in OFF.values() for name in values
}


def _pace(pair: EnginePair, constants: dict[str, float]) -> None:
    for engine in (pair.prefill, pair.decode):
        engine.call_ranks(RankProcess.pace, constants)


def _measurements(found: Found) -> Iterator[Measurement]:
    for name, (seconds, turns) in found.items():
        steps_s = [gil.mean_step_s(turns, side) for side in (0, 1)]
        figures = {
            f"{side}_step_s": step_s
            for side, step_s in zip(("prefill", "decode"), steps_s, strict=True)
            if step_s
        }
        kind: ContenderKind = "ours" if name == "nothing" else "variant"
        yield Measurement(f"without {name}", kind, tuple(seconds), figures=figures)
