"""The data path's part of a read's record. A session reads only those fields that it sends to the peer, and `row`: with
one a read moves bytes, without one it waits for its turn.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvconnector.errors import KVConnectorError
from kvconnector.planning import MAX_CHUNKS


class Program(msgspec.Struct, eq=False, kw_only=True):
    """A read as the data path runs it, on either side: its `row` in the compiled loop (-1 if it has none) and that
    row's `jobs`. `error` says why it ends early if the loop does not know.
    """

    row: int = -1
    jobs: Any = None
    error: KVConnectorError | None = None


class Receive(Program, eq=False, kw_only=True):
    """A read into our blocks. When the loop was last polled, `num_moved` of its chunks had arrived, or copy calls of a
    direct read had been made; `share` is the same as a fraction of its bytes, 0 if unknown. `is_quiet`: its end was
    reported.

    A packed read has `window` slots, 0 until they are reserved. Its chunks have consecutive tags from `first_tag` on,
    and the producer sends the first `limit` of them. `cancelled_s` is when its receives were first cancelled. A direct
    read waits until `until_s` for the lease that `lease_key` names.
    """

    num_moved: int = 0
    share: float = 0.0
    is_quiet: bool = False
    first_tag: int = 0
    window: int = 0
    limit: int = MAX_CHUNKS
    cancelled_s: float | None = None
    until_s: float = 0.0
    lease_key: bytes = b""
