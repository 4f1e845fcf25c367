"""`soak`: two engines under mixed load with aborts and faults, for minutes or days.

The first half of a run has faults of every kind. In the second half no engine is killed or restarted, so that its
processes live long enough to show what grows. A failed request is explained if this process aborted it, or caused a
fault of an engine while it was loaded. All others count as `unexplained`.

Between two faults the soak drains the load, fills both engines' pools with known bytes, and moves one more request. It
compares that request with the bytes sent, and all other blocks with their earlier content: wrong bytes and late writes
end the run.

If another release is given, an engine that starts again has this release or the other one, so that all four pairs of
releases occur equally often.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engine_process import TURN_S, Engine, Turned
from kvconnector.bench.engines import EnginePair
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.results import CaseResult, ShowProgress
from kvconnector.bench.shapes import EngineShape
from scripts.benchmarks.releases import Release, open_release
from scripts.benchmarks.soak_state import (
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
"""Seconds from one fault to the next; fewer in short runs, which should have each kind, too."""
DRAIN_S = 60.0
MAX_TOLD = 10
"""Most unexplained errors that are reported in full."""
PEER_TIMEOUT_S = 5.0
SETTINGS = {
    "lease": {"duration_s": 5.0},
    "peer": {"timeout_s": PEER_TIMEOUT_S, "heartbeat_interval_s": 1.0, "transfer_timeout_s": 10.0},
}


class SoakOptions(BenchOptions, frozen=True, kw_only=True):
    """A soak's length, the file from which it goes on after an interruption, and another release's wheel or folder."""

    minutes: float = 1.0
    state: str = ""
    other_release: str = ""


class Fault(NamedTuple):
    """One fault of an engine. It stops for `pause_s`; a silent one stops until its peer has given it up."""

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
"""The faults, in turn."""


@dataclass(slots=True)
class _Side:
    """One engine's free blocks and release. `lives` counts its starts."""

    shape: EngineShape
    free: list[int]
    lives: int
    release: str = RELEASES[0]

    def take(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(self.shape.num_blocks(num_tokens))]


@dataclass(slots=True)
class _Request:
    """A request, until both engines have given its `blocks` back, which are by side.

    `is_loading`: its load is awaited, and was not aborted. `is_first`: it was asked for before the engines had greeted
    each other. `pair` are the counts of its engines' releases. `cause` is what this process did to it, or to an engine
    while it was loaded; if it is empty, a failure is unexplained.
    """

    num_tokens: int
    blocks: dict[str, list[int]]
    is_first: bool
    pair: PairCounts
    cause: str
    started_s: float = 0.0
    is_loading: bool = True
    has_failed: bool = False

    @property
    def transfer(self) -> Transfer:
        return Transfer(self.num_tokens, [self.blocks["prefill"]], [self.blocks["decode"]])


class Soak:
    """One run, or the rest of it. This process is the block managers and the router of the engines of `pair`."""

    def __init__(
        self,
        pair: EnginePair,
        state: SoakState,
        total_s: float,
        progress: ShowProgress,
        other: Release | None = None,
    ) -> None:
        self._pair, self._state, self._random = pair, state, rng_of(state)
        self._total_s, self._progress, self._other = total_s, progress, other
        self._sides: dict[str, _Side] = {}
        for name, shape in pair.deployment.shapes.items():
            free = list(range(pair.deployment.num_blocks(shape)[0]))
            self._sides[name] = _Side(shape, free, lives=1 + 1000 * state.num_begun)
        self._requests: dict[str, _Request] = {}
        self._trouble = ("", 0.0)
        """The last fault by which an engine lost its peer, and until when new requests may fail because of it."""
        self._have_met = False
        self._began_s = time.monotonic() - state.elapsed_s

    @property
    def _releases(self) -> dict[str, str]:
        return {name: side.release for name, side in self._sides.items()}

    @property
    def _counts(self) -> PairCounts:
        """The counts of the two engines' releases."""
        return self._state.pair(pair_of(self._releases))

    @property
    def _loading(self) -> list[str]:
        return [name for name, request in self._requests.items() if request.is_loading]

    def run(self, path: Path | None) -> None:
        """Continue until `total_s` of the run are over, in rounds: a comparison of bytes within load, and then a fault.
        In the second half, once each kind of fault has occurred, leave out those that end a process.

        Raises:
            ResultMismatchError: blocks leaked, or bytes are wrong.
        """
        state, total_s = self._state, self._total_s
        round_s = min(FAULT_S, total_s / 2 / (len(FAULTS) + 1))
        check_at_s = state.elapsed_s + round_s / 2
        while state.elapsed_s < total_s:
            self._serve(check_at_s - state.elapsed_s)
            self._check()
            save_state(path, state)
            self._serve(round_s / 2)
            check_at_s = state.elapsed_s + round_s / 2
            if self._have_met and state.elapsed_s < total_s:
                number = state.count("fault_turns") - 1
                fault = FAULTS[number % len(FAULTS)]
                is_late = state.elapsed_s > total_s / 2 and number >= len(FAULTS)
                if not (fault.is_restart and is_late):
                    self._cause(fault)
        self._check()
        save_state(path, state)

    def _serve(self, seconds: float, paused: str = "") -> None:
        """Serve requests for `seconds`, without new ones while an engine is `paused`: its scheduler is stopped, too."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if not paused:
                self._start_requests()
                self._abort_some()
            self._step(paused)
            self._progress("requests, aborts and faults", self._state.elapsed_s / self._total_s)

    def _step(self, paused: str = "") -> None:
        running = [each for name, each in self._pair.engines.items() if name != paused]
        for end in [each.begin(Engine.turn, TURN_S) for each in running]:
            self._record(end())
        self._state.elapsed_s = time.monotonic() - self._began_s

    def _check(self) -> None:
        """Drain the load, compare bytes, and record the memory, descriptors and threads of both engines.

        Raises:
            ResultMismatchError: see `run`.
        """
        self._drain()
        num_tokens = self._random.choice(self._pair.deployment.options.tokens)
        while not self._compare(num_tokens) and time.monotonic() < self._trouble[1]:
            pass
        self._counts.checks += 1
        for name, engine in self._pair.engines.items():
            usages = engine.call(Engine.usage)
            values = tuple(float(sum(each)) for each in zip(*usages, strict=True))
            self._state.note_usage(name, self._sides[name].lives, values)

    def _compare(self, num_tokens: int) -> bool:
        """Move one request alone, and compare all of the consumer's blocks. Returns False if the load failed, which it
        may after a fault.

        Raises:
            ResultMismatchError: see `run`.
        """
        name, request = self._allocate(num_tokens)
        transfer = request.transfer
        self._pair.prepare(transfer)
        self._start_loads({name: request})
        self._drain()
        if request.has_failed:
            return False
        try:
            self._pair.check(transfer)
        except ResultMismatchError as error:
            raise ResultMismatchError(error.message, releases=pair_of(self._releases)) from error
        return True

    def _drain(self) -> None:
        """Wait for all requests. Raises ResultMismatchError: some still hold blocks after `DRAIN_S`."""
        deadline = time.monotonic() + DRAIN_S
        while self._requests and time.monotonic() < deadline:
            self._step()
        if self._requests:
            holders = [side for request in self._requests.values() for side in request.blocks]
            raise ResultMismatchError("blocks of requests leaked", requests=Counter(holders))

    # -- load --

    def _start_requests(self) -> None:
        sizes, asked = self._pair.deployment.options.tokens, dict[str, _Request]()
        for _ in range(IN_FLIGHT - len(self._loading)):
            num_tokens = self._random.randint(1, self._random.choice(sizes))
            sides = self._sides.values()
            if any(len(side.free) < side.shape.num_blocks(num_tokens) for side in sides):
                break  # the engines would queue this request
            name, request = self._allocate(num_tokens)
            asked[name] = request
        if asked:
            self._start_loads(asked)

    def _allocate(self, num_tokens: int) -> tuple[str, _Request]:
        """Take blocks for a request on both sides. Returns its name, and the request."""
        name = f"request-{self._state.count('requests')}"
        cause, until_s = self._trouble
        request = self._requests[name] = _Request(
            num_tokens=num_tokens,
            blocks={side: each.take(num_tokens) for side, each in self._sides.items()},
            is_first=not self._have_met,
            pair=self._counts,
            cause=cause if time.monotonic() < until_s else "",
        )
        return name, request

    def _give_back(self, name: str, side: str) -> None:
        """Free the blocks of a request on a side, unless they are free."""
        if request := self._requests.get(name):
            self._sides[side].free += request.blocks.pop(side, [])
            if not request.blocks:
                del self._requests[name]

    def _start_loads(self, asked: dict[str, _Request]) -> None:
        """Offer and load requests with both engines' next steps."""
        self._pair.offer_and_want({name: each.transfer for name, each in asked.items()})
        for request in asked.values():
            request.started_s = time.perf_counter()

    def _abort_some(self) -> None:
        if (loading := self._loading) and self._random.random() < ABORT_PROBABILITY:
            name = self._random.choice(loading)
            self._state.count("aborts")
            request = self._requests[name]
            request.is_loading, request.cause = False, request.cause or "aborted"
            if not self._pair.decode.call(Engine.abort, name):
                self._give_back(name, "decode")

    def _record(self, turned: Turned) -> None:
        for name in turned.sent:
            self._give_back(name, "prefill")
        for name, error in turned.loads.items():
            request = self._requests.get(name)
            if request and error:
                self._record_failure(name, error, request)
            elif request and request.is_loading:  # else it was aborted
                self._record_arrival(request)
            if request:
                request.is_loading = False
            self._give_back(name, "decode")

    def _record_arrival(self, request: _Request) -> None:
        token_bytes = self._pair.deployment.options.model.token_bytes
        self._state.count("bytes", request.num_tokens * token_bytes)
        request.pair.served += 1
        if request.is_first and not self._have_met:
            self._have_met = True
            request.pair.met += 1
        if request.cause:
            return  # it may have arrived before the fault, unnoticed
        seconds = time.perf_counter() - request.started_s
        request.pair.samples.add(seconds, self._random)
        samples = self._state.first_samples if request.is_first else self._state.samples
        samples.add(seconds, self._random)

    def _record_failure(self, name: str, error: str, request: _Request) -> None:
        """Count a failure by its cause."""
        request.has_failed = True
        self._state.count(f"{error.partition(':')[0]}, {request.cause or 'unexplained'}")
        if not request.cause:
            request.pair.failed_unexplained += 1
            if self._state.total("failed_unexplained") <= MAX_TOLD:
                self._progress(f"{name} failed, and nothing was done to it: {error}")
        elif request.is_loading:
            request.pair.failed_explained += 1

    # -- faults --

    def _cause(self, fault: Fault) -> None:
        """Cause a fault of an engine, and undo a pause."""
        self._state.count(str(fault))
        self._progress(f"{fault.engine} is {fault.kind}")
        if fault.loses_peer:
            for name in self._loading:
                self._requests[name].cause = str(fault)
            # an engine that its peer gave up on greets again when it notices
            self._trouble = str(fault), time.monotonic() + fault.pause_s + 2 * PEER_TIMEOUT_S
        if fault.is_restart:
            self._restart(fault)
        else:
            engine = self._pair.engines[fault.engine]
            engine.pause()
            self._serve(fault.pause_s, paused=fault.engine)
            engine.resume()

    def _restart(self, fault: Fault) -> None:
        """End an engine and start it again under the same id. Its loads and leases are gone."""
        side, environment = self._sides[fault.engine], dict[str, str]()
        self._have_met = False
        if fault.kind == "killed":
            self._pair.engines[fault.engine].kill()
        if self._other is not None:
            side.release = self._state.next_release(self._releases, fault.engine)
            self._progress(f"{fault.engine} starts again: {pair_of(self._releases)} release")
            environment = {} if side.release == RELEASES[0] else self._other.environment
        self._pair.restart(fault.engine, environment)
        side.lives += 1
        for name, request in list(self._requests.items()):
            self._give_back(name, fault.engine)
            request.is_first = False  # one of its engines is gone
            request.is_loading &= fault.engine != "decode"


def run(options: SoakOptions, progress: ShowProgress) -> Iterator[CaseResult]:
    """Yield the `cases_of` the run, also if it is interrupted.

    Raises:
        ResultMismatchError: blocks leaked, or bytes are wrong.
        ConfigError: the state's file or the other release cannot be used.
    """
    deployment = Deployment(options, in_flight=IN_FLIGHT // 8)
    name = f"{options.model.name}, {deployment}"
    path = Path(options.state) if options.state else None
    with ExitStack() as exits:
        other = None
        if options.other_release:
            other = exits.enter_context(open_release(Path(options.other_release)))
            name += f", beside {other}"
        state = load_state(path, name)
        begun = f", {state.elapsed_s:.0f} s of them done before" if state.num_begun else ""
        progress(f"{options.minutes:g} minutes{begun}, {name}")
        pair = exits.enter_context(EnginePair(deployment, SETTINGS))
        soak = Soak(pair, state, options.minutes * 60, progress, other)
        state.num_begun += 1
        try:
            soak.run(path)
        except KeyboardInterrupt:
            save_state(path, state)
            yield from cases_of(name, state)
            raise
    yield from cases_of(name, state)
