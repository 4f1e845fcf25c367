"""When transfers are pumped, and what is said when they are not."""

from __future__ import annotations

import logging
import time

import pytest

from kvconnector.datapath.pump import selftest, ucp
from kvconnector.datapath.pump.choice import PathOptions, open_datapath
from kvconnector.datapath.pump.copies_cpu import CpuCopies
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.datapath.pump.ucp import UcxNetwork
from kvconnector.datapath.staging import SlotPool
from kvconnector.errors import TransportError
from kvconnector.transport.ucx import open_ucx_transport
from tests.support.transport_suite import HostMemory
from tests.unit.datapath.pump_pair import DEADLINE_S, PACE

pytestmark = pytest.mark.ucx


def opened() -> DataPath:
    transport = open_ucx_transport()
    path = open_datapath(
        selftest.TestCache("cpu").pools,
        transport,
        send_slots=SlotPool(2, 4096, "cpu"),
        recv_slots=None,
        options=PathOptions(
            window=4,
            quarantine_s=1.0,
            max_programs=0,
            spin_s=0.0,
            direct="auto",
        ),
        clock=time.monotonic,
    )
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


def test_self_test_that_is_broken_off_awaits_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may go, and a message that it awaited is there for whoever asks for it now."""
    first_tags = []

    def break_off(self: DataPath, *args: object, first_tag: int, window: int) -> None:
        first_tags.append(first_tag)
        self.pump(0.0, ())  # which posts its receives
        raise TransportError("broken off")

    monkeypatch.setattr(DataPath, "submit_send", break_off)
    transport = open_ucx_transport()
    with pytest.raises(TransportError, match="broken off"):
        selftest.check_pump(
            transport,
            UcxNetwork(transport),
            cache := selftest.TestCache("cpu"),
            CpuCopies(cache.pools, selftest.SLOT_BYTES),
            (SlotPool(2, selftest.SLOT_BYTES, "cpu"), SlotPool(2, selftest.SLOT_BYTES, "cpu")),
            pace=PACE,
            deadline_s=DEADLINE_S,
        )
    sent, received = HostMemory(64), HostMemory(64)
    sent.write(bytes(range(64)))
    arriving = transport.recv(first_tags[0], received.buffer)
    transport.send(transport.connect(transport.address), first_tags[0], sent.buffer)
    deadline_s = time.monotonic() + DEADLINE_S
    while arriving not in {completion.ticket for completion in transport.progress()}:
        assert time.monotonic() < deadline_s, "the message went elsewhere"
    assert received.read() == sent.read()
    transport.close()
