"""What moves where: a request's token ranges become chunks, one read per producer rank. Pure, vectorised numpy."""

from kvconnector.planning.naive import Item, naive_plan, naive_run_address, plan_items
from kvconnector.planning.plan import (
    CHUNK_DTYPE,
    PeerPlan,
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
from kvconnector.planning.runs import joined_runs, run_addresses
from kvconnector.topology import Segment

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
    "joined_runs",
    "naive_plan",
    "naive_run_address",
    "plan_items",
    "plan_peer",
    "plan_transfer",
    "run_addresses",
]
