"""`python -m tests.vllm.harness [CASE...]`: every case, also with NixlConnector, as Markdown and JSON."""

import argparse
import importlib.util
import json
import signal
import sys
from pathlib import Path

from tests.vllm.harness.cases import CASES
from tests.vllm.harness.device import Device
from tests.vllm.harness.jobs import run_jobs
from tests.vllm.harness.report import NIXL, OURS, as_cells, as_markdown, environment, say
from tests.vllm.harness.runner import in_own_process, model_paths, preload, why_skipped

BY_NAME = {case.name: case for case in CASES}


def main():
    """0 when no case of ours has a complaint."""
    arguments = parse()
    folder, device = arguments.folder, Device(arguments.device)
    reasons = {name: why_skipped(BY_NAME[name], device) for name in arguments.cases}
    if arguments.list:
        say("\n".join(f"{name}: not run: {why}" if why else name for name, why in reasons.items()))
        return 0
    # an interrupted run ends its engines too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    preload(device)
    jobs = [
        (BY_NAME[name], connector)
        for name, why in reasons.items()
        if not why
        for connector in connectors_of(BY_NAME[name], arguments)
    ]
    in_own_process(lambda: [model_paths(case, folder) for case, _ in jobs])
    rows, facts = [], environment(device)
    not_run = {name: why or "the run ended before it" for name, why in reasons.items()}
    for row in run_jobs(jobs, folder, device, at_once=arguments.jobs, limit_s=arguments.limit):
        rows.append(row)
        say("  ".join(as_cells(row)))
        not_run.pop(row["case"], None)
        report = {"environment": facts, "rows": rows, "not_run": not_run}
        (folder / "report.json").write_text(json.dumps(report, indent=1))
        (folder / "report.md").write_text(as_markdown(rows, not_run))
    say(as_markdown(rows, not_run))
    failed = [row["case"] for row in rows if row["connector"] == OURS and row["complaints"]]
    say(f"failed: {', '.join(failed)}" if failed else "no case failed")
    return 1 if failed else 0


def parse():
    parser = argparse.ArgumentParser(prog="scripts/test_vllm")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all of them without an argument")
    parser.add_argument("--no-nixl", action="store_true", help="our connector alone")
    parser.add_argument("--quick", action="store_true", help="a few cases, our connector alone")
    parser.add_argument("--launchers", action="store_true", help="those with launchers or routers")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--list", action="store_true", help="the names of all cases")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a case")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for models, logs, report.json and report.md"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in BY_NAME]
    if unknown:
        parser.error(f"no case named {', '.join(unknown)}; --list names them")
    if not arguments.cases:
        arguments.cases = [
            name
            for name, case in BY_NAME.items()
            if (case.is_quick or not arguments.quick)
            and ({*case.needs} - {"gpus"} or not arguments.launchers)
        ]
    return arguments


def connectors_of(case, arguments):
    has_nixl = case.has_nixl and importlib.util.find_spec("nixl") is not None
    return [OURS, NIXL] if has_nixl and not (arguments.no_nixl or arguments.quick) else [OURS]


if __name__ == "__main__":
    sys.exit(main())
