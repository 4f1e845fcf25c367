"""Builds the compiled library from the C sources of this folder: `python kernels/native/build.py` in a checkout.

`pip install` calls it through the build hook, hatch_build.py; nothing is compiled after that. It needs the standard
library only, and a C compiler: $CC, the system's, or the one in the package ziglang.

    build.py                 build the library in the checkout, unless it is what the sources make
    build.py --requirements  print the packages that the build needs here: none, or one that brings a compiler
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAME = "libkvconnector_kernels.so"
IN_CHECKOUT = FOLDER.parent / "kvconnector_kernels" / NAME
ZIG = "ziglang==0.15.1"
OLDEST_GLIBC = "2.28"
"""Of the systems that a wheel for others runs on. It is built by ziglang, which has the symbols of every glibc."""
MACHINES = ("x86_64", "aarch64")

WARNINGS = ("-Wall", "-Wextra", "-Werror")
FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",  # what POSIX and Linux add to C11's headers
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",  # Python writes records as numbers
    "-pthread",
)


class BuildError(RuntimeError):
    """The library cannot be built here. The text has what the compiler said."""


def sources() -> list[Path]:
    """Return the C files."""
    return sorted(FOLDER.glob("*.c"))


def sources_hash() -> str:
    """Return what changes whenever a source or the way it is compiled does."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in (*sources(), *sorted(FOLDER.glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def system_compiler() -> tuple[str, ...]:
    """Return the command of a C compiler that can link a shared library here: $CC or the system's; empty if none."""
    named = os.environ.get("CC")
    for candidate in [named] if named else ["cc", "gcc", "clang"]:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]) and _can_link(command):
            return tuple(command)
    return ()


def _can_link(command: Sequence[str]) -> bool:
    """Return True if a compiler also finds libc's headers: some images have one without them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.c")
        source.write_text(
            "#include <poll.h>\n#include <stdatomic.h>\nint none(void) { return poll(0, 0, 0); }\n"
        )
        arguments = [*command, "-std=c11", "-shared", "-fPIC", str(source), "-o", f"{source}.so"]
        return subprocess.run(arguments, capture_output=True, check=False).returncode == 0


def has_zig() -> bool:
    """Return True if the package ziglang is installed."""
    return importlib.util.find_spec("ziglang") is not None


def zig_compiler(machine: str) -> tuple[str, ...]:
    """Return ziglang's C compiler for the oldest systems of a machine, "x86_64" or "aarch64"."""
    return (sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{OLDEST_GLIBC}")


def requirements(machine: str = "") -> list[str]:
    """Return the packages that `build` needs, for a wheel that also runs on other systems if a machine is named."""
    return [ZIG] if machine or not system_compiler() else []


def build(output: Path, machine: str = "") -> None:
    """Build the library: for this system, or for the oldest systems of a machine.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    if sys.platform != "linux":
        raise BuildError(f"kvconnector runs on Linux, this is {sys.platform}")
    if machine and machine not in MACHINES:
        raise BuildError(f"there are builds for {' and '.join(MACHINES)}, not for {machine!r}")
    command = () if machine else system_compiler()
    if not command:
        if not has_zig():
            raise BuildError(f"no C compiler works here: install one, or pip install {ZIG}")
        command = zig_compiler(machine or platform.machine())
    compile_files(command, output, [*sources()], ["-O3", "-shared", "-Wl,--build-id=none", "-s"])


def compile_files(
    command: Sequence[str], output: Path, files: Sequence[Path], flags: Sequence[str]
) -> None:
    """Compile C files into one file, which replaces a former one at once. Raises BuildError: the compiler fails."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=output.parent) as folder:
        made = Path(folder, output.name)
        arguments = [*command, *FLAGS, *WARNINGS, *flags, f"-I{FOLDER}"]
        arguments += [f'-DKVC_SOURCES="{sources_hash()}"', *map(str, files), "-o", str(made)]
        # ziglang keeps what it makes of glibc, and a home may not be writable
        environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(Path(folder, "zig"))}
        environment["ZIG_LOCAL_CACHE_DIR"] = environment["ZIG_GLOBAL_CACHE_DIR"]
        done = subprocess.run(
            arguments, capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode:
            raise BuildError(f"{shlex.join(arguments)}\n{done.stderr}")
        made.replace(output)


def is_current(library: Path) -> bool:
    """Return True if a library was built from the sources as they are now."""
    return library.is_file() and sources_hash().encode() in library.read_bytes()


def build_in_checkout() -> None:
    """Build the library of a checkout, unless it is current. Raises BuildError: see `build`."""
    if not is_current(IN_CHECKOUT):
        build(IN_CHECKOUT)


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    if arguments == ["--requirements"]:
        sys.stdout.write("".join(f"{each}\n" for each in requirements()))
        return 0
    if arguments:
        sys.stderr.write(str(__doc__))
        return 2
    try:
        build_in_checkout()
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
