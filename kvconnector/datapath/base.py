"""What the halves of the data path share: the events that they report, and how they word what cannot be copied."""

from __future__ import annotations

from collections import deque

from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.session import events as ev
from kvconnector.session.reads import RankRead
from kvconnector_kernels.relayout import RelayoutError


class EventQueue(deque[object]):
    """Events for the sessions, oldest first. `stopped` and `failed`: of reads that hold no slots."""

    def stopped(self, read: RankRead) -> None:
        """A read ended because it was asked to, and writes nothing any more."""
        self += (ev.ReceiveStopped(read), ev.ReceiveDrained(read))

    def failed(self, read: RankRead, error: KVConnectorError) -> None:
        """A read ended by an error, and writes nothing any more."""
        self += (ev.ReceiveFailed(read, error), ev.ReceiveDrained(read))


def as_connector_error(error: RelayoutError | KVConnectorError) -> KVConnectorError:
    """Why a read cannot be copied, as an error of ours."""
    return error if isinstance(error, KVConnectorError) else TransportError(str(error))
