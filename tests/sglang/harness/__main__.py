"""`python -m tests.sglang.harness [CASE...]`: runs every case, and reports as Markdown and JSON."""

import shutil
import sys
import time
import traceback
from contextlib import ExitStack

from tests.sglang.harness.cases import CASES
from tests.sglang.harness.device import Device
from tests.sglang.harness.engine import Engine, EngineSpec, preload
from tests.sglang.harness.model import model_of
from tests.sglang.harness.pair import Pair
from tests.vllm.harness.report import (
    OURS,
    NoAnswerError,
    Outcome,
    Report,
    cases_parser,
    environment,
    in_own_process,
    list_cases,
    parse,
)

BY_NAME = {case.name: case for case in CASES}


def main():
    """Run the cases. Exit status 0 if no case has a complaint."""
    arguments = arguments_of()
    folder, backend = arguments.folder, arguments.backend
    chosen = [BY_NAME[name] for name in arguments.cases]
    device = Device(arguments.device, dict(arguments.option))
    reasons = {case.name: device.why_not(case) for case in chosen}
    if arguments.list:
        list_cases(reasons)
        return 0
    preload(device)
    import sglang

    facts = environment(device=device.name, sglang=sglang.__version__)
    report = Report(folder, facts, reasons)
    in_own_process(lambda: [model_of(folder, **case.model) for case in chosen])
    with ExitStack() as stack:
        alone = Alone(folder, stack, device)
        for case in chosen:
            if not reasons[case.name]:
                started = time.monotonic()
                outcome = run_case(case, folder, alone, backend, device)
                report.add(case.name, backend, outcome, time.monotonic() - started)
    return report.end(backend)


def arguments_of():
    parser = cases_parser("scripts/test_sglang")
    parser.add_argument("--quick", action="store_true", help="a few cases")
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

    def is_chosen(case, arguments):
        is_ours = arguments.backend == OURS
        return (case.is_quick or not arguments.quick) and (is_ours or not case.is_ours)

    return parse(parser, BY_NAME, is_chosen)


class Alone:
    """One engine alone, of the last case's model."""

    def __init__(self, folder, stack, device):
        self._folder, self._engine, self._model, self._known = folder, None, None, {}
        self._device = device
        stack.callback(self._stop)

    def of(self, model, options):
        """Return the engine for this model."""
        if (model, options) != self._model:
            self._stop()
            log = self._folder / "alone.log"
            spec = EngineSpec(
                model=str(model),
                log=log,
                dumps=self._folder,
                options=dict(options),
                device=self._device,
            )
            self._model, self._known = (model, options), {}
            self._engine = Engine(spec)
            self._engine.wait_until_ready()
        return self

    def ask(self, prompt, **options):
        """Return its answer, which is remembered if it was asked before."""
        key = repr((prompt, options))
        if key not in self._known:
            self._known[key] = self._engine.ask(prompt, **options)
        return self._known[key]

    def _stop(self):
        if self._engine is not None:
            self._engine.kill()


def run_case(case, folder, alone, backend, device):
    """Start the two engines, run the scenario, and end them."""
    outcome, place = Outcome(), folder / case.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    pair = None
    try:
        model = model_of(folder, **case.model)
        if case.servers is not None:
            case.servers(place, outcome, model, alone.of(model, ()))
            return outcome
        common = case.prefill.items() & case.decode.items()
        one = tuple(each for each in sorted(common) if each[0] == "disable-radix-cache")
        if case.model.get("window"):  # what it computes does not depend on a pool of windows
            one += (("disable-hybrid-swa-memory", True),)
        pair = Pair(case, model, place, alone.of(model, one), backend=backend, device=device)
        started = time.monotonic()
        pair.wait_until_ready()
        outcome.figures["start_s"] = round(time.monotonic() - started, 1)
        case.scenario(pair, outcome)
    except NoAnswerError as error:
        outcome.complaints.append(str(error))
    except Exception as error:
        traceback.print_exc()
        outcome.complaints.append(f"{type(error).__name__}: {error}")
    finally:
        if pair is not None:
            pair.stop()
    return outcome


if __name__ == "__main__":
    sys.exit(main())
