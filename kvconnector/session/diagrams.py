"""The state diagrams of all machines, generated from their transition tables."""

from __future__ import annotations

from typing import Any

from kvconnector.session.lease import LEASE_TABLE
from kvconnector.session.load import LOAD_TABLE
from kvconnector.session.machine import Table
from kvconnector.session.peers import PEER_TABLE
from kvconnector.session.remote_engine import ENGINE_TABLE

TABLES: tuple[Table[Any], ...] = (LEASE_TABLE, PEER_TABLE, LOAD_TABLE, ENGINE_TABLE)


def render_diagrams() -> dict[str, str]:
    """Mermaid source by machine: lease, peer, load, remote engine."""
    return {table.name: table.mermaid() for table in TABLES}
