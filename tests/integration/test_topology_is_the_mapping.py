"""Everybody who needs to know who reads what from whom asks `TpKVTopology`: nothing works where it does not answer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.cli.plan import build_report
from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.planning import plan_peer
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.topology import TpKVTopology
from minillm.cluster import Cluster
from tests.integration.minillm_engines import RunCluster, complete_on, prompt_of
from tests.unit.session import harness as h

SILENT = "the topology does not answer"


@pytest.fixture
def forked() -> None:
    """Every process is to import the broken topology."""


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


@pytest.mark.integration
@pytest.mark.ucx
@pytest.mark.timeout(170)
def test_a_transfer_between_two_minillm_engines_asks_it(
    run_cluster: RunCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process of the engines imports this before anything else."""
    (tmp_path / "sitecustomize.py").write_text(
        "from kvconnector.errors import GeometryError\n"
        "from kvconnector.topology import TpKVTopology\n"
        "def targets(self, remote):\n"
        f"    raise GeometryError({SILENT!r})\n"
        "TpKVTopology.targets = targets\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))

    async def main(cluster: Cluster) -> None:
        common = ["--engine", "block=16", "--failure-policy", "fail"]
        prefill = await cluster.start_engine("prefill", "prefill", common)
        decode = await cluster.start_engine("decode", "decode", common)
        await cluster.wait_healthy(prefill, decode)
        prompt = prompt_of(40)
        offer = await complete_on(
            cluster, prefill, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
        )
        with pytest.raises(AssertionError, match=SILENT):
            await complete_on(
                cluster,
                decode,
                prompt,
                max_tokens=2,
                kv_transfer_params=offer["kv_transfer_params"],
            )

    run_cluster(main)
