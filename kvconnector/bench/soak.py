"""`soak`: two engines under mixed load with aborts and restarts, and what that leaves behind."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engines import TURN_S, EnginePair
from kvconnector.bench.options import SEED, BenchOptions
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.results import CaseResult, Measurement, ShowProgress
from kvconnector.bench.shapes import EngineShape
from kvconnector.runtime import WorkerOutput

IN_FLIGHT = 64
ABORT_PROBABILITY = 0.03
"""In each step, of one request."""
NUM_RESTARTS = 4
"""In the first half, of decode and prefill in turn; processes of the second half are compared with themselves."""
SETTINGS = {
    "lease": {"duration_s": 5.0},
    "peer": {"timeout_s": 5.0, "heartbeat_interval_s": 1.0, "transfer_timeout_s": 10.0},
}
DRAIN_S = 60.0
MAX_TOLD = 10
"""Errors without a cause that are told in full."""


@dataclass(slots=True)
class _Side:
    """One engine's blocks: the free ones, and those of each request."""

    shape: EngineShape
    free: list[int]
    held: dict[str, list[int]] = field(default_factory=dict)

    def has_room(self, num_tokens: int) -> bool:
        return len(self.free) >= self.shape.num_blocks(num_tokens)

    def take(self, request: str, num_tokens: int) -> list[int]:
        self.held[request] = [self.free.pop() for _ in range(self.shape.num_blocks(num_tokens))]
        return self.held[request]

    def give_back(self, request: str) -> None:
        self.free += self.held.pop(request, [])


class Soak:
    """One run. The schedulers, the block managers and the router are this process."""

    def __init__(self, pair: EnginePair, options: BenchOptions, progress: ShowProgress) -> None:
        deployment = pair.deployment
        self._pair = pair
        self._progress = progress
        self._random = random.Random(SEED)
        self._sides = {
            name: _Side(shape, list(range(deployment.num_blocks(shape))))
            for name, shape in (("prefill", deployment.prefill), ("decode", deployment.decode))
        }
        self._token_bytes = options.model.token_bytes
        self._loading: dict[str, tuple[float, int, list[float]]] = {}
        self._aborted: set[str] = set()
        self._bereft: set[str] = set()
        """Requests whose producer was killed while they were loaded."""
        self._have_met = False
        self.samples_s: list[float] = []
        self.first_samples_s: list[float] = []
        """Of requests that were asked for before the engines had met, after a start or a restart."""
        self.counts: Counter[str] = Counter()

    def run(self, minutes: float) -> dict[str, float]:
        """The processes' use of memory, descriptors and threads. Raises ResultMismatchError: blocks leaked."""
        began_s = time.monotonic()
        half_s = minutes * 30
        restarts = [half_s * (each + 1) / (NUM_RESTARTS + 1) for each in range(NUM_RESTARTS)]
        before: dict[str, float] = {}
        while (elapsed_s := time.monotonic() - began_s) < 2 * half_s:
            if restarts and elapsed_s > restarts[0]:
                restarts.pop(0)
                self._restart("prefill" if len(restarts) % 2 else "decode")
            if not before and elapsed_s > half_s * 1.1:
                before = self._usage("half_way")
            self._start_requests()
            self._abort_some()
            self._step()
            self._progress("requests, aborts and restarts", elapsed_s / (2 * half_s))
        deadline = time.monotonic() + DRAIN_S
        while any(side.held for side in self._sides.values()) and time.monotonic() < deadline:
            self._step()
        leaked = {name: len(side.held) for name, side in self._sides.items() if side.held}
        if leaked:
            raise ResultMismatchError("blocks of requests leaked", requests=leaked)
        return {**before, **self._usage("end")}

    def _start_requests(self) -> None:
        sizes = self._pair.deployment.tokens
        for _ in range(IN_FLIGHT - len(self._loading)):
            num_tokens = self._random.randint(1, self._random.choice(sizes))
            if not all(side.has_room(num_tokens) for side in self._sides.values()):
                return  # the engines would queue it
            self.counts["requests"] += 1
            name = f"soak-{self.counts['requests']}"
            blocks = [side.take(name, num_tokens) for side in self._sides.values()]
            self._pair.offer_and_load(name, Transfer(num_tokens, *blocks))
            samples = self.samples_s if self._have_met else self.first_samples_s
            self._loading[name] = (time.perf_counter(), num_tokens, samples)

    def _abort_some(self) -> None:
        if self._loading and self._random.random() < ABORT_PROBABILITY:
            name = self._random.choice(list(self._loading))
            self.counts["aborts"] += 1
            del self._loading[name]
            self._aborted.add(name)
            self._pair.decode.scheduler.finish(name)
            if not self._pair.decode.scheduler.is_loading(name):
                self._sides["decode"].give_back(name)

    def _step(self) -> None:
        engines = (self._pair.prefill, self._pair.decode)
        for end in [each.begin_turn(TURN_S) for each in engines]:
            self._record(end())

    def _record(self, output: WorkerOutput) -> None:
        for name in output.finished_sending:
            self._sides["prefill"].give_back(name)
        for name in output.finished_recving:
            self._sides["decode"].give_back(name)
            failed = output.failed_recving.get(name)
            if failed is not None:
                self.counts[f"{failed.partition(':')[0]}_{self._cause_of(name, failed)}"] += 1
            if name not in self._loading:
                continue  # it was aborted
            started_s, num_tokens, samples = self._loading.pop(name)
            self._pair.decode.scheduler.finish(name)
            if failed is not None:
                self.counts["failed"] += 1
                continue
            self.counts["bytes"] += num_tokens * self._token_bytes
            self._have_met = True
            if name not in self._bereft:  # it arrived before the kill, and nobody looked
                samples.append(time.perf_counter() - started_s)

    def _cause_of(self, name: str, failed: str) -> str:
        """What this process did to a request that failed."""
        if name in self._bereft:
            return "producer_killed"
        if name in self._aborted:
            return "aborted"
        self.counts["unexplained"] += 1
        if self.counts["unexplained"] <= MAX_TOLD:
            self._progress(f"{name} failed, and nothing was done to it: {failed}")
        return "unexplained"

    def _restart(self, name: str) -> None:
        """Kill an engine and start it again under the same id. What it loaded or held is gone with it."""
        self.counts[f"{name}_restarts"] += 1
        self._have_met = False
        if name == "prefill":
            self._bereft |= set(self._loading)
        self._pair.restart(name)
        for request in list(self._sides[name].held):
            self._sides[name].give_back(request)
        if name == "decode":
            self._loading.clear()

    def _usage(self, when: str) -> dict[str, float]:
        return {
            f"{name}_{what}_{when}": float(sum(each[index] for each in usages))
            for name, engine in (("prefill", self._pair.prefill), ("decode", self._pair.decode))
            for usages in [engine.ranks.call(RankProcess.usage)]
            for index, what in enumerate(("rss_mib", "descriptors", "threads"))
        }


def run(options: BenchOptions, progress: ShowProgress) -> Sequence[CaseResult]:
    """One case. Raises ResultMismatchError if blocks leaked, or bytes are wrong after all of it."""
    deployment = Deployment.of(options, options.tokens, in_flight=IN_FLIGHT // 8)
    progress(f"{options.minutes:g} minutes, {deployment}")
    with EnginePair(deployment, SETTINGS) as pair:
        soak = Soak(pair, options, progress)
        usage = soak.run(options.minutes)
        pair.verify(deployment.transfer(max(deployment.tokens)))
    figures = {
        "leaked_blocks": 0.0,
        "unexplained": 0.0,
        **{k: float(v) for k, v in sorted(soak.counts.items())},
        **usage,
        "first_contacts": float(len(soak.first_samples_s)),
        "first_contact_longest_s": max(soak.first_samples_s, default=0.0),
    }
    nbytes = soak.counts["bytes"] // max(1, len(soak.samples_s) + len(soak.first_samples_s))
    name = "kvconnector, requests that arrived, less first contacts"
    ours = Measurement(name, "ours", tuple(soak.samples_s), nbytes, figures)
    return [CaseResult(f"{options.minutes:g} minutes, {deployment}", (ours,))]
