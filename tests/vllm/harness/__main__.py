"""`python -m tests.vllm.harness [CASE...]`: runs every case, also with NixlConnector; Markdown and JSON."""

import importlib.util
import os
import sys

from tests.vllm.harness.cases import CASES
from tests.vllm.harness.device import EXACT, Device
from tests.vllm.harness.jobs import run_jobs
from tests.vllm.harness.report import NIXL, OURS, Harness
from tests.vllm.harness.runner import model_paths, preload, why_skipped


class VllmHarness(Harness):
    """Pairs of vLLM's engines, several cases at a time."""

    prog, cases = "scripts/test_vllm", CASES

    def __init__(self):
        super().__init__()
        self._device = Device(self.arguments.device)

    def add_options(self, parser):
        parser.add_argument(
            "--no-nixl", action="store_true", help="our connector alone, as --quick"
        )
        parser.add_argument("--launchers", action="store_true", help="with launchers or routers")
        parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
        parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
        parser.add_argument("--limit", type=float, default=600.0, help="seconds of a case")

    def is_chosen(self, case):
        is_launched = bool({*case.needs} - {"gpus", "cpus"})
        return super().is_chosen(case) and (is_launched or not self.arguments.launchers)

    def why_not(self, case):
        return why_skipped(case, self._device)

    def start(self):
        os.environ |= EXACT
        preload(self._device)
        import vllm

        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        return {"device": self._device.name, "vllm": vllm.__version__}

    def make_models(self, case):
        model_paths(case, self.folder)

    def rows(self, cases):
        jobs = [(case, connector) for case in cases for connector in self._connectors_of(case)]
        given = self.arguments
        return run_jobs(jobs, self.folder, self._device, at_once=given.jobs, limit_s=given.limit)

    def _connectors_of(self, case):
        has_nixl = case.has_nixl and importlib.util.find_spec("nixl") is not None
        is_alone = self.arguments.no_nixl or self.arguments.quick
        return [OURS, NIXL] if has_nixl and not is_alone else [OURS]


if __name__ == "__main__":
    sys.exit(VllmHarness().run())
