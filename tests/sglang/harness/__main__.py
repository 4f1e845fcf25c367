"""`python -m tests.sglang.harness [CASE...]`: runs every case, and reports as Markdown and JSON."""

import sys
import time
from contextlib import ExitStack, closing

from tests.sglang.harness.alone import Alone
from tests.sglang.harness.cases import CASES, LORA
from tests.sglang.harness.device import Device
from tests.sglang.harness.engine import Engine, EngineSpec, preload
from tests.sglang.harness.model import model_of
from tests.sglang.harness.nodes import hosts_of
from tests.sglang.harness.pair import Pair
from tests.vllm.harness.report import OURS, SerialHarness


class SglangHarness(SerialHarness):
    """Pairs of SGLang's engines, with our backend or one of SGLang's."""

    prog, cases = "scripts/test_sglang", CASES

    def __init__(self):
        super().__init__()
        self.connector = self.arguments.backend
        self._device = Device(self.arguments.device, dict(self.arguments.option))
        self._alone = Alone(self._alone_of)

    def add_options(self, parser):
        parser.add_argument("--backend", default=OURS, help="or nixl, mooncake: SGLang's own")
        parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
        parser.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            type=lambda text: text.split("=", 1),
            help="an option of sglang.launch_server for all engines",
        )

    def is_chosen(self, case):
        is_ours = self.arguments.backend == OURS
        return super().is_chosen(case) and (is_ours or not case.is_ours)

    def why_not(self, case):
        if self._device.kind == "cuda" and case.model.get("kind") == "sparse":
            return "SGLang has kernels for it on GPUs, which are not those of this harness"
        return self._device.why_not(case)

    def start(self):
        preload(self._device)
        import sglang

        return {"device": self._device.name, "sglang": sglang.__version__}

    def make_models(self, case):
        model_of(self.folder, **case.model)

    def _alone_of(self, model, options):
        return Engine(
            EngineSpec(
                model=model,
                log=self.folder / "alone.log",
                dumps=self.folder,
                options=dict(options),
                device=self._device,
            )
        )

    def run_case(self, case, place, outcome):
        model = model_of(self.folder, **case.model)
        if case.servers is not None:
            case.servers(place, outcome, model, self._alone.of(str(model), ()))
            return
        common = case.prefill.items() & case.decode.items()
        kept = ("disable-radix-cache", *LORA)
        one = tuple(each for each in sorted(common, key=str) if each[0] in kept)
        if case.model.get("window"):  # what it computes does not depend on a pool of windows
            one += (("disable-hybrid-swa-memory", True),)
        if case.model.get("kind") == "sparse":
            one += (("page-size", 64),)
        alone = self._alone.of(str(model), one)
        with ExitStack() as stack:
            nodes = stack.enter_context(hosts_of(case.nodes)) if case.nodes else None
            shared = {"backend": self.connector, "device": self._device, "nodes": nodes}
            pair = stack.enter_context(closing(Pair(case, model, place, alone, **shared)))
            started = time.monotonic()
            pair.wait_until_ready()
            outcome.figures["start_s"] = round(time.monotonic() - started, 1)
            case.scenario(pair, outcome)

    def close(self):
        self._alone.close()


if __name__ == "__main__":
    sys.exit(SglangHarness().run())
