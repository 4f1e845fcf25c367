"""What a data path has to tell: events for the sessions, and records of reads that brought their bytes."""

from __future__ import annotations

from kvconnector.datapath.base import DataEvent, Pending, TransferRecord
from kvconnector.errors import KVConnectorError
from kvconnector.session import events as ev


class Report:
    """Events and records that nobody has taken yet. The last two methods are for reads that hold no slots: such a read
    is drained where it ends.
    """

    def __init__(self) -> None:
        self.events: Pending[DataEvent] = Pending()
        self.records: Pending[TransferRecord] = Pending()

    def advanced(self, read_id: int) -> None:
        """Some of its bytes are here."""
        self.events.append(ev.ReceiveAdvanced(read_id))

    def finished(self, record: TransferRecord) -> None:
        """All of its bytes are in place."""
        self.records.append(record)
        self.events.append(ev.ReceiveFinished(record.read_id))

    def stopped(self, read_id: int) -> None:
        """It was asked to end, and writes nothing any more."""
        self.events += [ev.ReceiveStopped(read_id), ev.ReceiveDrained(read_id)]

    def failed(self, read_id: int, error: KVConnectorError) -> None:
        """It ended for a reason of its own, and writes nothing any more."""
        self.events += [ev.ReceiveFailed(read_id, error), ev.ReceiveDrained(read_id)]
