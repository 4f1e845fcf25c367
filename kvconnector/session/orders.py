"""Orders that an engine's scheduler half sends to every worker. They are events of the sessions, and are serialized
between the engine's processes.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvconnector.errors import KVConnectorError
from kvconnector.ids import EngineAddress
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.topology import EngineGeometry


class _Order(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """An order about one request. The garbage collector does not track orders (`gc=False`), as thousands are queued."""

    request_id: str


class _Lease(_Order, frozen=True):
    """Consumers may read these blocks. A worker sets `error` if its check finds that they cannot be read: readers are
    then refused.
    """

    transfer_id: str
    secret: str
    blocks: tuple[GroupBlocks, ...]


class HoldRequest(_Lease, frozen=True):
    """The producer finished a request: keep these blocks, which hold its first `num_tokens` tokens, for a consumer.
    `lease_duration_s`, if not 0, replaces the configured duration until a consumer reads or renews. For `extra` see
    `Progress`.
    """

    num_tokens: int
    lease_duration_s: float = 0.0
    error: KVConnectorError | None = None
    extra: bytes = b""

    @property
    def watermark(self) -> Watermark:
        return Watermark(self.num_tokens)


class GrowRequest(_Lease, frozen=True):
    """The producer is computing a request's prompt: consumers may read these blocks up to the watermark, whose whole
    tokens come from steps before the one with this order. The scheduler repeats the order with more tokens, and the
    worker with more layers.
    """

    watermark: Watermark
    error: KVConnectorError | None = None


class WithdrawRequest(_Order, frozen=True):
    """The producer takes back a held request, or the blocks of one that it is still computing."""


class ReclaimRequest(_Order, frozen=True):
    """The producer takes back a held request, unless a consumer has asked for it: its pool is full."""


class WantRequest(_Order, frozen=True):
    """A request whose blocks are at the producer `engine` is queued at this consumer: greet that engine and keep the
    lease alive. `is_followed`: the producer may still be computing the prompt.
    """

    transfer_id: str
    secret: str
    engine: EngineAddress
    is_followed: bool = False


class LoadRequest(_Order, frozen=True):
    """Load tokens `[start, stop)` of each group from the producer's blocks into ours. A followed request has no
    `remote_blocks`: the producer's workers report them. A worker sets `error` if its check fails: then the load fails.
    Ranges of a compressed group count rows. The load brings what the tokens up to `token_stop` need.
    `keeps_all`: all groups keep every token, so a part of the load is of use.
    """

    token_ranges: tuple[tuple[int, int], ...]
    local_blocks: tuple[GroupBlocks, ...]
    remote_blocks: tuple[GroupBlocks, ...]
    error: KVConnectorError | None = None
    token_stop: int = 0
    keeps_all: bool = True


class DropRequest(_Order, frozen=True):
    """The consumer gives up a wanted or loading request. `needs_none`: it continues with what it has, and a request
    that is only wanted ends at the producer as if it had been read.
    """

    needs_none: bool = False


LeaseOrder: TypeAlias = HoldRequest | GrowRequest
ProducerOrder: TypeAlias = LeaseOrder | WithdrawRequest | ReclaimRequest
ConsumerOrder: TypeAlias = WantRequest | LoadRequest | DropRequest
Order: TypeAlias = ProducerOrder | ConsumerOrder


class StepMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One step's orders for every worker of the engine, oldest first: an id may be used again within a step. `engine`
    is set until the scheduler knows that all workers have it.
    """

    engine: EngineGeometry | None = None
    orders: tuple[Order, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Returns True if workers need not receive it."""
        return not (self.engine or self.orders)
