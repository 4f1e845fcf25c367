"""Which of two paths a read takes: the one that a linear model of its time says is shorter. Pure.

A path's time is a fixed part, a part by bytes, and a part by *runs*: stretches of memory that are contiguous on both
sides. The packed path's are figures that were measured with it; a direct path's are probed when a peer is met.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvconnector.errors import LocalError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Probe:
    """One timed copy: `nbytes` in `num_runs` runs took `seconds`."""

    nbytes: int
    num_runs: int
    seconds: float

    def __post_init__(self) -> None:
        if self.nbytes < 1 or not 1 <= self.num_runs <= self.nbytes or self.seconds <= 0:
            raise LocalError("a probe copies something and takes time", probe=self)


@dataclass(frozen=True, slots=True)
class PathCost:
    """Seconds of a read: `fixed_s`, and so much for each byte and each run.

    Raises:
        LocalError: a negative or infinite share.
    """

    fixed_s: float
    per_byte_s: float
    per_run_s: float

    def __post_init__(self) -> None:
        if not all(0 <= share < float("inf") for share in self.shares):
            raise LocalError("a path's costs are not negative and finite", cost=self)

    @property
    def shares(self) -> tuple[float, float, float]:
        """The three parts, in order."""
        return (self.fixed_s, self.per_byte_s, self.per_run_s)

    def seconds(self, nbytes: int, num_runs: int) -> float:
        """What a read of `nbytes` in `num_runs` runs is expected to take."""
        return self.fixed_s + nbytes * self.per_byte_s + num_runs * self.per_run_s

    @classmethod
    def fit(cls, smallest: Probe, longest: Probe, scattered: Probe) -> PathCost:
        """From three probes: little in one run, much in one run, and much in many.

        Noise never makes a share negative: what a probe took less than the shares found before explain is zero.
        """
        fixed_s = smallest.seconds
        per_byte_s = max(0.0, longest.seconds - fixed_s) / longest.nbytes
        rest_s = scattered.seconds - fixed_s - scattered.nbytes * per_byte_s
        return cls(fixed_s, per_byte_s, max(0.0, rest_s) / scattered.num_runs)

    def __str__(self) -> str:
        gigabytes = f"{1e-9 / self.per_byte_s:.1f} GB/s" if self.per_byte_s else "no time by bytes"
        return f"{gigabytes} + {self.per_run_s * 1e6:.2f} us a run + {self.fixed_s * 1e6:.0f} us"


# Measured while control messages, which a direct read has not, went over ZMQ: 2 ms beside the bytes, the slope from
# 256 MiB to 1 GiB over NVLink, and the bandwidth between CPU processes. Over UCX the 2 ms are less, so `auto` leans to
# direct reads.
PACKED_ON_CUDA = PathCost(fixed_s=2e-3, per_byte_s=1 / 326e9, per_run_s=0.0)
PACKED_ON_CPU = PathCost(fixed_s=2e-3, per_byte_s=1 / 3.49e9, per_run_s=0.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """The path of a read and why, in words for the log."""

    path: Literal["direct", "packed"]
    reason: str


def choose(nbytes: int, num_runs: int, *, direct: PathCost, packed: PathCost) -> Choice:
    """The path that is expected to bring a read sooner; direct if both take the same, for it needs no peer's work."""
    direct_s, packed_s = direct.seconds(nbytes, num_runs), packed.seconds(nbytes, num_runs)
    reason = (
        f"{nbytes / _MIB:.1f} MiB in {num_runs} runs: "
        f"{direct_s * 1e3:.2f} ms directly, {packed_s * 1e3:.2f} ms packed"
    )
    return Choice("direct" if direct_s <= packed_s else "packed", reason)
