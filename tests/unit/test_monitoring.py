"""The dashboard and the alert rules of examples/monitoring."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvconnector.integrations.prometheus import EngineMetrics
from kvconnector.session import WorkerStats
from kvconnector.session.completion import RequestTrace
from tests.unit.cli.test_top import Gauges

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
PAGE = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
STATS = (Path(__file__).parents[2] / "kvconnector/integrations/vllm/stats.py").read_text()


@pytest.fixture(scope="module")
def exported():
    registry = CollectorRegistry()
    load = RequestTrace(request_id="r", kind="load", outcome="done", phases=(), path="packed")
    EngineMetrics("d0", Gauges(), registry=registry).observe(
        WorkerStats(traces=[load], contained={"KeyError": 1})
    )
    return set(re.findall(r"^(kvconnector_\w+)", generate_latest(registry).decode(), re.MULTILINE))


def test_every_metric_is_on_its_page():
    registry = CollectorRegistry()
    EngineMetrics("d0", Gauges(), registry=registry)
    ours = {each.name + "_total" * (each.type == "counter") for each in registry.collect()}
    kinds = re.findall(r'self\._(counter|histogram)\(\s*"(\w+)"', STATS)
    of_vllm = {f"vllm:kvconnector_{name}" + "_total" * (kind == "counter") for kind, name in kinds}
    assert len(of_vllm) == len(re.findall(r"self\._(?:counter|histogram)\(", STATS))
    assert ours | of_vllm == set(
        re.findall(r"^\| `((?:vllm:)?kvconnector_\w+)`", PAGE, re.MULTILINE)
    )


def test_contained_exceptions_are_counted_by_type():
    registry = CollectorRegistry()
    metrics = EngineMetrics("d0", Gauges(), registry=registry)
    metrics.observe(
        WorkerStats(contained={"KeyError": 2}).merged(WorkerStats(contained={"KeyError": 1}))
    )
    labels = {"engine": "d0", "type": "KeyError"}
    assert registry.get_sample_value("kvconnector_contained_exceptions_total", labels) == 3


def queries():
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    yield from re.findall(r"expr: (.*)", (FOLDER / "alerts.yaml").read_text())


def test_the_dashboard_and_the_alerts_query_exported_metrics(exported):
    asked = {name for query in queries() for name in re.findall(r"(?<!:)\bkvconnector_\w+", query)}
    assert asked <= exported
    assert len(asked) >= 6


def test_they_query_every_metric_that_vllm_exports_under_the_names_of_its_page():
    documented = set(re.findall(r"^\| `(vllm:kvconnector_\w+)`", PAGE, re.MULTILINE))
    asked = {name for query in queries() for name in re.findall(r"vllm:kvconnector_\w+", query)}
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert asked == documented - {"vllm:kvconnector_xfer_gigabytes_per_second"}
    for name in documented:
        assert f'"{name.removeprefix("vllm:kvconnector_").removesuffix("_total")}' in STATS, name


def test_the_dashboard_is_up_to_date():
    pytest.importorskip("grafana_foundation_sdk")
    command = [sys.executable, FOLDER / "dashboard.py"]
    written = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    assert written == (FOLDER / "dashboard.json").read_bytes()


def test_alerts_fire_when_they_should():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    subprocess.run([promtool, "test", "rules", "alerts_test.yaml"], cwd=FOLDER, check=True)
