"""The engine-facing halves: workers with their driver thread, and schedulers."""

from kvconnector.datapath import CacheGroup
from kvconnector.runtime.params import TransferParams
from kvconnector.runtime.scheduler import KVConsumerScheduler, KVProducerScheduler
from kvconnector.runtime.steps import StepMetadata, WorkerMetadata
from kvconnector.runtime.tensors import view_of
from kvconnector.runtime.worker import KVConsumerWorker, KVProducerWorker, KVWorker
from kvconnector.session import WorkerOutput

__all__ = [
    "CacheGroup",
    "KVConsumerScheduler",
    "KVConsumerWorker",
    "KVProducerScheduler",
    "KVProducerWorker",
    "KVWorker",
    "StepMetadata",
    "TransferParams",
    "WorkerMetadata",
    "WorkerOutput",
    "view_of",
]
