"""`python -m tests.vllm.harness [CASE...]`: runs every case, also with NixlConnector; Markdown and JSON."""

import importlib.util
import os
import sys

from tests.vllm.harness.cases import CASES
from tests.vllm.harness.device import EXACT, Device
from tests.vllm.harness.jobs import run_jobs
from tests.vllm.harness.report import (
    NIXL,
    OURS,
    Report,
    cases_parser,
    environment,
    in_own_process,
    list_cases,
    parse,
)
from tests.vllm.harness.runner import model_paths, preload, why_skipped

BY_NAME = {case.name: case for case in CASES}


def main():
    """Run the cases. Exit status 0 if no case of ours has a complaint."""
    arguments = arguments_of()
    folder, device = arguments.folder, Device(arguments.device)
    reasons = {name: why_skipped(BY_NAME[name], device) for name in arguments.cases}
    if arguments.list:
        list_cases(reasons)
        return 0
    os.environ |= EXACT
    preload(device)
    import vllm

    report = Report(folder, environment(device=device.name, vllm=vllm.__version__), reasons)
    (folder / "logs").mkdir(exist_ok=True)
    jobs = [
        (BY_NAME[name], connector)
        for name, why in reasons.items()
        if not why
        for connector in connectors_of(BY_NAME[name], arguments)
    ]
    in_own_process(lambda: [model_paths(case, folder) for case, _ in jobs])
    for row in run_jobs(jobs, folder, device, at_once=arguments.jobs, limit_s=arguments.limit):
        report.add(*row)
    return report.end()


def arguments_of():
    parser = cases_parser("scripts/test_vllm")
    parser.add_argument("--no-nixl", action="store_true", help="our connector alone")
    parser.add_argument("--quick", action="store_true", help="a few cases, our connector alone")
    parser.add_argument("--launchers", action="store_true", help="those with launchers or routers")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a case")

    def is_chosen(case, arguments):
        is_launched = bool({*case.needs} - {"gpus", "cpus"})
        return (case.is_quick or not arguments.quick) and (is_launched or not arguments.launchers)

    return parse(parser, BY_NAME, is_chosen)


def connectors_of(case, arguments):
    has_nixl = case.has_nixl and importlib.util.find_spec("nixl") is not None
    return [OURS, NIXL] if has_nixl and not (arguments.no_nixl or arguments.quick) else [OURS]


if __name__ == "__main__":
    sys.exit(main())
