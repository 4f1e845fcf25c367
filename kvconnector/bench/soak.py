"""`soak`: two engines under mixed load with aborts and faults, for minutes or days.

The first half of a run has faults of every kind. In the second half no engine is killed or restarted, so that its
processes live long enough to show what grows. A failed request is explained if this process aborted it, or caused a
fault of an engine while it was loaded. All others count as `unexplained`.

From time to time the soak drains the load, fills both engines' pools with known bytes, and moves one more request. It
compares that request with the bytes sent, and all other blocks with their earlier content: wrong bytes and late writes
end the run.

If another release is given, an engine that starts again has this release or the other one, so that all four pairs of
releases occur equally often.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import Blocks, Deployment
from kvconnector.bench.engine_process import TURN_S, Engine, EngineProcess, Turned
from kvconnector.bench.engines import ROLES
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.releases import Release, open_release
from kvconnector.bench.results import CaseResult, ShowProgress
from kvconnector.bench.shapes import EngineShape
from kvconnector.bench.soak_faults import FAULTS, PEER_TIMEOUT_S, SETTINGS, Fault
from kvconnector.bench.soak_state import (
    RELEASES,
    PairCounts,
    SoakState,
    cases_of,
    load_state,
    pair_of,
    rng_of,
    save_state,
)

IN_FLIGHT = 64
ABORT_PROBABILITY = 0.03
"""Probability that a step aborts one request."""
FAULT_S = 45.0
"""Seconds between two faults; fewer in short runs, so that each kind occurs in the first half."""
CHECK_S = 60.0
"""Seconds between two comparisons of bytes, after which the state is saved; fewer in short runs."""
DRAIN_S = 60.0
MAX_TOLD = 10
"""Most unexplained errors that are reported in full."""


@dataclass(slots=True)
class _Side:
    """One engine, its release, its free blocks, and the blocks that each request holds. `lives` counts its starts."""

    engine: EngineProcess
    shape: EngineShape
    free: list[int]
    lives: int
    release: str = RELEASES[0]
    held: dict[str, list[int]] = field(default_factory=dict)

    def has_room(self, num_tokens: int) -> bool:
        return len(self.free) >= self.shape.num_blocks(num_tokens)

    def take(self, request: str, num_tokens: int) -> None:
        self.held[request] = [self.free.pop() for _ in range(self.shape.num_blocks(num_tokens))]

    def give_back(self, request: str) -> None:
        self.free += self.held.pop(request, [])


@dataclass(slots=True)
class _Loading:
    """A request that the consumer loads, and the counts of its engines' releases. `is_first`: it was asked for before
    the engines had greeted each other.
    """

    started_s: float
    num_tokens: int
    is_first: bool
    pair: PairCounts


class Soak:
    """One run, or the rest of it. This process is the block managers and the router. `close` ends the engines."""

    def __init__(
        self,
        deployment: Deployment,
        state: SoakState,
        progress: ShowProgress,
        other: Release | None = None,
    ) -> None:
        self._deployment, self._state, self._progress = deployment, state, progress
        self._other, self._random = other, rng_of(state)
        self._loading: dict[str, _Loading] = {}
        self._aborted: set[str] = set()
        self._troubled: dict[str, str] = {}
        """By request: the fault that happened while it was loaded."""
        self._trouble = ("", 0.0)
        """The last fault by which an engine lost its peer, and until when new requests may fail because of it."""
        self._paused = ("", 0.0)
        self._have_met = False
        self._sides: dict[str, _Side] = {}
        for name, shape in deployment.shapes.items():
            free, lives = list(range(deployment.num_blocks(shape)[0])), 1 + 1000 * state.num_begun
            self._sides[name] = _Side(self._open(name, RELEASES[0]), shape, free, lives)

    def _open(self, name: str, release: str) -> EngineProcess:
        is_other = release != RELEASES[0]
        environment = self._other.environment if self._other and is_other else {}
        return EngineProcess(self._deployment, name, environment)

    def _start(self, name: str) -> None:
        self._sides[name].engine.call(Engine.start, name, ROLES[name], SETTINGS)

    def close(self) -> None:
        for side in self._sides.values():
            side.engine.close()

    @property
    def _releases(self) -> dict[str, str]:
        return {name: side.release for name, side in self._sides.items()}

    @property
    def _pair(self) -> PairCounts:
        """The counts of the two engines' releases."""
        return self._state.pair(pair_of(self._releases))

    def run(self, total_s: float, path: Path | None) -> None:
        """Start the engines, and continue until `total_s` of the run are over.

        Raises:
            ResultMismatchError: blocks leaked, or bytes are wrong.
        """
        for name in self._sides:
            self._start(name)
        state, began_s = self._state, time.monotonic() - self._state.elapsed_s
        fault_s = min(FAULT_S, total_s / 2 / (len(FAULTS) + 1))
        check_s = min(CHECK_S, total_s / 8)
        fault_at_s, check_at_s = state.elapsed_s + fault_s, state.elapsed_s + check_s
        while (elapsed_s := time.monotonic() - began_s) < total_s:
            state.elapsed_s = elapsed_s
            if self._paused[0] and time.monotonic() > self._paused[1]:
                self._resume()
            if elapsed_s > fault_at_s and self._have_met and not self._paused[0]:
                fault_at_s = elapsed_s + fault_s
                fault = FAULTS[state.counts.get("fault_turns", 0) % len(FAULTS)]
                if self._cause(fault, total_s) and fault.is_restart:
                    check_at_s = min(check_at_s, elapsed_s + fault_s / 2)  # before the next restart
            if elapsed_s > check_at_s and not self._paused[0]:
                self._check()
                save_state(path, state)
                check_at_s = time.monotonic() - began_s + check_s
            if not self._paused[0]:  # its scheduler is stopped, too
                self._start_requests()
                self._abort_some()
            self._step()
            self._progress("requests, aborts and faults", elapsed_s / total_s)
        self._resume()
        self._check()
        state.elapsed_s = time.monotonic() - began_s
        save_state(path, state)

    def _check(self) -> None:
        """Drain the load, compare bytes, and record the memory, descriptors and threads of both engines.

        Raises:
            ResultMismatchError: see `run`.
        """
        self._drain()
        self._troubled.clear()
        self._aborted.clear()
        num_tokens = self._random.choice(self._deployment.tokens)
        while not self._compare(num_tokens) and time.monotonic() < self._trouble[1]:
            pass
        self._state.count("checks")
        self._pair.checks += 1
        for name, side in self._sides.items():
            usages = side.engine.call(Engine.usage)
            values = tuple(float(sum(each)) for each in zip(*usages, strict=True))
            self._state.note_usage(name, side.lives, values)

    def _compare(self, num_tokens: int) -> bool:
        """Move one request alone, and compare all of the consumer's blocks. Returns False if the load failed, which it
        may after a fault.

        Raises:
            ResultMismatchError: see `run`.
        """
        prefill, decode = self._sides.values()
        failed, name = self._state.counts.get("failed", 0), self._allocate(num_tokens)
        ours, theirs = [decode.held[name]], [prefill.held[name]]
        self._prepare(theirs, num_tokens)
        self._start_loads({name: num_tokens})
        self._drain()
        if self._state.counts.get("failed", 0) > failed:
            return False
        for mismatch in decode.engine.call_ranks(RankProcess.mismatch, ours, num_tokens):
            if mismatch:
                raise ResultMismatchError(mismatch, releases=pair_of(self._releases))
        return True

    def _prepare(self, blocks: Blocks, num_tokens: int) -> None:
        """Write the sequence into the producer's blocks, and poison into the consumer's pools."""
        prefill, decode = self._sides.values()
        prefill.engine.call_ranks(RankProcess.write, blocks, num_tokens)
        decode.engine.call_ranks(RankProcess.poison)

    def _drain(self) -> None:
        """Wait for all requests. Raises ResultMismatchError: some still hold blocks after `DRAIN_S`."""
        deadline = time.monotonic() + DRAIN_S
        while any(side.held for side in self._sides.values()) and time.monotonic() < deadline:
            self._step()
        leaked = {name: len(side.held) for name, side in self._sides.items() if side.held}
        if leaked:
            raise ResultMismatchError("blocks of requests leaked", requests=leaked)

    # -- load --

    def _start_requests(self) -> None:
        sizes, asked = self._deployment.tokens, dict[str, int]()
        for _ in range(IN_FLIGHT - len(self._loading)):
            num_tokens = self._random.randint(1, self._random.choice(sizes))
            if not all(side.has_room(num_tokens) for side in self._sides.values()):
                break  # the engines would queue this request
            asked[self._allocate(num_tokens)] = num_tokens
        if asked:
            self._start_loads(asked)

    def _allocate(self, num_tokens: int) -> str:
        """Take blocks for a request on both sides. Returns its name."""
        self._state.count("requests")
        name = f"request-{self._state.counts['requests']}"
        for side in self._sides.values():
            side.take(name, num_tokens)
        return name

    def _start_loads(self, asked: dict[str, int]) -> None:
        """Offer requests, given by name and number of tokens, and load them, with both engines' next steps."""
        prefill, decode = self._sides.values()
        offered = [(name, [prefill.held[name]], count) for name, count in asked.items()]
        params = prefill.engine.call(Engine.offer, offered)
        pairs = zip(asked.items(), params, strict=True)
        wanted = [(name, offer, [decode.held[name]], count) for (name, count), offer in pairs]
        decode.engine.call(Engine.want, wanted)
        for name, count in asked.items():
            now_s, is_first = time.perf_counter(), not self._have_met
            self._loading[name] = _Loading(now_s, count, is_first, self._pair)
            if time.monotonic() < self._trouble[1]:
                self._troubled[name] = self._trouble[0]

    def _abort_some(self) -> None:
        if self._loading and self._random.random() < ABORT_PROBABILITY:
            name = self._random.choice(list(self._loading))
            self._state.count("aborts")
            del self._loading[name]
            self._aborted.add(name)
            if not self._sides["decode"].engine.call(Engine.abort, name):
                self._sides["decode"].give_back(name)

    def _step(self) -> None:
        running = [side.engine for name, side in self._sides.items() if name != self._paused[0]]
        for end in [each.begin(Engine.turn, TURN_S) for each in running]:
            self._record(end())

    def _record(self, turned: Turned) -> None:
        for name in turned.sent:
            self._sides["prefill"].give_back(name)
        for name, failed in turned.loads.items():
            self._sides["decode"].give_back(name)
            loading = self._loading.pop(name, None)
            if failed:
                self._record_failure(name, failed, loading)
            elif loading is not None:  # else it was aborted
                self._record_arrival(name, loading)

    def _record_arrival(self, name: str, loading: _Loading) -> None:
        self._state.count("bytes", loading.num_tokens * self._deployment.options.model.token_bytes)
        loading.pair.served += 1
        if loading.is_first and not self._have_met:
            self._have_met = True
            loading.pair.met += 1
        if name in self._troubled:
            return  # it may have arrived before the fault, unnoticed
        seconds = time.perf_counter() - loading.started_s
        loading.pair.samples.add(seconds, self._random)
        samples = self._state.first_samples if loading.is_first else self._state.samples
        samples.add(seconds, self._random)

    def _record_failure(self, name: str, failed: str, loading: _Loading | None) -> None:
        """Count a failure by its cause: this process's action on the request, or on an engine while it was loaded."""
        cause = self._troubled.get(name) or ("aborted" if name in self._aborted else "unexplained")
        self._state.count(f"{failed.partition(':')[0]}, {cause}")
        pair = loading.pair if loading else self._pair
        if cause == "unexplained":
            self._state.count("unexplained")
            pair.failed_unexplained += 1
            if self._state.counts["unexplained"] <= MAX_TOLD:
                self._progress(f"{name} failed, and nothing was done to it: {failed}")
        elif loading is not None:
            pair.failed_explained += 1
        if loading is not None:
            self._state.count("failed")

    # -- faults --

    def _cause(self, fault: Fault, total_s: float) -> bool:
        """Cause a fault. In the second half, once each kind has occurred, leave out faults that end a process. Returns
        True if the fault was caused.
        """
        state = self._state
        state.count("fault_turns")
        is_late = state.elapsed_s > total_s / 2 and state.counts["fault_turns"] > len(FAULTS)
        if fault.is_restart and is_late:
            return False
        state.count(str(fault))
        self._progress(f"{fault.engine} is {fault.kind}", state.elapsed_s / total_s)
        if fault.loses_peer:
            self._troubled |= dict.fromkeys(self._loading, str(fault))
            # an engine that its peer gave up on greets again when it notices
            self._trouble = str(fault), time.monotonic() + fault.pause_s + 2 * PEER_TIMEOUT_S
        if fault.is_restart:
            self._restart(fault)
        else:
            self._sides[fault.engine].engine.pause()
            self._paused = fault.engine, time.monotonic() + fault.pause_s
        return True

    def _resume(self) -> None:
        name, _ = self._paused
        if name:
            self._sides[name].engine.resume()
            self._paused = "", 0.0

    def _restart(self, fault: Fault) -> None:
        """End an engine and start it again under the same id. Its loads and leases are gone."""
        side = self._sides[fault.engine]
        self._have_met = False
        if fault.kind == "killed":
            side.engine.kill()
        side.engine.close()
        if self._other is not None:
            side.release = self._state.next_release(self._releases, fault.engine)
            self._progress(f"{fault.engine} starts again: {pair_of(self._releases)} release")
        side.engine = self._open(fault.engine, side.release)
        self._start(fault.engine)
        side.lives += 1
        for request in list(side.held):
            side.give_back(request)
        if fault.engine == "decode":
            self._loading.clear()
        for loading in self._loading.values():
            loading.is_first = False  # its producer is gone


def run(options: BenchOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Yield the `cases_of` the run, also if it is interrupted.

    Raises:
        ResultMismatchError: blocks leaked, or bytes are wrong.
        ConfigError: the state's file or the other release cannot be used.
    """
    asked, total_s = options.soak, options.soak.minutes * 60
    deployment = Deployment(options, options.tokens, in_flight=IN_FLIGHT // 8)
    name = f"{options.model.name}, {deployment}"
    path = Path(asked.state) if asked.state else None
    with ExitStack() as exits:
        other = None
        if asked.other_release:
            other = exits.enter_context(open_release(Path(asked.other_release)))
            name += f", beside {other}"
        state = load_state(path, name)
        begun = f", {state.elapsed_s:.0f} s of them done before" if state.num_begun else ""
        progress(f"{asked.minutes:g} minutes{begun}, {name}")
        soak = exits.enter_context(closing(Soak(deployment, state, progress, other)))
        state.num_begun += 1
        try:
            soak.run(total_s, path)
        except KeyboardInterrupt:
            save_state(path, state)
            yield from cases_of(name, state)
            raise
    yield from cases_of(name, state)
