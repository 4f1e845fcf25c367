"""Checks a step's orders. An order with wrong blocks gets an error, and is refused alone.

Each check has one place. Only here our own block ids are compared with the pools, whichever integration made the order:
no id is negative or beyond the pool. The data path computes addresses from these ids without another check. Whether a
load's blocks hold its tokens, and none of them twice, as these would replace each other, is checked here, too; for a
lease by `offers.py`, where the engine offers it. A peer's ids are checked elsewhere: those of a packed read against the
lease (`session/read_check.py`), those of a direct read against the exported pools (`copies.py`). A peer's token ranges
are checked when they are planned (`planning.plan_read`), those of our own loads are not checked again there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias, get_args

from msgspec.structs import replace

from kvconnector.config import Role
from kvconnector.datapath.pools import Pools
from kvconnector.errors import BlockIdError, KVConnectorError, LocalError
from kvconnector.planning import MAX_TOKENS, GroupBlocks
from kvconnector.session.containment import failure_of
from kvconnector.session.orders import (
    ConsumerOrder,
    GrowRequest,
    HoldRequest,
    LeaseOrder,
    LoadRequest,
    Order,
    ProducerOrder,
    StepMetadata,
)

logger = logging.getLogger(__name__)

Blocks: TypeAlias = tuple[GroupBlocks, ...]
"""A request's blocks, by cache group."""
_WITH_BLOCKS = frozenset({HoldRequest, GrowRequest, LoadRequest})
"""Orders whose blocks are compared with the pools. The others of a step, maybe thousands, need no check."""
_NOT_TAKEN: dict[Role, frozenset[type]] = {
    "consumer": frozenset(get_args(ProducerOrder)),
    "producer": frozenset(get_args(ConsumerOrder)),
}


def checked_orders(
    step: StepMetadata, pools: Pools, role: Role, note_contained: Callable[[str, Exception], None]
) -> list[Order]:
    """Return the step's orders, with an error in each that must be refused. `note_contained` is told of those whose
    check itself failed.

    Raises:
        LocalError: An order is for a role that this worker does not have.
    """
    not_taken = _NOT_TAKEN.get(role, frozenset())
    orders: list[Order] = []
    for order in step.orders:
        if type(order) in not_taken:
            raise LocalError(
                f"a {role} does not accept the order {type(order).__name__}",
                request=order.request_id,
                role=role,
            )
        if type(order) in _WITH_BLOCKS:
            try:
                _check_blocks(order, pools)
            except KVConnectorError as error:
                logger.debug("request %s is refused: %s", order.request_id, error)
                order = replace(order, error=error)  # noqa: PLW2901
            except Exception as error:
                order = _refused(order, error, note_contained)  # noqa: PLW2901
        orders.append(order)
    return orders


def orders_with_blocks(
    orders: Sequence[Order], note_contained: Callable[[str, Exception], None]
) -> tuple[list[Order], list[Blocks]]:
    """Return the orders, and the blocks of those that are not refused. An order whose blocks cannot be listed gets an
    error: nothing could make its copies wait for the engine's kernels.
    """
    taken: list[Order] = []
    blocks: list[Blocks] = []
    for order in orders:
        try:
            blocks += blocks_of((order,))
        except Exception as error:
            taken.append(_refused(order, error, note_contained))
        else:
            taken.append(order)
    return taken, blocks


def _refused(
    order: Order, error: Exception, note_contained: Callable[[str, Exception], None]
) -> Order:
    note_contained(f"request {order.request_id}", error)
    return replace(order, error=failure_of(error))


def blocks_of(orders: Sequence[object]) -> list[Blocks]:
    """Return the blocks of the leases and loads among these that are not refused."""
    leases = [each.blocks for each in orders if isinstance(each, LeaseOrder) and not each.error]
    loads = [
        each.local_blocks for each in orders if isinstance(each, LoadRequest) and not each.error
    ]
    return leases + loads


def _check_blocks(order: Order, pools: Pools) -> None:
    what = f"the blocks of request {order.request_id}"
    if isinstance(order, LeaseOrder):
        pools.check_blocks(order.blocks, what)
    elif isinstance(order, LoadRequest):
        pools.check_blocks(order.local_blocks, what)
        # those of the producer are its own groups', which its greeting shows
        if len(order.token_ranges) != len(pools.groups):
            raise BlockIdError(
                "a load must name the tokens of every cache group",
                given=len(order.token_ranges),
                groups=len(pools.groups),
            )
        held = zip(pools.groups, order.local_blocks, order.token_ranges, strict=True)
        for group, blocks, (start, stop) in held:
            if not 0 <= start <= stop <= MAX_TOKENS:
                raise BlockIdError(
                    f"the tokens of request {order.request_id} must lie between 0 and max_tokens",
                    tokens=(start, stop),
                    max_tokens=MAX_TOKENS,
                )
            blocks.check_hold(range(start, stop), group.geometry.virtual_block_tokens, what=what)
