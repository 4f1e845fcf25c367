from __future__ import annotations

import pytest

from kvconnector.session import machine


@pytest.fixture(scope="package")
def transitions():
    """Every (machine, state, event, state) that any test of this folder went through."""
    return set()


@pytest.fixture(autouse=True)
def _record_transitions(transitions, monkeypatch):
    move = machine.Tracked.move

    def recorded(self, event, target, now):
        before = self.state
        move(self, event, target, now)
        transitions.add((self._table.name, before.value, type(event).__name__, target.value))

    monkeypatch.setattr(machine.Tracked, "move", recorded)
