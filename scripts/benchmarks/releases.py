"""Another release of kvconnector, with which this one's benchmarks run an engine.

A folder of links has the other release, except for `kvconnector.bench`, which is this one's. Processes that import from
it run the other release in everything that two engines exchange, and answer this one's calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

import msgspec

from kvconnector import bench
from kvconnector.errors import ConfigError, IncompatiblePeerError
from kvconnector.wire import versions
from kvconnector.wire.versions import WireVersions

OURS = Path(bench.__file__).parent
PROBE_TIMEOUT_S = 120.0
PROBE = """
import kvconnector, kvconnector.bench.engine_process, msgspec, sys
try:
    from kvconnector.wire.versions import SPOKEN
except ImportError:  # a release that states none
    from kvconnector.wire.codec import WIRE_MAJOR
    SPOKEN = WIRE_MAJOR, WIRE_MAJOR
sys.stdout.buffer.write(msgspec.json.encode((kvconnector.__version__, SPOKEN)))
"""


class Release(msgspec.Struct, frozen=True):
    """The other release. `environment` are the variables of processes that run it, besides those of this process."""

    path: str
    version: str
    wire: WireVersions
    environment: dict[str, str]

    def __str__(self) -> str:
        return f"{self.version} of {self.path}, which speaks wire version {self.wire}"


@contextmanager
def open_release(path: Path) -> Iterator[Release]:
    """Open a wheel, a checkout, or a folder into which kvconnector was installed.

    Raises:
        ConfigError: There is no kvconnector, this release's benchmarks cannot run on it, or the two have no wire
            version in common.
    """
    with TemporaryDirectory(prefix="kvconnector-release-") as made:
        folder = path.absolute()
        if path.suffix == ".whl":
            folder = Path(made, "wheel")
            try:
                with ZipFile(path) as wheel:
                    wheel.extractall(folder)
            except (OSError, BadZipFile, zlib.error) as error:
                raise ConfigError(
                    f"this wheel cannot be opened: {error}", path=str(path)
                ) from error
        linked = Path(made, "linked")
        _link(folder, linked, str(path))
        paths = os.pathsep.join([str(linked), *map(os.path.abspath, sys.path)])
        release = _probe({"PYTHONPATH": paths}, str(path))
        try:
            versions.SPOKEN.common(release.wire)
        except IncompatiblePeerError as error:
            raise ConfigError(
                "this release and that one speak no wire version in common",
                ours=str(versions.SPOKEN),
                theirs=str(release.wire),
                path=str(path),
            ) from error
        yield release


def _link(folder: Path, linked: Path, name: str) -> None:
    kernels = [folder / each / "kvconnector_kernels" for each in (".", "kernels")]
    found = [each for each in kernels if each.is_dir()]
    if not found or not (folder / "kvconnector" / "__init__.py").is_file():
        raise ConfigError(
            "there is no kvconnector: name a wheel, a checkout, or a folder of pip install --target",
            path=name,
        )
    package = linked / "kvconnector"
    package.mkdir(parents=True)
    for each in (folder / "kvconnector").iterdir():
        if each.name != OURS.name:
            (package / each.name).symlink_to(each)
    (package / OURS.name).symlink_to(OURS)
    (linked / found[0].name).symlink_to(found[0])


def _probe(environment: dict[str, str], name: str) -> Release:
    try:
        probe = subprocess.run(
            (sys.executable, "-P", "-c", PROBE),
            env={**os.environ, **environment},
            capture_output=True,
            check=True,
            timeout=PROBE_TIMEOUT_S,
        )
        version, wire = msgspec.json.decode(probe.stdout, type=tuple[str, WireVersions])
    except subprocess.CalledProcessError as error:
        *_, reason = error.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise ConfigError(
            f"this release's benchmarks cannot run on that one: {reason}", path=name
        ) from error
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise ConfigError(f"this release does not answer: {error}", path=name) from error
    return Release(name, version, wire, environment)
