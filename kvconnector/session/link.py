"""One connection to a peer: the record that sessions, ports and events pass to each other, and the messages that arrive
on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from kvconnector.wire import messages as m

MessageT_co = TypeVar("MessageT_co", bound=m.Message, covariant=True)


@dataclass(slots=True, eq=False)
class Link:
    """A connection with a worker or a directory service. The runtime has its control connection, the data path its
    endpoint and mappings, each under this record. `number` appears in texts: links that a session opens count up from
    1, links that peers open have negative numbers. `origin` is who opened it, as far as the control channel knows: a
    public key or, without keys, the address of a host; "" for a link of ours.

    `peer` is the session's record of the other end, None once the session expects nothing more from it. The data path
    sets `maps_pools` while the pools of the producer at the other end are mapped here.
    """

    number: int
    peer: object = None
    origin: str = ""
    maps_pools: bool = False

    def __repr__(self) -> str:
        return f"<Link {self.number}{', maps pools' if self.maps_pools else ''}>"


class FromPeer(msgspec.Struct, Generic[MessageT_co], frozen=True, eq=False):
    """A message from the worker or the directory service at `link`. Tables name it by the message's type."""

    link: Link
    message: MessageT_co


def kind_of(event: object) -> type:
    """Return the type by which tables name an event: the message's type if it came from a peer."""
    # several times for each event; `isinstance` takes twice as long for a struct
    return type(event.message) if type(event) is FromPeer else type(event)
