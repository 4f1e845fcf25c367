"""`python -m tests.vllm.harness [CASE...]`: every case, also with NixlConnector, as a table, Markdown and JSON."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from tests.vllm.harness.cases import CASES, Case
from tests.vllm.harness.report import (
    CONNECTORS,
    NIXL,
    OURS,
    Row,
    as_markdown,
    as_row,
    as_table,
    as_text,
    environment,
)
from tests.vllm.harness.runner import preload, run_case

BY_NAME = {case.name: case for case in CASES}


def main() -> int:
    """0 when no case of ours has a complaint."""
    arguments = parse()
    console = Console(width=120)
    if arguments.list:
        console.print("\n".join(BY_NAME))
        return 0
    # an interrupted run ends its engines too
    signal.signal(signal.SIGTERM, _exit)
    (arguments.folder / "logs").mkdir(parents=True, exist_ok=True)
    preload()
    rows = kept_rows(arguments.folder) if arguments.resume else []
    kept = {(row["case"], row["connector"]) for row in rows}
    for name in arguments.cases:
        for connector in connectors_of(BY_NAME[name], arguments):
            if (name, connector) in kept:
                continue
            started = time.monotonic()
            outcome = run_case(BY_NAME[name], connector, arguments.folder)
            seconds = time.monotonic() - started
            rows.append(as_row(name, connector, outcome, seconds))
            console.print(
                f"{seconds:6.1f} s  {name} {connector}: {as_text(rows[-1])}", markup=False
            )
            save(arguments.folder, rows)
    console.print(as_table(rows))
    for row in rows:
        for complaint in row["complaints"]:
            console.print(f"{row['case']} ({row['connector']}): {complaint}", markup=False)
    failed = [row["case"] for row in rows if row["connector"] == OURS and row["complaints"]]
    console.print(f"failed: {', '.join(failed)}" if failed else "every case is good")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/test_vllm")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all of them without an argument")
    parser.add_argument("--no-nixl", action="store_true", help="our connector alone")
    parser.add_argument("--only-nixl", action="store_true", help="NixlConnector alone")
    parser.add_argument("--quick", action="store_true", help="a few cases, our connector alone")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what an interrupted run of this commit on this machine has found",
    )
    parser.add_argument("--list", action="store_true", help="the names of all cases")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for models, logs, report.json and report.md"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in BY_NAME]
    if unknown:
        parser.error(f"no case named {', '.join(unknown)}; --list names them")
    if not arguments.cases:
        arguments.cases = [
            name for name, case in BY_NAME.items() if case.is_quick or not arguments.quick
        ]
    return arguments


def connectors_of(case: Case, arguments: argparse.Namespace) -> list[str]:
    """Those that a case is run with."""
    wanted = [
        connector
        for connector in CONNECTORS
        if not (connector == NIXL and (arguments.no_nixl or arguments.quick))
        and not (connector == OURS and arguments.only_nixl)
    ]
    return [connector for connector in wanted if connector == OURS or case.has_nixl]


def kept_rows(folder: Path) -> list[Row]:
    """The rows of the report in `folder`, if it was made under the same conditions."""
    path = folder / "report.json"
    if not path.exists():
        return []
    report: dict[str, Any] = json.loads(path.read_text())
    return list(report["rows"]) if report["environment"] == environment() else []


def save(folder: Path, rows: list[Row]) -> None:
    """Both reports, after every case."""
    report = {"environment": environment(), "rows": rows}
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    (folder / "report.md").write_text(as_markdown(rows))


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
