"""What a benchmark is given, and what it returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np

from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.config import ConnectorConfig
from kvconnector.errors import ConfigError

PathMode = Literal["", "auto", "always", "never"]
ContenderKind = Literal["ours", "variant", "peer", "naive", "limit"]
SEED = 1
"""Of contents, block ids and request lengths."""
WARMUP = 3
"""Untimed repetitions before the timed ones."""
TIMEOUT_S = 120.0
"""For one transfer, and for a peer that is stopped while others are timed."""
TUNING = ("KVCONNECTOR_STAGING_", "KVCONNECTOR_PATHS_", "KVCONNECTOR_UCX")
"""Environment variables that a benchmark heeds, as an engine does."""

Settings: TypeAlias = Mapping[str, Mapping[str, object]]
"""Of `ConnectorConfig`, by section."""


class TransportOptions(msgspec.Struct, frozen=True):
    """How bytes may travel: `UCX_TLS`, ours and the peer's, and our `paths.direct`. Empty leaves the choice open.

    Raises:
        ConfigError: there is no such setting of `paths.direct`.
    """

    tls: str = ""
    direct: PathMode = ""

    def __post_init__(self) -> None:
        if self.direct not in get_args(PathMode):
            raise ConfigError("direct is auto, always or never", direct=self.direct)

    @property
    def share_memory(self) -> bool:
        """Whether host memory may go from process to process without a socket."""
        return not self.tls or not set(self.tls.split(",")) <= {"tcp", "self"}

    def settings(self) -> dict[str, dict[str, str]]:
        """Settings by section. Who asks for sockets alone wants no reads of another process's memory either."""
        direct = self.direct or ("" if self.share_memory else "never")
        return {
            "ucx": {"tls": self.tls} if self.tls else {},
            "paths": {"direct": direct} if direct else {},
        }


class Gpus(msgspec.Struct, frozen=True):
    """On which GPUs the ranks of each engine take turns; none leaves it to their number."""

    prefill: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line's options. Empty or zero leaves the choice to the benchmark.

    Raises:
        ConfigError: a value is out of range.
    """

    model: ModelShape
    tokens: tuple[int, ...] = ()
    scattered: bool = True
    prefill: EngineShape | None = None
    decode: EngineShape | None = None
    device: str = "cpu"
    gpus: Gpus = Gpus()
    transport: TransportOptions = TransportOptions()
    peer: str = ""
    decode_load: bool = False
    iterations: int = 0
    minutes: float = 1.0

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError("device is cpu or cuda", device=self.device)
        if self.peer not in ("", "nixl"):
            raise ConfigError("no such peer", peer=self.peer, known=["nixl"])
        if self.iterations < 0 or not 0 < self.minutes < 1e5:
            raise ConfigError(
                "iterations must not be negative, minutes must be positive",
                iterations=self.iterations,
                minutes=self.minutes,
            )

    @property
    def one_device(self) -> str:
        """Where a benchmark of one device runs."""
        return "cpu" if self.device == "cpu" else "cuda:0"

    def config(
        self, engine_id: str, role: str, settings: Settings = MappingProxyType({})
    ) -> ConnectorConfig:
        """The connector's configuration for one engine on this host: the environment's tuning, over it that of the
        options. `settings` have the last word.

        Raises:
            ConfigError: settings that do not exist or do not fit together.
        """
        tuning = {name: value for name, value in os.environ.items() if name.startswith(TUNING)}
        base = {
            "engine_id": engine_id,
            "role": role,
            "control": {"insecure": True},
            "peer": {"timeout_s": TIMEOUT_S},
            "lease": {"duration_s": TIMEOUT_S},
        }
        tuned = msgspec.to_builtins(ConnectorConfig.from_env(tuning, base))
        for section, changes in (*self.transport.settings().items(), *settings.items()):
            tuned[section].update(changes)
        return ConnectorConfig.from_mapping(tuned)


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one contender for one case, in seconds.

    `nbytes` is the payload of one time, the mean where lengths differ, 0 where bytes are no matter; `batch` is the
    number of operations in one time. `figures` are what else was found: seconds where a name ends in `_s`, else plain
    numbers and ratios.
    """

    contender: str
    kind: ContenderKind
    samples_s: tuple[float, ...]
    nbytes: int = 0
    batch: int = 1
    figures: dict[str, float] = {}

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
        return next(each for each in self.measurements if each.kind == "ours")

    def fastest(self, kind: ContenderKind) -> Measurement | None:
        """The contender of this kind with the shortest median."""
        found = [each for each in self.measurements if each.kind == kind]
        return min(found, key=lambda each: each.p50_s, default=None)

    def first(self, kind: ContenderKind) -> Measurement | None:
        """The contender of this kind that comes first: of a peer, its default."""
        return next((each for each in self.measurements if each.kind == kind), None)

    def ratios(self) -> dict[str, float]:
        """How many times as fast we are as the peer's default, and as the fastest of each other kind, by name."""
        others = {"peer_default": self.first("peer")}
        others |= {kind: self.fastest(kind) for kind in ("peer", "naive", "limit")}
        ours_s = self.ours.p50_s
        return {name: each.p50_s / ours_s for name, each in others.items() if each is not None}


Progress: TypeAlias = Callable[[str], None]
"""Told in a few words what a benchmark does next."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark. `run` raises `ResultMismatchError` rather than report a time for a wrong result.

    `headline` sums the cases up in a line, where ratios to a peer, a naive way or a limit do not. `has_peers` says that
    it can be run beside a peer.
    """

    name: str
    description: str
    run: Callable[[BenchOptions, Progress], Sequence[CaseResult]]
    headline: Callable[[Sequence[CaseResult]], str] | None = None
    has_peers: bool = False
