"""The build hook: an install compiles the C sources of kernels/native, once. See build.py there.

A wheel is for all Pythons of this machine. With KVCONNECTOR_WHEEL_MACHINE=x86_64 or aarch64 it is for all systems of
that machine with glibc 2.28 or newer, and can be made anywhere.
"""

from __future__ import annotations

import os
import platform
import runpy
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _builder(root: str) -> ModuleType:
    folder = str(Path(root, "kernels", "native"))
    sys.path.insert(0, folder)
    try:
        import build  # type: ignore[import-not-found]  # of that folder
    finally:
        sys.path.remove(folder)
    found: ModuleType = build
    return found


def _commit(root: str) -> str:
    """Return the checkout's commit, "" without one, as the package itself finds it."""
    path = Path(root, "kvconnector", "_version.py")
    found: dict[str, Any] = runpy.run_path(str(path))
    return str(found["_commit"](path.parent))


class BuildHook(BuildHookInterface[Any]):
    """Compiles the library into a wheel, or into the checkout of an editable install."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return the packages that the build needs here: none, or one that brings a compiler."""
        if self.target_name == "sdist":
            return []
        found: list[str] = _builder(self.root).requirements(self._machine)
        return found

    @property
    def _machine(self) -> str:
        return os.environ.get("KVCONNECTOR_WHEEL_MACHINE", "")

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library, and name the wheel's platform. Sources only get the commit that they are of."""
        self._folder = tempfile.TemporaryDirectory()
        if version != "editable":
            self._include_commit(build_data)
        if self.target_name == "sdist":
            return
        builder = _builder(self.root)
        build_data["pure_python"] = False
        glibc = builder.OLDEST_GLIBC.replace(".", "_")
        system = (
            f"manylinux_{glibc}_{self._machine}" if self._machine else f"linux_{platform.machine()}"
        )
        build_data["tag"] = f"py3-none-{system}"
        if version == "editable":
            builder.build_in_checkout()
            return
        library = Path(self._folder.name, builder.NAME)
        builder.build(library, self._machine)
        build_data["force_include"][str(library)] = f"kvconnector_kernels/{builder.NAME}"

    def _include_commit(self, build_data: dict[str, Any]) -> None:
        commit = _commit(self.root)
        if (
            commit and not Path(self.root, "kvconnector", "_commit").exists()
        ):  # else it is one of the sources
            named = Path(self._folder.name, "_commit")
            named.write_text(f"{commit}\n")
            build_data["force_include"][str(named)] = "kvconnector/_commit"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is in the wheel or the archive now."""
        self._folder.cleanup()
