"""Which sequence holds which block table."""

from __future__ import annotations

from kvconnector.cache.block_manager.allocator import Device
from kvconnector.cache.block_manager.errors import DoubleAllocationError
from kvconnector.cache.block_manager.sequence import Sequence, SequenceGroup
from kvconnector.cache.block_manager.sequence_blocks import SequenceBlocks
from kvconnector.errors import LocalProtocolError, UnknownRequestError


class TableDirectory(dict[int, SequenceBlocks]):
    """Block tables by sequence id."""

    def require_absent(self, seq: Sequence) -> None:
        """Raises DoubleAllocationError if the sequence has a table."""
        if seq.seq_id in self:
            raise DoubleAllocationError("the sequence already has blocks", seq_id=seq.seq_id)

    def of(self, seq: Sequence) -> SequenceBlocks:
        """The sequence's table. Raises UnknownRequestError if it has none."""
        table = self.get(seq.seq_id)
        if table is None:
            raise UnknownRequestError("the sequence has no blocks", seq_id=seq.seq_id)
        return table

    def unfinished(self, group: SequenceGroup) -> list[tuple[Sequence, SequenceBlocks]]:
        """The group's unfinished sequences with blocks. Raises UnknownRequestError for none."""
        pairs = [
            (seq, self[seq.seq_id])
            for seq in group.seqs()
            if not seq.is_finished and seq.seq_id in self
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
        held = [self[seq.seq_id] for seq in group.seqs() if seq.seq_id in self]
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
