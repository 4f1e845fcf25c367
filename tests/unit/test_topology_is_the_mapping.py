"""Everybody who needs to know who reads what from whom asks `TpKVTopology`: nothing works where it does not answer."""

from __future__ import annotations

import pytest

from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.cli.plan import build_report
from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.planning import plan_peer
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.topology import TpKVTopology
from tests.unit.session import harness as h

SILENT = "the topology does not answer"


@pytest.fixture
def silent_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    def targets(self: TpKVTopology, remote: object) -> None:
        raise GeometryError(SILENT)

    monkeypatch.setattr(TpKVTopology, "targets", targets)


@pytest.mark.usefixtures("silent_topology")
def test_the_planner_and_the_command_line_ask_it() -> None:
    with pytest.raises(GeometryError, match=SILENT):
        plan_peer(TpKVTopology(h.engine("d"), Rank(0, 0)), h.engine())
    with pytest.raises(GeometryError, match=SILENT):
        build_report(
            ModelShape.parse("qwen3-8b"),
            EngineShape(),
            EngineShape(),
            range(9),
            chunk_bytes=1 << 20,
        )


@pytest.mark.usefixtures("silent_topology")
def test_a_consumer_session_asks_it_whom_to_greet() -> None:
    side = h.consumer()
    (opened,) = h.of(side.tell(h.wanted(), h.load_asked()), cmd.OpenLink)
    commands = side.tell(ev.DirectoryArrived(opened.link, h.directory()))
    (finished,) = h.of(commands, cmd.FinishLoad)
    assert SILENT in str(finished.error)
    assert not h.of(commands, cmd.OpenLink)
