from pathlib import Path

from kvconnector.agenda import MAX_AT_ONCE
from kvconnector.session.consumer import LOAD_TABLE
from kvconnector.session.engines import ENGINE_TABLE
from kvconnector.session.peers import PEER_TABLE
from kvconnector.session.producer import LEASE_TABLE, MAX_REMEMBERED_LEASES
from kvconnector.wire.messages import MAX_NAMED

PAGE = Path(__file__).parents[3] / "docs/protocol.md"
TABLES = (LEASE_TABLE, PEER_TABLE, LOAD_TABLE, ENGINE_TABLE)


def mermaid(table):
    """Return the table as a Mermaid state diagram, in its order, without events that may leave a state unchanged."""
    lines = ["stateDiagram-v2", f"    [*] --> {table.start.value}"]
    for state, row in table.rows.items():
        edges = {}
        for event, targets in row.items():
            for target in sorted(targets, key=lambda s: str(s.value)):
                edges.setdefault(target, []).append(event.__name__)
        lines += [
            f"    {state.value} --> {target.value}: {'<br>'.join(events)}"
            for target, events in edges.items()
            if target is not state
        ]
        if not row:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(lines)


def test_the_protocol_page_shows_the_state_tables():
    text = PAGE.read_text()
    for table in TABLES:
        diagram = f"```mermaid\n{mermaid(table)}\n```"
        assert diagram in text, f"put the diagram of {table.name} into docs/protocol.md"


def test_the_protocol_page_has_the_numbers_of_the_code():
    text = " ".join(PAGE.read_text().split())
    for words in (
        f"is handled for {MAX_AT_ONCE} of them at a time",
        f"names at most {MAX_NAMED} transfers",
        f"remembers how its last {MAX_REMEMBERED_LEASES:,} leases ended",
    ):
        assert words in text
