"""Shared by the halves of the data path: the queue of their events, and the errors of reads that cannot be copied."""

from __future__ import annotations

from collections import deque

from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.session import events as ev
from kvconnector.session.load import RankRead
from kvconnector_kernels.relayout import RelayoutError


class EventQueue(deque[object]):
    """Events for the sessions, oldest first. `stopped` and `failed` report reads that hold no slots."""

    def stopped(self, read: RankRead) -> None:
        """Report that a read ended because it was asked to. It writes nothing more."""
        self += (ev.ReceiveStopped(read), ev.ReceiveDrained(read))

    def failed(self, read: RankRead, error: KVConnectorError) -> None:
        """Report that a read ended with an error. It writes nothing more."""
        self += (ev.ReceiveFailed(read, error), ev.ReceiveDrained(read))


def as_connector_error(error: RelayoutError | KVConnectorError) -> KVConnectorError:
    """Return the reason why a read cannot be copied, as an error of ours."""
    return error if isinstance(error, KVConnectorError) else TransportError(str(error))
