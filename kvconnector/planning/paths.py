"""Which of two paths each read from one producer takes, by what they are expected to cost and by what reads took. Pure.

The first expectations are of a probe, which may have met a busy machine. So every read that ends corrects its path's,
and the path that is not taken is tried once in a while, ever more rarely.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal, TypeAlias

import msgspec

from kvconnector.errors import LocalError
from kvconnector.planning.cost import PathCost

Path: TypeAlias = Literal["direct", "packed"]

PACKED_MUST_SAVE = 1.5
"""A direct read is made even if it may take so many times as long: a packed one also takes time of the producer's, and
memory bandwidth for two copies more."""
WINDOW = 7
"""Reads of a path whose median counts: fewer than half of them may be disturbed."""
FIRST_TRIAL: dict[Path, int] = {"direct": 8, "packed": 64}
LAST_PAUSE = 256
"""The path that seems worse is tried by the last of so many reads; then of twice as many, up to so many. Packed ones
take time of the producer's as well, so there is less haste."""
_MIB = 1 << 20
_MIN_S = 1e-9


class ReadSize(msgspec.Struct, frozen=True):
    """What a read's time depends on: its bytes, those that are read for them on the direct path, and contiguous runs.

    Raises:
        LocalError: no bytes, or no runs.
    """

    nbytes: int
    read_bytes: int
    num_runs: int

    def __post_init__(self) -> None:
        if min(self.nbytes, self.read_bytes, self.num_runs) < 1:
            raise LocalError("a read brings something", size=self)


class Choice(msgspec.Struct, frozen=True):
    """The path of a read of `size`, and what it is expected to take on either. `is_trial`: it seems the worse one."""

    path: Path
    size: ReadSize
    direct_s: float
    packed_s: float
    is_trial: bool

    @property
    def saved_s(self) -> float:
        """How many seconds less than on the other path it is expected to take."""
        saved_s = self.packed_s - self.direct_s
        return saved_s if self.path == "direct" else -saved_s

    @property
    def reason(self) -> str:
        """Why, in words for the log."""
        return (
            f"{self.size.nbytes / _MIB:.1f} MiB in {self.size.num_runs} runs: "
            f"{self.direct_s * 1e3:.2f} ms directly, {self.packed_s * 1e3:.2f} ms packed"
            f"{', tried' if self.is_trial else ''}"
        )


class LearntCost:
    """What reads of a path cost: a first expectation, and how many times that the latest ones took.

    That factor is the median of up to `WINDOW` reads that were expected to take about as long, by a factor of four;
    where there are none, of those that come closest.
    """

    def __init__(self, first: PathCost) -> None:
        self._first = first
        self._factors: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def __str__(self) -> str:
        return str(self._first)

    @property
    def is_observed(self) -> bool:
        """Whether a read has ended on this path."""
        return bool(self._medians)

    def expected_s(self, nbytes: int, num_runs: int) -> float:
        """What a read of so much will take."""
        first_s = self._first.seconds(nbytes, num_runs)
        return first_s * self._factor(first_s)

    def delay_s(self, nbytes: int, num_runs: int) -> float:
        """How much longer than at first a read of so much is expected to take; not less than 0."""
        first_s = self._first.seconds(nbytes, num_runs)
        return first_s * max(0.0, self._factor(first_s) - 1.0)

    def _factor(self, first_s: float) -> float:
        if not self._medians:
            return 1.0
        size = _size_of(first_s)
        if size not in self._medians:
            size = min(self._medians, key=lambda known: (abs(known - size), known))
        return self._medians[size]

    def observe(self, nbytes: int, num_runs: int, seconds: float) -> None:
        """A read of so much took `seconds`, which are more than 0."""
        first_s = self._first.seconds(nbytes, num_runs)
        if first_s > 0.0:
            size = _size_of(first_s)
            factors = self._factors.setdefault(size, deque(maxlen=WINDOW))
            factors.append(seconds / first_s)
            self._medians[size] = statistics.median_low(factors)


def _size_of(seconds: float) -> int:
    return round(math.log(max(seconds, _MIN_S), 4))


class PathChooser:
    """The choice for the reads from one producer. `direct` and `packed` are what is expected of reads at first.

    As long as no packed read has ended, what delays direct ones is taken to delay those as well: most often it is other
    work for the same cores. So packed ones are only tried if direct ones take clearly longer than those were at first
    expected to take; direct ones are tried whenever they are not chosen.
    """

    def __init__(self, direct: PathCost, packed: PathCost) -> None:
        self._costs: dict[Path, LearntCost] = {
            "direct": LearntCost(direct),
            "packed": LearntCost(packed),
        }
        self._pauses = dict(FIRST_TRIAL)
        self._until_trial = dict(FIRST_TRIAL)

    def __str__(self) -> str:
        return f"{self._costs['direct']} directly, {self._costs['packed']} packed"

    def choose(self, size: ReadSize) -> Choice:
        """The path of the next read."""
        direct, packed = self._costs["direct"], self._costs["packed"]
        direct_s = direct.expected_s(size.read_bytes, size.num_runs)
        packed_s = at_best_s = packed.expected_s(size.nbytes, size.num_runs)
        if not packed.is_observed:
            packed_s += direct.delay_s(size.read_bytes, size.num_runs)
        is_direct = direct_s <= PACKED_MUST_SAVE * packed_s
        is_sure = is_direct and direct_s <= PACKED_MUST_SAVE * at_best_s
        is_trial = not is_sure and self._is_time_for("packed" if is_direct else "direct")
        path: Path = "direct" if is_direct != is_trial else "packed"
        return Choice(path, size, direct_s, packed_s, is_trial)

    def observe(self, path: Path, size: ReadSize, seconds: float) -> None:
        """A read on `path` took `seconds`."""
        nbytes = size.read_bytes if path == "direct" else size.nbytes
        self._costs[path].observe(nbytes, size.num_runs, max(seconds, _MIN_S))

    def _is_time_for(self, path: Path) -> bool:
        """Whether the path that seems worse is to be tried."""
        self._until_trial[path] -= 1
        if self._until_trial[path]:
            return False
        self._pauses[path] = min(2 * self._pauses[path], LAST_PAUSE)
        self._until_trial[path] = self._pauses[path]
        return True
