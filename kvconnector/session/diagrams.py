"""The state diagrams of all machines, generated from their transition tables."""

from __future__ import annotations

from typing import Any

from kvconnector.session.guests import GUEST_TABLE
from kvconnector.session.lease import LEASE_TABLE
from kvconnector.session.load import LOAD_TABLE
from kvconnector.session.machine import Table
from kvconnector.session.remote_engine import ENGINE_TABLE

TABLES: tuple[Table[Any], ...] = (LEASE_TABLE, GUEST_TABLE, LOAD_TABLE, ENGINE_TABLE)


def render_diagrams() -> dict[str, str]:
    """Mermaid source by machine: lease, guest, load, remote engine."""
    return {table.name: table.mermaid() for table in TABLES}
