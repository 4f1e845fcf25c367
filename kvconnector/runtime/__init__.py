"""The engine-facing halves: workers with their driver thread, and schedulers."""

from kvconnector.datapath import CacheGroup
from kvconnector.runtime.consumer_scheduler import KVConsumerScheduler
from kvconnector.runtime.params import TransferParams
from kvconnector.runtime.producer_scheduler import KVProducerScheduler
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
