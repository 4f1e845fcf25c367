"""`turns`: two checkouts in turns, such as two commits, so that what else the machine does slows both.

Each checkout runs the benchmark with its own code, in a process of its own, once in each round. Every second round
begins with the other checkout. A figure is the median of the rounds' medians; the ratio is the second's to the first's.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvconnector.errors import ConfigError

RUN_TIMEOUT_S = 600.0
PROGRAM = "import sys; from kvconnector.cli import main; sys.exit(main())"
"""The command line of any commit: some have no `python -m kvconnector`."""
Key: TypeAlias = tuple[str, str, str]
"""How blocks travel ("any" or "packed"), the case, and the contender."""


class Compared(NamedTuple):
    """Medians of both checkouts' rounds, in seconds, and the rounds themselves."""

    key: Key
    medians_s: tuple[float, float]
    rounds_s: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def ratio(self) -> float:
        """The second checkout's time over the first's."""
        return self.medians_s[1] / self.medians_s[0]


def order(number: int) -> tuple[int, int]:
    """Return the numbers of the two checkouts in the order of a round."""
    return (0, 1) if number % 2 == 0 else (1, 0)


def run(tree: Path, benchmark: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run a benchmark with a checkout's code. Returns its report.

    Args:
        tree: The checkout, whose C library is built.
        benchmark: The name of a benchmark of `kvconnector bench` and its options.
        variables: Environment variables beside this process's own.

    Raises:
        ConfigError: it fails, or takes longer than `RUN_TIMEOUT_S`.
    """
    if not (tree / "kvconnector" / "__init__.py").is_file():
        raise ConfigError("this is no checkout of kvconnector", path=str(tree))
    paths = os.pathsep.join([str(tree.absolute()), str((tree / "kernels").absolute())])
    with TemporaryDirectory(prefix="kvconnector-turns-") as folder:
        report = Path(folder, "report.json")
        line = [sys.executable, "-P", "-c", PROGRAM, "bench", *benchmark]
        try:
            done = subprocess.run(
                [*line, "--output", str(report)],
                env={**os.environ, "PYTHONPATH": paths, **variables},
                capture_output=True,
                text=True,
                check=False,
                timeout=RUN_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"the benchmark does not end: {error}", path=str(tree)) from error
        if done.returncode or not report.is_file():
            *_, reason = done.stderr.strip().splitlines() or ["no output"]
            raise ConfigError(f"the benchmark failed: {reason}", path=str(tree))
        found: dict[str, Any] = msgspec.json.decode(report.read_bytes())
        return found


def medians_of(report: Mapping[str, Any]) -> Iterable[tuple[str, str, float]]:
    """Yield each case, contender and median in seconds of a report, of this release's form or an older one's."""
    for case in report["cases"]:
        for each in case["measurements"]:
            if each["samples_s"]:
                yield case["case"], each["contender"], statistics.median(each["samples_s"])


def compare(
    found: Mapping[Key, Sequence[Sequence[float]]],
) -> list[Compared]:
    """Return a comparison for each key that both checkouts have: `found` has each one's rounds, in seconds."""
    return [
        Compared(
            key,
            (statistics.median(first), statistics.median(second)),
            (tuple(first), tuple(second)),
        )
        for key, (first, second) in found.items()
        if first and second
    ]
