"""What a benchmark is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np

from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.config import ConnectorConfig
from kvconnector.errors import ConfigError, KVConnectorError

When = Literal["", "auto", "always", "never"]
PeerName = Literal["", "nixl", "mooncake"]
Part = Literal["ours", "variant", "peer", "naive", "limit"]


class ResultMismatchError(KVConnectorError):
    """A benchmark's result is wrong, so it reports no time."""


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `ConnectorConfig.staging`; zero leaves one as it is."""

    chunk_bytes: int = 0
    budget_bytes: int = 0
    window: int = 0

    def settings(self) -> dict[str, int]:
        """Those that were asked for."""
        asked: dict[str, int] = msgspec.structs.asdict(self)
        return {name: value for name, value in asked.items() if value}


class Ways(msgspec.Struct, frozen=True):
    """How bytes may travel: `UCX_TLS`, ours and the peer's, and our `paths`. Empty leaves the choice open.

    Raises:
        ConfigError: there is no such setting of `paths`.
    """

    tls: str = ""
    direct: When = ""

    def __post_init__(self) -> None:
        if self.direct not in get_args(When):
            raise ConfigError("direct is auto, always or never", direct=self.direct)

    @property
    def share_memory(self) -> bool:
        """Whether the transports let host memory go from process to process without a socket."""
        return not self.tls or not set(self.tls.split(",")) <= {"tcp", "self"}

    def paths(self) -> dict[str, str]:
        """Settings of `ConnectorConfig.paths`: who asks for sockets alone wants no reads of another process's memory
        either.
        """
        return {"direct": self.direct or ("auto" if self.share_memory else "never")}


class Peer(msgspec.Struct, frozen=True):
    """Whom to compare with, and the directory to import it from; empty for nobody, and for where it is installed."""

    name: PeerName = ""
    site: str = ""


class Gpus(msgspec.Struct, frozen=True):
    """On which GPUs the ranks of each engine take turns; none leaves it to their number."""

    prefill: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line's options. Empty or zero leaves the choice to the benchmark.

    `decode_caps` are the caps on copy programs to try beside a decode load; None is no decode load.

    Raises:
        ConfigError: a value is out of range, or the device is neither "cpu" nor "cuda".
    """

    model: ModelShape
    tokens: tuple[int, ...] = ()
    scattered: bool = True
    prefill: EngineShape | None = None
    decode: EngineShape | None = None
    device: str = "cpu"
    ways: Ways = Ways()
    staging: Staging = Staging()
    peer: Peer = Peer()
    gpus: Gpus = Gpus()
    decode_caps: tuple[int, ...] | None = None
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
                "paths": self.ways.paths(),
                "ucx": {"tls": self.ways.tls},
            }
        )


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one contender for one case, in seconds.

    `nbytes` is the payload of one time, 0 where bytes are no matter; `batch` is the number of operations in one time.
    `figures` are what else was found: seconds where a name ends in `_s`, else plain numbers and ratios.
    """

    contender: str
    part: Part
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
        return next(each for each in self.measurements if each.part == "ours")

    def fastest(self, part: Part) -> Measurement | None:
        """The contender of this part with the shortest median."""
        found = [each for each in self.measurements if each.part == part]
        return min(found, key=lambda each: each.p50_s, default=None)

    def first(self, part: Part) -> Measurement | None:
        """The contender of this part that comes first: of a peer, its default."""
        return next((each for each in self.measurements if each.part == part), None)

    def ratios(self) -> dict[str, float]:
        """How many times as fast we are as the peer's default, and as the fastest of each other kind, by name."""
        others = {"peer_default": self.first("peer")}
        others |= {part: self.fastest(part) for part in ("peer", "naive", "limit")}
        ours_s = self.ours.p50_s
        return {name: each.p50_s / ours_s for name, each in others.items() if each is not None}


Progress: TypeAlias = Callable[[str], None]
"""Told in a few words what a benchmark does next."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """An entry of the registry. `run` raises `ResultMismatchError` rather than report a time for a wrong result.

    `headline` sums the cases up in a line, where ratios to a peer, a naive way or a limit do not. `has_peers` says that
    it can be run beside a peer.
    """

    name: str
    description: str
    run: Callable[[BenchOptions, Progress], Sequence[CaseResult]]
    headline: Callable[[Sequence[CaseResult]], str] | None = None
    has_peers: bool = False
