"""`handover`: what a user waits for between two engines, from a prompt's last step to its cache at the consumer.

The producer's model is a pause: so many tokens a second, so many in a step. Prompts are handed over in two ways, in
turns: streamed, where the consumer reads while the producer computes, and one after the other, where it begins with the
producer's answer. In both the time ends when all of the consumer's ranks have reported the load.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.options import TIMEOUT_S, WARMUP, BenchOptions
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.results import CaseResult, Measurement, Progress
from kvconnector.errors import KVConnectorError, TransferTimeoutError
from kvconnector.ids import new_secret
from kvconnector.runtime import WorkerOutput
from kvconnector.session import KVOutputAggregator

DEFAULT_TOKENS = (1024, 4096, 16384, 32768)
ITERATIONS = 10
STEP_TOKENS = 2048
"""That one step of the producer computes, at most."""
TURN_S = 5e-3
"""Longest pause of a consumer that has nothing to compute."""
STREAMED, IN_SEQUENCE = "streamed", "one after the other"


def run(options: BenchOptions, progress: Progress) -> Sequence[CaseResult]:
    """Every prompt length, both ways in turns; what arrives is checked before the first and after the last."""
    deployment = Deployment.of(options, options.tokens or DEFAULT_TOKENS)
    iterations = options.iterations or ITERATIONS
    cases = []
    progress(f"starting {deployment}")
    with EnginePair(deployment) as pair, ThreadPoolExecutor(1) as thread:
        handover = _Handover(pair, thread, options)
        for num_tokens in deployment.tokens:
            case = deployment.case_name(num_tokens)
            progress(case)
            transfer = deployment.transfer(num_tokens)
            ways = {STREAMED: handover.streamed, IN_SEQUENCE: handover.in_sequence}
            samples: dict[str, list[float]] = {name: [] for name in ways}
            for way in ways.values():
                pair.prepare(transfer)
                way(transfer)
                pair.check(transfer)
            for _ in range(iterations):
                for name, way in ways.items():
                    samples[name].append(way(transfer))
            pair.check(transfer)
            cases.append(handover.case(case, transfer, samples))
    return cases


class _Handover:
    """A router, and the engines' loops: the producer's in `thread`, the consumer's in this one."""

    def __init__(self, pair: EnginePair, thread: ThreadPoolExecutor, options: BenchOptions) -> None:
        self._pair = pair
        self._thread = thread
        self._options = options
        self._address: dict[str, Any] = {}
        smallest = pair.deployment.transfer(min(pair.deployment.tokens))
        for _ in range(WARMUP):  # which also tells where the producer is
            self.in_sequence(smallest)

    def streamed(self, transfer: Transfer) -> float:
        """Seconds from the end of the last step to the end of the load, of which most is done by then."""
        request_id = self._pair.new_request_id()
        names = {"transfer_id": request_id, "transfer_secret": new_secret()}
        self._pair.prefill.queue(request_id, {"do_remote_decode": True, **names})
        params = {"do_remote_prefill": True, **self._address, **names}
        decode = self._pair.decode
        decode.scheduler.on_new_request(request_id, params)
        computed = self._thread.submit(self._compute_and_offer, request_id, transfer)
        outputs = _Outputs(self._pair)
        self._turn_until(lambda: request_id in outputs.begun, outputs, computed)
        external, _ = decode.scheduler.matched_tokens(request_id, transfer.num_tokens + 1, 0)
        decode.scheduler.load(request_id, blocks=[transfer.decode_blocks], num_tokens=external)
        self._turn_until(lambda: request_id in outputs.received, outputs, computed)
        ended_s = time.perf_counter()
        decode.loaded(request_id)
        computed_s, _ = computed.result()
        self._pair.prefill.await_sent(request_id)
        return ended_s - computed_s

    def in_sequence(self, transfer: Transfer) -> float:
        """Seconds from the end of the last step to the end of the load, which begins with the producer's answer."""
        request_id = self._pair.new_request_id()
        computed_s, params = self._compute_and_offer(request_id, transfer)
        self._pair.decode.want(request_id, params, transfer.decode_blocks, transfer.num_tokens)
        self._pair.decode.load(request_id)
        ended_s = time.perf_counter()
        self._pair.prefill.await_sent(request_id)
        folded = str(params["remote_request_id"]).split("|")
        keys = ("remote_engine_id", "remote_host", "remote_port")
        self._address = {key: params[key] for key in keys} | {"remote_public_key": folded[2]}
        return ended_s - computed_s

    def _compute_and_offer(
        self, request_id: str, transfer: Transfer
    ) -> tuple[float, dict[str, Any]]:
        """When the last step was over, and the producer's answer."""
        prefill, blocks, num_tokens = (
            self._pair.prefill,
            transfer.prefill_blocks,
            transfer.num_tokens,
        )
        for start in range(0, num_tokens, STEP_TOKENS):
            step = min(STEP_TOKENS, num_tokens - start)
            prefill.compute(request_id, blocks, start, step / self._options.rate)
        computed_s = time.perf_counter()
        return computed_s, prefill.offer(request_id, blocks, num_tokens)

    def _turn_until(self, is_over: Any, outputs: _Outputs, computed: Future[Any]) -> None:
        """Turn the consumer's loop.

        Raises:
            KVConnectorError: a load failed, or the producer. TransferTimeoutError: it takes too long.
        """
        deadline = time.perf_counter() + TIMEOUT_S
        while not is_over():
            outputs.turn()
            if computed.done():
                computed.result()
            if time.perf_counter() > deadline:
                raise TransferTimeoutError("a streamed prompt did not arrive")

    def case(self, name: str, transfer: Transfer, samples: dict[str, list[float]]) -> CaseResult:
        """Both ways, the streamed one as ours."""
        options = self._options
        nbytes = options.model.token_bytes * transfer.num_tokens
        last = transfer.num_tokens % STEP_TOKENS or STEP_TOKENS
        return CaseResult(
            case=f"{name}, {options.rate:g} tokens/s in steps of {STEP_TOKENS}",
            measurements=tuple(
                Measurement(
                    contender=way,
                    kind="ours" if way == STREAMED else "naive",
                    samples_s=tuple(times),
                    figures={
                        "payload_bytes": float(nbytes),
                        "last_step_bytes": float(options.model.token_bytes * last),
                    },
                )
                for way, times in samples.items()
            ),
            notes=tuple(f"kvconnector by: {path}" for path in sorted(self._pair.paths)),
        )


class _Outputs:
    """What the consumer's ranks have reported since it was made."""

    def __init__(self, pair: EnginePair) -> None:
        self._pair = pair
        self._aggregator = KVOutputAggregator(len(pair.deployment.decode.ranks))
        self.begun: set[str] = set()
        self.received: set[str] = set()

    def turn(self) -> None:
        """One turn of the consumer's loop.

        Raises:
            KVConnectorError: a load failed.
        """
        step = self._pair.decode.scheduler.build_step()
        outputs = self._pair.decode.ranks.call(RankProcess.turn, step, "idle", TURN_S)
        output = self._aggregator.aggregate(outputs) or WorkerOutput()
        if output.failed_recving:
            raise KVConnectorError("loads failed", reasons=output.failed_recving)
        self._pair.paths |= {each.path for each in output.stats.transfers}
        # `loaded` tells the scheduler of the end
        self._pair.decode.scheduler.update(WorkerOutput(begun=output.begun))
        self.begun |= output.begun
        self.received |= output.finished_recving
