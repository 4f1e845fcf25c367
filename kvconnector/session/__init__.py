"""Protocol state machines: events in, calls of a `Port` out. No clock, no threads, no sockets."""

from kvconnector.session.completion import (
    KVOutputAggregator,
    LoadInFlight,
    Phase,
    RequestTrace,
    WorkerOutput,
    WorkerStats,
)
from kvconnector.session.consumer import ConsumerSession
from kvconnector.session.producer import ProducerSession

__all__ = [
    "ConsumerSession",
    "KVOutputAggregator",
    "LoadInFlight",
    "Phase",
    "ProducerSession",
    "RequestTrace",
    "WorkerOutput",
    "WorkerStats",
]
