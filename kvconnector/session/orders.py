"""Orders of an engine's scheduler half to every worker: events of the session. They travel between its processes."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvconnector.errors import KVConnectorError
from kvconnector.ids import EngineAddress
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.topology import EngineGeometry


class _Order(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """An order to every worker about one request. Thousands are queued, so the garbage collector passes them over."""

    request_id: str


class _Lease(_Order, frozen=True):
    """Consumers may read these blocks. `error`, of a worker's check: they cannot be read, and readers are refused."""

    transfer_id: str
    secret: str
    blocks: tuple[GroupBlocks, ...]


class HoldRequest(_Lease, frozen=True):
    """The producer finished a request: keep these blocks for a consumer. They have its first `num_tokens` tokens.
    `lease_duration_s` above zero takes the place of the configured duration until a consumer reads or renews. `extra`:
    see `Progress`.
    """

    num_tokens: int
    lease_duration_s: float = 0.0
    error: KVConnectorError | None = None
    extra: bytes = b""

    @property
    def watermark(self) -> Watermark:
        return Watermark(self.num_tokens)


class GrowRequest(_Lease, frozen=True):
    """The producer computes a request's prompt and owns its blocks: consumers may read them up to the watermark. Its
    whole steps are those before the one with this order. Ordered again with more tokens, and by the worker with more
    layers.
    """

    watermark: Watermark
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
    a request that is followed: the producer's workers report them. `error`, of a worker's check: the load fails.
    """

    token_ranges: tuple[tuple[int, int], ...]
    local_blocks: tuple[GroupBlocks, ...]
    remote_blocks: tuple[GroupBlocks, ...]
    error: KVConnectorError | None = None


class DropRequest(_Order, frozen=True):
    """The consumer gives a wanted or loading request up, or needs nothing of it."""


LeaseOrder: TypeAlias = HoldRequest | GrowRequest
Order: TypeAlias = LeaseOrder | WithdrawRequest | WantRequest | LoadRequest | DropRequest


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
