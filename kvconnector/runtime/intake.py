"""A step's news as session events, after a check.

What no scheduler half says raises, and nothing of the step is taken: its caller is broken. A request whose blocks
cannot be what they should is refused alone, with a reason, and the others of the step go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from kvconnector.config import Role
from kvconnector.datapath.pools import Pools
from kvconnector.errors import BlockIdError, KVConnectorError, LocalError
from kvconnector.ids import EngineId, RequestId, Secret, TransferId
from kvconnector.planning import GroupBlocks
from kvconnector.runtime.steps import BlockList, HoldRequest, LoadRequest, StepMetadata
from kvconnector.session import events as ev

logger = logging.getLogger(__name__)

BLOCK_ID_BYTES = 4


Blocks: TypeAlias = tuple[GroupBlocks, ...]
"""A request's blocks, by cache group."""


class CheckedStep(msgspec.Struct, frozen=True, eq=False):
    """A step, and for each of its requests, in its order, the blocks, or why the request is refused: those of a lease,
    and the local and the remote ones of a load.
    """

    step: StepMetadata
    holds: tuple[Blocks | KVConnectorError, ...]
    loads: tuple[tuple[Blocks, Blocks] | KVConnectorError, ...]

    @property
    def refused_holds(self) -> dict[str, KVConnectorError]:
        """The leases that are refused, by request."""
        return {
            hold.request_id: found
            for hold, found in zip(self.step.holds, self.holds, strict=True)
            if isinstance(found, KVConnectorError)
        }

    def events(self) -> Iterator[object]:
        """The session events of the step, in an order in which each request's make sense."""
        step = self.step
        for hold, found in zip(step.holds, self.holds, strict=True):
            yield _granted(hold, found)
        for request_id in step.withdrawn:
            yield ev.Withdrawn(RequestId(request_id))
        for want in step.wants:
            yield ev.Wanted(
                request_id=RequestId(want.request_id),
                transfer_id=TransferId(want.transfer_id),
                secret=Secret(want.secret),
                engine=ev.EngineAddress(EngineId(want.engine_id), want.address, want.public_key),
            )
        for load, sides in zip(step.loads, self.loads, strict=True):
            yield _load_asked(load, sides)
        for request_id in step.dropped:
            yield ev.LoadWithdrawn(RequestId(request_id))


def check_step(step: StepMetadata, pools: Pools, role: Role) -> CheckedStep:
    """The step with its block ids decoded; requests with ids outside the pools, or too few, are refused.

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
    return CheckedStep(
        step,
        tuple(_blocks_of_hold(hold, pools) for hold in step.holds),
        tuple(_blocks_of_load(load, pools) for load in step.loads),
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


def _blocks_of_hold(hold: HoldRequest, pools: Pools) -> Blocks | KVConnectorError:
    try:
        blocks = _group_blocks(hold.blocks)
        pools.check_blocks(blocks, f"the blocks of request {hold.request_id}")
    except KVConnectorError as error:
        logger.warning("the lease of request %s is refused: %s", hold.request_id, error)
        return error
    return blocks


def _blocks_of_load(load: LoadRequest, pools: Pools) -> tuple[Blocks, Blocks] | KVConnectorError:
    what = f"the blocks of request {load.request_id}"
    try:
        blocks = _group_blocks(load.local_blocks)
        remote_blocks = _group_blocks(load.remote_blocks)
        pools.check_blocks(blocks, what)
        for group, local, (start, stop) in zip(
            pools.groups, blocks, load.token_ranges, strict=True
        ):
            local.check_covers(start, stop, group.geometry.virtual_block_tokens, what=what)
    except KVConnectorError as error:
        return error
    return blocks, remote_blocks


def _granted(hold: HoldRequest, found: Blocks | KVConnectorError) -> ev.Granted:
    blocks, error = ((), found) if isinstance(found, KVConnectorError) else (found, None)
    return ev.Granted(
        request_id=RequestId(hold.request_id),
        transfer_id=TransferId(hold.transfer_id),
        secret=Secret(hold.secret),
        blocks=blocks,
        num_tokens=hold.num_tokens,
        lease_duration_s=hold.lease_duration_s,
        error=error,
    )


def _load_asked(load: LoadRequest, found: tuple[Blocks, Blocks] | KVConnectorError) -> ev.LoadAsked:
    if isinstance(found, KVConnectorError):
        return ev.LoadAsked(RequestId(load.request_id), (), (), (), found)
    local_blocks, remote_blocks = found
    return ev.LoadAsked(
        request_id=RequestId(load.request_id),
        token_ranges=tuple(range(start, stop) for start, stop in load.token_ranges),
        local_blocks=local_blocks,
        remote_blocks=remote_blocks,
    )


def _group_blocks(blocks: Sequence[BlockList]) -> Blocks:
    return tuple([block_list.group_blocks() for block_list in blocks])
