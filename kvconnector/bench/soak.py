"""`soak`: two engines under mixed load with aborts and faults, for minutes or days, and what remains of that.

The first half of a run has faults of every kind. In the second half no engine is killed or restarted, so that its
processes live long enough for what grows to show. Requests that fail are explained by what this process did to them:
to an engine while they were loaded, or to themselves. All others count as `unexplained`.

From time to time the load is drained, both engines' pools are filled with known bytes, and one more request is compared
with what was sent, and all other blocks with what lay there: wrong bytes and late writes end the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engines import TURN_S, EnginePair
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.results import CaseResult, Measurement, ShowProgress
from kvconnector.bench.shapes import EngineShape
from kvconnector.bench.soak_state import SoakState, load_state, rng_of, save_state
from kvconnector.runtime import WorkerOutput

IN_FLIGHT = 64
ABORT_PROBABILITY = 0.03
"""In each step, of one request."""
FAULT_S = 45.0
"""Between two faults; in short runs fewer seconds, so that each kind has its turn in the first half."""
CHECK_S = 60.0
"""Between two comparisons of bytes, and between two savings of the state; in short runs less."""
PEER_TIMEOUT_S = 5.0
SETTINGS = {
    "lease": {"duration_s": 5.0},
    "peer": {
        "timeout_s": PEER_TIMEOUT_S,
        "heartbeat_interval_s": 1.0,
        "transfer_timeout_s": 10.0,
    },
}
DRAIN_S = 60.0
MAX_TOLD = 10
"""Errors without a cause that are reported in full."""


class Fault(NamedTuple):
    """What is done to an engine. `pause_s`: it is stopped for this time; a silent one is given up by its peer then."""

    kind: str
    engine: str
    is_restart: bool = False
    pause_s: float = 0.0

    @property
    def loses_peer(self) -> bool:
        """Returns True if requests that are loaded meanwhile may fail."""
        return self.is_restart or self.pause_s > PEER_TIMEOUT_S

    def __str__(self) -> str:
        return f"{self.engine}_{self.kind}"


FAULTS = (
    Fault("killed", "decode", is_restart=True),
    Fault("paused", "prefill", pause_s=1.0),
    Fault("restarted", "prefill", is_restart=True),
    Fault("silent", "decode", pause_s=1.6 * PEER_TIMEOUT_S),
    Fault("killed", "prefill", is_restart=True),
    Fault("paused", "decode", pause_s=1.0),
    Fault("restarted", "decode", is_restart=True),
    Fault("silent", "prefill", pause_s=1.6 * PEER_TIMEOUT_S),
)


@dataclass(slots=True)
class _Side:
    """One engine's blocks: the free ones, and those of each request. `lives` counts its starts."""

    shape: EngineShape
    free: list[int]
    held: dict[str, list[int]] = field(default_factory=dict)
    lives: int = 1

    def has_room(self, num_tokens: int) -> bool:
        return len(self.free) >= self.shape.num_blocks(num_tokens)

    def take(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(self.shape.num_blocks(num_tokens))]

    def give_back(self, request: str) -> None:
        self.free += self.held.pop(request, [])


@dataclass(slots=True)
class _Loading:
    """A request that the consumer loads. `is_first`: it was asked for before the engines had met."""

    started_s: float
    num_tokens: int
    is_first: bool


class Soak:
    """One run, or what is left of it. The schedulers, the block managers and the router are this process."""

    def __init__(
        self, pair: EnginePair, options: BenchOptions, state: SoakState, progress: ShowProgress
    ) -> None:
        deployment = pair.deployment
        self._pair, self._state, self._progress = pair, state, progress
        self._random = rng_of(state)
        self._sides = {
            name: _Side(shape, list(range(deployment.num_blocks(shape)[0])))
            for name, shape in deployment.shapes.items()
        }
        for side in self._sides.values():
            side.lives += 1000 * state.num_begun
        self._token_bytes = options.model.token_bytes
        self._loading: dict[str, _Loading] = {}
        self._aborted: set[str] = set()
        self._troubled: dict[str, str] = {}
        """The fault that each request met which was loaded at that time."""
        self._trouble = ("", 0.0)
        """The last fault that loses a peer, and until when it may still fail new requests."""
        self._paused = ("", 0.0)
        self._have_met = False

    def run(self, total_s: float, path: Path | None) -> None:
        """Go on until `total_s` of the run are over.

        Raises:
            ResultMismatchError: blocks leaked, or bytes are wrong.
        """
        state, began_s = self._state, time.monotonic() - self._state.elapsed_s
        fault_s = min(FAULT_S, total_s / 2 / (len(FAULTS) + 1))
        check_s = min(CHECK_S, total_s / 8)
        fault_at_s, check_at_s = state.elapsed_s + fault_s, state.elapsed_s + check_s
        while (elapsed_s := time.monotonic() - began_s) < total_s:
            state.elapsed_s = elapsed_s
            if self._paused[0] and time.monotonic() > self._paused[1]:
                self._resume()
            if elapsed_s > fault_at_s and not self._paused[0]:
                fault_at_s = elapsed_s + fault_s
                self._strike(FAULTS[state.counts.get("fault_turns", 0) % len(FAULTS)], total_s)
            if elapsed_s > check_at_s and not self._paused[0]:
                self._check()
                save_state(path, state)
                check_at_s = time.monotonic() - began_s + check_s
            self._start_requests()
            self._abort_some()
            self._step()
            self._progress("requests, aborts and faults", elapsed_s / total_s)
        self._resume()
        self._check()
        state.elapsed_s = time.monotonic() - began_s
        save_state(path, state)

    def _check(self) -> None:
        """Drain the load, compare bytes, and note what both engines use.

        Raises:
            ResultMismatchError: see `run`.
        """
        deadline = time.monotonic() + DRAIN_S
        while any(side.held for side in self._sides.values()) and time.monotonic() < deadline:
            self._step()
        leaked = {name: len(side.held) for name, side in self._sides.items() if side.held}
        if leaked:
            raise ResultMismatchError("blocks of requests leaked", requests=leaked)
        self._troubled.clear()
        self._aborted.clear()
        deployment = self._pair.deployment
        self._pair.verify(deployment.transfer(self._random.choice(deployment.tokens)))
        self._have_met = True
        self._state.count("checks")
        for name in self._sides:
            usages = self._pair.engine(name).ranks.call(RankProcess.usage)
            values = tuple(float(sum(each)) for each in zip(*usages, strict=True))
            self._state.note_usage(name, self._sides[name].lives, values)

    # -- load --

    def _start_requests(self) -> None:
        sizes = self._pair.deployment.tokens
        for _ in range(IN_FLIGHT - len(self._loading)):
            num_tokens = self._random.randint(1, self._random.choice(sizes))
            if not all(side.has_room(num_tokens) for side in self._sides.values()):
                return  # the engines would queue it
            self._state.count("requests")
            blocks = [side.take(num_tokens) for side in self._sides.values()]
            name = self._pair.offer_and_want(Transfer(num_tokens, *([ids] for ids in blocks)))
            for side, ids in zip(self._sides.values(), blocks, strict=True):
                side.held[name] = ids
            self._loading[name] = _Loading(time.perf_counter(), num_tokens, not self._have_met)
            if time.monotonic() < self._trouble[1]:
                self._troubled[name] = self._trouble[0]

    def _abort_some(self) -> None:
        if self._loading and self._random.random() < ABORT_PROBABILITY:
            name = self._random.choice(list(self._loading))
            self._state.count("aborts")
            del self._loading[name]
            self._aborted.add(name)
            self._pair.decode.scheduler.finish(name)
            if not self._pair.decode.scheduler.is_loading(name):
                self._sides["decode"].give_back(name)

    def _step(self) -> None:
        running = [self._pair.engine(name) for name in self._sides if name != self._paused[0]]
        for end in [each.begin_turn(TURN_S) for each in running]:
            self._record(end())

    def _record(self, output: WorkerOutput) -> None:
        for name in output.finished_sending:
            self._sides["prefill"].give_back(name)
        for name in output.finished_recving:
            self._sides["decode"].give_back(name)
            failed = output.failed_recving.get(name)
            if failed is not None:
                self._state.count(f"{failed.partition(':')[0]}, {self._cause_of(name, failed)}")
            loading = self._loading.pop(name, None)
            if loading is None:
                continue  # it was aborted
            self._pair.decode.scheduler.finish(name)
            if failed is not None:
                self._state.count("failed")
                continue
            self._state.count("bytes", loading.num_tokens * self._token_bytes)
            self._have_met = True
            if name not in self._troubled:  # it arrived before the fault, and nobody looked
                samples = self._state.first_samples if loading.is_first else self._state.samples
                samples.add(time.perf_counter() - loading.started_s, self._random)

    def _cause_of(self, name: str, failed: str) -> str:
        """What this process did to a request that failed."""
        if name in self._troubled:
            return self._troubled[name]
        if name in self._aborted:
            return "aborted"
        self._state.count("unexplained")
        if self._state.counts["unexplained"] <= MAX_TOLD:
            self._progress(f"{name} failed, and nothing was done to it: {failed}")
        return "unexplained"

    # -- faults --

    def _strike(self, fault: Fault, total_s: float) -> None:
        """Do it; in the second half nothing that ends a process, once each kind had its turn."""
        state = self._state
        state.count("fault_turns")
        is_late = state.elapsed_s > total_s / 2 and state.counts["fault_turns"] > len(FAULTS)
        if fault.is_restart and is_late:
            return
        state.count(str(fault))
        self._progress(f"{fault.engine} is {fault.kind}", state.elapsed_s / total_s)
        if fault.loses_peer:
            self._troubled |= dict.fromkeys(self._loading, str(fault))
            # a peer that was given up for a time greets anew once it notices
            self._trouble = str(fault), time.monotonic() + fault.pause_s + 2 * PEER_TIMEOUT_S
        if fault.is_restart:
            self._restart(fault)
        else:
            self._pair.engine(fault.engine).ranks.pause()
            self._paused = fault.engine, time.monotonic() + fault.pause_s

    def _resume(self) -> None:
        name, _ = self._paused
        if name:
            self._pair.engine(name).ranks.resume()
            self._paused = "", 0.0

    def _restart(self, fault: Fault) -> None:
        """End an engine and start it again under the same id. What it loaded or held is gone with it."""
        name = fault.engine
        self._have_met = False
        self._pair.restart(name, is_killed=fault.kind == "killed")
        side = self._sides[name]
        side.lives += 1
        for request in list(side.held):
            side.give_back(request)
        if name == "decode":
            self._loading.clear()


def run(options: BenchOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Yield one case, of what was done until then where the run is interrupted.

    Raises:
        ResultMismatchError: blocks leaked, or bytes are wrong.
        ConfigError: the state's file cannot be used.
    """
    total_s = options.minutes * 60
    deployment = Deployment(options, options.tokens, in_flight=IN_FLIGHT // 8)
    name = f"{options.model.name}, {deployment}"
    path = Path(options.state) if options.state else None
    state = load_state(path, name)
    begun = f", {state.elapsed_s:.0f} s of them done before" if state.num_begun else ""
    progress(f"{total_s / 60:g} minutes{begun}, {deployment}")
    with EnginePair(deployment, SETTINGS) as pair:
        soak = Soak(pair, options, state, progress)
        state.num_begun += 1
        try:
            soak.run(total_s, path)
        except KeyboardInterrupt:
            save_state(path, state)
            yield case_of(name, state)
            raise
    yield case_of(name, state)


def case_of(name: str, state: SoakState) -> CaseResult:
    """Return what a run has found so far."""
    figures = {
        "unexplained": 0.0,
        **{each: float(number) for each, number in sorted(state.counts.items())},
        "interruptions": float(max(0, state.num_begun - 1)),
        "arrived": float(state.samples.num_seen + state.first_samples.num_seen),
        "first_contacts": float(state.first_samples.num_seen),
        "first_contact_longest_s": state.first_samples.longest_s,
        "longest_s": state.samples.longest_s,
        **state.growth(),
    }
    nbytes = state.counts.get("bytes", 0) // max(1, int(figures["arrived"]))
    contender = "kvconnector, requests that arrived, less first contacts"
    ours = Measurement(contender, "ours", tuple(state.samples.kept_s), nbytes, figures)
    return CaseResult(f"{state.elapsed_s / 60:.1f} minutes, {name}", (ours,))
