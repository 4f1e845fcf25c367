"""The findings of a `soak`, kept in a file, so that a run of days can resume after an interruption."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from kvconnector.bench import file_errors
from kvconnector.bench.options import SEED
from kvconnector.bench.results import CaseResult, ContenderKind, Measurement
from kvconnector.errors import ConfigError

MAX_SAMPLES = 20_000
"""Number of times that are kept, each drawn with equal probability."""
KEPT_POINTS = 1000
"""Most points of an engine's use of memory, descriptors and threads; beyond this, every second one is dropped."""
SETTLE_SHARE = 0.25
"""The share of an engine's life in which pools are mapped and allocators fill."""
MEASURES = ("own_mib", "shared_mib", "descriptors", "threads")
"""Shared memory is that of pools: a consumer's grows until it has read all of its producer's."""


RELEASES = ("this", "other")


def pair_of(releases: Mapping[str, str]) -> str:
    """Name the releases of both engines, as in "this to other"."""
    return f"{releases['prefill']} to {releases['decode']}"


class Samples(msgspec.Struct):
    """Seconds of `num_seen` requests, of which at most `MAX_SAMPLES` are kept, each with equal probability."""

    num_seen: int = 0
    kept_s: list[float] = []
    longest_s: float = 0.0

    def add(self, seconds: float, rng: random.Random) -> None:
        self.num_seen += 1
        self.longest_s = max(self.longest_s, seconds)
        if len(self.kept_s) < MAX_SAMPLES:
            self.kept_s.append(seconds)
        elif (place := rng.randrange(self.num_seen)) < MAX_SAMPLES:
            self.kept_s[place] = seconds


class UsagePoint(msgspec.Struct, frozen=True):
    """The `MEASURES` of all processes of an engine together, `at_s` into the run; `life` counts the engine's starts."""

    at_s: float
    life: int
    values: tuple[float, ...]


class PairCounts(msgspec.Struct):
    """Counts of requests between engines of two releases. `met` counts the starts after which a first request arrived.
    Failures are explained by a fault or not. Each of `checks` compared bytes.
    """

    met: int = 0
    served: int = 0
    failed_explained: int = 0
    failed_unexplained: int = 0
    checks: int = 0
    samples: Samples = msgspec.field(default_factory=Samples)


class SoakState(msgspec.Struct):
    """One run, over all its interruptions, which `elapsed_s` leaves out. `of` names what it runs. `pairs` are by the
    releases of both engines, see `pair_of`.
    """

    of: str
    elapsed_s: float = 0.0
    num_begun: int = 0
    counts: dict[str, int] = {}
    samples: Samples = msgspec.field(default_factory=Samples)
    first_samples: Samples = msgspec.field(default_factory=Samples)
    usage: dict[str, list[UsagePoint]] = {}
    pairs: dict[str, PairCounts] = {}

    def pair(self, name: str) -> PairCounts:
        """Return the counts of a pair of releases, to be increased."""
        return self.pairs.setdefault(name, PairCounts())

    def next_release(self, releases: Mapping[str, str], engine: str) -> str:
        """Return the release in which to start an engine again: the one that has met the other engine's release less
        often, or the present one if both have met it equally often. `releases` are both engines' now.
        """
        choices = sorted(RELEASES, key=lambda release: release != releases[engine])
        return min(choices, key=lambda each: self.pair(pair_of({**releases, engine: each})).met)

    def total(self, name: str) -> int:
        """Return the sum of a count of `PairCounts` over all pairs."""
        return sum(getattr(pair, name) for pair in self.pairs.values())

    def count(self, name: str, number: int = 1) -> int:
        """Add to a count. Returns the new one."""
        self.counts[name] = self.counts.get(name, 0) + number
        return self.counts[name]

    def note_usage(self, engine: str, life: int, values: tuple[float, ...]) -> None:
        """Add a point of an engine's use."""
        points = self.usage.setdefault(engine, [])
        points.append(UsagePoint(self.elapsed_s, life, values))
        if len(points) > KEPT_POINTS:
            del points[1::2]

    def growth(self) -> dict[str, float]:
        """Return figures of the longest life of each engine, after it settled: its length, its use at the beginning and
        at the end (medians of the first and the last quarter), and the growth of its own memory, in MiB an hour.
        """
        found: dict[str, float] = {}
        for engine, points in self.usage.items():
            (life, _), *_ = Counter(point.life for point in points).most_common(1)
            lived = [point for point in points if point.life == life]
            settled = lived[int(len(lived) * SETTLE_SHARE) :]
            values = np.array([point.values for point in settled])
            quarter = max(1, len(settled) // 4)
            hours = np.array([point.at_s for point in settled]) / 3600
            found[f"{engine}_watched_s"] = settled[-1].at_s - settled[0].at_s
            for index, measure in enumerate(MEASURES):
                found[f"{engine}_{measure}_first"] = float(np.median(values[:quarter, index]))
                found[f"{engine}_{measure}_last"] = float(np.median(values[-quarter:, index]))
            if np.ptp(hours) > 0:
                slope = np.polyfit(hours - hours[0], values[:, 0], 1)[0]
                found[f"{engine}_own_mib_per_hour"] = float(slope)
        return found


def load_state(path: Path | None, of: str) -> SoakState:
    """Return the state to resume from, a new one if there is no file.

    Raises:
        ConfigError: it cannot be read, or is of another run.
    """
    if path is None or not path.exists():
        return SoakState(of=of)
    with file_errors("this is no soak's state", path):
        state = msgspec.json.decode(path.read_bytes(), type=SoakState)
    if state.of != of:
        raise ConfigError(
            "this state is of another soak: name another file",
            path=str(path),
            found=state.of,
            wanted=of,
        )
    return state


def save_state(path: Path | None, state: SoakState) -> None:
    """Replace the file atomically: a run that is killed here leaves the previous state.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with file_errors("cannot write the soak's state", path):
        partial.write_bytes(msgspec.json.encode(state))
        partial.replace(path)


def rng_of(state: SoakState) -> random.Random:
    """Return a run's random numbers, which differ after each interruption."""
    return random.Random(f"{SEED} {state.num_begun}")


def cases_of(name: str, state: SoakState) -> list[CaseResult]:
    """Return the cases of a run: one of all requests, and one by pairs of releases if several have met."""
    unexplained = state.total("failed_unexplained")
    counts = {
        **state.counts,
        "unexplained": unexplained,
        "failed": unexplained + state.total("failed_explained"),
        "checks": state.total("checks"),
    }
    figures = {
        "unexplained": 0.0,
        **{each: float(number) for each, number in sorted(counts.items())},
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
    cases = [CaseResult(f"{state.elapsed_s / 60:.1f} minutes, {name}", (ours,))]
    if len(state.pairs) > 1:  # the cases of two releases
        names = [pair_of({"prefill": p, "decode": d}) for p in RELEASES for d in RELEASES]
        measured = tuple(_measured(each, state.pair(each)) for each in names)
        # a figure that is the same for all is not in the table
        notes = (f"{figures['unexplained']:.0f} failures are unexplained",)
        cases.append(CaseResult("by the releases of prefill and decode engine", measured, notes))
    return cases


def _measured(name: str, pair: PairCounts) -> Measurement:
    kind: ContenderKind = "variant" if RELEASES[1] in name else "ours"
    counts = msgspec.structs.asdict(pair)
    samples = counts.pop("samples")
    figures = {**counts, "longest_s": samples.longest_s}
    return Measurement(name, kind, tuple(samples.kept_s), figures=figures)
