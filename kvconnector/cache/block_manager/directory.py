"""Which sequence holds which block table."""

from __future__ import annotations

from kvconnector.cache.block_manager.allocator import Device
from kvconnector.cache.block_manager.errors import DoubleAllocationError
from kvconnector.cache.block_manager.sequence import Sequence, SequenceGroup
from kvconnector.cache.block_manager.sequence_blocks import SequenceBlocks
from kvconnector.errors import LocalProtocolError, UnknownRequestError


class TableDirectory:
    """Block tables by sequence; none can be overwritten."""

    __slots__ = ("_tables",)

    def __init__(self) -> None:
        self._tables: dict[int, SequenceBlocks] = {}

    def require_absent(self, seq: Sequence) -> None:
        """Raises DoubleAllocationError if the sequence has a table."""
        if seq.seq_id in self._tables:
            raise DoubleAllocationError("the sequence already has blocks", seq_id=seq.seq_id)

    def add(self, seq: Sequence, table: SequenceBlocks) -> None:
        """Enters a sequence's table. Raises DoubleAllocationError if it has one."""
        self.require_absent(seq)
        self._tables[seq.seq_id] = table

    def pop(self, seq: Sequence) -> SequenceBlocks | None:
        """Removes the sequence's table, if it has one."""
        return self._tables.pop(seq.seq_id, None)

    def get(self, seq: Sequence) -> SequenceBlocks:
        """The sequence's table. Raises UnknownRequestError if it has none."""
        table = self._tables.get(seq.seq_id)
        if table is None:
            raise UnknownRequestError("the sequence has no blocks", seq_id=seq.seq_id)
        return table

    def unfinished(self, group: SequenceGroup) -> list[tuple[Sequence, SequenceBlocks]]:
        """The group's unfinished sequences with blocks. Raises UnknownRequestError for none."""
        pairs = [
            (seq, self._tables[seq.seq_id])
            for seq in group.seqs()
            if not seq.is_finished and seq.seq_id in self._tables
        ]
        if not pairs:
            raise UnknownRequestError(
                "no unfinished sequence of the group has blocks", request_id=group.request_id
            )
        return pairs

    def on_device(self, group: SequenceGroup, device: Device) -> list[SequenceBlocks]:
        """All tables of the group on one device.

        Raises:
            UnknownRequestError: the group has no table at all.
            LocalProtocolError: it has none on this device.
        """
        tables = [self._tables.get(seq.seq_id) for seq in group.seqs()]
        held = [table for table in tables if table is not None]
        if not held:
            raise UnknownRequestError("the group has no blocks", request_id=group.request_id)
        there = [table for table in held if table.device is device]
        if not there:
            raise LocalProtocolError(
                "the group has no blocks on this device",
                request_id=group.request_id,
                device=device.value,
            )
        return there
