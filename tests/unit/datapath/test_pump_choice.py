"""When transfers are pumped, and what is said when they are not."""

from __future__ import annotations

import logging

import pytest

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.pump import selftest, ucp
from kvconnector.datapath.pump.choice import open_datapath
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.transport.ucx import open_ucx_transport

pytestmark = pytest.mark.ucx


def opened() -> DataPath:
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


def test_pump_that_passes_its_own_transfer_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert opened().name == "pump"
    assert "without the GIL" in caplog.text


def test_unknown_libucp_is_not_pumped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ucp, "KNOWN_VERSIONS", ((0, 1), (0, 2)))
    assert opened().name == "packed"
    assert "structs are not known" in caplog.text


def test_wrong_bytes_in_the_self_test_keep_the_pump_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = selftest.TestCache.tokens
    monkeypatch.setattr(
        selftest.TestCache,
        "tokens",
        lambda self, block_ids: tokens(self, block_ids) + block_ids[0],
    )
    assert opened().name == "packed"
    assert "other bytes" in caplog.text
