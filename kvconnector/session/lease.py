"""One request that a producer holds for its consumer: its states and its record. `producer` has the table.

Ownership of the blocks
-----------------------
*FILLING.* The engine is still computing the prompt and owns the blocks. It may take them back at any time, by
`WithdrawRequest` or by granting other blocks, which voids the lease. Consumers read below the watermark, and use the
bytes only if the lease is still published afterwards. Such a lease never expires and is never released.

*HELD, READING.* The prompt is complete, and the lease owns the blocks until `release` gives them back. That happens
exactly once: when all consumer ranks that the topology names have confirmed (`released`), when the time is up
(`expired`), or when either side gives up the request (`aborted`). Heartbeats and reads extend the time and never
shorten it.

An engine whose pool is full may ask for the end of a lease (`ReclaimRequest`). It ends as if its time were up, unless a
consumer has shown by any message that it wants it. A direct read begins without one: it finds the key retracted.

*DRAINING.* The outcome is known, but sends still read the blocks. They are stopped, no new read may begin, and the last
`SendOver` gives the blocks back.

*Consumers on this host* find the lease's keys on the board and read its blocks without asking. `retract` is called
before `release`, while the same event is handled: a read that ends after it does not count. A retracted key is never
published again.

*Before and after.* Messages about a transfer that is not granted yet are kept for a while (`EarlyEvents`), and so are
reads that name the blocks of an incomplete lease: a router can be faster than the engine's next step. The outcome of a
lease is remembered (`EndedLeases`): late messages are then answered with the reason, and no other lease gets its name
and secret. Secrets are compared in constant time, and a wrong one is answered like an unknown name.

*What breaks if this changes.* If a lease ends while sends are under way, its blocks go to the next request while they
are read. If `Done` counted messages instead of ranks, a duplicate would end a lease.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvconnector.agenda import NEVER
from kvconnector.errors import KVConnectorError, OfferReclaimedError
from kvconnector.ids import EngineId, Rank
from kvconnector.layout import NO_TOKENS, GroupBlocks
from kvconnector.planning import SourceRead
from kvconnector.session.link import Link
from kvconnector.session.machine import Table, Tracked
from kvconnector.session.orders import GrowRequest, LeaseOrder
from kvconnector.session.trace import LeaseTrace
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal


class LeaseState(StrEnum):
    """States of a producer's request."""

    FILLING = "filling"
    HELD = "held"
    READING = "reading"
    DRAINING = "draining"
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"


_S = LeaseState
REFUSAL_OF = {
    LeaseState.RELEASED: (
        Refusal.UNKNOWN_TRANSFER,
        "the transfer is complete: prefill the request again",
    ),
    LeaseState.EXPIRED: (Refusal.LEASE_EXPIRED, "the lease on the request's blocks has ended"),
    LeaseState.ABORTED: (Refusal.ABORTED, "the request was aborted"),
}
USED_NAMES = "the transfer is complete: draw names anew"
"""The error text for a transfer whose name was drawn by the router, which may use the name again by mistake. SGLang's
decode engine recognises the refusal by it, also one of another release, so it may not change before a new wire version
has a `Refusal` for it: `UNKNOWN_TRANSFER` also refuses names that were never granted.
"""


class Lease(Tracked[LeaseState]):
    """A request's blocks, the ranks that have confirmed, and the sends that read the blocks.

    It is published under its `keys`. If it `is_streamed`, it was granted before it was complete: its `followers` get a
    report whenever it grows, and the engine expects its release only once it `is_complete`. Its `outcome` is known, and
    the `reason` if it was aborted or taken back, before its last send has stopped. It `is_wanted` once any consumer has
    asked for it; if none has, it ends at `reclaim_at`.
    """

    def __init__(self, table: Table[LeaseState], granted: LeaseOrder, now: float) -> None:
        super().__init__(table, f"request {granted.request_id}")
        self.request_id: str = granted.request_id
        self.transfer_id: str = granted.transfer_id
        self.secret: str = granted.secret
        self.blocks: tuple[GroupBlocks, ...] = ()
        self.watermark = NO_TOKENS
        self.is_streamed = isinstance(granted, GrowRequest)
        self.is_complete = False
        self.is_wanted = False
        self.expires_at = NEVER
        self.reclaim_at = NEVER
        self.keys: tuple[bytes, ...] = ()
        self.followers: tuple[Link, ...] = ()
        self.confirmed: dict[EngineId, set[Rank]] = {}
        self.sends: dict[Send, None] = {}
        self.trace = LeaseTrace(now, now)
        self.outcome: LeaseState | None = None
        self.reason: KVConnectorError | None = None
        self.is_reported = False
        self.extra = b""

    def __repr__(self) -> str:
        return (
            f"<Lease {self.transfer_id} of {self.request_id}: {self.state.value}, {self.watermark},"
            f" sends {[send.key for send in self.sends]},"
            f" followers {[link.number for link in self.followers]},"
            f" until {self.expires_at}>"
        )

    def grow(self, granted: LeaseOrder) -> bool:
        """Record the request's blocks and watermark.

        Returns:
            False if consumers know other blocks of it, or if tokens that they know are computed again.
        """
        watermark = granted.watermark
        if not (self.is_complete or watermark.continues(self.watermark)):
            return False
        for old, new in zip(self.blocks, granted.blocks, strict=False):
            is_same = old.first_block == new.first_block and new.wire_ids.startswith(old.wire_ids)
            if old.wire_ids and not is_same:
                return False
        self.blocks = granted.blocks
        if watermark != self.watermark:
            self.watermark = watermark
        return True

    def make_keys(self) -> tuple[bytes, ...]:
        """Return the keys under which consumers look it up. Followers make theirs before they know the blocks."""
        known_blocks: list[tuple[GroupBlocks, ...]] = [()] if self.is_streamed else []
        known_blocks += [self.blocks] if self.is_complete else []
        return tuple([lease_key(self.transfer_id, self.secret, blocks) for blocks in known_blocks])

    def progress(self) -> m.Progress:
        """Return the report to its followers."""
        if self.outcome is not None:
            refusal, text = self.refusal()
            return m.Progress(
                transfer_id=self.transfer_id, secret=self.secret, refusal=refusal, text=text
            )
        return m.Progress(
            transfer_id=self.transfer_id,
            secret=self.secret,
            blocks=self.blocks,
            is_complete=self.is_complete,
            watermark=self.watermark,
            extra=self.extra,
        )

    def refusal(self) -> tuple[Refusal, str]:
        """Return the refusal for peers that ask for the lease after its outcome is known."""
        outcome = self.outcome or LeaseState.ABORTED
        refusal, text = REFUSAL_OF[outcome]
        if isinstance(self.reason, OfferReclaimedError):
            return Refusal.RECLAIMED, self.reason.message
        is_named = self.is_streamed and outcome is LeaseState.RELEASED
        return refusal, USED_NAMES if is_named else text

    def opens_with(self, secret: str) -> bool:
        """Returns True if a peer's secret is this lease's. Takes the same time no matter where they differ."""
        return _is_same(self.secret, secret)


class Send(msgspec.Struct, eq=False):
    """A consumer worker's read of a lease, from `began` until nothing reads its `blocks` any more. Session, port and
    data path pass this record to each other. `read` is the request, `source` the same cut into chunks.
    """

    link: Link
    lease: Lease
    read: m.Read
    source: SourceRead
    blocks: tuple[GroupBlocks, ...]
    began: float

    def __repr__(self) -> str:
        return f"<Send {self.key} of {self.lease}>"

    @property
    def key(self) -> tuple[int, int]:
        """Its link's number, and its number at the consumer worker."""
        return self.link.number, self.read.read_id


def _is_same(ours: str, theirs: str) -> bool:
    # encoded, because `compare_digest` raises TypeError for non-ASCII text, and this text comes from a peer
    return hmac.compare_digest(ours.encode(), theirs.encode())


LEASE_KEY_BYTES = 16


def lease_key(transfer_id: str, secret: str, blocks: Sequence[GroupBlocks]) -> bytes:
    """Return the key under which a lease is published, for consumers that read the blocks themselves.

    A key is made from the secret and the block ids, so a consumer that finds it published knows that these are the
    lease's blocks. The key of a followed lease has no block ids, as the producer reports those itself.
    """
    parts: list[bytes] = []
    for text in (transfer_id.encode(), secret.encode()):
        parts += (struct.pack("<Q", len(text)), text)
    for group in blocks:
        parts += (struct.pack("<QQ", group.first_block, group.num_blocks), group.wire_ids)
    return hashlib.blake2b(b"".join(parts), digest_size=LEASE_KEY_BYTES).digest()


class EndedLeases:
    """The last `limit` leases that ended, with the refusals for peers that ask for them too late."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # a look-up compares secrets only if their hashes are equal, so its time tells nothing about one
        self._ended: dict[tuple[str, str], tuple[LeaseState, tuple[Refusal, str]]] = {}

    def add(self, lease: Lease) -> None:
        """Remember an ended lease; forget the oldest beyond the limit."""
        self._ended[lease.transfer_id, lease.secret] = lease.state, lease.refusal()
        if len(self._ended) > self._limit:
            del self._ended[next(iter(self._ended))]

    def find(self, transfer_id: str, secret: str) -> tuple[Refusal, str] | None:
        """Return the refusal of the lease with this id and secret, None if it is not remembered."""
        ended = self._ended.get((transfer_id, secret))
        return None if ended is None else ended[1]

    def has_released(self, transfer_id: str, secret: str) -> bool:
        """Returns True if the lease is remembered as one whose consumers had everything that they needed."""
        state, _ = self._ended.get((transfer_id, secret), (None, None))
        return state is LeaseState.RELEASED
