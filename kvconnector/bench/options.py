"""Options of benchmarks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import msgspec

from kvconnector.bench.shapes import MODELS, EngineShape, ModelShape
from kvconnector.bench.sizes import parse_numbers
from kvconnector.config import ConnectorConfig, ControlConfig
from kvconnector.errors import ConfigError

SEED = 1
"""Seed of contents, block ids and request lengths."""
WARMUP = 3
"""Untimed repetitions before the timed ones."""
TIMEOUT_S = 120.0
"""Seconds for one transfer, and for a peer that is stopped while others are timed."""
TUNING = (
    "KVCONNECTOR_STAGING_",
    "KVCONNECTOR_PATHS_",
    "KVCONNECTOR_UCX_",
    "KVCONNECTOR_CONTROL_OVER_UCX",
)
"""Prefixes of environment variables that count for a benchmark's engines."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

SettingsByPart: TypeAlias = Mapping[str, Mapping[str, object]]
"""Settings of `ConnectorConfig`, by section."""


class Compute(NamedTuple):
    """A producer's tokens a second, tokens in a step, and the numbers of prompts that share them at once."""

    rate: int = 8000
    step: int = 2048
    prompts: tuple[int, ...] = (1,)

    @classmethod
    def parse(cls, text: str) -> Compute:
        """Parse "8000", "8000,2048" or "8000,2048,1,8". Raises ConfigError: something else, or a zero."""
        numbers = parse_numbers(text)
        if 0 in numbers:
            raise ConfigError("expected positive numbers", names=cls._fields, given=text)
        return msgspec.convert((*numbers[:2], numbers[2:])[: len(numbers)], cls)


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line's options; a benchmark uses some of them, and may have more in a class of its own.

    `gpus`: those on which the producer's, and the consumer's, ranks take turns. `tls` is UCX_TLS, ours and the peer's.
    `connect`: where a `bench serve` runs the producer, as "HOST:PORT" or "HOST:PORT,KEY".
    Raises ConfigError: a value is out of range.
    """

    model: ModelShape = MODELS["llama-3.1-8b"]
    tokens: tuple[int, ...] = (2048,)
    scattered: bool = True
    prefill: EngineShape = EngineShape()
    decode: EngineShape = EngineShape()
    device: str = "cpu"
    gpus: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    tls: str = ""
    peer: str = ""
    iterations: int = 10
    compute: Compute = Compute()
    connect: str = ""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError("a device must be cpu or cuda", device=self.device)
        if self.device == "cuda" and importlib.util.find_spec("torch") is None:
            raise ConfigError('caches on GPUs require torch: pip install "kvconnector[torch]"')
        if not set(self.peers) <= {"nixl", "mooncake"}:
            raise ConfigError("--peer must be nixl, mooncake or both", peer=self.peer)

    @property
    def peers(self) -> list[str]:
        """The libraries to compare with."""
        return [name for name in self.peer.split(",") if name]

    @property
    def share_memory(self) -> bool:
        """Returns True if processes may exchange host memory without a socket."""
        return not self.tls or not set(self.tls.split(",")) <= {"tcp", "self"}

    def config(
        self, engine_id: str, role: str, settings: SettingsByPart = MappingProxyType({})
    ) -> ConnectorConfig:
        """Return the connector's configuration for one engine: the environment's tuning, overridden by the options, and
        both by `settings`. Raises ConfigError: settings do not exist, or do not fit together.
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
        tuned["ucx"].update({"tls": self.tls} if self.tls else {})
        # with sockets only, an engine must not read another process's memory either
        tuned["paths"].update({} if self.share_memory else {"direct": "never"})
        for section, changes in settings.items():
            tuned[section].update(changes)
        return ConnectorConfig.from_mapping(tuned)


def control_settings() -> ControlConfig:
    """Return the control channel's settings for measurements between hosts: the environment's `KVCONNECTOR_CONTROL_*`,
    as in an engine; without any, loopback without keys. Raises ConfigError: settings do not exist, or do not fit
    together.
    """
    named = {
        name: value for name, value in os.environ.items() if name.startswith("KVCONNECTOR_CONTROL_")
    }
    base = {"engine_id": "bench", "control": {} if named else {"insecure": True}}
    return ConnectorConfig.from_env(named, base).control
