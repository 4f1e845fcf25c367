"""Fails when two modules of the package give one public name to two classes, functions or types, or two modules of the
core to two constants; when two modules of the core have one file name; and when something has a name that was given up.

A reader who searches for a name should find one thing, and find it under one name. `SAME` and `SAME_FILES` list the
exceptions with their reasons: the same thing for another device, or entry points.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kvconnector", "kernels")
RIM = ("kvconnector/bench", "kvconnector/cli", "kvconnector/integrations")
"""Their constants are their own."""
SAME = {
    "COPY": "the library's function for each device",
    "ElementOrder": "the wire's, and the kernels' own of the same values",
    "ITEM_SIZES_BYTES": "those of named types, and those that the kernels copy",
    "NAME": "the library's, for its build and its users",
    "PAD_SLOT_ID": "the cache's, and the kernels' own of the same value",
    "ROUNDINGS": "those that geometries name, and the kernels' own of the same values",
    "READ": "the library's function for each device",
    "apply_writes": "a kernel and its oracle",
    "check_block_ids": "the pool's check, and the kernels' own of their arguments",
    "gather_rows": "a kernel and its oracle",
    "main": "entry points of command lines",
    "map_slots": "a kernel and its oracle",
    "register": "entry points that others name",
    "run": "entry points of benchmarks and of the command line",
}
SAME_FILES = {
    "address": "the control channel's, and UCX's own",
    "cpu": "each kernel's for this device",
    "export": "what travels of a worker's pools, and what makes it of them",
    "library": "the library of C, and UCX's",
    "naive": "each kernel's and the planner's oracle",
    "triton": "each kernel's for this device",
}
GIVEN_UP = {
    "begun": "producer_started",
    "has_started": "producer_started",
    "prefill_started": "producer_started",
    "is_handshaking": "is_greeting",
}
"""Names that one thing had beside another."""


def name_of(node: ast.stmt, *, takes_constants: bool) -> str:
    """Return the name of a class, a function, a type or a constant that a statement defines, else an empty one."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name
    target: ast.expr | None = None
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
        target = node.target
    elif (
        isinstance(node, ast.Assign)
        and ast.unparse(node.value).startswith(("Annotated[", "NewType("))
    ) or (takes_constants and isinstance(node, ast.Assign) and is_constant(node.targets[0])):
        target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def is_constant(target: ast.expr) -> bool:
    """Returns True for a name in capitals."""
    return isinstance(target, ast.Name) and target.id.isupper()


def find_names() -> dict[str, list[str]]:
    """Return the modules of each public class, function, type and constant at module level, by its name."""
    modules = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = path.relative_to(ROOT).as_posix()
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                name = name_of(node, takes_constants=not module.startswith(RIM))
                if name and not name.startswith("_"):
                    modules[name].append(module)
    return modules


def find_files() -> dict[str, list[str]]:
    """Return the modules of the core by their file's name."""
    modules = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("[!_]*.py")):
            module = path.relative_to(ROOT).as_posix()
            if not module.startswith(RIM):
                modules[path.stem].append(module)
    return modules


def find_given_up() -> list[str]:
    """Return complaints about attributes, functions and arguments whose names were given up."""
    found = []
    for path in sorted((ROOT / "kvconnector").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                name, line = node.attr, node.lineno
            elif isinstance(node, ast.FunctionDef):
                name, line = node.name, node.lineno
            elif isinstance(node, ast.arg | ast.keyword):
                name, line = node.arg or "", node.lineno
            else:
                continue
            if name in GIVEN_UP:
                found.append(f"{path.relative_to(ROOT)}:{line}: {name} is {GIVEN_UP[name]}")
    return found


def find_shared(modules: dict[str, list[str]], listed: dict[str, str]) -> list[str]:
    """Return complaints about names of two things that are not listed, and listed ones that are of one."""
    shared = {name: places for name, places in modules.items() if len(places) > 1}
    complaints = [
        f"{name}: two things, in {' and '.join(shared[name])}"
        for name in sorted(set(shared) - set(listed))
    ]
    complaints += [
        f"{name}: is one thing now, and need not be listed"
        for name in sorted(set(listed) - set(shared))
    ]
    return complaints


def main() -> int:
    """Print the complaints; return 1 if there are any."""
    complaints = find_shared(find_names(), SAME) + find_shared(find_files(), SAME_FILES)
    complaints += find_given_up()
    print("\n".join(complaints) or "each public name is one thing")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
