"""What moves where: a request's token ranges become chunks, one read per producer rank. Pure, vectorised numpy."""

from kvconnector.planning.naive import Item, naive_plan, plan_items
from kvconnector.planning.plan import (
    CHUNK_DTYPE,
    PeerPlan,
    Segment,
    SourceRead,
    TransferPlan,
    plan_peer,
    plan_transfer,
)
from kvconnector.planning.request import GroupBlocks
from kvconnector.planning.retention import (
    KeepsAll,
    KeepsChunk,
    KeepsState,
    KeepsWindow,
    Retention,
)

__all__ = [
    "CHUNK_DTYPE",
    "GroupBlocks",
    "Item",
    "KeepsAll",
    "KeepsChunk",
    "KeepsState",
    "KeepsWindow",
    "PeerPlan",
    "Retention",
    "Segment",
    "SourceRead",
    "TransferPlan",
    "naive_plan",
    "plan_items",
    "plan_peer",
    "plan_transfer",
]
