"""A run of cases: their choice by name, their outcomes, and the reports, for the harnesses of all engines."""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvconnector.bench.environment import commit, cpu_name

OURS, NIXL = "kvconnector", "nixl"
HEADINGS = ("case", "connector", "tokens equal", "bytes equal", "seconds", "state")


class NoAnswerError(Exception):
    """An engine did not answer in time, or is gone."""


@dataclass
class Outcome:
    """Counts of prompts with equal tokens and with equal caches, and complaints. `differs_alone` names prompts with
    equal caches to which the engine itself, without a transfer, gives other tokens. `checks`: what else was compared.
    """

    equal: int = 0
    prompts: int = 0
    equal_bytes: int = 0
    compared_bytes: int = 0
    checks: int = 0
    complaints: list[str] = field(default_factory=list)
    differs_alone: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def compare(self, what, answer, expected):
        self.prompts += 1
        self.equal += answer.tokens == expected
        if answer.tokens != expected:
            are_equal = [a == b for a, b in zip(answer.tokens, expected, strict=False)]
            first = [*are_equal, False].index(False)
            self.complaints.append(f"{what}: tokens differ from the {first}th on ({answer.reason})")

    def compare_bytes(self, what, difference):
        self.compared_bytes += 1
        self.equal_bytes += not difference
        if difference:
            self.complaints.append(f"{what}: {difference}")

    def check(self, what, found, expected=True):
        self.checks += 1
        if found != expected:
            self.complaints.append(f"{what}: {found!r} instead of {expected!r}")


class Harness(ABC):
    """A run of cases by the names on the command line; each harness says what its engines need.

    `prog` is the script that users call, `cases` are all of them. `arguments` are parsed at the start of a run.
    """

    prog = ""
    cases: Sequence[Any] = ()
    connector = OURS

    def __init__(self):
        parser = argparse.ArgumentParser(prog=self.prog)
        by_name = {case.name: case for case in self.cases}
        parser.add_argument(
            "cases", nargs="*", metavar="CASE", help="all of them without an argument"
        )
        parser.add_argument("--list", action="store_true", help="the names of all cases")
        parser.add_argument("--quick", action="store_true", help="a few cases")
        parser.add_argument(
            "--folder",
            type=Path,
            required=True,
            help="for models, logs, report.json and report.md",
        )
        self.add_options(parser)
        self.arguments = parser.parse_args()
        self.folder = self.arguments.folder
        if unknown := [name for name in self.arguments.cases if name not in by_name]:
            parser.error(f"no case named {', '.join(unknown)}; --list names them")
        named = [by_name[name] for name in self.arguments.cases]
        self._chosen = named or [case for case in self.cases if self.is_chosen(case)]

    def add_options(self, parser):  # noqa: B027 (a hook)
        """Add what only this harness takes: by default nothing."""

    def is_chosen(self, case):
        """Return True if a case runs where none is named."""
        return case.is_quick or not self.arguments.quick

    def why_not(self, case):
        """Return the reason for which a case cannot run here, "" if it can."""
        return case.why_not

    @abstractmethod
    def start(self):
        """Import what the engines need. Returns their versions by name."""

    @abstractmethod
    def make_models(self, case):
        """Make the models of a case, in a process of its own."""

    @abstractmethod
    def rows(self, cases):
        """Run cases, and yield the arguments of `Report.add` as they end."""

    def close(self):  # noqa: B027 (a hook)
        """End what serves several cases: by default there is nothing."""

    def run(self):
        """Run the cases. Returns the exit status: 0 if no case has a complaint."""
        reasons = {case.name: self.why_not(case) for case in self._chosen}
        if self.arguments.list:
            say(
                "\n".join(
                    f"{name}: not run: {why}" if why else name for name, why in reasons.items()
                )
            )
            return 0
        runnable = [case for case in self._chosen if not reasons[case.name]]
        with closing(self):
            report = Report(self.folder, environment(**self.start()), reasons)
            in_own_process(lambda: [self.make_models(case) for case in runnable])
            for row in self.rows(runnable):
                report.add(*row)
        return report.end(self.connector)


class SerialHarness(Harness):
    """A harness that runs one case after another, in this process."""

    @abstractmethod
    def run_case(self, case, place, outcome):
        """Start a case's engines, run its scenario, and end them. `place` is an empty folder."""

    def rows(self, cases):
        for case in cases:
            outcome, place, started = Outcome(), self.folder / case.name, time.monotonic()
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            with complaints_to(outcome):
                self.run_case(case, place, outcome)
            yield case.name, self.connector, outcome, time.monotonic() - started


@contextmanager
def complaints_to(outcome):
    """Make a complaint of an error, so that the next case runs."""
    try:
        yield
    except NoAnswerError as error:
        outcome.complaints.append(str(error))
    except (Exception, SystemExit) as error:  # SystemExit: a server of the example's ended
        traceback.print_exc()
        text = str(error).strip().splitlines() or [""]
        outcome.complaints.append(f"{type(error).__name__}: {text[-1]}")


class Report:
    """Writes `report.json` and `report.md` after every case. `reasons`: why cases are not run, by name."""

    def __init__(self, folder, facts, reasons):
        # an interrupted run ends its engines too
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._facts, self._rows = folder, facts, []
        self._not_run = {name: why or "the run ended before it" for name, why in reasons.items()}

    def add(self, case, connector, outcome, seconds):
        if not (outcome.complaints or outcome.prompts or outcome.compared_bytes or outcome.checks):
            outcome.complaints.append("it compared nothing")
        row = {"case": case, "connector": connector, **asdict(outcome)}
        self._rows.append(row | {"seconds": round(seconds, 1)})
        say("  ".join(as_cells(self._rows[-1])))
        self._not_run.pop(case, None)
        found = {"environment": self._facts, "rows": self._rows, "not_run": self._not_run}
        (self._folder / "report.json").write_text(json.dumps(found, indent=1))
        (self._folder / "report.md").write_text(as_markdown(self._rows, self._not_run))

    def end(self, connector=OURS):
        """Return the exit status: 0 if cases of this connector ran, and none has a complaint."""
        say(as_markdown(self._rows, self._not_run))
        rows = [row for row in self._rows if row["connector"] == connector]
        failed = [row["case"] for row in rows if row["complaints"]]
        good = "no case failed" if rows else "no case ran"
        say(f"failed: {', '.join(failed)}" if failed else good)
        return 1 if failed or not rows else 0


def in_own_process(make):
    """Make models in a process of its own: that from which engines are forked must use neither CUDA nor OpenMP."""
    process = multiprocessing.get_context("fork").Process(target=make)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("the models could not be made; why is above")


def becomes(condition, timeout_s=60.0, poll_s=0.05):
    """Poll `condition` until it is true, for at most `timeout_s`. Returns its last value."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return found


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def environment(**engine):
    return {
        "commit": commit() or "unknown",
        "machine": f"{os.cpu_count()} x {cpu_name()}",
        **engine,
    }


def as_cells(row):
    own = [f"the engine itself differs: {each}" for each in row["differs_alone"]]
    return [
        row["case"],
        row["connector"],
        f"{row['equal']}/{row['prompts']}",
        f"{row['equal_bytes']}/{row['compared_bytes']}",
        f"{row['seconds']}",
        "; ".join(row["complaints"] + own) or "good",
    ]


def as_markdown(rows, skipped):
    lines = [HEADINGS, ["---"] * len(HEADINGS), *map(as_cells, rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "".join(f"\nNot run: {name}: {why}" for name, why in skipped.items()) + "\n"
