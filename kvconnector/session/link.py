"""One connection with a peer: the record that sessions, port, data path and events hand to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Link:
    """A control connection with a worker or a directory service, and all that lasts as long as it. The `number` is for
    texts: sessions count the links that they open from 1, those that peers open have negative numbers.

    *Of the sessions:* `there` is their record of who is at the other end, None once nothing more is awaited from there.

    *Of the runtime:* both sides use the wire `version` in which it was opened. `handle` is its connection, None before
    and after. Messages that come over the transport have this `tag`, and `opener` checks them; `sealer` makes ours.
    `consumer` names one that may have mapped this worker's CUDA memory. `unsent` are messages of this turn, in order.

    *Of the data path:* `endpoint` is the transport's, 0 while there is none: a consumer's for messages alone, which it
    then owns, a producer's for chunks as well. `pools` are those of a producer that are read directly. `warm_ups` are
    the tickets of warm-up messages that are still awaited.
    """

    number: int
    there: Any = None
    handle: Any = None
    version: int = 0
    is_lost: bool = False
    tag: int = 0
    opener: Any = None
    sealer: Any = None
    consumer: str = ""
    unsent: list[bytes] = field(default_factory=list)
    unsent_bytes: int = 0
    endpoint: int = 0
    is_tcp_fallback: bool = False
    pools: Any = None
    warm_ups: set[int] = field(default_factory=set)

    def __repr__(self) -> str:
        state = (
            "lost"
            if self.is_lost
            else f"by {'transport' if self.uses_transport else 'control channel'}"
        )
        mapped = f", maps our pools as {self.consumer}" if self.consumer else ""
        return f"<Link {self.number} {state}{mapped}{', direct' if self.pools else ''}>"

    @property
    def uses_transport(self) -> bool:
        """Returns True if our messages travel over the transport by now: a producer's do once the peer has written to
        its inbox.
        """
        if not self.endpoint or self.sealer is None:
            return False
        return self.number > 0 or (self.opener is not None and self.opener.has_opened)
