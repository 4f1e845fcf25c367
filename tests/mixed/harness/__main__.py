"""`python -m tests.mixed.harness [CASE...]`: runs every case, and reports as Markdown and JSON."""

import os
import shutil
import sys
import time
import traceback
from contextlib import closing, suppress

from tests.mixed.harness.cases import CASES
from tests.mixed.harness.engines import SglangEngine, SglangHost, Wanted, python_of_sglang
from tests.mixed.harness.pair import Pair
from tests.sglang.harness.model import model_of
from tests.vllm.harness.device import EXACT, Device
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
from tests.vllm.harness.runner import preload

BY_NAME = {case.name: case for case in CASES}


def main():
    """Run the cases. Exit status 0 if no case has a complaint."""
    parser = cases_parser("scripts/test_mixed")
    parser.add_argument("--quick", action="store_true", help="a few cases")
    arguments = parse(parser, BY_NAME, lambda case, given: case.is_quick or not given.quick)
    chosen = [BY_NAME[name] for name in arguments.cases]
    reasons = {case.name: case.why_not for case in chosen}
    if arguments.list:
        list_cases(reasons)
        return 0
    python_of_sglang()
    folder = arguments.folder
    os.environ |= EXACT
    with closing(SglangHost()) as host:
        preload(Device("cpu"))
        import vllm

        report = Report(folder, environment(vllm=vllm.__version__), reasons)
        in_own_process(lambda: [model_of(folder / "models", **case.model) for case in chosen])
        with closing(Alone(host, folder)) as alone:
            for case in chosen:
                if not case.why_not:
                    started = time.monotonic()
                    outcome = run_case(case, folder, host, alone)
                    report.add(case.name, OURS, outcome, time.monotonic() - started)
    return report.end()


class Alone:
    """A server of SGLang alone, of the last case's model."""

    def __init__(self, host, folder):
        self._host, self._folder = host, folder
        self._engine, self._model, self._known = None, None, {}

    def of(self, model):
        """Return the engine for this model."""
        if model != self._model:
            self.close()
            self._model, self._known = model, {}
            self._engine = SglangEngine(self._host, Wanted("alone", model, self._folder))
            self._engine.wait_until_ready()
        return self

    def ask(self, prompt, **options):
        """Return its answer, which is remembered if it was asked before."""
        key = repr((prompt, options))
        if key not in self._known:
            self._known[key] = self._engine.ask(prompt, **options)
        return self._known[key]

    def close(self):
        """End it."""
        if self._engine is not None:
            with suppress(NoAnswerError, OSError):
                self._engine.kill()
            self._engine = None


def run_case(case, folder, host, alone):
    """Start the two engines, run the scenario, and end them; every error becomes a complaint."""
    outcome, place = Outcome(), folder / case.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        if case.servers is not None:
            case.servers(place, outcome, host)
            return outcome
        model = str(model_of(folder / "models", **case.model))
        of_sglang = alone.of(model)
        with closing(Pair(case, model, place, host, of_sglang)) as pair:
            pair.wait_until_ready()
            case.scenario(pair, outcome)
    except NoAnswerError as error:
        outcome.complaints.append(str(error))
    except Exception as error:
        traceback.print_exc()
        outcome.complaints.append(f"{type(error).__name__}: {error}")
    return outcome


if __name__ == "__main__":
    sys.exit(main())
