"""`python -m tests.vllm.harness [CASE...]`: every case, also with NixlConnector, as a table and JSON."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.vllm.harness.cases import CASES, Case
from tests.vllm.harness.engine import EngineSpec
from tests.vllm.harness.model import make_model
from tests.vllm.harness.pair import Pair
from tests.vllm.harness.scenarios import Outcome

CONNECTORS = ("kvconnector", "nixl")


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def transfer_config(case: Case, connector: str, role: str) -> dict[str, Any]:
    """`--kv-transfer-config` of one engine."""
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector" if connector == "nixl" else "KVConnector",
        "kv_role": role,
        "kv_load_failure_policy": case.policy,
        "engine_id": f"{role}-{case.name}",
        "kv_connector_extra_config": case.options,
    }
    if case.is_wrapped:
        # children are found by name: ours through its plugin
        child = {name: value for name, value in config.items() if name != "engine_id"}
        wrapper = {**config, "kv_connector": "MultiConnector"}
        return wrapper | {"kv_connector_extra_config": {"connectors": [child]}}
    if connector != "nixl":
        config["kv_connector_module_path"] = "kvconnector.integrations.vllm"
    return config


def specs_of(case: Case, connector: str, folder: Path) -> tuple[EngineSpec, EngineSpec]:
    """Both engines of a case."""
    model = str(make_model(folder / "models", **case.model))
    names = ("prefill", "decode")
    specs = []
    for number, (name, options) in enumerate(zip(names, (case.prefill, case.decode), strict=True)):
        world = options.get("tp_size", 1) * options.get("pp_size", 1)
        cpus = "|".join(str((number + rank) % (os.cpu_count() or 1)) for rank in range(world))
        transfer = transfer_config(case, connector, case.roles[number])
        transfer["engine_id"] = f"{name}-{case.name}"
        specs.append(
            EngineSpec(
                model=model,
                transfer=transfer,
                cpus=cpus,
                log=folder / "logs" / f"{case.name}-{connector}-{name}.log",
                environment={
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                },
                **options,
            )
        )
    return specs[0], specs[1]


def run_case(case: Case, connector: str, folder: Path) -> Outcome:
    """One case with one connector; what goes wrong is a complaint."""
    outcome = Outcome()
    try:
        with Pair(*specs_of(case, connector, folder)) as pair:
            try:
                case.scenario(pair, outcome)
                if case.leaves_nothing:
                    outcome.complaints += pair.leftovers()
            finally:
                outcome.transfer_s = pair.transfer_s()
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        outcome.complaints.append(f"{type(error).__name__}: {text[-1]}")
    return outcome


def preload() -> None:
    """Import what every engine imports, once."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
    }
    import importlib

    for module in (
        "vllm",
        "vllm.entrypoints.llm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.gemma3",
        "kvconnector.runtime",
        "ucxx",
    ):
        importlib.import_module(module)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test_vllm")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all of them without an argument")
    parser.add_argument("--no-nixl", action="store_true", help="our connector alone")
    parser.add_argument("--only-nixl", action="store_true", help="NixlConnector alone")
    parser.add_argument("--list", action="store_true", help="the names of all cases")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for models, logs and report.json"
    )
    arguments = parser.parse_args()
    by_name = {case.name: case for case in CASES}
    console = Console(width=120)
    if arguments.list:
        console.print("\n".join(by_name))
        return 0
    unknown = [name for name in arguments.cases if name not in by_name]
    if unknown:
        parser.error(f"no case named {', '.join(unknown)}; --list names them")
    connectors = (
        ["nixl"] if arguments.only_nixl else list(CONNECTORS[: 1 if arguments.no_nixl else 2])
    )
    (arguments.folder / "logs").mkdir(parents=True, exist_ok=True)
    preload()
    rows = []
    for name in arguments.cases or by_name:
        for connector in connectors:
            started = time.monotonic()
            outcome = run_case(by_name[name], connector, arguments.folder)
            row = as_row(name, connector, outcome)
            rows.append(row)
            console.print(
                f"{time.monotonic() - started:6.1f} s  {name} {connector}: {as_text(row)}",
                markup=False,
            )
            report = arguments.folder / "report.json"
            report.write_text(json.dumps(rows, indent=1))
    console.print(as_table(rows))
    for row in rows:
        for complaint in row["complaints"]:
            console.print(f"{row['case']} ({row['connector']}): {complaint}", markup=False)
    failed = [row for row in rows if row["connector"] == "kvconnector" and row["complaints"]]
    return 1 if failed else 0


def as_row(name: str, connector: str, outcome: Outcome) -> dict[str, Any]:
    """A case's line of the report."""
    return {
        "case": name,
        "connector": connector,
        "equal": outcome.equal,
        "prompts": outcome.prompts,
        "median_transfer_ms": outcome.median_transfer_ms,
        "transfer_ms": [round(seconds * 1e3, 3) for seconds in outcome.transfer_s],
        "first_token_ms": [round(seconds * 1e3, 1) for seconds in outcome.first_token_s],
        "complaints": outcome.complaints,
    }


def as_text(row: dict[str, Any]) -> str:
    """A row for the log."""
    state = "; ".join(row["complaints"]) or "good"
    return f"{row['equal']}/{row['prompts']} equal, transfers {_median(row) or '-'} ms, {state}"


def as_table(rows: list[dict[str, Any]]) -> Table:
    """The report for a terminal: one line a case, ours beside NixlConnector's."""
    table = Table("case", "tokens equal", "transfer ms", "NIXL: tokens equal", "transfer ms")
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["connector"]] = row
    for name, found in by_case.items():
        cells = [name]
        for connector in CONNECTORS:
            cells += (
                [_equal(found[connector]), _median(found[connector])]
                if connector in found
                else ["", ""]
            )
        table.add_row(*cells)
    return table


def _equal(row: dict[str, Any]) -> str:
    mark = "" if not row["complaints"] else " [red]x[/red]"
    return f"{row['equal']}/{row['prompts']}{mark}"


def _median(row: dict[str, Any]) -> str:
    value = row["median_transfer_ms"]
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
