"""The engines that are installed here, each compared with what its integration uses of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec

from kvconnector.integrations import vllm
from kvconnector.integrations.contract import Entry, Sources, differences, release_of
from kvconnector.integrations.sglang import used as of_sglang
from kvconnector.integrations.sglang.shared import KNOWN_VERSIONS as KNOWN_SGLANG
from kvconnector.integrations.vllm import used as of_vllm


@dataclass(frozen=True)
class InstalledEngine:
    """An installed engine. `is_known`: its release was tested."""

    name: str
    version: str
    is_known: bool
    _entries: tuple[Entry, ...]

    def differences(self) -> list[str]:
        """Return what is not as the integration uses it, in words. It parses the engine's files, for a second or so."""
        return differences(self._entries, Sources.of(self.name))


def installed_engines() -> Iterator[InstalledEngine]:
    """Yield vLLM and SGLang, if they are installed. Neither is imported."""
    releases = tuple(f"{major}.{minor}" for major, minor in vllm.SUPPORTED_VLLM)
    for name, known, entries in (
        ("vllm", releases, of_vllm.ENTRIES + of_vllm.RANGES),
        (
            "sglang",
            KNOWN_SGLANG,
            of_sglang.ENTRIES + of_sglang.SPARSE + of_sglang.SPLIT + of_sglang.STAGES,
        ),
    ):
        if found := _version_of(name):
            release = release_of(found)
            is_known = any(release[: len(each)] == each for each in map(release_of, known))
            yield InstalledEngine(name, found, is_known, entries)


def _version_of(package: str) -> str | None:
    """Return an installed package's version, or None."""
    if find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        # vLLM has builds of other names. This reads the list of files of all distributions
        names = packages_distributions().get(package)
        return version(names[0]) if names else None
