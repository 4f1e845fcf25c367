"""The lease board: which blocks of a producer worker may be read right now, in memory that consumers map.

A table of `num_buckets` buckets with 8 entries each. An entry is valid for a read if its key is the lease's, `ready`
equals `expected`, which is not zero, and the read ends within its `num_tokens`, or within `ahead`: the tokens up to
`ahead / 2^10` are in the layers below `ahead % 2^10`. The producer's host thread writes all but `ready`, `num_tokens`
and `ahead`, which are written behind the kernels that fill the blocks. A consumer reads the bucket of
its key before its first copy and after its last one: if the entry was valid both times, so was all that it read in
between, for an entry that was retracted is never published again.

Whatever order the stores of one change become visible in, no entry is valid too early: retracting leaves `expected` at
zero, and a new `expected` differs from the `ready` that the entry still has. A lease may grow: what tells of its tokens
is written as `ready` is, behind the kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvconnector.datapath.device_memory import kept_unless_idle
from kvconnector.datapath.direct.shared_memory import SharedMemory
from kvconnector.planning import ALL_LAYERS
from kvconnector.session.watermark import MAX_AHEAD_LAYERS, Watermark
from kvconnector.wire.export import BUCKET_BYTES

ENTRY_DTYPE = np.dtype(
    [
        ("key", "<u8", 2),
        ("expected", "<i4"),
        ("ready", "<i4"),
        ("num_tokens", "<i4"),
        ("ahead", "<i4"),
    ]
)
ENTRIES_PER_BUCKET = BUCKET_BYTES // ENTRY_DTYPE.itemsize
_ENTRY = struct.Struct("<16siiii")
NUM_BUCKETS = 1024
"""Room for thousands of leases in 256 KiB; a bucket that is full costs one lease the direct path, nothing else."""

_MAX_EXPECTED = (1 << 31) - 1


class ReadyWriter(Protocol):
    """Writes what tells of an entry's tokens behind whatever fills the blocks."""

    def write(self, address: int, value: int) -> None:
        """Set the aligned int32 at `address`, which is inside the board."""

    def close(self) -> None:
        """Let every write that is under way end, and release what `write` needed. Raises TransportError: the device has
        failed, or a write does not end: the memory must stay.
        """


def bucket_offset(key: bytes, num_buckets: int) -> int:
    """Where the bucket of a key begins, in bytes from the board's first. `num_buckets` is a power of two."""
    return (int.from_bytes(key[:8], "little") & (num_buckets - 1)) * BUCKET_BYTES


def is_valid(bucket: bytes, key: bytes, token_stop: int, layer_stop: int = ALL_LAYERS.stop) -> bool:
    """Whether a bucket says that the lease's blocks hold its tokens up to this one in the layers below that."""
    for found, expected, ready, num_tokens, ahead in _ENTRY.iter_unpack(bucket):
        if found == key and expected != 0 and expected == ready:
            if num_tokens >= token_stop:
                return True
            watermark = Watermark(num_tokens, *divmod(ahead, MAX_AHEAD_LAYERS))
            return watermark.layer_stop(token_stop) >= layer_stop
    return False


class LeaseBoard:
    """The board of one producer worker, at the beginning of `memory`. One thread at a time.

    `open_writer(address, nbytes)` makes what writes `ready` into the board's memory; None where the blocks are complete
    when their lease is published, as on the CPU: `ready` is then written at once.

    Raises:
        TransportError: the writer cannot be made, or the memory.
    """

    def __init__(
        self,
        open_writer: Callable[[int, int], ReadyWriter] | None = None,
        *,
        num_buckets: int = NUM_BUCKETS,
    ) -> None:
        self.num_buckets = num_buckets
        self.memory = SharedMemory(num_buckets * BUCKET_BYTES)
        self._entries = self.memory.array[: num_buckets * BUCKET_BYTES].view(ENTRY_DTYPE)
        self._issued = np.zeros(len(self._entries), np.int64)
        self._is_taken = np.zeros(len(self._entries), np.bool_)
        self._published: dict[bytes, int] = {}
        self._writer = open_writer(self.address, self._entries.nbytes) if open_writer else None

    @property
    def address(self) -> int:
        """Of the first byte; page aligned."""
        return self._entries.ctypes.data

    def publish(
        self, key: bytes, num_tokens: int, ahead_tokens: int = 0, ahead_layers: int = 0
    ) -> bool:
        """Let the blocks of a lease be read once they are complete; False if the key's bucket is full. They hold the
        tokens of their sequence up to this `Watermark`; of a lease that is published already, by now.
        """
        ahead = ahead_tokens * MAX_AHEAD_LAYERS + ahead_layers if ahead_layers else 0
        if key in self._published:
            self._write("num_tokens", self._published[key], num_tokens)
            self._write("ahead", self._published[key], ahead)
            return True
        first = bucket_offset(key, self.num_buckets) // ENTRY_DTYPE.itemsize
        for index in range(first, first + ENTRIES_PER_BUCKET):
            entry = self._entries[index]
            # an entry whose last `ready` is still to be written could be validated by it
            if self._is_taken[index] or int(entry["ready"]) != self._issued[index]:
                continue
            self._is_taken[index] = True
            expected = int(self._issued[index]) % _MAX_EXPECTED + 1
            self._issued[index] = expected
            self._published[key] = index
            entry["expected"] = expected
            entry["key"] = np.frombuffer(key, "<u8")
            # in this order: a former lease's number may still be on its way
            self._write("num_tokens", index, num_tokens)
            self._write("ahead", index, ahead)
            self._write("ready", index, expected)
            return True
        return False

    def retract(self, key: bytes) -> None:
        """Let a lease's blocks not be read any more, before they are written again. No effect on an unknown key."""
        index = self._published.pop(key, None)
        if index is not None:
            self._entries[index]["key"] = 0
            self._entries[index]["expected"] = 0
            self._is_taken[index] = False

    def close(self) -> None:
        """Retract whatever is published, and let writes that are under way end. Idempotent. Raises TransportError: they
        do not; the board's memory then stays for as long as the process lives.
        """
        for key in list(self._published):
            self.retract(key)
        writer, self._writer = self._writer, None
        if writer is not None:
            with kept_unless_idle(self.memory, "the lease board's memory"):
                writer.close()
        self.memory.close()

    def _write(self, field: str, index: int, value: int) -> None:
        if self._writer is None:
            self._entries[index][field] = value
        else:
            address = self._entries[field][index : index + 1].ctypes.data
            self._writer.write(address, value)
