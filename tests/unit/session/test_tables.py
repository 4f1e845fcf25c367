from __future__ import annotations

from pathlib import Path

import pytest

from kvconnector.errors import LocalProtocolError
from kvconnector.session.diagrams import TABLES, render_diagrams
from kvconnector.session.machine import Tracked

EVENTS = sorted(
    {event for table in TABLES for row in table.rows.values() for event in row},
    key=lambda event: event.__name__,
)
UNLISTED = [
    pytest.param(table, state, event, id=f"{table.name}-{state.value}-{event.__name__}")
    for table in TABLES
    for state in table.rows
    for event in EVENTS
    if table.allowed(state, event) is None
]


def _instance(event):
    return event(*(None for _ in event.__struct_fields__))  # the tables look at the type alone


@pytest.mark.parametrize("table, state, event", UNLISTED)
def test_an_unlisted_event_is_refused_with_the_story_and_changes_nothing(table, state, event):
    record = Tracked(table, "request r")
    earlier, targets = next(iter(table.rows[table.start].items()))
    record.move(_instance(earlier), min(targets, key=lambda s: s.value), 1.0)
    story = record.story
    record.state = state
    with pytest.raises(LocalProtocolError) as refused:
        record.accept(_instance(event))
    assert record.state is state
    assert record.story == story
    text = str(refused.value)
    assert event.__name__ in text
    assert state.value in text
    assert story[0] in text
    assert refused.value.context["subject"] == "request r"


def test_the_documentation_shows_the_tables_as_they_are():
    text = (Path(__file__).parents[3] / "docs/protocol.md").read_text()
    for name, diagram in render_diagrams().items():
        assert f"```mermaid\n{diagram}\n```" in text, f"regenerate the diagram of {name}"
