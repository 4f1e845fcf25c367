"""`handover`: what a user waits for between two engines, from a prompt's last step to its cache at the consumer.

The producer's model takes a given number of tokens a second and in a step, dealt out evenly to the prompts that are
computed at once: matrix products, on CPUs a pause. Prompts are handed over in two ways, in turns: streamed, where the
consumer reads while the producer computes, and one after the other, where it begins with the producer's answer. In both
the time ends when all of the consumer's ranks have reported the load.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engines import ROUTER_HOP_S, EnginePair
from kvconnector.bench.options import WARMUP, BenchOptions, Compute
from kvconnector.bench.processes import ANSWER_TIMEOUT_S
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.results import CaseResult, Measurement, ShowProgress
from kvconnector.errors import KVConnectorError, TransferTimeoutError
from kvconnector.ids import new_secret

MAX_TURNS = 4
"""Prompts of one case have at most this many sets of blocks, lest short ones are read from a processor's cache."""
SEQUENCE_EVERY = 3
"""In one of how many turns the way is timed that streaming is compared with."""
STREAMED, IN_SEQUENCE = "streamed", "one after the other"


def run(options: BenchOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Prompts of every length, both ways in turns; what arrives is checked before the first and after the last. Of
    several numbers of prompts at once, those are left out that are more than the longest with the smallest number.
    """
    deployment, compute = Deployment(options, options.tokens), options.compute
    unit = deployment.common_block_tokens
    sizes = [
        # prompts that are computed at once fill their blocks, and are checked as one
        (count, each + (-each % unit if count > 1 else 0))
        for count in compute.prompts
        for each in deployment.tokens
    ]
    most = max(count * each for count, each in sizes if count == min(compute.prompts))
    pools = replace(deployment, tokens=(most,))
    progress(f"starting {deployment}")
    with EnginePair(pools) as pair, ThreadPoolExecutor(1) as thread:
        handover = _Handover(pair, thread, compute)
        pair.prepare(pools.transfer(most))  # shorter prompts begin with the same
        for _ in range(WARMUP):  # which also tells where the producer is
            handover.measure([pools.transfer(min(deployment.tokens))], compute.step, IN_SEQUENCE)
        for count, num_tokens in sizes:
            if count * num_tokens <= most:
                case = f"{deployment.case_name(num_tokens)}, {count} at once"
                progress(case, sizes.index((count, num_tokens)) / len(sizes))
                yield _case(case, handover, _prompts(pools, count, num_tokens))


def _prompts(pools: Deployment, count: int, num_tokens: int) -> list[list[Transfer]]:
    """Prompts that are computed at once, in turns that have blocks of their own as far as there are some."""
    whole, fill = pools.transfer(max(pools.tokens)), not num_tokens % pools.common_block_tokens
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
    """Both ways, the streamed one as ours."""
    pair, compute = handover.pair, handover.compute
    pools, model = pair.deployment, pair.deployment.options.model
    count, num_tokens = len(turns[0]), turns[0][0].num_tokens
    share = max(1, compute.step // count)
    samples: dict[str, list[float]] = {STREAMED: [], IN_SEQUENCE: []}
    steps_s = dict.fromkeys(samples, 0.0)
    for way, warmed in ((IN_SEQUENCE, turns[:1]), (STREAMED, turns)):
        pair.decode.ranks.call(RankProcess.poison)
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
                    "last_step_bytes": model.token_bytes * (num_tokens % share or share),
                    "prefill_steps_kept": len(times) * num_tokens / compute.rate / steps_s[way],
                },
            )
            for way, times in samples.items()
        ),
        notes=tuple(f"kvconnector by: {path}" for path in sorted(pair.paths)),
    )


class _Handover:
    """A router, and the engines' loops: the producer's in `thread`, the consumer's in this one."""

    def __init__(self, pair: EnginePair, thread: ThreadPoolExecutor, compute: Compute) -> None:
        self.pair = pair
        self.compute = compute
        self._thread = thread
        self._address: dict[str, Any] = {}

    def measure(
        self, prompts: Sequence[Transfer], share: int, way: str
    ) -> tuple[list[float], float]:
        """Seconds from the end of the last step to the end of each load, and seconds of all steps, of `share` tokens of
        each prompt. Raises KVConnectorError: a load failed, or the producer. TransferTimeoutError: it takes too long.
        """
        prefill, decode = self.pair.prefill, self.pair.decode
        requests = {self.pair.new_request_id(): prompt for prompt in prompts}
        for request_id in requests if way == STREAMED else ():
            names = {"transfer_id": request_id, "transfer_secret": new_secret()}
            prefill.scheduler.on_new_request(request_id, {"do_remote_decode": True, **names})
            params = {"do_remote_prefill": True, **self._address, **names}
            decode.scheduler.on_new_request(request_id, params)
        computed = self._thread.submit(self._compute_and_offer, requests, share)
        if way == IN_SEQUENCE:
            for request_id, params in computed.result()[2].items():
                prompt = requests[request_id]
                decode.want(request_id, params, prompt.decode_blocks, prompt.num_tokens)
        ended_s = self._await(requests, computed)
        computed_s, steps_s, answers = computed.result()
        prefill.await_sent(list(requests))
        params = answers.popitem()[1]
        folded = str(params["remote_request_id"]).split("|")
        keys = ("remote_engine_id", "remote_host", "remote_port")
        self._address = {key: params[key] for key in keys} | {"remote_public_key": folded[2]}
        return [each - computed_s for each in ended_s], steps_s

    def _compute_and_offer(
        self, requests: Mapping[str, Transfer], share: int
    ) -> tuple[float, float, dict[str, dict[str, Any]]]:
        """When the last step was over, the seconds of all steps, and the producer's answers."""
        prefill = self.pair.prefill
        blocks = {request_id: prompt.prefill_blocks for request_id, prompt in requests.items()}
        num_tokens = next(iter(requests.values())).num_tokens
        steps_s = prefill.compute(blocks, num_tokens, share, self.compute.rate)
        computed_s = time.perf_counter()
        answers = {each: prefill.offer(each, ids, num_tokens) for each, ids in blocks.items()}
        prefill.turn(ROUTER_HOP_S)
        return computed_s, steps_s, answers

    def _await(self, requests: Mapping[str, Transfer], computed: Future[Any]) -> list[float]:
        """Turn the consumer's loop until all is loaded: when each load was over."""
        decode = self.pair.decode
        ended_s: list[float] = []
        deadline = time.perf_counter() + ANSWER_TIMEOUT_S
        while len(ended_s) < len(requests):
            output, now_s = decode.turn(), time.perf_counter()
            if output.failed_recving:
                raise KVConnectorError("loads failed", reasons=output.failed_recving)
            self.pair.paths |= {each.path for each in output.stats.transfers}
            for request_id in output.begun:
                prompt = requests[request_id]
                decode.ask(request_id, prompt.decode_blocks, prompt.num_tokens)
            for request_id in output.finished_recving:
                decode.scheduler.finish(request_id)
                ended_s.append(now_s)
            if computed.done():
                computed.result()
            if now_s > deadline:
                raise TransferTimeoutError("a prompt did not arrive in time")
        return ended_s
