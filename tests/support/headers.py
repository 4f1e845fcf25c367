"""What C headers say, as a compiler sees it: tests compare with it what is written down in Python."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def numbers_of(expressions, headers, folder, search=()):
    """Return the values of constant C expressions, such as `sizeof(struct pollfd)`.

    Args:
        expressions: The expressions.
        headers: The headers that they need.
        folder: An empty folder.
        search: Where headers are, beside the system's.

    Returns:
        The value of each expression, by its text.
    """
    source, program = folder / "print.c", folder / "print"
    source.write_text(
        "#define _GNU_SOURCE\n"
        + "".join(f"#include <{name}>\n" for name in ("stddef.h", "stdio.h", *headers))
        + "int main(void) {\n"
        + "".join(f'printf("%lld\\n", (long long)({each}));\n' for each in expressions)
        + "}\n"
    )
    include = [f"-I{each}" for each in search]
    subprocess.run(["gcc", *include, "-o", program, source], check=True)
    found = map(int, subprocess.check_output([program], text=True).split())
    return dict(zip(expressions, found, strict=True))


def offsets_of(structs):
    """Return C expressions for the offsets of fields, and the offsets in Python: `{C's name: (class, {C's name of a
    field: ours})}`.
    """
    return {
        f"offsetof({name}, {field})": getattr(kind, ours).offset
        for name, (kind, fields) in structs.items()
        for field, ours in fields.items()
    }


def cuda_headers():
    """Return the folder of a cuda.h that an installed package brings; skip the test if there is none."""
    for package, path in (
        ("triton", "backends/nvidia/include"),
        ("nvidia.cuda_runtime", "include"),
    ):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (Path(folder) / path / "cuda.h").is_file():
                return Path(folder) / path
    return pytest.skip("no package brings cuda.h")
