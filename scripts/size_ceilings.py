"""Fails when a file, a function, a class, a room or the README outgrows its ceiling.

A file counts its lines, a function its lines from `def` to its last one (docstring included), a
class the distinct instance attributes it declares or assigns. What must be larger stands in
`EXCEPTIONS`, with the reason and its own ceiling.

A room is a folder with what is below it, less the rooms in it; it counts the lines of its Python
files. Whoever grows a room finds what to take out of it, or argues for more lines in the commit
that changes `ROOMS`.
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
ROOMS = {
    "kvconnector": 610,
    "kvconnector/bench": 3730,
    "kvconnector/cache": 2540,
    "kvconnector/cli": 1790,
    "kvconnector/control": 1330,
    "kvconnector/datapath": 5140,
    "kvconnector/integrations": 2820,
    "kvconnector/planning": 400,
    "kvconnector/runtime": 3330,
    "kvconnector/session": 3330,
    "kvconnector/topology": 1050,
    "kvconnector/transport": 2030,
    "kvconnector/wire": 520,
    "kernels/kvconnector_kernels": 10,
    "kernels/kvconnector_kernels/block_table": 590,
    "kernels/kvconnector_kernels/pump": 1580,
    "kernels/kvconnector_kernels/relayout": 1770,
    "examples": 60,
    "examples/launchers": 40,
    "examples/monitoring": 100,
    "examples/minillm": 5520,
    "examples/vllm_1p1d": 500,
    "scripts": 310,
    "tests": 90,
    "tests/control": 410,
    "tests/docs": 420,
    "tests/golden": 60,
    "tests/hosts": 910,
    "tests/integration": 1380,
    "tests/kernels": 1610,
    "tests/property": 1960,
    "tests/support": 2390,
    "tests/transport": 720,
    "tests/unit": 1260,
    "tests/unit/bench": 730,
    "tests/unit/cache": 650,
    "tests/unit/cli": 660,
    "tests/unit/control": 110,
    "tests/unit/datapath": 2070,
    "tests/unit/minillm": 1250,
    "tests/unit/runtime": 1170,
    "tests/unit/session": 980,
    "tests/vllm": 5030,
}


class Allowance(NamedTuple):
    """A larger ceiling for one name, and why."""

    ceiling: int
    reason: str


# "path" for a file, "path:Class.function" for a function, "path:Class" for a class.
EXCEPTIONS: dict[str, Allowance] = {}


class Measure(NamedTuple):
    """One measured size: which ceiling it is held against, the thing's name, and its size."""

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
    """Return a line for each size above its ceiling and each allowance that nothing needs now."""
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


def weigh_rooms(measures: list[Measure], rooms: dict[str, int]) -> list[str]:
    """Return a line for each room above its ceiling and each file that is in no room."""
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
    return complaints + [
        f"{room}: {weight} lines, the ceiling is {rooms[room]}"
        for room, weight in weights.items()
        if weight > rooms[room]
    ]


def main() -> int:
    """Measure the checkout; print the complaints and return 1 if there are any."""
    measures = [
        measure
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for measure in measure_file(path, path.relative_to(ROOT).as_posix())
    ]
    complaints = find_complaints(measures, EXCEPTIONS) + weigh_rooms(measures, ROOMS)
    readme_lines = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    if readme_lines > README_LINES:
        complaints.append(f"README.md: {readme_lines} lines, the ceiling is {README_LINES}")
    print("\n".join(complaints) or f"{len(measures)} sizes within their ceilings")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
