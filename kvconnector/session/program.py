"""The data path's part of a read's record. A session looks at no more of it than a peer is to know."""

from __future__ import annotations

from typing import Any

import msgspec

from kvconnector.errors import KVConnectorError
from kvconnector.planning import MAX_CHUNKS


class Program(msgspec.Struct, eq=False, kw_only=True):
    """A read as the data path runs it, on either side: its `row` in the compiled loop, -1 while it has none, and the
    `jobs` of that. `error`: why it ends early, where the loop does not know.
    """

    row: int = -1
    jobs: Any = None
    error: KVConnectorError | None = None


class Receive(Program, eq=False, kw_only=True):
    """What is read into our blocks. `num_moved` of its chunks were here when the loop was last looked at, or calls made
    of a direct read; `share` of its bytes, 0 where that is not known. `is_quiet`: its end was reported.

    One that is sent has `window` slots once it is promised some, and its chunks have the tags from `first_tag` on; the
    producer sends the first `limit`. At `cancelled_s` the network was first asked to end what is awaited for it. A
    direct one waits until `until_s` for the lease that `lease_key` names.
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
