"""The UCX of this process: finding a libucp and loading it.

Any libucp of a known version works, whichever package installed it: only C functions are called (`abi`, `libucp`). A
process uses one, since two with the same file names would share halves of each other. So a libucp that something else
has loaded, as ucxx does, is used where the setting leaves the choice open (`auto`), and excludes any other.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_size_t, c_uint, c_void_p
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvconnector.errors import ConfigError, TransportError
from kvconnector.transport.ucx import abi
from kvconnector.transport.ucx.ports import active_drivers, active_rdma_ports

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Chooses the libucp that is loaded already, else NIXL's where RDMA ports are active, else the wheel's."""
KNOWN_VERSIONS = ((1, 18), (1, 23))
"""First and last minor version of UCX whose headers were compared with `abi`."""

_SONAME = "libucp.so.0"
_MEMTYPE_CACHE = "UCX_MEMTYPE_CACHE"
_WHEEL_FILES = ("libucs.so", "libuct.so", "libucp.so")
"""The names by which ucxx loads the files of the wheel, which has three copies of each: loading them by other names
would load a second UCX.
"""
_RTLD_DL_LINKMAP = 2


class UcxLibrary:
    """A libucp in this process. `source` is the setting that found it.

    `releasing` and `keeping` are the same functions, of libucp and its libucs: calls of the former release the GIL.

    Raises TransportError: the file cannot be loaded, is no libucp, or its version is not known.
    """

    def __init__(self, source: str, path: Path) -> None:
        self.source, self.path = source, path
        try:
            with ucx_environment_kept(without_efa=brings_libibverbs(path)):
                if path.name in _WHEEL_FILES:
                    for name in _WHEEL_FILES:
                        ctypes.CDLL(str(path.with_name(name)))
                self.releasing = ctypes.CDLL(str(path))
            self.keeping = ctypes.PyDLL(str(path), handle=self.releasing._handle)
            for functions in (self.releasing, self.keeping):
                abi.declare(functions)
        except (OSError, AttributeError) as error:
            text = f"this libucp cannot be used: {error}"
            raise TransportError(text, library=str(path)) from error
        self.version = _version(self.keeping)
        _check_version(self.version, path)

    def __repr__(self) -> str:
        named = "" if self.source == str(self.path) else f"{self.source}: "
        return f"UCX {_dotted(self.version)} ({named}{self.path})"

    def status_text(self, status: int) -> str:
        """Return UCX's words for a status."""
        text: bytes = self.keeping.ucs_status_string(status)
        return text.decode(errors="replace")

    def components(self) -> list[str]:
        """Return components that this UCX can use if there is hardware for them: "tcp", "cuda_ipc", "ib" and others."""
        found, count = ctypes.POINTER(ctypes.c_void_p)(), c_uint()
        status = self.keeping.uct_query_components(byref(found), byref(count))
        self.check(status, "UCX does not list its components")
        attr = abi.ComponentAttr(field_mask=abi.COMPONENT_FIELD_NAME)
        names = []
        for component in found[: count.value]:
            self.check(self.keeping.uct_component_query(component, byref(attr)), "no such name")
            names.append(attr.name.decode(errors="replace"))
        self.keeping.uct_release_component_list(found)
        return sorted(names)

    def check(self, status: int, message: str, **context: object) -> None:
        """Raise TransportError unless a status is OK."""
        if status != abi.OK:
            raise TransportError(message, ucx_status=self.status_text(status), **context)


def load_library(source: str = AUTO) -> UcxLibrary:
    """Load the libucp that a setting names, once.

    Args:
        source: `auto`, one of `SOURCES`, or a file's path.

    Raises:
        ConfigError: There is no such source.
        TransportError: none is found there, it cannot be used, or this process has loaded another one.
    """
    if source != AUTO and source not in SOURCES and "/" not in source:
        known = [AUTO, *SOURCES]
        raise ConfigError(
            "ucx.library is neither one of these names nor a path", named=source, known=known
        )
    with _lock:
        if not _loaded:
            _loaded.append(_first_usable() if source == AUTO else _load(source))
            logger.info("%r has %s", _loaded[0], ", ".join(_loaded[0].components()))
        (loaded,) = _loaded
        if source not in (AUTO, loaded.source) and not _is_same(loaded.path, _find(source)):
            raise TransportError(
                "a process can use only one UCX, and this one has loaded another",
                loaded=loaded,
                named=source,
            )
        return loaded


def _first_usable() -> UcxLibrary:
    reasons: dict[str, str] = {}
    if (present := _present()) is not None:
        return UcxLibrary("loaded", present)
    ports = active_rdma_ports()
    for candidate in automatic_order(ports):
        try:
            library = _load(candidate)
        except TransportError as error:
            reasons[candidate] = error.statement
            continue
        if ports and not rdma_modules(library.path):
            why = {source: reasons.get(source) or _rdma_lack(source) for source in SOURCES}
            logger.warning(
                'RDMA ports are active (%s), and no UCX here can use them: pip install "kvconnector[rdma]".'
                " %r is used. %s",
                ", ".join(ports),
                library,
                "; ".join(f"{source}: {reason}" for source, reason in why.items()),
            )
        return library
    raise TransportError(
        'no UCX was found: pip install "kvconnector[ucx-cu12]" (ucx-cu13 for a driver of CUDA 13), or set ucx.library',
        **reasons,
    )


def automatic_order(ports: Collection[str]) -> list[str]:
    """Return the sources that `auto` tries, the preferred one first, on a host with these active RDMA ports."""
    is_capable = bool(ports) and not _rdma_lack("nixl")
    return sorted(SOURCES, key="nixl".__eq__, reverse=is_capable)


def _rdma_lack(source: str) -> str:
    """Return the reason why a source's UCX cannot use RDMA; "" if it can."""
    try:
        path = _find(source)
    except TransportError as error:
        return error.statement
    if not rdma_modules(path):
        return f"{path} has no transports for RDMA"
    if knows_no_driver(path):
        return f"{path} knows NVIDIA's NICs (mlx5_core) alone, not {', '.join(active_drivers())}"
    return ""


def knows_no_driver(libucp: Path) -> bool:
    """Returns True if a libucp brings a libibverbs that can use none of the active ports."""
    return brings_libibverbs(libucp) and active_drivers().isdisjoint(("mlx5_core", ""))


def brings_libibverbs(libucp: Path) -> bool:
    """Returns True if a libucp comes with a libibverbs of its own, as in NIXL's wheel, which has a provider for
    NVIDIA's NICs alone.

    UCX's module for EFA would load the system's libefa, and with it the system's libibverbs and libnl beside those of
    the wheel, and the process would crash when it ends. So that module is not loaded.
    """
    return any(libucp.parent.glob("libibverbs-*"))


def rdma_modules(libucp: Path) -> list[Path]:
    """Return the files of a libucp's transports for RDMA."""
    return sorted((libucp.resolve().parent / "ucx").glob("libuct_ib*.so*"))


def _load(source: str) -> UcxLibrary:
    path, present = _find(source), _present()
    if present is not None and _is_same(present, path):
        return UcxLibrary(source, present)
    if present is not None and path.name.startswith("libucp.so"):
        raise TransportError(
            "this process has already loaded another UCX, and the two would use parts of each other",
            loaded=str(present),
            named=str(path),
        )
    return UcxLibrary(source, path)


def _is_same(one: Path, other: Path) -> bool:
    """Returns True if these are the same library, of which wheels have a copy under each of its names."""
    return one.resolve().parent == other.resolve().parent


def _find(source: str) -> Path:
    """Return the path of a source's libucp. Raises TransportError: it has none."""
    return SOURCES[source]() if source in SOURCES else Path(source)


def _of_wheel() -> Path:
    """Find the libucp of `libucx`, on which ucxx depends, by the name under which ucxx loads it."""
    return _existing(_package("libucx"), "lib/libucp.so")


def _of_nixl() -> Path:
    """Find the libucp in a wheel of NIXL, whose files have names of their own."""
    package = _package("nixl_cu13", "nixl_cu12")
    return _existing(package.parent / f"{package.name}.libs", "libucp-*.so*")


def _package(*names: str) -> Path:
    """Return the folder of the first package that is installed, without importing it."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            return Path(spec.submodule_search_locations[0])
    raise TransportError(f"the package {' or '.join(names)} is not installed")


def _existing(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise TransportError(
            "the package has no UCX at the expected path: its layout may have changed",
            folder=str(folder),
            expected=pattern,
        )
    return found[0]


SOURCES: Mapping[str, Callable[[], Path]] = MappingProxyType({"wheel": _of_wheel, "nixl": _of_nixl})
"""Finds the libucp of each source, the preferred one first."""

_lock = threading.Lock()
_loaded: list[UcxLibrary] = []
"""The libucp of this process, once it is known."""


def _present() -> Path | None:
    """Return the path of the `libucp.so.0` that this process has loaded, or None."""
    try:
        library = ctypes.CDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    return path_of(library.ucp_get_version)


def path_of(function: Any) -> Path:
    """Return the path of the loaded file of a C function."""
    info, link_map = (c_void_p * 4)(), c_void_p()
    address = ctypes.cast(function, c_void_p)
    ctypes.CDLL(None).dladdr1(address, info, byref(link_map), _RTLD_DL_LINKMAP)
    _, name = (c_size_t * 2).from_address(link_map.value or 0)
    return Path(os.fsdecode(ctypes.string_at(name)))


def _version(functions: Any) -> tuple[int, int, int]:
    numbers = (c_uint(), c_uint(), c_uint())
    functions.ucp_get_version(*(byref(number) for number in numbers))
    return numbers[0].value, numbers[1].value, numbers[2].value


def _check_version(version: tuple[int, ...], path: Path) -> None:
    first, last = KNOWN_VERSIONS
    if not first <= version[:2] <= last:
        raise TransportError(
            f"this UCX is not supported: kvconnector calls libucp {_dotted(first)} to {_dotted(last)}",
            version=_dotted(version),
            library=str(path),
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@contextmanager
def ucx_environment_kept(*, without_efa: bool = False) -> Iterator[None]:
    """Remove the UCX_* environment variables that the block adds, and load UCX without a cache of memory types.

    Bindings set UCX_* defaults when imported, which would reach this process's children and other users of UCX. libucs
    reads UCX_MEMTYPE_CACHE when it is loaded: without the cache UCX asks the driver what a pointer is, as caching
    allocators require. If it is set later, libucs reports it on stderr as unused. `without_efa`: see
    `brings_libibverbs`.
    """
    before = {name for name in os.environ if name.startswith("UCX_")}
    os.environ.setdefault(_MEMTYPE_CACHE, "n")
    if without_efa:
        os.environ.setdefault("UCX_MODULES", "^efa")
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_")]:
            if name not in before:
                del os.environ[name]
