"""Fails when modules of the package import each other, be it inside a function or for the type checker alone.

Modules of a circle can only be understood, tested and moved together.
"""

from __future__ import annotations

import sys

import grimp


def find_circles(imported: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the largest groups of modules that all need each other, sorted.

    Args:
        imported: For each module those that it imports.
    """
    needed = {}
    for module in imported:
        found: set[str] = set()
        todo = [module]
        while todo:
            new = imported[todo.pop()] - found
            found |= new
            todo += new
        needed[module] = found
    circles = {
        tuple(sorted(other for other in needed[module] if module in needed[other]))
        for module in imported
        if module in needed[module]
    }
    return sorted(circles)


def main() -> int:
    """Print the circles; return 1 if there are any."""
    graph = grimp.build_graph("kvconnector", "kvconnector_kernels", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    circles = find_circles(imported)
    for circle in circles:
        print(f"these import each other: {', '.join(circle)}")
    if not circles:
        print("no module needs one that needs it")
    return 1 if circles else 0


if __name__ == "__main__":
    sys.exit(main())
