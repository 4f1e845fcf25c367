from __future__ import annotations

import pytest

from kvconnector.session.diagrams import TABLES


def test_every_transition_of_the_tables_was_taken(transitions, request):
    """Runs last in this folder; a row that no test takes is either untested or impossible."""
    ran = {item.path.name for item in request.session.items}
    if hasattr(request.config, "workerinput"):
        pytest.skip("needs the whole folder in one process")
    if not {"test_producer.py", "test_consumer.py", "test_engines.py"} <= ran:
        pytest.skip("needs the whole folder")
    listed = {
        (table.name, state.value, event.__name__, target.value)
        for table in TABLES
        for state, row in table.rows.items()
        for event, targets in row.items()
        for target in targets
    }
    assert listed - transitions == set()
