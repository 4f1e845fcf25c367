"""What an engine's scheduler half orders of every worker: events of the session. They travel between its processes."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvconnector.errors import KVConnectorError
from kvconnector.ids import EngineAddress
from kvconnector.planning import GroupBlocks
from kvconnector.topology import EngineGeometry


class _Order(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What every worker is to do about one request. Thousands are queued, so the garbage collector passes them over."""

    request_id: str


class HoldRequest(_Order, frozen=True):
    """The producer finished a request: hold these blocks for a consumer. `lease_duration_s` above zero takes the place
    of the configured duration until a consumer reads or renews.

    Where it `is_complete` not yet, the engine still computes the prompt and owns the blocks: they will have its first
    `num_tokens` tokens once the kernels before this step are through, and this step computes those up to
    `ahead_tokens`. The same is ordered again with more tokens, or by the worker with more layers, see
    `session.watermark`. `error`, of a worker's check: the blocks cannot be read, and readers are refused.
    """

    transfer_id: str
    secret: str
    blocks: tuple[GroupBlocks, ...]
    num_tokens: int
    lease_duration_s: float = 0.0
    is_complete: bool = True
    ahead_tokens: int = 0
    ahead_layers: int = 0
    error: KVConnectorError | None = None


class WithdrawRequest(_Order, frozen=True):
    """The producer takes a held request back, or the blocks of one that it computes."""


class WantRequest(_Order, frozen=True):
    """A request whose blocks are on a producer, the `engine`, is queued at this consumer: find the peer, keep the lease
    alive. `is_followed`: the producer may still compute them.
    """

    transfer_id: str
    secret: str
    engine: EngineAddress
    is_followed: bool = False


class LoadRequest(_Order, frozen=True):
    """Fetch tokens `[start, stop)` of each group from the producer's blocks into ours. There are no `remote_blocks` of
    a request that is followed: the producer's workers tell them. `error`, of a worker's check: the load fails at once.
    """

    token_ranges: tuple[tuple[int, int], ...]
    local_blocks: tuple[GroupBlocks, ...]
    remote_blocks: tuple[GroupBlocks, ...]
    error: KVConnectorError | None = None


class DropRequest(_Order, frozen=True):
    """The consumer gives a wanted or loading request up, or needs nothing of it."""


Order: TypeAlias = HoldRequest | WithdrawRequest | WantRequest | LoadRequest | DropRequest


class StepMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One step's orders for every worker of the engine, in the order in which they were given: an id may be used again
    within a step. `engine` is there until the scheduler knows that all workers have it.
    """

    engine: EngineGeometry | None = None
    orders: tuple[Order, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing new."""
        return not (self.engine or self.orders)
