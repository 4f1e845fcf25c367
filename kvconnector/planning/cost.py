"""What a read costs on a path: a linear model of its time. Pure.

A path's time is a fixed part, a part by bytes, and a part by *runs*: stretches of memory that are contiguous on both
sides. A direct path's are probed, on CPUs when a worker starts and on GPUs when a peer is met; a packed path's are
figures that were measured with it, or follow from the probe. `paths` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvconnector.errors import LocalError


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


# 1 and 4 GiB took 4.13 and 13.7 ms (`kvconnector bench transfer --device cuda --tokens 8192,32768 --direct never`,
# median of 10; two H200s over NVLink, commit 0da6293): 0.9 ms beside the bytes, of which a direct read has 0.4, too.
PACKED_ON_CUDA = PathCost(fixed_s=0.5e-3, per_byte_s=1 / 337e9, per_run_s=0.0)


# On CPUs the same cores make the packed path's copies, so its bandwidth follows from that of reading. Idle cores work
# on several copies of a read at a time, busy ones do not: 32 MiB took 50.5 ms packed and 13.7 directly, 2 MiB 3.8 and
# 2.4 ms (`kvconnector bench transfer --device cpu --tokens 16,256 --direct never` and `always`, median of 12; 2-core
# Xeon VM under other load, commit 28650b0).
PACKED_COPIES = 2.0
PACKED_EXTRA_S = 1e-3


def packed_on_cpu(reading: PathCost) -> PathCost:
    """What packed reads between two processes of a host cost where reading the other one's memory costs `reading`."""
    fixed_s, per_byte_s = reading.fixed_s + PACKED_EXTRA_S, PACKED_COPIES * reading.per_byte_s
    return PathCost(fixed_s, per_byte_s, per_run_s=0.0)
