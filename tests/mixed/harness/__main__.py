"""`python -m tests.mixed.harness [CASE...]`: runs every case, and reports as Markdown and JSON."""

import os
import sys
from contextlib import closing

from tests.mixed.harness.cases import CASES, why_not
from tests.mixed.harness.engines import SglangEngine, SglangHost, Wanted, python_of_sglang
from tests.mixed.harness.pair import Pair
from tests.sglang.harness.alone import Alone
from tests.sglang.harness.model import model_of
from tests.vllm.harness.device import EXACT, Device
from tests.vllm.harness.report import SerialHarness
from tests.vllm.harness.runner import preload


class MixedHarness(SerialHarness):
    """Engines of two kinds. Those of SGLang are in another environment, behind one process that forks them."""

    prog, cases = "scripts/test_mixed", CASES

    def __init__(self):
        super().__init__()
        self._host = None
        self._alone = Alone(self._alone_of)
        self._device = Device(self.arguments.device)

    def add_options(self, parser):
        parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")

    def why_not(self, case):
        return case.why_not or why_not(case, self._device)

    def start(self):
        python_of_sglang()
        os.environ |= EXACT
        self._host = SglangHost(self._device)
        preload(self._device)
        import vllm

        return {"device": self._device.name, "vllm": vllm.__version__}

    def make_models(self, case):
        model_of(self.folder / "models", **case.model)

    def _alone_of(self, model):
        return SglangEngine(self._host, Wanted("alone", model, self.folder))

    def run_case(self, case, place, outcome):
        if case.servers is not None:
            case.servers(place, outcome, self._host)
            return
        model = str(model_of(self.folder / "models", **case.model))
        alone = self._alone.of(model)
        with closing(Pair(case, model, place, self._host, alone, device=self._device)) as pair:
            pair.wait_until_ready()
            case.scenario(pair, outcome)

    def close(self):
        self._alone.close()
        if self._host is not None:
            self._host.close()


if __name__ == "__main__":
    sys.exit(MixedHarness().run())
