"""What a benchmark is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.config import ConnectorConfig
from kvconnector.errors import ConfigError, KVConnectorError

PeerName = Literal["", "nixl", "mooncake"]
Part = Literal["ours", "variant", "peer", "naive", "limit"]


class ResultMismatchError(KVConnectorError):
    """A benchmark's result is wrong, so it reports no time."""


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `ConnectorConfig.staging`; zero leaves one as it is."""

    chunk_bytes: int = 0
    budget_bytes: int = 0
    window: int = 0
    copy_threads: int = 0

    def settings(self) -> dict[str, int]:
        """Those that were asked for."""
        asked: dict[str, int] = msgspec.structs.asdict(self)
        return {name: value for name, value in asked.items() if value}


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line's options. Empty or zero leaves the choice to the benchmark.

    Raises:
        ConfigError: a value is out of range, or the device is neither "cpu" nor "cuda".
    """

    model: ModelShape
    tokens: tuple[int, ...] = ()
    scattered: bool = True
    prefill: EngineShape | None = None
    decode: EngineShape | None = None
    device: str = "cpu"
    tls: str = ""
    staging: Staging = Staging()
    peer: PeerName = ""
    peer_site: str = ""
    iterations: int = 0
    warmup: int = 3
    seed: int = 1
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError("device is cpu or cuda", device=self.device)
        if min(self.iterations, self.warmup) < 0 or self.timeout_s <= 0:
            raise ConfigError(
                "iterations and warmup must not be negative, timeout must be positive",
                iterations=self.iterations,
                warmup=self.warmup,
                timeout_s=self.timeout_s,
            )

    def config(
        self, engine_id: str, role: str, staging: Mapping[str, object] = MappingProxyType({})
    ) -> ConnectorConfig:
        """The connector's configuration for one engine of the benchmark, on this host; `staging` has the last word.

        Raises:
            ConfigError: staging settings that do not fit together.
        """
        return ConnectorConfig.from_mapping(
            {
                "engine_id": engine_id,
                "role": role,
                "control": {"insecure": True},
                "staging": {**self.staging.settings(), **staging},
                "ucx": {"tls": self.tls},
            }
        )


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one contender for one case, in seconds.

    `nbytes` is the payload of one time, 0 where bytes are no matter; `batch` is the number of operations in one time.
    """

    contender: str
    part: Part
    samples_s: tuple[float, ...]
    nbytes: int = 0
    batch: int = 1

    @property
    def p50_s(self) -> float:
        """The median of one operation."""
        return float(np.percentile(self.samples_s, 50)) / self.batch

    @property
    def p99_s(self) -> float:
        """The 99th percentile of one operation, interpolated where there are fewer than a hundred samples."""
        return float(np.percentile(self.samples_s, 99)) / self.batch

    @property
    def gigabytes_per_s(self) -> float | None:
        """Payload by the median, in 10^9 bytes a second."""
        return self.nbytes / self.p50_s / 1e9 if self.nbytes else None


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """All contenders of one case. Exactly one is ours."""

    case: str
    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()

    @property
    def ours(self) -> Measurement:
        """Our measurement."""
        return next(each for each in self.measurements if each.part == "ours")

    def fastest(self, part: Part) -> Measurement | None:
        """The contender of this part with the shortest median."""
        found = [each for each in self.measurements if each.part == part]
        return min(found, key=lambda each: each.p50_s, default=None)

    def ratio_to(self, part: Part) -> float | None:
        """How many times as fast as the fastest of that part we are; None without one."""
        other = self.fastest(part)
        return other.p50_s / self.ours.p50_s if other is not None else None


Progress: TypeAlias = Callable[[str], None]
"""Told in a few words what a benchmark does next."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """An entry of the registry. `run` raises `ResultMismatchError` rather than report a time for a wrong result."""

    name: str
    description: str
    run: Callable[[BenchOptions, Progress], Sequence[CaseResult]]
