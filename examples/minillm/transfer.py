"""Both sides of KV transfer: what an engine and its ranks ask of them, and those of an engine without any."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from kvconnector.config import ConnectorConfig
from kvconnector.session import LoadInFlight
from minillm.config import EngineConfig
from minillm.messages import EMPTY
from minillm.request_books import BlockOffer, LoadTarget

Params = dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class TransferEvents:
    """Transfers that all ranks finished since the last step. `failed_recving` is part of `finished_recving`.

    `invalid_blocks` are those that a failed load should have filled, by `block_number`; reported when the first rank
    fails. `stored` are the cache events that all ranks have reported, see `stored_event`; None where none are counted.
    """

    finished_sending: Set[str] = frozenset()
    finished_recving: Set[str] = frozenset()
    failed_recving: Mapping[str, str] = field(default_factory=dict)
    invalid_blocks: frozenset[int] = frozenset()
    stored: frozenset[str] | None = None


class LoadStats(msgspec.Struct, kw_only=True):
    """One request's load as its ranks reported it: bytes of all ranks, seconds of the slowest, paths taken.

    Of the prompt, `cached_tokens` were here already, and `loaded_tokens` were loaded: none if the load failed.
    """

    bytes: int = 0
    seconds: float = 0.0
    path: str = ""
    cached_tokens: int = 0
    loaded_tokens: int = 0

    def add(self, nbytes: int, seconds: float, path: str) -> None:
        """Merge one rank's record."""
        self.bytes += nbytes
        self.seconds = max(self.seconds, seconds)
        paths = {*self.path.split("+"), *path.split("+")} - {""}
        self.path = "+".join(sorted(paths))


class SchedulerTransfer:
    """The scheduler half of a connector, in one engine's terms. Block ids come by cache group.

    This class is for a monolithic engine, where nothing is ever remote. `ConnectorTransfer` is kvconnector's.
    """

    def __init__(self) -> None:
        self.stats: dict[str, LoadStats] = {}
        """Loads of requests that are not over; the engine takes them out."""
        self.registry = CollectorRegistry()
        """The connector's Prometheus metrics."""

    @property
    def loads_in_flight(self) -> Sequence[LoadInFlight]:
        """Progress of the loads under way."""
        return ()

    def on_new_request(self, request_id: str, params: Params) -> None:
        """A request was queued."""

    def matched_tokens(
        self, request_id: str, num_prompt: int, num_computed: int, params: Params
    ) -> tuple[int, bool]:
        """Tokens that a remote engine has beyond the `num_computed` here, and whether they arrive asynchronously."""
        return 0, False

    def is_early(self, request_id: str) -> bool:
        """Returns True if the remote engine has the request still in its queue, so that it needs no blocks here."""
        return False

    def after_alloc(
        self, request_id: str, target: LoadTarget, num_external: int, num_encoder_tokens: int
    ) -> None:
        """The request has blocks: load `num_external` tokens as far as groups lack them, and the encoder's output."""

    def is_offered(self, params: Params) -> bool:
        """Returns True if a request with these params will be read by another engine."""
        return False

    def grow(
        self, request_id: str, tables: list[list[int]], num_tokens: int, ahead_tokens: int
    ) -> None:
        """An offered request is in the next step: earlier steps computed its first `num_tokens` tokens, and this one
        computes those up to `ahead_tokens`.
        """

    def withdraw(self, request_id: str) -> None:
        """A request that is computed here has lost its blocks."""

    def finished(
        self,
        request_id: str,
        offer: BlockOffer | None,
        num_tokens: int,
        num_encoder_tokens: int,
        params: Params,
    ) -> tuple[bool, Params]:
        """The request ended. Returns True if its blocks must be kept, and params for the response."""
        return False, None

    def abort(self, request_id: str) -> None:
        """The request's client is gone, or its load failed for good. Unknown requests are ignored."""

    def build_step(self) -> msgspec.Raw:
        """The ranks' metadata for the next step."""
        return EMPTY

    def update(self, outputs: Sequence[msgspec.Raw]) -> TransferEvents:
        """Book the ranks' outputs of a step, in rank order."""
        return TransferEvents()

    def close(self) -> None:
        """Bounded and idempotent."""


class WorkerTransfer:
    """The worker half of a connector as the rank's loop uses it; this class is for a rank without a connector."""

    def handshake(self) -> msgspec.Raw:
        """This rank's metadata for the scheduler process."""
        return EMPTY

    def start_step(self, metadata: msgspec.Raw) -> None:
        """Take the scheduler's metadata; never blocks."""

    def layer_written(self, layer: int) -> None:
        """The step has written its tokens of a layer and of those before it; never blocks."""

    def wait(self, timeout_s: float) -> None:
        """An idle step: return when something finished, or after `timeout_s`."""
        time.sleep(timeout_s)

    def poll(self, stored: tuple[str, ...]) -> msgspec.Raw:
        """The connector's output since the last step, with the cache events of this one; never blocks."""
        return EMPTY

    def close(self) -> None:
        """Bounded and idempotent."""


def connector_config(config: EngineConfig) -> ConnectorConfig:
    """The connector's settings for this engine: one-host defaults, then the engine's own `connector` sections, then
    the environment's.
    """
    settings: dict[str, Any] = {
        "engine_id": config.engine_id,
        "role": "producer" if config.role == "prefill" else "consumer",
        "control": {"host": "127.0.0.1", "insecure": True},
    }
    return ConnectorConfig.from_env(os.environ, {**settings, **config.connector})


def create_scheduler_transfer(
    config: EngineConfig, metadata: Sequence[msgspec.Raw]
) -> SchedulerTransfer:
    """The half that the engine's role needs, by every rank's handshake metadata, in rank order."""
    if config.role == "mono":
        return SchedulerTransfer()
    # imported here so that a monolithic engine runs without the connector's runtime
    from minillm.scheduler_transfer import ConnectorTransfer

    return ConnectorTransfer(config, metadata)
