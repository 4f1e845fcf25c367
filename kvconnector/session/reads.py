"""One read of a consumer worker: its record, which lives until its slots are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvconnector.layout import GroupBlocks
from kvconnector.planning import SourceRead
from kvconnector.session.agenda import NEVER
from kvconnector.wire import messages as m

if TYPE_CHECKING:
    from kvconnector.session.load import Load
    from kvconnector.session.remote_engine import RemoteWorker


class RankRead(msgspec.Struct, eq=False):
    """A part of a load that is read from one producer worker: `source`, from its `remote_blocks` into our `blocks`.
    Session, port and data path pass this record to each other.

    `is_stopped`: no further chunk may be written. `is_asked`: the peer knows of the read. `is_peer_over`: the peer
    ended it, or is gone, and the data path knows how many chunks it sent. `deadline` is the time at which a peer that
    has not answered a cancellation is given up.

    *Set by the data path:* a packed read that has slots has a `window` of them, and its chunks have consecutive tags
    from `first_tag` on. A read that `is_moving` moves bytes; otherwise it waits for its turn. `share` is the fraction
    of its bytes that has arrived, 0 if unknown.
    """

    read_id: int
    load: Load
    worker: RemoteWorker
    source: SourceRead
    blocks: tuple[GroupBlocks, ...]
    remote_blocks: tuple[GroupBlocks, ...]
    is_stopped: bool = False
    is_asked: bool = False
    is_peer_over: bool = False
    deadline: float = NEVER
    window: int = 0
    first_tag: int = 0
    is_moving: bool = False
    share: float = 0.0

    def __repr__(self) -> str:
        state = "stopped" if self.is_stopped else "asked" if self.is_asked else "begun"
        return f"<RankRead {self.read_id} by link {self.worker.link.number}, {state}>"

    def message(self) -> m.Read:
        """Return the request to the producer worker, once slots are reserved. It knows a followed prompt's blocks."""
        source, key = self.source, self.load.key
        return m.Read(
            transfer_id=key.transfer_id,
            secret=key.secret,
            read_id=self.read_id,
            incarnation=self.worker.incarnation,
            token_ranges=tuple([(tokens.start, tokens.stop) for tokens in source.token_ranges]),
            layers=(source.layers.start, source.layers.stop),
            chunk_bytes=source.chunk_bytes,
            num_chunks=source.num_chunks,
            blocks=() if self.load.is_followed else self.remote_blocks,
            window=self.window,
            first_tag=self.first_tag,
        )
