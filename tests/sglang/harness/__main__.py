"""`python -m tests.sglang.harness [CASE...]`: every case, as Markdown and JSON."""

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from kvconnector.bench.environment import commit, cpu_name
from tests.sglang.harness.cases import CASES
from tests.sglang.harness.engine import Engine, EngineSpec, NoAnswerError, preload
from tests.sglang.harness.model import model_of
from tests.sglang.harness.pair import OURS, Outcome, Pair

BY_NAME = {case.name: case for case in CASES}
HEADINGS = ("case", "tokens equal", "caches equal", "seconds", "state")


def main():
    """0 when no case has a complaint."""
    arguments = parse()
    chosen = [BY_NAME[name] for name in arguments.cases]
    if arguments.list:
        say("\n".join(f"{c.name}: not run: {c.why_not}" if c.why_not else c.name for c in chosen))
        return 0
    # an interrupted run ends its engines too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    preload()
    make_models(chosen, folder)
    rows, facts = [], environment(arguments.backend)
    not_run = {case.name: case.why_not for case in chosen if case.why_not}
    with ExitStack() as stack:
        alone = Alone(folder, stack)
        for case in chosen:
            if case.why_not:
                continue
            started = time.monotonic()
            outcome = run_case(case, folder, alone, arguments.backend)
            seconds = round(time.monotonic() - started, 1)
            rows.append({"case": case.name, **asdict(outcome), "seconds": seconds})
            say("  ".join(as_cells(rows[-1])))
            report = {"environment": facts, "rows": rows, "not_run": not_run}
            (folder / "report.json").write_text(json.dumps(report, indent=1))
            (folder / "report.md").write_text(as_markdown(rows, not_run))
    say(as_markdown(rows, not_run))
    failed = [row["case"] for row in rows if row["complaints"]]
    say(f"failed: {', '.join(failed)}" if failed else "no case failed")
    return 1 if failed else 0


def parse():
    parser = argparse.ArgumentParser(prog="scripts/test_sglang")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all of them without an argument")
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--backend", default=OURS, help="or nixl, mooncake: SGLang's own")
    parser.add_argument("--list", action="store_true", help="the names of all cases")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for models, logs, report.json and report.md"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in BY_NAME]
    if unknown:
        parser.error(f"no case named {', '.join(unknown)}; --list names them")
    if not arguments.cases:
        is_ours = arguments.backend == OURS
        arguments.cases = [
            name
            for name, case in BY_NAME.items()
            if (case.is_quick or not arguments.quick) and (is_ours or not case.is_ours)
        ]
    return arguments


def make_models(cases, folder):
    """In a process of its own: forked engines hang in OpenMP where their parent has used it."""
    pid = os.fork()
    if pid == 0:
        try:
            for case in cases:
                model_of(folder, **case.model)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("the models could not be made; why is above")


class Alone:
    """One engine without another, of the model that the last case had."""

    def __init__(self, folder, stack):
        self._folder, self._engine, self._model, self._known = folder, None, None, {}
        stack.callback(self._stop)

    def of(self, model, options):
        """The engine for this model."""
        if (model, options) != self._model:
            self._stop()
            log = self._folder / "alone.log"
            spec = EngineSpec(
                model=str(model.path), log=log, dumps=self._folder, options=dict(options)
            )
            self._model, self._known = (model, options), {}
            self._engine = Engine(spec)
            self._engine.wait_until_ready()
        return self

    def ask(self, prompt, **options):
        """Its answer, from its cache if it was asked before."""
        key = repr((prompt, options))
        if key not in self._known:
            self._known[key] = self._engine.ask(prompt, **options)
        return self._known[key]

    def _stop(self):
        if self._engine is not None:
            self._engine.kill()


def run_case(case, folder, alone, backend):
    """Start the two engines, run the scenario, end them."""
    outcome, place = Outcome(), folder / case.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    pair = None
    try:
        model = model_of(folder, **case.model)
        common = case.prefill.items() & case.decode.items()
        one = tuple(each for each in sorted(common) if each[0] == "disable-radix-cache")
        pair = Pair(case, model, place, alone.of(model, one), backend)
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


def environment(backend):
    """What the report is about."""
    import sglang

    return {
        "commit": commit() or "unknown",
        "machine": f"{os.cpu_count()} x {cpu_name()}",
        "sglang": sglang.__version__,
        "backend": backend,
    }


def as_cells(row):
    """A row of the table."""
    return [
        row["case"],
        f"{row['equal']}/{row['prompts']}",
        f"{row['equal_bytes']}/{row['compared_bytes']}",
        f"{row['seconds']}",
        "; ".join(row["complaints"]) or "good",
    ]


def as_markdown(rows, not_run):
    """The table, and what was not run and why."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *map(as_cells, rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "".join(f"\nNot run: {name}: {why}" for name, why in not_run.items()) + "\n"


def say(text):
    """To standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
