"""The mutation campaign: makes each mistake of `tests/mutants.toml` in a copy of the tree, where its tests must fail.

    scripts/mutants                      all mutants, as many at a time as there are cores
    scripts/mutants --room planning      those of a room; may be repeated
    scripts/mutants --room vllm          those of vLLM's integration, in the environment of scripts/test_vllm
    scripts/mutants --file read_check    those of files whose path contains this
    scripts/mutants --name "a lease"     those whose name contains this
    scripts/mutants --sample 20          20 of them, drawn by --seed
    scripts/mutants --list               print them and run nothing; fails for one that does not fit its file
    scripts/mutants --folders --room planning           which folders of tests notice each mutant, and how fast
    scripts/mutants --folders --room wire golden tests/unit/test_wire.py     of these folders and files alone

A mutant replaces `old`, which must be in `file` exactly once, by `new`. The room's `tests`, or its own, must fail. If
no test can fail for it, `equivalent` says why. The campaign fails for a mutant that survives, for an equivalent one
that is killed, for an `old` that is no longer in its file, and if the tests fail without a mutant. It never changes the
checkout.

`--folders` measures instead of judging: each place of `PLACES` (those of hosts and engines only if named), or each that
is named, runs on its own against every mutant, up to its first failure, and a table says which places notice what. A
behaviour should be guarded once, where that is fastest: look at what only a slow place notices, and at places that
notice nothing on their own. Name files to learn that of files. Places that fail, or take longer than `--limit-s`,
without a mutant are not tried.
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
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

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
UNENDED = 124  # ours, for tests that take too long
# what --folders tries on its own: pytest's arguments
PLACES = {
    "unit": ("tests/unit", "--ignore=tests/unit/minillm"),
    "golden": ("tests/golden",),
    "property": ("tests/property",),
    "control": ("tests/control",),
    "kernels": ("tests/kernels",),
    "transport": ("tests/transport",),
    "minillm": (
        "tests/unit/minillm",
        *sorted(
            str(path.relative_to(ROOT)) for path in ROOT.glob("tests/integration/test_minillm_*.py")
        ),
    ),
    "integration": ("tests/integration", "--ignore-glob=tests/integration/test_minillm_*"),
}
ENGINE_PLACES = {name: (f"tests/{name}",) for name in ("hosts", "mixed", "sglang", "vllm")}

T = TypeVar("T")


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

    def run(
        self, tests: Sequence[str], needs: str = "", limit_s: float = LIMIT_S
    ) -> tuple[int, str]:
        """Run tests, which may need an engine's package. Return pytest's exit status, or UNENDED if they take too long,
        and the output.
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
            process_group=0,  # what the tests start ends with them
        ) as self._tests:
            try:
                output, _ = self._tests.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                self.stop()
                return UNENDED, f"no end within {limit_s} s"
            except BaseException:  # the campaign is told to end
                self.stop()
                raise
        return self._tests.returncode, output

    def stop(self) -> None:
        """End the tests that run. Any thread may call this."""
        if self._tests is not None and self._tests.poll() is None:
            os.killpg(self._tests.pid, signal.SIGKILL)

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
    if status not in (0, UNENDED, *NOTICED):
        return f"its tests did not run:\n{output[-2000:]}"
    if status == 0:
        return None if mutant.equivalent else "survives"
    return "is killed, though listed as equivalent" if mutant.equivalent else None


class Trees:
    """Copies of the checkout, `jobs` of them, in `folder`."""

    def __init__(self, jobs: int, folder: Path) -> None:
        self._all = [Tree(folder / str(number)) for number in range(jobs)]
        self._free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for tree in self._all:
            self._free.put(tree)

    @contextlib.contextmanager
    def one(self) -> Iterator[Tree]:
        """Wait for a copy that nobody uses, and keep it within this context."""
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)

    def try_each(
        self,
        mutants: Sequence[Mutant],
        attempt: Callable[[Mutant, Tree], T],
        ended: Callable[[Mutant, T], None],
    ) -> None:
        """Call `attempt` for each mutant, as many at a time as there are copies, and here `ended` with each result."""

        def in_a_tree(mutant: Mutant) -> T:
            with self.one() as tree:
                return attempt(mutant, tree)

        with ThreadPoolExecutor(len(self._all)) as pool:
            running = {pool.submit(in_a_tree, mutant): mutant for mutant in mutants}
            try:
                for future in as_completed(running):
                    ended(running[future], future.result())
            except BaseException:  # it is told to end
                pool.shutdown(wait=False, cancel_futures=True)
                for tree in self._all:
                    tree.stop()
                raise


def run(mutants: list[Mutant], trees: Trees) -> list[str]:
    """Try all mutants; print each result and return the complaints."""
    with trees.one() as tree:
        for needs in sorted({mutant.needs for mutant in mutants}):
            tests = {test for mutant in mutants if mutant.needs == needs for test in mutant.tests}
            status, output = tree.run(sorted(tests), needs)
            if status:
                return [f"the tests fail without a mutant:\n{output[-4000:]}"]
    complaints = []

    def ended(mutant: Mutant, complaint: str | None) -> None:
        result = complaint or ("equivalent" if mutant.equivalent else "killed")
        print(f"{mutant.room}: {mutant.name}: {result}", flush=True)
        if complaint:
            complaints.append(f"{mutant.room}: {mutant.name}: {complaint}")

    trees.try_each(mutants, complaint_about, ended)
    return complaints


class Tried(msgspec.Struct, frozen=True):
    """What a place of tests made of a mutant. `noticed` is None if the tests did not end."""

    place: str
    seconds: float
    noticed: bool | None


def tried(
    mutant: Mutant, tree: Tree, places: Mapping[str, Sequence[str]], limit_s: float
) -> list[Tried]:
    """Run each place on its own against a mutant. Raises ValueError: it does not fit, or tests did not run."""
    results = []
    with tree.mutated(mutant):
        for place, tests in places.items():
            start = time.monotonic()
            status, output = tree.run(tests, mutant.needs, limit_s)
            seconds = time.monotonic() - start
            if status not in (0, UNENDED, *NOTICED):
                raise ValueError(
                    f"{mutant.name}: the tests of {place} did not run:\n{output[-2000:]}"
                )
            results.append(Tried(place, seconds, None if status == UNENDED else status in NOTICED))
    return results


def folder_report(found: Mapping[str, Sequence[Tried]], slow_s: float) -> list[str]:
    """Return the lines of the table of --folders.

    Args:
        found: By mutant, what each place made of it.
        slow_s: A place that takes longer to notice a mutant is slow.
    """
    lines = ["| mutant | noticed by | fastest | s |", "|---|---|---|---|"]
    unnoticed, late, unknown = [], [], []
    doubtful: set[str] = (
        set()
    )  # places of which unended tests leave open what they notice, or notice alone
    notices = {each.place: 0 for results in found.values() for each in results}
    alone = dict.fromkeys(notices, 0)
    for mutant, results in found.items():
        noticed = {each.place: each.seconds for each in results if each.noticed}
        unended = [each.place for each in results if each.noticed is None]
        words = ", ".join([*noticed, *(f"{place} (no end)" for place in unended)]) or "nothing"
        fastest = min(noticed, key=lambda place: noticed[place], default="")
        seconds = f"{noticed[fastest]:.1f}" if fastest else ""
        lines.append(f"| {mutant} | {words} | {fastest} | {seconds} |")
        for place in noticed:
            notices[place] += 1
        if unended:
            unknown.append(mutant)
            doubtful.update(unended, noticed)
        elif not noticed:
            unnoticed.append(mutant)
        elif len(noticed) == 1:
            alone[fastest] += 1
        if fastest and noticed[fastest] > slow_s:
            late.append(mutant)
    lines += [""]
    lines += [
        f"{place}: notices {notices[place]}, {alone[place]} of them alone" for place in notices
    ]
    spare = [place for place in notices if not alone[place] and place not in doubtful]
    for title, names in (
        ("noticed by none of these", unnoticed),
        (f"noticed only after more than {slow_s:g} s", late),
        ("not known of all places, because tests did not end", unknown),
        ("notice nothing", [place for place in spare if not notices[place]]),
        ("notice nothing that no other place does", [place for place in spare if notices[place]]),
    ):
        if names:
            lines += ["", f"{title}:", *(f"  {name}" for name in names)]
    return lines


def run_folders(
    mutants: Sequence[Mutant],
    trees: Trees,
    places: Mapping[str, Sequence[str]],
    limit_s: float,
    slow_s: float,
) -> list[str]:
    """Try all mutants in each place; print the table and return the complaints."""
    complaints, sound = [], dict(places)
    with trees.one() as tree:
        for place, tests in places.items():
            start = time.monotonic()
            status, output = tree.run(tests, mutants[0].needs, limit_s)
            print(f"{place}: {time.monotonic() - start:.1f} s without a mutant", flush=True)
            if status:
                del sound[place]
                complaints.append(
                    f"{place} is not tried, as it fails without a mutant:\n{output[-2000:]}"
                )
    found: dict[str, list[Tried]] = {}

    def attempt(mutant: Mutant, tree: Tree) -> list[Tried] | str:
        try:
            return tried(mutant, tree, sound, limit_s)
        except (OSError, ValueError) as error:
            return f"{mutant.room}: {mutant.name}: {error}"

    def ended(mutant: Mutant, result: list[Tried] | str) -> None:
        name = f"{mutant.room}: {mutant.name}"
        if isinstance(result, str):
            complaints.append(result)
        else:
            found[name] = result
            print(
                f"{name}: {', '.join(each.place for each in result if each.noticed) or 'nothing'}",
                flush=True,
            )

    if sound:
        try:
            trees.try_each(mutants, attempt, ended)
        finally:  # also of a part, if it is told to end
            print("", *folder_report(found, slow_s), sep="\n", flush=True)
    return complaints


def places_of(names: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return pytest's arguments by place: of those named, folders and files too, or of all that start no engines.

    Raises:
        ValueError: There is no such place.
    """
    known = {**PLACES, **ENGINE_PLACES}
    if absent := [name for name in names if name not in known and not (ROOT / name).exists()]:
        raise ValueError(
            f"there is no {', '.join(absent)}; give {', '.join(known)}, or folders or files of tests"
        )
    return {name: known.get(name, (name,)) for name in names or PLACES}


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


def meant(names: Sequence[str], path: str, words: str) -> list[Mutant]:
    """Return the mutants of these rooms, or of all, with this in their file's path and their names.

    Raises:
        click.UsageError: There is no such room.
    """
    with TABLE.open("rb") as file:
        rooms = msgspec.convert(tomllib.load(file), dict[str, Room])
    if unknown := set(names) - set(rooms):
        raise click.UsageError(f"no rooms {sorted(unknown)}; there are {sorted(rooms)}")
    return [
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


def able_to_run(mutants: list[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Return the mutants whose tests can run here, and print how many are left out.

    Raises:
        click.UsageError: A room that was named lacks its engine.
    """
    lacking = {mutant.needs for mutant in mutants if mutant.needs} - _installed()
    if lacking and names:
        raise click.UsageError(
            f"a room needs {sorted(lacking)}: scripts/mutants --room vllm runs it in an environment of its own"
        )
    left_out = [mutant for mutant in mutants if mutant.needs in lacking]
    if left_out:
        rest = sorted({mutant.room for mutant in left_out})
        print(f"left out: {len(left_out)} mutants of {rest}, which need {sorted(lacking)}")
    return [mutant for mutant in mutants if mutant.needs not in lacking]


@click.command(context_settings={"show_default": True})
@click.option("--room", "names", multiple=True, help="Only mutants of this room; may be repeated.")
@click.option("--file", "path", default="", help="Only mutants of files whose path contains this.")
@click.option("--name", "words", default="", help="Only mutants whose name contains this.")
@click.option("--sample", type=int, help="Only this many, at random.")
@click.option("--seed", default=0, help="Of the sample.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="At a time.")
@click.option("--list", "is_list", is_flag=True, help="Print them and run nothing.")
@click.option("--folders", "by_folder", is_flag=True, help="Measure which of PLACES notice what.")
@click.option("--limit-s", default=60.0, help="Of a place's tests, with --folders.")
@click.option(
    "--slow-s", default=10.0, help="What takes longer to notice a mutant is slow, with --folders."
)
@click.argument("places", nargs=-1)
def main(
    *,
    names: Sequence[str],
    path: str,
    words: str,
    sample: int | None,
    seed: int,
    jobs: int,
    is_list: bool,
    by_folder: bool,
    limit_s: float,
    slow_s: float,
    places: Sequence[str],
) -> None:
    """Make each known mistake in a copy of the tree. Exit status 1 if there are complaints."""
    if places and not by_folder:
        raise click.UsageError("places are for --folders")
    if by_folder and not names:
        raise click.UsageError("--folders runs for hours over all rooms: give --room")
    try:
        tried_places = places_of(places)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    mutants = meant(names, path, words)
    if sample is not None and sample < len(mutants):
        mutants = random.Random(seed).sample(mutants, sample)
    if not mutants:
        raise click.UsageError("no mutant is meant")
    if is_list:
        sys.exit(print_all(mutants))
    mutants = able_to_run(mutants, names)
    if by_folder:
        mutants = [mutant for mutant in mutants if not mutant.equivalent]
        if len({mutant.needs for mutant in mutants}) != 1:
            raise click.UsageError("--folders tries rooms of one environment: give --room")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its tests and copies end with it
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = Trees(max(1, min(jobs, len(mutants))), Path(folder))
        if by_folder:
            complaints, good = run_folders(mutants, trees, tried_places, limit_s, slow_s), ""
        else:
            complaints, good = (
                run(mutants, trees),
                f"all {len(mutants)} mutants are noticed, or equivalent",
            )
    print("\n".join(complaints) or good)
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
