"""The engines that are installed here, each compared with what its integration uses of it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from typing import NamedTuple

from kvconnector.integrations import sglang, vllm
from kvconnector.integrations.contract import Sources, differences, release_of
from kvconnector.integrations.sglang import used as of_sglang
from kvconnector.integrations.vllm import used as of_vllm


class EngineReport(NamedTuple):
    """An installed engine. `differences`: what is not as the integration uses it, in words."""

    engine: str
    version: str
    is_known: bool
    differences: list[str]


def examine_engines() -> Iterator[EngineReport]:
    """Yield the reports on vLLM and SGLang, if they are installed. Neither is imported."""
    releases = tuple(f"{major}.{minor}" for major, minor in vllm.SUPPORTED_VLLM)
    tables = (
        ("vllm", releases, of_vllm.ENTRIES + of_vllm.RANGES),
        ("sglang", sglang.KNOWN_VERSIONS, of_sglang.ENTRIES + of_sglang.SPARSE),
    )
    distributions = packages_distributions()  # vLLM has builds of other names
    for package, known, entries in tables:
        if package not in distributions:
            continue
        found, sources = version(distributions[package][0]), Sources.of(package)
        release = release_of(found)
        is_known = any(release[: len(each)] == each for each in map(release_of, known))
        yield EngineReport(package, found, is_known, differences(entries, sources))
