"""One connection to a peer: the record that sessions, port, data path and events pass to each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Link:
    """A connection with a worker or a directory service. The runtime has its control connection, the data path its
    endpoint and mappings, each under this record. `number` appears in texts: links that a session opens count up from
    1, links that peers open have negative numbers.

    `peer` is the session's record of the other end, None once the session expects nothing more from it. The data path
    sets `maps_pools` while the pools of the producer at the other end are mapped here.
    """

    number: int
    peer: object = None
    maps_pools: bool = False

    def __repr__(self) -> str:
        return f"<Link {self.number}{', maps pools' if self.maps_pools else ''}>"
