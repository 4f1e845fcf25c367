"""Moving a read's chunks: kernels plus transport, behind one submit-and-step interface."""

from kvconnector.datapath.base import (
    DataEvent,
    Program,
    ReadOrigin,
    SegmentWindow,
    TransferRecord,
)
from kvconnector.datapath.pools import CacheGroup, Pools

__all__ = [
    "CacheGroup",
    "DataEvent",
    "Pools",
    "Program",
    "ReadOrigin",
    "SegmentWindow",
    "TransferRecord",
]
