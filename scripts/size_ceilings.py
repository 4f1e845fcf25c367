"""Fails when a file, a function, a class, a room or the README outgrows its ceiling.

The size of a file is its lines; that of a function its lines from `def` to the last one, with the
docstring; that of a class the distinct instance attributes that it declares or assigns. `EXCEPTIONS`
lists what must be larger, with the reason and a ceiling of its own.

A room is a folder and everything below it, except the rooms in it. Its size is the lines of its Python files. The
ceiling follows the code: raise it only in the commit that needs it, which says what could not be taken out, and lower
it when the room gets smaller. The target is the size that the room should have; a room above its target is printed and
does not fail.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kvconnector", "kernels", "examples", "tests", "scripts")
CEILINGS = {"file lines": 400, "function lines": 60, "class attributes": 15}
README_LINES = 120


class Size(NamedTuple):
    """The lines that a room may have, and that it should have."""

    ceiling: int
    target: int | None = None


ROOMS: dict[str, Size] = {
    "kvconnector": Size(762, target=560),
    "kvconnector/bench": Size(5077),
    "kvconnector/cache": Size(3024, target=3280),
    "kvconnector/cli": Size(2883),
    "kvconnector/control": Size(1383, target=1330),
    "kvconnector/datapath": Size(4349, target=4050),
    "kvconnector/integrations": Size(3538, target=3510),
    "kvconnector/integrations/sglang": Size(1325, target=900),
    "kvconnector/layout": Size(632, target=520),
    "kvconnector/planning": Size(580, target=560),
    "kvconnector/runtime": Size(3733, target=2800),
    "kvconnector/session": Size(3563, target=2900),
    "kvconnector/topology": Size(941, target=980),
    "kvconnector/transport": Size(2751, target=2530),
    "kvconnector/wire": Size(630, target=500),
    "kernels/kvconnector_kernels": Size(1),
    "kernels/kvconnector_kernels/block_table": Size(562),
    "kernels/kvconnector_kernels/pump": Size(1906),
    "kernels/kvconnector_kernels/relayout": Size(1604),
    "examples": Size(59),
    "examples/launchers": Size(39),
    "examples/monitoring": Size(96),
    "examples/minillm": Size(5888),
    "examples/sglang_1p1d": Size(210),
    "examples/vllm_1p1d": Size(571),
    "scripts": Size(922),
    "tests": Size(90),
    "tests/control": Size(501),
    "tests/docs": Size(449),
    "tests/golden": Size(112),
    "tests/hosts": Size(1272),
    "tests/integration": Size(1723),
    "tests/kernels": Size(1972),
    "tests/property": Size(3084),
    "tests/sglang/pure": Size(883),
    "tests/support": Size(2854),
    "tests/transport": Size(1453),
    "tests/unit": Size(1838),
    "tests/unit/bench": Size(1099),
    "tests/unit/cache": Size(1052),
    "tests/unit/cli": Size(1243),
    "tests/unit/control": Size(96),
    "tests/unit/datapath": Size(2588),
    "tests/unit/minillm": Size(1669),
    "tests/unit/runtime": Size(2331),
    "tests/unit/session": Size(1663),
    "tests/sglang": Size(760),
    "tests/sglang/harness": Size(1082),
    "tests/vllm": Size(7163),
}
# lines that the rooms in and below these folders should have together; their ceilings bound the sum
TARGETS: dict[tuple[str, ...], int] = {
    ("kvconnector/bench", "kvconnector/cli"): 5860,
    ("kvconnector",): 30100,
    ("kernels",): 3650,
    ("tests",): 24800,
}


class Allowance(NamedTuple):
    """A larger ceiling for one name, and the reason."""

    ceiling: int
    reason: str


# "path" for a file, "path:Class.function" for a function, "path:Class" for a class.
EXCEPTIONS: dict[str, Allowance] = {}


class Measure(NamedTuple):
    """One measured size: the ceiling that applies, the thing's name, and its size."""

    kind: str
    name: str
    size: int


def measure_file(path: Path, name: str) -> Iterator[Measure]:
    """Yield the sizes of a file and of every function and class in it."""
    source = path.read_text(encoding="utf-8")
    yield Measure("file lines", name, len(source.splitlines()))
    yield from _measure_scope(ast.parse(source, filename=name), f"{name}:")


def _measure_scope(scope: ast.AST, prefix: str) -> Iterator[Measure]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Measure("function lines", prefix + node.name, _line_count(node))
            yield from _measure_scope(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield Measure("class attributes", prefix + node.name, len(_instance_attributes(node)))
            yield from _measure_scope(node, f"{prefix}{node.name}.")
        else:
            yield from _measure_scope(node, prefix)


def _line_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _instance_attributes(cls: ast.ClassDef) -> set[str]:
    """Return the fields a class annotates (not its class variables) and what methods set on `self`."""
    names = {
        statement.target.id
        for statement in cls.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.unparse(statement.annotation)
    }
    for method in cls.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {
                node.attr
                for node in ast.walk(method)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            }
    return names


def find_complaints(measures: list[Measure], allowances: dict[str, Allowance]) -> list[str]:
    """Return a line for each size above its ceiling and each allowance that is no longer needed."""
    complaints = []
    needed = set()
    for measure in measures:
        default = CEILINGS[measure.kind]
        if measure.size <= default:
            continue
        allowance = allowances.get(measure.name)
        needed.add(measure.name)
        ceiling = allowance.ceiling if allowance else default
        if measure.size > ceiling:
            complaints.append(
                f"{measure.name}: {measure.size} {measure.kind}, the ceiling is {ceiling}"
            )
    complaints += [
        f"{name}: has an exception that it does not need"
        for name in allowances
        if name not in needed
    ]
    return complaints


def weigh_rooms(
    measures: list[Measure], rooms: dict[str, Size]
) -> tuple[dict[str, int], list[str]]:
    """Return the lines of each room, and a complaint for each file that is in no room."""
    complaints = []
    weights = dict.fromkeys(rooms, 0)
    for measure in measures:
        if measure.kind == "file lines":
            folders = map(str, PurePath(measure.name).parents)
            room = next((folder for folder in folders if folder in rooms), None)
            if room is None:
                complaints.append(f"{measure.name}: its folder belongs to no room")
            else:
                weights[room] += measure.size
    return weights, complaints


def add_rooms(weights: dict[str, int], folders: tuple[str, ...]) -> int:
    """Return the lines of all rooms in and below `folders`."""
    return sum(
        weight
        for room, weight in weights.items()
        if any(room == folder or room.startswith(f"{folder}/") for folder in folders)
    )


def main() -> int:
    """Measure the checkout; print the complaints and return 1 if there are any."""
    measures = [
        measure
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for measure in measure_file(path, path.relative_to(ROOT).as_posix())
    ]
    complaints = find_complaints(measures, EXCEPTIONS)
    weights, homeless = weigh_rooms(measures, ROOMS)
    complaints += homeless
    for room, size in ROOMS.items():
        if weights[room] > size.ceiling:
            complaints.append(f"{room}: {weights[room]} lines, the ceiling is {size.ceiling}")
        elif size.target is not None and weights[room] > size.target:
            print(f"{room}: {weights[room]} lines, the target is {size.target}")
    for folders, target in TARGETS.items():
        if (weight := add_rooms(weights, folders)) > target:
            print(f"{' + '.join(folders)} in all: {weight} lines, the target is {target}")
    readme_lines = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    if readme_lines > README_LINES:
        complaints.append(f"README.md: {readme_lines} lines, the ceiling is {README_LINES}")
    print("\n".join(complaints) or f"{len(measures)} sizes within their ceilings")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
