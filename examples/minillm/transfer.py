"""Both halves of KV transfer: what an engine and its ranks call, and the halves of an engine without transfers."""

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
    """Transfers that all ranks have finished since the last step. `failed_recving` is part of `finished_recving`.

    `invalid_blocks` are the blocks that failed loads should have filled, by `block_number`, from the first rank's
    failure on. `stored` are the cache events that all ranks have reported (see `stored_event`); None if not counted.
    """

    finished_sending: Set[str] = frozenset()
    finished_recving: Set[str] = frozenset()
    failed_recving: Mapping[str, str] = field(default_factory=dict)
    invalid_blocks: frozenset[int] = frozenset()
    stored: frozenset[str] | None = None


class LoadStats(msgspec.Struct, kw_only=True):
    """One request's load as its ranks reported it: bytes of all ranks, seconds of the slowest one, and paths.

    This engine already had the prompt's first `cached_tokens`, and loaded `loaded_tokens`, 0 if the load failed.
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
    """The scheduler half of a connector, as the engine's scheduler calls it. Block ids are lists by cache group.

    This class is for an engine without remote requests: its methods do nothing. `ConnectorTransfer` uses kvconnector.
    """

    def __init__(self) -> None:
        self.stats: dict[str, LoadStats] = {}
        """Loads of requests that have not ended, by request. The engine removes them."""
        self.registry = CollectorRegistry()
        """The connector's Prometheus metrics."""

    @property
    def loads_in_flight(self) -> Sequence[LoadInFlight]:
        """Progress of the loads under way."""
        return ()

    def on_new_request(self, request_id: str, params: Params) -> None:
        """Take a queued request."""

    def matched_tokens(
        self, request_id: str, num_prompt: int, num_computed: int, params: Params
    ) -> tuple[int, bool]:
        """Return how many tokens a remote engine has beyond `num_computed`, and True if they arrive asynchronously."""
        return 0, False

    def is_early(self, request_id: str) -> bool:
        """Return True if the request is still in the remote engine's queue, so that it needs no blocks here yet."""
        return False

    def after_alloc(
        self, request_id: str, target: LoadTarget, num_external: int, num_encoder_tokens: int
    ) -> None:
        """Load up to `num_external` tokens that groups lack, and the encoder's output, into a request's new blocks."""

    def is_offered(self, params: Params) -> bool:
        """Return True if another engine will read a request with these params."""
        return False

    def grow(
        self, request_id: str, tables: list[list[int]], num_tokens: int, ahead_tokens: int
    ) -> None:
        """Report that the next step computes an offered request's tokens `[num_tokens, ahead_tokens)`, after earlier
        steps have computed the ones before.
        """

    def withdraw(self, request_id: str) -> None:
        """Report that a request being computed here has lost its blocks."""

    def finished(
        self,
        request_id: str,
        offer: BlockOffer | None,
        num_tokens: int,
        num_encoder_tokens: int,
        params: Params,
        *,
        end: bytes = b"",
    ) -> tuple[bool, Params]:
        """Take a request that has ended. Return True if its blocks must be kept, and params for the response. `end` is
        what engines of other kinds learn of the prompt.
        """
        return False, None

    def abort(self, request_id: str) -> None:
        """Give up a request whose client is gone, or whose load failed for good. Unknown requests are ignored."""

    def build_step(self) -> msgspec.Raw:
        """Return the ranks' metadata for the next step."""
        return EMPTY

    def update(self, outputs: Sequence[msgspec.Raw]) -> TransferEvents:
        """Take the ranks' outputs of a step, in rank order, and return what has ended."""
        return TransferEvents()

    def close(self) -> None:
        """Bounded and idempotent."""


class WorkerTransfer:
    """The worker half of a connector, as the rank's loop calls it. This class is for a rank without a connector."""

    def handshake(self) -> msgspec.Raw:
        """Return this rank's metadata for the scheduler process."""
        return EMPTY

    def start_step(self, metadata: msgspec.Raw) -> None:
        """Take the scheduler's metadata; never blocks."""

    def layer_written(self, layer: int) -> None:
        """Report that the step has written its tokens of all layers up to this one; never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Wait in an idle step until a transfer has ended, at most `timeout_s`."""
        time.sleep(timeout_s)

    def poll(self, stored: tuple[str, ...]) -> msgspec.Raw:
        """Return the connector's output since the last step, with the cache events of this step; never blocks."""
        return EMPTY

    def close(self) -> None:
        """Bounded and idempotent."""


def connector_config(config: EngineConfig) -> ConnectorConfig:
    """Return the connector's settings for this engine: defaults for one host, overridden by the engine's `connector`
    sections, which the environment overrides.
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
    """Return the scheduler half for the engine's role, from the handshake metadata of all ranks, in rank order."""
    if config.role == "mono":
        return SchedulerTransfer()
    # imported here so that a monolithic engine runs without the connector's runtime
    from minillm.scheduler_transfer import ConnectorTransfer

    return ConnectorTransfer(config, metadata)
