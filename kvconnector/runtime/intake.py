"""A step's orders as session events.

An order whose blocks cannot be what they should becomes an event with an error: that request is refused, and the
others of the step go on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

from kvconnector.config import Role
from kvconnector.datapath.pools import Pools
from kvconnector.errors import BlockIdError, KVConnectorError, LocalError
from kvconnector.ids import EngineAddress, EngineId, RequestId, Secret, TransferId
from kvconnector.planning import GroupBlocks
from kvconnector.runtime.steps import (
    BlockList,
    HoldRequest,
    LoadRequest,
    Order,
    StepMetadata,
    WantRequest,
    WithdrawRequest,
)
from kvconnector.session import events as ev

logger = logging.getLogger(__name__)

Blocks: TypeAlias = tuple[GroupBlocks, ...]
"""A request's blocks, by cache group."""


def events_of(step: StepMetadata, pools: Pools, role: Role) -> list[object]:
    """One session event for each order of the step.

    Raises:
        LocalError: an order for a role that this worker does not have.
    """
    for order in step.orders:
        is_for_producer = isinstance(order, HoldRequest | WithdrawRequest)
        if role == ("consumer" if is_for_producer else "producer"):
            raise LocalError(
                f"a {role} takes no {type(order).__name__}", request=order.request_id, role=role
            )
    return [_event_of(order, pools) for order in step.orders]


def blocks_of(events: Sequence[object]) -> list[Blocks]:
    """The blocks of each lease and each load among a step's events, of those that are not refused."""
    leases = [event.blocks for event in events if isinstance(event, ev.Granted)]
    loads = [event.local_blocks for event in events if isinstance(event, ev.LoadAsked)]
    return [blocks for blocks in (*leases, *loads) if blocks]


def _event_of(order: Order, pools: Pools) -> object:
    request_id = RequestId(order.request_id)
    if isinstance(order, HoldRequest):
        return _granted(order, pools)
    if isinstance(order, LoadRequest):
        return _load_asked(order, pools)
    if isinstance(order, WantRequest):
        return ev.Wanted(
            request_id=request_id,
            transfer_id=TransferId(order.transfer_id),
            secret=Secret(order.secret),
            engine=EngineAddress(EngineId(order.engine_id), order.address, order.public_key),
            is_followed=order.is_followed,
        )
    if isinstance(order, WithdrawRequest):
        return ev.Withdrawn(request_id)
    return ev.LoadWithdrawn(request_id)


def _granted(hold: HoldRequest, pools: Pools) -> ev.Granted:
    blocks: Blocks = ()
    error = None
    try:
        blocks = _group_blocks(hold, hold.blocks, pools)
        pools.check_blocks(blocks, f"the blocks of request {hold.request_id}")
    except KVConnectorError as refused:
        logger.warning("the lease of request %s is refused: %s", hold.request_id, refused)
        blocks, error = (), refused
    return ev.Granted(
        request_id=RequestId(hold.request_id),
        transfer_id=TransferId(hold.transfer_id),
        secret=Secret(hold.secret),
        blocks=blocks,
        num_tokens=hold.num_tokens,
        lease_duration_s=hold.lease_duration_s,
        error=error,
        is_complete=hold.is_complete,
        ahead_tokens=hold.ahead_tokens,
    )


def _load_asked(load: LoadRequest, pools: Pools) -> ev.LoadAsked:
    what = f"the blocks of request {load.request_id}"
    try:
        local = _group_blocks(load, load.local_blocks, pools)
        remote = _group_blocks(load, load.remote_blocks, pools) if load.remote_blocks else ()
        _check_groups(load, load.token_ranges, pools)
        pools.check_blocks(local, what)
        token_ranges = []
        for group, blocks, (start, stop) in zip(
            pools.groups, local, load.token_ranges, strict=True
        ):
            blocks.check_covers(start, stop, group.geometry.virtual_block_tokens, what=what)
            token_ranges.append(range(start, stop))
    except KVConnectorError as error:
        return ev.LoadAsked(RequestId(load.request_id), (), (), (), error)
    return ev.LoadAsked(RequestId(load.request_id), tuple(token_ranges), local, remote)


def _group_blocks(order: Order, blocks: Sequence[BlockList], pools: Pools) -> Blocks:
    _check_groups(order, blocks, pools)
    return tuple([block_list.group_blocks() for block_list in blocks])


def _check_groups(order: Order, by_group: Sequence[object], pools: Pools) -> None:
    if len(by_group) != len(pools.groups):
        raise BlockIdError(
            "a request names blocks and tokens of every cache group",
            request=order.request_id,
            given=len(by_group),
            groups=len(pools.groups),
        )
