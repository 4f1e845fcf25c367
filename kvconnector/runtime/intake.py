"""A step's news as session events, after a check.

What no scheduler half says raises, and nothing of the step is taken: its caller is broken. A request whose blocks
cannot be what they should is refused alone, with a reason, and the others of the step go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvconnector.config import Role
from kvconnector.datapath.pools import Pools
from kvconnector.errors import BlockIdError, KVConnectorError, LocalError
from kvconnector.ids import EngineId, RequestId, Secret, TransferId
from kvconnector.planning import GroupBlocks
from kvconnector.runtime.steps import BlockList, HoldRequest, LoadRequest, StepMetadata
from kvconnector.session import events as ev

logger = logging.getLogger(__name__)

BLOCK_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Refusals:
    """Requests of one step that are refused, with the reason: leases of a producer, loads of a consumer."""

    holds: Mapping[str, KVConnectorError]
    loads: Mapping[str, KVConnectorError]


def check_step(step: StepMetadata, pools: Pools, role: Role) -> Refusals:
    """The requests of the step that must be refused: block ids outside the pools, or too few for their tokens.

    Raises:
        LocalError: news for a role that this worker does not have.
        BlockIdError: a request names another number of cache groups, or block ids that are no whole int32.
    """
    if (step.holds or step.withdrawn) and role == "consumer":
        raise LocalError("a consumer holds no requests", role=role)
    if (step.wants or step.loads or step.dropped) and role == "producer":
        raise LocalError("a producer loads no requests", role=role)
    for hold in step.holds:
        _check_shape(hold.request_id, pools, hold.blocks)
    for load in step.loads:
        _check_shape(
            load.request_id, pools, load.local_blocks, load.remote_blocks, load.token_ranges
        )
    holds = {hold.request_id: _error_of_hold(hold, pools) for hold in step.holds}
    loads = {load.request_id: _error_of_load(load, pools) for load in step.loads}
    return Refusals(
        holds={name: error for name, error in holds.items() if error is not None},
        loads={name: error for name, error in loads.items() if error is not None},
    )


def _check_shape(
    request_id: str,
    pools: Pools,
    *by_group: Sequence[BlockList] | Sequence[tuple[int, int]],
) -> None:
    for items in by_group:
        if len(items) != len(pools.groups):
            raise BlockIdError(
                "a request names blocks and tokens of every cache group",
                request=request_id,
                given=len(items),
                groups=len(pools.groups),
            )
        for item in items:
            if isinstance(item, BlockList) and len(item.block_ids) % BLOCK_ID_BYTES:
                raise BlockIdError(
                    "block ids are no whole number of int32",
                    request=request_id,
                    nbytes=len(item.block_ids),
                )


def _error_of_hold(hold: HoldRequest, pools: Pools) -> KVConnectorError | None:
    try:
        pools.check_blocks(_group_blocks(hold.blocks), f"the blocks of request {hold.request_id}")
    except KVConnectorError as error:
        logger.warning("the lease of request %s is refused: %s", hold.request_id, error)
        return error
    return None


def _error_of_load(load: LoadRequest, pools: Pools) -> KVConnectorError | None:
    what = f"the blocks of request {load.request_id}"
    try:
        blocks = _group_blocks(load.local_blocks)
        _group_blocks(load.remote_blocks)
        pools.check_blocks(blocks, what)
        for group, local, (start, stop) in zip(
            pools.groups, blocks, load.token_ranges, strict=True
        ):
            local.covering(range(start, stop), group.geometry.virtual_block_tokens, what=what)
    except KVConnectorError as error:
        return error
    return None


def events_of(step: StepMetadata, refusals: Refusals) -> Iterator[object]:
    """The events of a checked step, in an order in which each request's make sense."""
    for hold in step.holds:
        yield _granted(hold, refusals.holds.get(hold.request_id))
    for request_id in step.withdrawn:
        yield ev.Withdrawn(RequestId(request_id))
    for want in step.wants:
        yield ev.Wanted(
            request_id=RequestId(want.request_id),
            transfer_id=TransferId(want.transfer_id),
            secret=Secret(want.secret),
            engine=ev.EngineAddress(EngineId(want.engine_id), want.address, want.public_key),
        )
    for load in step.loads:
        yield _load_asked(load, refusals.loads.get(load.request_id))
    for request_id in step.dropped:
        yield ev.LoadWithdrawn(RequestId(request_id))


def _granted(hold: HoldRequest, error: KVConnectorError | None) -> ev.Granted:
    return ev.Granted(
        request_id=RequestId(hold.request_id),
        transfer_id=TransferId(hold.transfer_id),
        secret=Secret(hold.secret),
        blocks=() if error is not None else _group_blocks(hold.blocks),
        num_tokens=hold.num_tokens,
        lease_duration_s=hold.lease_duration_s,
        error=error,
    )


def _load_asked(load: LoadRequest, error: KVConnectorError | None) -> ev.LoadAsked:
    if error is not None:
        return ev.LoadAsked(RequestId(load.request_id), (), (), (), error)
    return ev.LoadAsked(
        request_id=RequestId(load.request_id),
        token_ranges=tuple(range(start, stop) for start, stop in load.token_ranges),
        local_blocks=_group_blocks(load.local_blocks),
        remote_blocks=_group_blocks(load.remote_blocks),
    )


def _group_blocks(blocks: Sequence[BlockList]) -> tuple[GroupBlocks, ...]:
    return tuple(block_list.group_blocks() for block_list in blocks)
