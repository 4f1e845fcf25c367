"""One request that a producer holds for its consumer: the state table and the record.

Who owns the blocks, and when
-----------------------------

*FILLING.* The prompt is still computed, and the blocks are the engine's: it may take them back at any time by
`WithdrawRequest`, or by granting other blocks, which voids the lease. Consumers read below the watermark and believe
what they read only if the lease stands afterwards. Such a lease has no end in time, and no `release` answers it.

*HELD, READING.* The prompt is complete, and the blocks are the lease's until `release` gives them back. It comes
exactly once, whatever happens: all consumer ranks that the topology names have confirmed (`released`), the time is up
(`expired`), or either side gave the request up (`aborted`). Heartbeats and reads extend the time, never shorten it.

*DRAINING.* The outcome is known, and sends still read the blocks. They are stopped, nobody else may begin, and the last
`SendOver` gives the blocks back.

*Consumers on this host* read without asking, from what is published under the lease's keys. `retract` comes before
`release`, for the same event: what they read after it does not count for them. A key is never published
again once it was retracted.

*Before and after.* Messages about a transfer that is not granted yet are kept for a while (`EarlyEvents`), and so are
reads that name the blocks of a lease that is not complete: a router can be faster than the engine's next step. How a
lease ended is remembered (`EndedLeases`), so that who comes late knows why, and that no other lease gets its name and
secret. A secret is compared in constant time, and a wrong one is answered like an unknown name.

*What breaks if this is changed.* A lease that ends with sends under way hands blocks to the next request while they are
read. A `Done` that counts ranks by number instead of by identity ends a lease at a duplicate.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from enum import StrEnum

from kvconnector.ids import EngineId, Rank
from kvconnector.layout import NO_TOKENS, GroupBlocks
from kvconnector.planning import SourceRead
from kvconnector.session import events as ev
from kvconnector.session.link import Link
from kvconnector.session.machine import Table, Tracked, staying
from kvconnector.session.orders import GrowRequest, HoldRequest, LeaseOrder, WithdrawRequest
from kvconnector.session.port import NEVER
from kvconnector.session.program import Program
from kvconnector.session.trace import HoldTrace
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
_ENDED = frozenset({_S.RELEASED, _S.EXPIRED, _S.ABORTED})

LEASE_TABLE: Table[LeaseState] = Table(
    "lease",
    _S.FILLING,
    {
        _S.FILLING: {
            GrowRequest: frozenset({_S.FILLING, _S.DRAINING, _S.ABORTED}),
            HoldRequest: frozenset({_S.HELD, _S.READING, _S.DRAINING, _S.ABORTED}),
            m.Done: frozenset({_S.FILLING, _S.RELEASED, _S.DRAINING}),
            m.Abort: frozenset({_S.ABORTED, _S.DRAINING}),
            WithdrawRequest: frozenset({_S.ABORTED, _S.DRAINING}),
            **staying(_S.FILLING, m.Follow, m.Read, m.Heartbeat, ev.SendOver),
        },
        _S.HELD: {
            m.Read: frozenset({_S.HELD, _S.READING}),
            m.Done: frozenset({_S.HELD, _S.RELEASED}),
            m.Abort: frozenset({_S.ABORTED}),
            WithdrawRequest: frozenset({_S.ABORTED}),
            ev.Tick: frozenset({_S.EXPIRED}),
            **staying(_S.HELD, m.Follow, m.Heartbeat),
        },
        _S.READING: {
            m.Done: frozenset({_S.READING, _S.DRAINING}),
            ev.SendOver: frozenset({_S.READING, _S.HELD}),
            m.Abort: frozenset({_S.DRAINING}),
            WithdrawRequest: frozenset({_S.DRAINING}),
            ev.Tick: frozenset({_S.DRAINING}),
            **staying(_S.READING, m.Follow, m.Read, m.Heartbeat),
        },
        _S.DRAINING: {
            ev.SendOver: _ENDED | {_S.DRAINING},
            **staying(
                _S.DRAINING,
                GrowRequest,
                HoldRequest,
                m.Follow,
                m.Read,
                m.Heartbeat,
                m.Done,
                m.Abort,
                WithdrawRequest,
            ),
        },
        _S.RELEASED: {},
        _S.EXPIRED: {},
        _S.ABORTED: {},
    },
)

REFUSAL_OF = {
    LeaseState.RELEASED: (Refusal.UNKNOWN_TRANSFER, "the transfer is complete: draw names anew"),
    LeaseState.EXPIRED: (Refusal.LEASE_EXPIRED, "the lease on the request's blocks has ended"),
    LeaseState.ABORTED: (Refusal.ABORTED, "the request was aborted"),
}


class Lease(Tracked[LeaseState]):
    """A request's blocks, who may read them, who has confirmed, and since when which sends read them.

    `keys` are what it is published under while it is. One that `is_streamed` was granted before it was complete: its
    `followers` get a report whenever it grows, and the engine awaits its release only once it `is_complete`.
    """

    def __init__(self, granted: LeaseOrder, now: float) -> None:
        super().__init__(LEASE_TABLE, f"request {granted.request_id}")
        self.request_id: str = granted.request_id
        self.transfer_id: str = granted.transfer_id
        self.secret: str = granted.secret
        self.blocks: tuple[GroupBlocks, ...] = ()
        self.watermark = NO_TOKENS
        self.is_streamed = isinstance(granted, GrowRequest)
        self.is_complete = False
        self.expires_at = NEVER
        self.keys: tuple[bytes, ...] = ()
        self.followers: tuple[Link, ...] = ()
        self.confirmed: dict[EngineId, set[Rank]] = {}
        self.sends: dict[Send, None] = {}
        self.trace = HoldTrace(now, now)
        self.outcome: LeaseState | None = None
        self.extra = b""

    def __repr__(self) -> str:
        return (
            f"<Lease {self.transfer_id} of {self.request_id}: {self.state.value}, {self.watermark},"
            f" sends {[send.key for send in self.sends]},"
            f" followers {[link.number for link in self.followers]},"
            f" until {self.expires_at}>"
        )

    def grow(self, granted: LeaseOrder) -> bool:
        """Take the request's blocks. Returns False if those that consumers know are others, or are computed again."""
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

    def names(self) -> tuple[bytes, ...]:
        """The keys under which consumers look it up: those that follow it know no blocks when they make the key."""
        known_blocks: list[tuple[GroupBlocks, ...]] = [()] if self.is_streamed else []
        known_blocks += [self.blocks] if self.is_complete else []
        return tuple([lease_key(self.transfer_id, self.secret, blocks) for blocks in known_blocks])

    def progress(self) -> m.Progress:
        """The report to its followers."""
        if self.outcome is not None:
            refusal, text = REFUSAL_OF[self.outcome]
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

    def opens_with(self, secret: str) -> bool:
        """Returns True if a peer's secret is this lease's, in a time that does not depend on where they differ."""
        return _is_same(self.secret, secret)


class Send(Program, eq=False):
    """A consumer worker's read of a lease, from `began` on until nothing of `blocks` is sent any more: the record that
    session, port and data path hand to each other. `read` is what it asks for, `source` the same as it is cut.
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
        """Its link's number, and the one that its consumer worker has for it."""
        return self.link.number, self.read.read_id


def _is_same(ours: str, theirs: str) -> bool:
    # as bytes: `compare_digest` raises TypeError for text beyond ASCII, and the text is a peer's
    return hmac.compare_digest(ours.encode(), theirs.encode())


LEASE_KEY_BYTES = 16


def lease_key(transfer_id: str, secret: str, blocks: Sequence[GroupBlocks]) -> bytes:
    """The key under which a lease is published, for consumers that read the blocks themselves.

    Only a consumer that knows the secret and the very block ids can make it, so whoever finds it published knows that
    these are the lease's blocks. Of one that is followed the producer names the blocks itself, and the key has none.
    """
    parts: list[bytes] = []
    for text in (transfer_id.encode(), secret.encode()):
        parts += (struct.pack("<Q", len(text)), text)
    for group in blocks:
        parts += (struct.pack("<QQ", group.first_block, group.num_blocks), group.wire_ids)
    return hashlib.blake2b(b"".join(parts), digest_size=LEASE_KEY_BYTES).digest()


class EndedLeases:
    """Outcomes of the most recently ended leases, so that a late reader learns why: at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ended: dict[str, tuple[str, LeaseState]] = {}

    def add(self, lease: Lease) -> None:
        """Remember an ended lease; forget the oldest beyond the limit."""
        self._ended.pop(lease.transfer_id, None)  # the newest are the last
        self._ended[lease.transfer_id] = lease.secret, lease.state
        if len(self._ended) > self._limit:
            del self._ended[next(iter(self._ended))]

    def find(self, transfer_id: str, secret: str) -> LeaseState | None:
        """The outcome of the lease of this id and secret, if it is still remembered."""
        ours, state = self._ended.get(transfer_id, (None, None))
        return state if ours is not None and _is_same(ours, secret) else None
