"""The engine-facing halves: workers with their driver thread, and schedulers."""

from kvconnector.datapath import CacheGroup
from kvconnector.runtime.engine import WorkerMetadata
from kvconnector.runtime.params import TransferParams, wants_remote_decode, wants_remote_prefill
from kvconnector.runtime.scheduler import Scheduler
from kvconnector.runtime.tensors import cache_group, view_of
from kvconnector.runtime.worker import Worker
from kvconnector.session import WorkerOutput
from kvconnector.session.orders import StepMetadata

__all__ = [
    "CacheGroup",
    "Scheduler",
    "StepMetadata",
    "TransferParams",
    "Worker",
    "WorkerMetadata",
    "WorkerOutput",
    "cache_group",
    "view_of",
    "wants_remote_decode",
    "wants_remote_prefill",
]
