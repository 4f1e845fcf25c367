"""`verify=checksum`: what is damaged on its way is refused by name, and nothing of it is unpacked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvconnector.datapath.digests import Digests
from kvconnector.errors import ConfigError
from tests.support.fakes import FakeEngine, attention_model, dense_of
from tests.support.loopback import LoopbackFaults
from tests.support.world import World

MODEL = attention_model()
SOURCE, DESTINATION, NUM_TOKENS = [0, 1, 2], [7, 6, 5], 12
CHECKED = {"verify": "checksum"}


class Reads:
    """A producer and a consumer with these settings, and loads of the same blocks."""

    def __init__(self, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        staging = {"chunk_bytes": 64, "budget_bytes": 64 * 1024}
        self.world = World(settings={"staging": staging})
        self.p = self.world.start(FakeEngine("p", MODEL), role="producer", **ours)
        self.d = self.world.start(FakeEngine("d", MODEL, layout="NHD"), role="consumer", **theirs)
        self.granted = dense_of([self.p.workers[0].caches], [SOURCE], NUM_TOKENS)
        self.before = self.loaded()
        self._count = 0

    def load(self) -> tuple[str | None, str | None]:
        """Why a load failed, and how it came if it did not."""
        self._count += 1
        name = f"r{self._count}"
        offer = self.p.grant(name, [SOURCE], NUM_TOKENS)
        self.d.want(name, offer)
        self.d.load(name, offer, [DESTINATION], [range(NUM_TOKENS)])
        # a lease that nobody was let in to read lasts until it expires
        assert self.world.run(self.d.workers[0].outbox.is_filled)
        output = self.d.workers[0].poll()
        assert output.failed_recving or self.world.run(self.world.is_quiet)
        paths = [transfer.path for transfer in output.stats.transfers]
        return output.failed_recving.get(name), paths[0] if paths else None

    def loaded(self) -> Any:
        return dense_of([self.d.workers[0].caches], [DESTINATION], NUM_TOKENS)


@contextmanager
def reading(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Reads]:
    reads = Reads(ours, theirs)
    try:
        yield reads
    finally:
        reads.world.close()


def same(found: Any, expected: Any) -> bool:
    return all(np.array_equal(found[key], expected[key]) for key in expected)


def test_a_damaged_chunk_fails_its_load_by_name_and_the_next_load_is_right() -> None:
    with reading(CHECKED, CHECKED) as reads:
        reads.world.network.set_faults(LoopbackFaults(corrupt_probability=1.0))
        failed, _ = reads.load()
        assert failed is not None
        assert failed.startswith("CorruptionError: a chunk is not what its producer sent [chunk=")
        assert "rank='pp0tp0', engine='p'" in failed
        assert same(reads.loaded(), reads.before)
        reads.world.network.set_faults(LoopbackFaults())
        assert reads.load() == (None, "packed")
        assert same(reads.loaded(), reads.granted)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvconnector\[checksum\]'"):
        Digests("cpu")
