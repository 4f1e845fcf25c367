"""The lease board, in memory that consumers map: it says which blocks of a producer worker may be read right now.

*Layout.* A table of `num_buckets` buckets, a power of two, with 8 entries each. An entry is valid for a read if its key
is the lease's, `ready` equals `expected`, which is not zero, and the read ends within its `num_tokens`, or within
`ahead`: the tokens up to `ahead / 2^10` are in the layers below `ahead % 2^10`. If a lease grows, its numbers are
written again.

*Writer.* The producer's driver alone writes `key` and `expected` at once, `ready`, `num_tokens` and `ahead` after the
kernels that fill the blocks. On a GPU that is a write in a stream, which happens later, in order.

*Readers.* Consumers in other processes read it at any time, without a lock and without the producer knowing. A consumer
looks before its first copy and after its last one. If the entry was valid both times, so was everything read in
between: an entry is cleared before its blocks are written again, and no key is ever published twice.

*Why no entry is valid too early.* Clearing an entry leaves `expected` at zero. A new `expected` differs from the
`ready` that the entry still has, and an entry whose last `ready` is still to be written is not given to another lease.
kernels/native/board.c defines the order in which the words of one change become visible.

*Blocking.* Only `close` blocks: it waits for writes in a stream, with a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from kvconnector.agenda import NEVER
from kvconnector.datapath.device_memory import kept_unless_idle
from kvconnector.datapath.direct.cuda_driver import StreamWriter
from kvconnector.datapath.direct.shared_memory import SharedMemory
from kvconnector.layout.watermark import ALL_LAYERS, MAX_AHEAD_LAYERS, Watermark
from kvconnector.wire.export import BUCKET_BYTES
from kvconnector_kernels.pump.board_entries import (
    ENTRIES_PER_BUCKET,
    ENTRY,
    ENTRY_BYTES,
    claim,
    clear,
    look_up_lease,
    write,
)
from kvconnector_kernels.pump.records import BoardEntry

logger = logging.getLogger(__name__)

NUM_BUCKETS = 1024
"""Room for thousands of leases in 256 KiB. If a lease's bucket is full, it is read packed; nothing else changes."""

_MAX_EXPECTED = (1 << 31) - 1


def is_valid(
    address: int,
    num_buckets: int,
    key: bytes,
    token_stop: int,
    layer_stop: int = ALL_LAYERS.stop,
) -> bool:
    """Returns True if, according to the board at this address, a lease's blocks now hold its tokens up to `token_stop`
    in the layers below `layer_stop`.
    """
    num_tokens, ahead = look_up_lease(address, num_buckets, key)
    if num_tokens < 0 or num_tokens >= token_stop:
        return bool(num_tokens >= 0)
    watermark = Watermark(num_tokens, *divmod(ahead, MAX_AHEAD_LAYERS))
    return watermark.layer_stop(token_stop) >= layer_stop


class LeaseBoard:
    """The board of one producer worker, at the beginning of `memory`. One thread at a time uses it.

    `open_writer(address, nbytes)` makes the writer of `ready`, `num_tokens` and `ahead`. It is None where the blocks
    are complete when their lease is published, as on the CPU: these are then written at once.

    Raises:
        TransportError: the writer cannot be made, or the memory.
    """

    def __init__(
        self,
        open_writer: Callable[[int, int], StreamWriter] | None = None,
        *,
        num_buckets: int = NUM_BUCKETS,
    ) -> None:
        self.num_buckets = num_buckets
        self.memory = SharedMemory(num_buckets * BUCKET_BYTES)
        self._entries = self.memory.array[: num_buckets * BUCKET_BYTES].view(ENTRY)
        self.address = self._entries.ctypes.data
        """The address of the first byte; page aligned."""
        self._issued = np.zeros(len(self._entries), np.int64)
        self._is_taken = np.zeros(len(self._entries), np.bool_)
        self._published: dict[bytes, int] = {}
        self._writer = open_writer(self.address, self._entries.nbytes) if open_writer else None

    def __repr__(self) -> str:
        return f"<LeaseBoard of {self.num_buckets} buckets, {len(self._published)} leases>"

    def publish(self, key: bytes, watermark: Watermark) -> bool:
        """Let consumers read the blocks of a lease up to `watermark`, once the kernels launched so far have filled
        them. A known key gets the new watermark. Returns False if the key's bucket is full: the lease is then not
        published.
        """
        num_tokens, ahead = watermark.num_tokens, 0
        if watermark.ahead_layers:
            ahead = watermark.ahead_tokens * MAX_AHEAD_LAYERS + watermark.ahead_layers
        if key in self._published:
            self._write("num_tokens", self._published[key], num_tokens)
            self._write("ahead", self._published[key], ahead)
            return True
        bucket = int.from_bytes(key[:4], "little") & (self.num_buckets - 1)
        first = bucket * ENTRIES_PER_BUCKET
        for index in range(first, first + ENTRIES_PER_BUCKET):
            # a `ready` that is still to be written for the entry's former lease could validate the new one
            if self._is_taken[index] or int(self._entries[index]["ready"]) != self._issued[index]:
                continue
            self._is_taken[index] = True
            expected = int(self._issued[index]) % _MAX_EXPECTED + 1
            self._issued[index] = expected
            self._published[key] = index
            claim(self.address + index * ENTRY_BYTES, key, expected)
            # in this order, because a former lease's number may still be written later
            self._write("num_tokens", index, num_tokens)
            self._write("ahead", index, ahead)
            self._write("ready", index, expected)
            return True
        logger.debug("a lease is not published: its bucket of the board is full")
        return False

    def retract(self, key: bytes) -> None:
        """End direct reads of a lease, before its blocks are written again. No effect on an unknown key."""
        index = self._published.pop(key, None)
        if index is not None:
            clear(self.address + index * ENTRY_BYTES)
            self._is_taken[index] = False

    def close(self, until_s: float = NEVER) -> None:
        """Retract all leases, and wait for writes under way, and for whoever is given the memory, until `until_s` at
        the latest. Idempotent. Raises TransportError: the writes do not end; the board's memory then stays for as long
        as the process lives.
        """
        for key in list(self._published):
            self.retract(key)
        writer, self._writer = self._writer, None
        if writer is not None:
            with kept_unless_idle(self.memory, "the lease board's memory"):
                writer.close(until_s)
        self.memory.close(until_s)

    def _write(self, field: str, index: int, value: int) -> None:
        address = self.address + index * ENTRY_BYTES + getattr(BoardEntry, field).offset
        (write if self._writer is None else self._writer.write)(address, value)
