"""A step's news as session events, after a check that lets all of it through or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvconnector.config import Role
from kvconnector.datapath.pools import Pools
from kvconnector.errors import BlockIdError, LocalError
from kvconnector.ids import EngineId, RequestId, Secret, TransferId
from kvconnector.planning import GroupBlocks
from kvconnector.runtime.steps import BlockList, StepMetadata
from kvconnector.session import events as ev


def check_step(step: StepMetadata, pools: Pools, role: Role) -> None:
    """Raises:
    LocalError: news for a role that this worker does not have.
    BlockIdError: block ids outside the pools, or too few for the tokens they should hold.
    """
    if (step.holds or step.withdrawn) and role == "consumer":
        raise LocalError("a consumer holds no requests", role=role)
    if (step.wants or step.loads or step.dropped) and role == "producer":
        raise LocalError("a producer loads no requests", role=role)
    for hold in step.holds:
        pools.check_blocks(_group_blocks(hold.blocks), f"the blocks of request {hold.request_id}")
    for load in step.loads:
        what = f"the blocks of request {load.request_id}"
        blocks = _group_blocks(load.local_blocks)
        pools.check_blocks(blocks, what)
        if len(load.token_ranges) != len(pools.groups):
            raise BlockIdError(
                "a load names one token range per cache group",
                request=load.request_id,
                ranges=len(load.token_ranges),
                groups=len(pools.groups),
            )
        for group, local, (start, stop) in zip(
            pools.groups, blocks, load.token_ranges, strict=True
        ):
            local.covering(range(start, stop), group.geometry.block_size, what=what)


def events_of(step: StepMetadata) -> Iterator[object]:
    """The events of a checked step, in an order in which each request's make sense."""
    for hold in step.holds:
        yield ev.Granted(
            request_id=RequestId(hold.request_id),
            transfer_id=TransferId(hold.transfer_id),
            secret=Secret(hold.secret),
            blocks=_group_blocks(hold.blocks),
            num_tokens=hold.num_tokens,
            lease_duration_s=hold.lease_duration_s,
        )
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
        yield ev.LoadAsked(
            request_id=RequestId(load.request_id),
            token_ranges=tuple(range(start, stop) for start, stop in load.token_ranges),
            local_blocks=_group_blocks(load.local_blocks),
            remote_blocks=_group_blocks(load.remote_blocks),
        )
    for request_id in step.dropped:
        yield ev.LoadWithdrawn(RequestId(request_id))


def _group_blocks(blocks: Sequence[BlockList]) -> tuple[GroupBlocks, ...]:
    return tuple(block_list.group_blocks() for block_list in blocks)
