"""The mutation campaign: makes each mistake of `tests/mutants.toml` in a copy of the tree, where its tests must fail.

    scripts/mutants                      all mutants, as many at a time as there are cores
    scripts/mutants --room planning      those of a room; may be repeated
    scripts/mutants --room vllm          those of vLLM's integration, in the environment of scripts/test_vllm
    scripts/mutants --file read_check    those of files whose path contains this
    scripts/mutants --name "a lease"     those whose name contains this
    scripts/mutants --sample 20          20 of them, drawn by --seed
    scripts/mutants --list               print them and run nothing; fails for one that does not fit its file

A mutant replaces `old`, which must be in `file` exactly once, by `new`. The room's `tests`, or its own, must fail. If
no test can fail for it, `equivalent` says why. The campaign fails for a mutant that survives, for an equivalent one
that is killed, for an `old` that is no longer in its file, and if the tests fail without a mutant. It never changes the
checkout.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import click
import msgspec
from msgspec import structs

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutants.toml"
FOLDERS = ("kvconnector", "kernels", "examples", "tests", "scripts", "docs")
LIMIT_S = 900
ENGINES = ("vllm",)
# pytest's exit statuses: tests failed, and (for a mutant that cannot be imported) collection did
NOTICED = (1, 2)


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mistake, and the tests that must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str] = []
    """Tests to run instead of the room's."""
    equivalent: str = ""
    room: str = ""
    needs: str = ""

    def apply(self, text: str) -> str:
        """Return the file's text with the mistake in it. Raises ValueError: `old` is not in it exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)


class Room(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mistakes in one part of the package, and the tests that must notice them. `needs`: a package whose environment
    runs these tests, "vllm". An engine's packages emit warnings of their own.
    """

    tests: list[str]
    mutants: list[Mutant]
    needs: str = ""


class Tree:
    """A copy of the checkout, in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tests: subprocess.Popen[str] | None = None
        keep_out = shutil.ignore_patterns("logs", ".hypothesis", ".pytest_cache")
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=keep_out)
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy2(path, folder / path.name)

    def run(self, tests: Sequence[str], needs: str = "") -> tuple[int, str]:
        """Run tests, which may need an engine's package. Return pytest's exit status, or that of a failed test if they
        take too long, and the output.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": ":".join(str(self.folder / name) for name in ("", "kernels", "examples")),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant has its original's size and often its mtime
            "OMP_NUM_THREADS": "1",
            "HYPOTHESIS_PROFILE": "mutants",
        }
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
        if needs:
            # not `-m needs`: a room has pure tests, too, which carry no marker
            pytest += ["-W", "default"]
        with subprocess.Popen(
            [*pytest, *tests],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as self._tests:
            try:
                output, _ = self._tests.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                self._tests.kill()
                return NOTICED[0], f"no end within {LIMIT_S} s"
            except BaseException:  # the campaign is told to end
                self._tests.kill()
                raise
        return self._tests.returncode, output

    def stop(self) -> None:
        """End the tests that run. Any thread may call this."""
        if self._tests is not None:
            self._tests.kill()

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Keep the mutant in the tree within this context. Raises ValueError: it does not fit its file."""
        path = self.folder / mutant.file
        original = path.read_text(encoding="utf-8")
        path.write_text(mutant.apply(original), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(original, encoding="utf-8")


def complaint_about(mutant: Mutant, tree: Tree) -> str | None:
    """Try one mutant. Return what is wrong, or None if its tests notice it, or if it is listed as equivalent."""
    try:
        with tree.mutated(mutant):
            status, output = tree.run(mutant.tests, mutant.needs)
    except (OSError, ValueError) as error:
        return f"does not fit: {error}"
    if status not in (0, *NOTICED):
        return f"its tests did not run:\n{output[-2000:]}"
    if status == 0:
        return None if mutant.equivalent else "survives"
    return "is killed, though listed as equivalent" if mutant.equivalent else None


def run(mutants: list[Mutant], jobs: int, folder: Path) -> list[str]:
    """Try all mutants, `jobs` at a time; print each result and return the complaints."""
    all_trees = [Tree(folder / str(number)) for number in range(jobs)]
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for made in all_trees:
        trees.put(made)

    def attempt(mutant: Mutant) -> str | None:
        tree = trees.get()
        try:
            return complaint_about(mutant, tree)
        finally:
            trees.put(tree)

    tree = trees.get()
    try:
        for needs in sorted({mutant.needs for mutant in mutants}):
            tests = {test for mutant in mutants if mutant.needs == needs for test in mutant.tests}
            status, output = tree.run(sorted(tests), needs)
            if status:
                return [f"the tests fail without a mutant:\n{output[-4000:]}"]
    finally:
        trees.put(tree)
    complaints = []
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(attempt, mutant): mutant for mutant in mutants}
        try:
            for ended in as_completed(running):
                mutant, complaint = running[ended], ended.result()
                result = complaint or ("equivalent" if mutant.equivalent else "killed")
                print(f"{mutant.room}: {mutant.name}: {result}", flush=True)
                if complaint:
                    complaints.append(f"{mutant.room}: {mutant.name}: {complaint}")
        except BaseException:  # it is told to end
            pool.shutdown(wait=False, cancel_futures=True)
            for each in all_trees:
                each.stop()
            raise
    return complaints


def print_all(mutants: Sequence[Mutant]) -> int:
    """Print the mutants; return 1 if one does not fit its file."""
    status = 0
    for mutant in mutants:
        print(f"{mutant.room}: {mutant.name}")
        try:
            mutant.apply((ROOT / mutant.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            print(f"{mutant.room}: {mutant.name} does not fit: {error}", file=sys.stderr)
            status = 1
    return status


def _installed() -> set[str]:
    return {name for name in ENGINES if importlib.util.find_spec(name) is not None}


@click.command(context_settings={"show_default": True})
@click.option("--room", "names", multiple=True, help="Only mutants of this room; may be repeated.")
@click.option("--file", "path", default="", help="Only mutants of files whose path contains this.")
@click.option("--name", "words", default="", help="Only mutants whose name contains this.")
@click.option("--sample", type=int, help="Only this many, at random.")
@click.option("--seed", default=0, help="Of the sample.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="At a time.")
@click.option("--list", "is_list", is_flag=True, help="Print them and run nothing.")
def main(
    *,
    names: Sequence[str],
    path: str,
    words: str,
    sample: int | None,
    seed: int,
    jobs: int,
    is_list: bool,
) -> None:
    """Make each known mistake in a copy of the tree. Exit status 1 if there are complaints."""
    with TABLE.open("rb") as file:
        rooms = msgspec.convert(tomllib.load(file), dict[str, Room])
    if unknown := set(names) - set(rooms):
        raise click.UsageError(f"no rooms {sorted(unknown)}; there are {sorted(rooms)}")
    mutants = [
        structs.replace(
            mutant,
            room=name,
            tests=mutant.tests or rooms[name].tests,
            needs=rooms[name].needs,
        )
        for name in names or rooms
        for mutant in rooms[name].mutants
        if path in mutant.file and words in mutant.name
    ]
    if sample is not None and sample < len(mutants):
        mutants = random.Random(seed).sample(mutants, sample)
    if not mutants:
        raise click.UsageError("no mutant is meant")
    if is_list:
        sys.exit(print_all(mutants))
    lacking = {mutant.needs for mutant in mutants if mutant.needs} - _installed()
    if lacking and names:
        raise click.UsageError(
            f"a room needs {sorted(lacking)}: scripts/mutants --room vllm runs it in an environment of its own"
        )
    left_out = [mutant for mutant in mutants if mutant.needs in lacking]
    mutants = [mutant for mutant in mutants if mutant.needs not in lacking]
    if left_out:
        rest = sorted({mutant.room for mutant in left_out})
        print(f"left out: {len(left_out)} mutants of {rest}, which need {sorted(lacking)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its tests and copies end with it
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        complaints = run(mutants, max(1, min(jobs, len(mutants))), Path(folder))
    print("\n".join(complaints) or f"all {len(mutants)} mutants are noticed, or equivalent")
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
