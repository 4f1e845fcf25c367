"""Fails when modules of the package import each other, be it inside a function or for the type checker alone.

Modules of a circle can only be understood, tested and moved together. `KNOWN` lists those that are left, with the
reason; one that has been opened must leave the list.
"""

from __future__ import annotations

import sys

import grimp

KNOWN = {
    (
        "integrations.sglang",
        "integrations.sglang.backend",
    ): "the package loads what SGLang asks for by name",
    (
        "integrations.sglang.rank",
        "integrations.sglang.transfers",
    ): "a rank, and the transfers that it runs",
    (
        "integrations.vllm.cpu_attention",
        "integrations.vllm.parts",
    ): "a layer's cache, and one backend's form of it",
}


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
    """Print the circles; return 1 if one of them is not listed, or one that is listed is open."""
    graph = grimp.build_graph("kvconnector", "kvconnector_kernels", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    circles = {
        tuple(module.removeprefix("kvconnector.") for module in circle)
        for circle in find_circles(imported)
    }
    complaints = [
        f"these import each other: {', '.join(circle)}" for circle in sorted(circles - set(KNOWN))
    ]
    complaints += [
        f"these import each other no more, and need not be listed: {', '.join(circle)}"
        for circle in sorted(set(KNOWN) - circles)
    ]
    print(
        "\n".join(complaints) or "no module needs one that needs it, but for those that are listed"
    )
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
