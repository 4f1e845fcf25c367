"""KV-cache transfer between prefill and decode engines that are split differently.

    import kvconnector as kvc

has everything that the author of an engine needs; `examples/embed.py` shows all of it in use. A name loads its modules
when it is first used: importing the package imports neither torch nor UCX.

- `Config`: the settings of one engine, from `Config.from_mapping` or `Config.from_env`.
- `Worker`: one per rank. `register` the caches, then call `start_step` and `poll` once per engine step.
- `Scheduler`: one per engine. It offers finished prompts, matches and loads them, and makes each step's orders.
- `Rank`, `view_of`, `cache_group`: a rank's place, and its tensors as views and cache groups.
- `StepMetadata`, `WorkerMetadata`, `WorkerOutput`: messages between the two halves, which the engine carries.
- `KVOutputAggregator`: merges the outputs of an engine's workers; a request is finished when all of them report it.
- `TpKVTopology`: which rank holds what, and which ranks it reads from.
- `errors`: every exception, all derived from `KVConnectorError`.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers know it by its name; `typing` alone would take longer than all of this import

if TYPE_CHECKING:
    from typing import Any

    from kvconnector import errors
    from kvconnector._version import __version__
    from kvconnector.config import ConnectorConfig as Config
    from kvconnector.errors import KVConnectorError
    from kvconnector.ids import Rank
    from kvconnector.runtime import (
        Scheduler,
        StepMetadata,
        Worker,
        WorkerMetadata,
        WorkerOutput,
        cache_group,
        view_of,
    )
    from kvconnector.session import KVOutputAggregator
    from kvconnector.topology import TpKVTopology

__all__ = [
    "Config",
    "KVConnectorError",
    "KVOutputAggregator",
    "Rank",
    "Scheduler",
    "StepMetadata",
    "TpKVTopology",
    "Worker",
    "WorkerMetadata",
    "WorkerOutput",
    "__version__",
    "cache_group",
    "errors",
    "view_of",
]
_HOMES = (
    "errors",
    "ids",
    "config",
    "topology",
    "session",
    "runtime",
)  # the slowest to import comes last


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (
        name == "__version__"
    ):  # it may be read from files, which takes as long as the rest of this import
        return import_module(f"{__name__}._version").__version__
    if name == "errors":
        return import_module(f"{__name__}.errors")
    modules = (import_module(f"{__name__}.{home}") for home in _HOMES)
    name_there = "ConnectorConfig" if name == "Config" else name
    return next(getattr(each, name_there) for each in modules if hasattr(each, name_there))


def __dir__() -> list[str]:
    return __all__
