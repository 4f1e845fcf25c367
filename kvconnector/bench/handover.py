"""`handover`: what a user waits for between two engines, from a prompt's last step to its cache at the consumer.

The producer's model takes so many tokens a second, so many in a step, dealt out evenly to the prompts that are
computed at once: matrix products, on CPUs a pause. Prompts are handed over in two ways, in turns: streamed, where the
consumer reads while the producer computes, and one after the other, where it begins with the producer's answer. In both
the time ends when all of the consumer's ranks have reported the load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.options import WARMUP, BenchOptions, Compute
from kvconnector.bench.processes import ANSWER_TIMEOUT_S
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.results import CaseResult, Measurement, Progress, format_seconds
from kvconnector.errors import KVConnectorError, TransferTimeoutError
from kvconnector.ids import new_secret

DEFAULT_TOKENS = (1024, 4096, 16384, 32768)
ITERATIONS = 10
STREAMED, IN_SEQUENCE = "streamed", "one after the other"


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """Prompts of every length, both ways in turns; what arrives is checked before the first and after the last."""
    deployment = Deployment.of(options, options.tokens or DEFAULT_TOKENS)
    shapes, count = (deployment.prefill, deployment.decode), options.compute.prompts
    # prompts that are computed at once fill their blocks, and are checked as one
    unit = math.lcm(*(shape.virtual_block_tokens for shape in shapes))
    tokens = [each + (-each % unit if count > 1 else 0) for each in deployment.tokens]
    deployment = replace(deployment, tokens=(count * max(tokens),))
    cases = []
    progress(f"starting {deployment}")
    with EnginePair(deployment) as pair, ThreadPoolExecutor(1) as thread:
        handover = _Handover(pair, thread, options.compute)
        pair.prepare(
            deployment.transfer(deployment.tokens[0])
        )  # shorter prompts begin with the same
        for _ in range(WARMUP):  # which also tells where the producer is
            handover.measure([deployment.transfer(min(tokens))], IN_SEQUENCE)
        for num_tokens in tokens:
            case = deployment.case_name(num_tokens)
            progress(case)
            found = _case(case, handover, *_prompts(deployment, num_tokens, unit))
            for each in found.measurements:  # the table comes last, and a run may be ended before
                times = ", ".join(format_seconds(each.percentile_s(level)) for level in (50, 99))
                kept = each.figures["prefill_steps_kept"]
                progress(f"{each.contender}: {times}, {kept:.2f} of the producer's steps")
            cases.append(found)
    return cases


def _prompts(
    deployment: Deployment, num_tokens: int, unit: int
) -> tuple[Transfer, list[list[Transfer]]]:
    """Prompts that are computed at once, in turns that have blocks of their own as far as there are some, lest short
    ones are read from a processor's cache; and the long one of which all are parts.
    """
    options, longest = deployment.options, max(deployment.tokens)
    count = options.compute.prompts
    has_turns = num_tokens % unit == 0  # they fill their blocks
    num_turns = (
        min(options.iterations or ITERATIONS, longest // (count * num_tokens)) if has_turns else 1
    )
    whole = deployment.transfer(num_turns * count * num_tokens)
    theirs, ours = (
        shape.num_blocks(num_tokens) for shape in (deployment.prefill, deployment.decode)
    )
    prompts = [
        Transfer(
            num_tokens,
            whole.prefill_blocks[each * theirs : (each + 1) * theirs],
            whole.decode_blocks[each * ours : (each + 1) * ours],
        )
        for each in range(num_turns * count)
    ]
    return whole, [prompts[first : first + count] for first in range(0, len(prompts), count)]


def _case(
    name: str, handover: _Handover, whole: Transfer, turns: Sequence[Sequence[Transfer]]
) -> CaseResult:
    """Both ways, the streamed one as ours; `turns` are all parts of `whole`."""
    pair, compute = handover.pair, handover.compute
    options = pair.deployment.options
    samples: dict[str, list[float]] = {STREAMED: [], IN_SEQUENCE: []}
    steps_s = dict.fromkeys(samples, 0.0)
    iterations = options.iterations or ITERATIONS
    for way in samples:
        pair.decode.ranks.call(RankProcess.poison)
        for prompts in turns:
            handover.measure(prompts, way)
        pair.check(whole)
    for turn in range(iterations):
        for way in samples:
            exposed_s, seconds = handover.measure(turns[turn % len(turns)], way)
            samples[way] += exposed_s
            steps_s[way] += seconds
    pair.check(whole)
    num_tokens = turns[0][0].num_tokens
    last = num_tokens % compute.share or compute.share
    computed_s = iterations * compute.prompts * num_tokens / compute.rate
    return CaseResult(
        case=f"{name}, {compute.prompts} at once, {compute.rate} tokens/s in steps of {compute.step}",
        measurements=tuple(
            Measurement(
                contender=way,
                kind="ours" if way == STREAMED else "naive",
                samples_s=tuple(times),
                figures={
                    "prompt_tokens": num_tokens,
                    "last_step_bytes": options.model.token_bytes * last,
                    "prefill_steps_kept": computed_s / steps_s[way],
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

    def measure(self, prompts: Sequence[Transfer], way: str) -> tuple[list[float], float]:
        """Seconds from the end of the last step to the end of each load, and seconds of all steps. Raises
        KVConnectorError: a load failed, or the producer. TransferTimeoutError: it takes too long.
        """
        prefill, decode = self.pair.prefill, self.pair.decode
        requests = {self.pair.new_request_id(): prompt for prompt in prompts}
        for request_id in requests if way == STREAMED else ():
            names = {"transfer_id": request_id, "transfer_secret": new_secret()}
            prefill.scheduler.on_new_request(request_id, {"do_remote_decode": True, **names})
            params = {"do_remote_prefill": True, **self._address, **names}
            decode.scheduler.on_new_request(request_id, params)
        computed = self._thread.submit(self._compute_and_offer, requests)
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
        self, requests: Mapping[str, Transfer]
    ) -> tuple[float, float, dict[str, dict[str, Any]]]:
        """When the last step was over, the seconds of all steps, and the producer's answers."""
        prefill, compute = self.pair.prefill, self.compute
        blocks = {request_id: prompt.prefill_blocks for request_id, prompt in requests.items()}
        num_tokens = next(iter(requests.values())).num_tokens
        # one prompt warms up as one
        share = compute.share if len(requests) > 1 else compute.step
        steps_s = prefill.compute(blocks, num_tokens, share, compute.rate)
        return time.perf_counter(), steps_s, prefill.offer(blocks, num_tokens)

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
