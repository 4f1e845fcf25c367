"""`verify=checksum`: a chunk that is corrupted in transit fails its load, and is not unpacked."""

import sys

import numpy as np
import pytest

from kvconnector.datapath.pump.digests import Digests
from kvconnector.errors import ConfigError
from tests.support.fakes import FakeEngine, attention_model, dense_of
from tests.support.loopback import LoopbackFaults
from tests.support.world import World

SOURCE, DESTINATION, NUM_TOKENS = [0, 1, 2], [7, 6, 5], 12


def test_a_corrupt_chunk_fails_only_its_own_load():
    staging = {"chunk_bytes": 64, "budget_bytes": 64 * 1024}
    world = World(settings={"staging": staging, "verify": "checksum"})
    p = world.start(FakeEngine("p", attention_model()), role="producer")
    d = world.start(FakeEngine("d", attention_model(), layout="NHD"), role="consumer")
    (consumer,) = d.workers

    def load(name):
        d.load_from(p, name, SOURCE, DESTINATION, NUM_TOKENS)
        assert world.run(lambda: consumer.outbox.is_filled)
        return consumer.poll()

    granted = dense_of([p.workers[0].caches], [SOURCE], NUM_TOKENS)
    before = dense_of([consumer.caches], [DESTINATION], NUM_TOKENS)
    try:
        world.network.faults = LoopbackFaults(corrupt_probability=1.0)
        failed = load("damaged").failed_recving["damaged"]
        assert failed.startswith(
            "CorruptionError: a chunk differs from what its producer sent [chunk="
        )
        assert "rank='pp0tp0', engine='p'" in failed
        np.testing.assert_equal(dense_of([consumer.caches], [DESTINATION], NUM_TOKENS), before)
        world.network.faults = LoopbackFaults()
        output = load("whole")
        assert [transfer.path for transfer in output.stats.transfers] == ["packed"]
        np.testing.assert_equal(dense_of([consumer.caches], [DESTINATION], NUM_TOKENS), granted)
    finally:
        world.close()


def test_a_missing_xxhash_is_named(monkeypatch):
    for name in ("xxhash", "xxhash._xxhash"):  # another test may have imported both
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'kvconnector\[checksum\]'"):
        Digests("cpu", 64)
