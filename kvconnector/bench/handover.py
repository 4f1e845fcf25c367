"""`handover`: how long a user waits between two engines, from a prompt's last step to its cache at the consumer.

The producer's model computes a given number of tokens a second and in a step, by matrix products, or by pauses on CPUs.
Prompts that are computed at once share these tokens evenly. Prompts are handed over in two ways, in turns: streamed, so
that the consumer reads while the producer computes, and one after the other, so that it begins with the producer's
answer. Both times end when all of the consumer's ranks have reported the load.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engine_process import Engine
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.options import WARMUP, BenchOptions, Compute
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.results import CaseResult, Measurement, ShowProgress
from kvconnector.ids import new_secret

MAX_TURNS = 4
"""Most sets of blocks of a case; with a single one, short prompts would be read from a processor's cache."""
SEQUENCE_EVERY = 3
"""One turn in this many also measures the way without streaming."""
STREAMED, IN_SEQUENCE = "streamed", "one after the other"


def run(options: BenchOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Yield a case for every length and number of prompts, except for those with more tokens than the smallest number
    of the longest prompts. Both ways take turns; the bytes are checked before the first turn and after the last.
    """
    deployment, compute = Deployment(options), options.compute
    unit = deployment.common_block_tokens
    sizes = [
        # prompts that are computed at once fill their blocks, and are checked as one
        (count, each + (-each % unit if count > 1 else 0))
        for count in compute.prompts
        for each in options.tokens
    ]
    most = max(count * each for count, each in sizes if count == min(compute.prompts))
    pools = Deployment(msgspec.structs.replace(options, tokens=(most,)))
    progress(f"starting {deployment}")
    with EnginePair(pools) as pair:
        handover = _Handover(pair, compute)
        pair.prepare(pools.transfer(most))  # shorter prompts have a prefix of it
        for _ in range(WARMUP):  # which also gives the producer's address
            handover.measure([pools.transfer(min(options.tokens))], compute.step, IN_SEQUENCE)
        for count, num_tokens in sizes:
            if count * num_tokens <= most:
                case = f"{deployment.case_name(num_tokens)}, {count} at once"
                progress(case, sizes.index((count, num_tokens)) / len(sizes))
                yield _case(case, handover, _prompts(pools, count, num_tokens))


def _prompts(pools: Deployment, count: int, num_tokens: int) -> list[list[Transfer]]:
    """Return the prompts of each turn, which are computed at once. Turns have their own blocks if pools allow it."""
    whole = pools.transfer(max(pools.options.tokens))
    fill = not num_tokens % pools.common_block_tokens
    num_turns = min(pools.options.iterations, MAX_TURNS, whole.num_tokens // (count * num_tokens))
    theirs, ours = (shape.num_blocks(num_tokens) for shape in pools.shapes.values())
    prompts = [
        Transfer(
            num_tokens,
            [ids[each * theirs : (each + 1) * theirs] for ids in whole.prefill_blocks],
            [ids[each * ours : (each + 1) * ours] for ids in whole.decode_blocks],
        )
        for each in range(num_turns * count if fill else count)
    ]
    return [prompts[first : first + count] for first in range(0, len(prompts), count)]


def _case(name: str, handover: _Handover, turns: Sequence[Sequence[Transfer]]) -> CaseResult:
    """Measure both ways, the streamed one as ours."""
    pair, compute = handover.pair, handover.compute
    pools = pair.deployment
    count, num_tokens = len(turns[0]), turns[0][0].num_tokens
    share = max(1, compute.step // count)
    token_bytes, _ = pools.request_bytes(1)
    last_step_bytes = token_bytes * (num_tokens % share or share)
    samples: dict[str, list[float]] = {STREAMED: [], IN_SEQUENCE: []}
    steps_s = dict.fromkeys(samples, 0.0)
    for way, warmed in ((IN_SEQUENCE, turns[:1]), (STREAMED, turns)):
        pair.decode.call_ranks(RankProcess.poison)
        for prompts in warmed:
            handover.measure(prompts, share, way)
        pair.check(pools.transfer(len(warmed) * count * num_tokens))
    for turn in range(pools.options.iterations):
        for way in samples if turn % SEQUENCE_EVERY == 0 else (STREAMED,):
            exposed_s, seconds = handover.measure(turns[turn % len(turns)], share, way)
            samples[way] += exposed_s
            steps_s[way] += seconds
    pair.check(pools.transfer(len(turns) * count * num_tokens))
    return CaseResult(
        case=f"{name}, {compute.rate} tokens/s in steps of {compute.step}",
        measurements=tuple(
            Measurement(
                contender=way,
                kind="ours" if way == STREAMED else "naive",
                samples_s=tuple(times),
                figures={
                    "prompt_tokens": num_tokens,
                    "prompts": count,
                    "last_step_bytes": last_step_bytes,
                    "prefill_steps_kept": len(times) * num_tokens / compute.rate / steps_s[way],
                },
            )
            for way, times in samples.items()
        ),
        notes=tuple(f"kvconnector's path: {path}" for path in sorted(pair.paths)),
    )


class _Handover:
    """A router between the two engines."""

    def __init__(self, pair: EnginePair, compute: Compute) -> None:
        self.pair = pair
        self.compute = compute
        self._address: dict[str, Any] = {}

    def measure(
        self, prompts: Sequence[Transfer], share: int, way: str
    ) -> tuple[list[float], float]:
        """Hand over prompts at once, computed in steps of `share` tokens of each. Returns the seconds from the last
        step to the end of each load, and the seconds of all steps.

        Raises:
            CallFailedError: a load or the producer failed, or took too long.
        """
        prefill, decode, num_tokens = self.pair.prefill, self.pair.decode, prompts[0].num_tokens
        named = self.pair.named(*prompts)
        asked = {name: (prompt.decode_blocks, num_tokens) for name, prompt in named.items()}
        if way == STREAMED:
            secrets = {
                name: {"transfer_id": name, "transfer_secret": new_secret()} for name in named
            }
            theirs = {name: {"do_remote_decode": True, **each} for name, each in secrets.items()}
            prefill.call(Engine.announce, theirs)
            where = {"do_remote_prefill": True, **self._address}
            decode.call(Engine.announce, {name: where | each for name, each in secrets.items()})
            receiving = decode.begin(Engine.receive, asked)
        blocks = {name: prompt.prefill_blocks for name, prompt in named.items()}
        computed = prefill.call(Engine.compute, blocks, num_tokens, share, self.compute.rate)
        computed_s = computed.ended_s
        if self.pair.deployment.options.connect:  # by another clock
            computed_s += time.perf_counter() - computed.offered_s
        if way == IN_SEQUENCE:
            offered = zip(asked.items(), computed.params, strict=True)
            wanted = [(name, params, *each) for (name, each), params in offered]
            want = decode.begin(Engine.want, wanted)
            receiving = decode.begin(Engine.receive, asked)
            want()
        ended_s, paths = receiving()
        self.pair.paths |= paths
        prefill.call(Engine.await_sent, list(named))
        params = computed.params[-1]
        folded = str(params["remote_request_id"]).split("|")
        keys = ("remote_engine_id", "remote_host", "remote_port")
        self._address = {key: params[key] for key in keys} | {"remote_public_key": folded[2]}
        return [each - computed_s for each in ended_s], computed.steps_s
