"""`python -m tests.vllm.harness [CASE...]`: every case, also with NixlConnector, as Markdown and JSON."""

import argparse
import importlib.util
import json
import signal
import sys
from pathlib import Path

from tests.vllm.harness.cases import CASES
from tests.vllm.harness.device import Device
from tests.vllm.harness.jobs import Job, run_jobs
from tests.vllm.harness.report import NIXL, OURS, as_markdown, as_row, as_text, environment
from tests.vllm.harness.runner import in_own_process, model_paths, preload, why_skipped

NO_NIXL = importlib.util.find_spec("nixl") is None
BY_NAME = {case.name: case for case in CASES}


def main():
    """0 when no case of ours has a complaint."""
    arguments = parse()
    device = Device(arguments.device, arguments.dtype)
    reasons = {name: why_skipped(BY_NAME[name], device) for name in arguments.cases}
    skipped = {name: reason for name, reason in reasons.items() if reason}
    if arguments.list:
        say("\n".join(f"{name}: not run: {why}" if why else name for name, why in reasons.items()))
        return 0
    # an interrupted run ends its engines too
    signal.signal(signal.SIGTERM, _exit)
    (arguments.folder / "logs").mkdir(parents=True, exist_ok=True)
    preload(device)
    jobs = [
        Job(BY_NAME[name], connector)
        for name in arguments.cases
        if name not in skipped
        for connector in connectors_of(BY_NAME[name], arguments)
    ]
    in_own_process(lambda: [model_paths(job.case, arguments.folder) for job in jobs])
    rows = []
    pending = {job.case.name: "the run ended before it" for job in jobs}
    at_once, limit_s = arguments.jobs, arguments.limit
    for done in run_jobs(jobs, arguments.folder, device, at_once=at_once, limit_s=limit_s):
        rows.append(as_row(done.job.case.name, done.job.connector, done.outcome, done.seconds))
        say(
            f"{done.seconds:6.1f} s  {rows[-1]['case']} {rows[-1]['connector']}: {as_text(rows[-1])}"
        )
        pending.pop(done.job.case.name, None)
        save(arguments.folder, rows, skipped | pending, device)
    say(as_markdown(rows, skipped))
    ours = [row for row in rows if row["connector"] == OURS]
    failed = [row["case"] for row in ours if row["complaints"]]
    differs = [row["case"] for row in ours if row["differs_alone"]]
    if differs:
        say(f"vLLM itself differs: {', '.join(differs)}")
    say(f"failed: {', '.join(failed)}" if failed else "no case failed")
    return 1 if failed else 0


def say(text):
    """A line of the run's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/test_vllm")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all of them without an argument")
    parser.add_argument("--no-nixl", action="store_true", help="our connector alone")
    parser.add_argument("--quick", action="store_true", help="a few cases, our connector alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", help="of models; float32 unless a case names another")
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
            name for name, case in BY_NAME.items() if case.is_quick or not arguments.quick
        ]
    return arguments


def connectors_of(case, arguments):
    """Those that a case is run with."""
    is_ours_alone = arguments.no_nixl or arguments.quick or not case.has_nixl or NO_NIXL
    return [OURS] if is_ours_alone else [OURS, NIXL]


def save(folder, rows, skipped, device):
    """Both reports, after every case."""
    report = {"environment": environment(device), "rows": rows, "not_run": skipped}
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    (folder / "report.md").write_text(as_markdown(rows, skipped))


def _exit(number, frame):
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
