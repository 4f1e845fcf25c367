"""One connection to a peer: the record that sessions, port, data path and events pass to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Link:
    """A control connection with a worker or a directory service, and all state that ends with it. `number` appears in
    texts: links that a session opens count up from 1, links that peers open have negative numbers.

    *Used by the sessions:* `peer` is the record of the other end, None once the session expects nothing
    more from it.

    *Used by the runtime:* both sides use the wire `version` in which the link was opened. `handle` is the open
    connection, else None. `max_message_bytes` is the longest message that the peer takes, 0 if it has not said so.
    `consumer` names a consumer that may have mapped this worker's CUDA memory. `unsent` are the messages of the
    driver's present turn, oldest first.

    *Used by the data path:* `endpoint` is the transport's, 0 if there is none. A consumer opens one to learn of the
    producer's loss, and owns it; a producer sends chunks through it. `pools` are a producer's pools that are read
    directly. `warm_ups` are the tickets of warm-up messages that have not arrived yet.
    """

    number: int
    peer: object = None
    handle: Any = None
    version: int = 0
    is_lost: bool = False
    max_message_bytes: int = 0
    consumer: str = ""
    unsent: list[bytes] = field(default_factory=list)
    unsent_bytes: int = 0
    endpoint: int = 0
    is_tcp_fallback: bool = False
    pools: Any = None
    warm_ups: set[int] = field(default_factory=set)

    def __repr__(self) -> str:
        state = "lost" if self.is_lost else "open"
        mapped = f", maps our pools as {self.consumer}" if self.consumer else ""
        return f"<Link {self.number} {state}{mapped}{', direct' if self.pools else ''}>"
