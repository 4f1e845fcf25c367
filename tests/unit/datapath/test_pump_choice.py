"""When transfers are pumped, and what is said when they are not."""

import logging

import pytest

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.pump import network, selftest
from kvconnector.datapath.pump.choice import open_datapath
from kvconnector.transport.ucx import open_ucx_transport

pytestmark = pytest.mark.ucx


def opened():
    settings = {
        "engine_id": "p",
        "role": "producer",
        "control": {"insecure": True},
        "staging": {"chunk_bytes": 4096},
    }
    config = ConnectorConfig.from_mapping(settings)
    path = open_datapath(config, selftest.TestCache("cpu").pools, open_ucx_transport())
    path.close()
    return path


def other_bytes(cache, block_ids):
    return TOKENS(cache, block_ids) + block_ids[0]


TOKENS = selftest.TestCache.tokens
UNKNOWN_LIBRARY = (network, "KNOWN_VERSIONS", ((0, 1), (0, 2)))


@pytest.mark.parametrize(
    "change, name, words",
    [
        ((selftest.TestCache, "tokens", TOKENS), "pump", "without the GIL"),
        (UNKNOWN_LIBRARY, "packed", "structs are not known"),
        ((selftest.TestCache, "tokens", other_bytes), "packed", "other bytes"),
    ],
    ids=["right", "unknown libucp", "wrong bytes"],
)
def test_a_pump_that_passes_its_own_transfer_is_taken(monkeypatch, caplog, change, name, words):
    monkeypatch.setattr(*change)
    with caplog.at_level(logging.INFO):
        assert opened().name == name
    assert words in caplog.text
