from pathlib import Path

import pytest

from kvconnector.errors import LocalProtocolError
from kvconnector.session import events as ev
from kvconnector.session.diagrams import TABLES, render_diagrams
from kvconnector.session.machine import Tracked
from kvconnector.wire.messages import Message


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_an_unlisted_event_is_refused_with_the_story_and_changes_nothing(table):
    record = Tracked(table, "request r")
    kind, targets = next(iter(table.rows[table.start].items()))
    values = dict.fromkeys(kind.__struct_fields__)
    event = ev.FromPeer(-1, kind(**values)) if issubclass(kind, Message) else kind(**values)
    record.move(event, min(targets), 1.0)
    state, story = record.state, record.story
    with pytest.raises(
        LocalProtocolError, match=f"object is not possible .* {state.value}"
    ) as told:
        record.accept(object())
    assert (record.state, record.story) == (state, story)
    assert story[0] in str(told.value)
    assert told.value.context["subject"] == "request r"


def test_the_documentation_shows_the_tables_as_they_are():
    text = (Path(__file__).parents[3] / "docs/protocol.md").read_text()
    for name, diagram in render_diagrams().items():
        assert f"```mermaid\n{diagram}\n```" in text, f"regenerate the diagram of {name}"
