"""Foreign connections to UCX's ports take only spare descriptors, and peers can connect once they are closed."""

import logging
import resource
import select

import pytest

from kvconnector.transport.ucx import load_library, open_ucx_transport
from kvconnector.transport.ucx.library import link_map_of
from kvconnector.transport.ucx.listeners import (
    WANTED_DESCRIPTORS,
    find_import,
    raise_descriptor_limit,
    replace_import,
)
from tests.support.transport_suite import Ledger, Worker, exchange
from tests.transport.remote import RemoteTransport
from tests.transport.strangers import UCX_TCP_MAGIC, connect, listening_ports, unknown_message

pytestmark = pytest.mark.ucx

OPTIONS = {"TLS": "tcp", "NET_DEVICES": "lo"}
FILES = 192


def test_a_listener_survives_a_flood_of_foreign_connections(capfd):
    if load_library().version[:2] == (1, 20):
        pytest.skip("UCX 1.20 reaches nobody over lo (openucx/ucx#11202)")
    limited = RemoteTransport(
        {"options": OPTIONS}, prefix=("prlimit", f"--nofile={FILES}:{FILES}", "--")
    )
    (port,) = listening_ports(limited.child.pid)
    strangers = [connect(port) for _ in range(FILES)]
    assert select.select([strangers[-1]], [], [], 0.2)[0], "it stays open"
    limited.drive(0.5)
    log = capfd.readouterr().err
    assert f"this process may open {FILES} files" in log
    assert "turned away" in log
    for stranger in strangers:
        stranger.close()
    limited.drive(0.5)
    peer = open_ucx_transport(options=OPTIONS)
    here = Worker(peer, peer.connect(limited.address))
    there = Worker(limited, limited.connect(peer.address), limited.allocate)
    exchange(Ledger(peer, limited), here, there, 1)
    exchange(Ledger(peer, limited), there, here, 2)
    peer.close()
    limited.close()
    limited.release()


def test_foreign_messages_are_logged_briefly_without_their_bytes(caplog, capfd):
    before = set(listening_ports("self"))
    transport = open_ucx_transport(options=OPTIONS)
    (port,) = set(listening_ports("self")) - before
    with caplog.at_level(logging.WARNING):
        stranger = connect(port)
        stranger.sendall(UCX_TCP_MAGIC + unknown_message(b"a prompt's bytes") * 500)
        stranger.shutdown(1)
        while not select.select([stranger], [], [], 0.01)[0]:
            transport.progress()
        transport.close()
    stranger.close()
    text = caplog.text + "".join(capfd.readouterr())
    assert "got active message id 25" in text
    assert "messages faster than they are kept" in text
    assert len(text.splitlines()) < 12
    assert "prompt" not in text
    assert "6120 7072" not in text  # as a dump shows it


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_open_file_limit_is_raised_up_to_the_hard_limit(limits):
    hard = limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert raise_descriptor_limit() == min(hard, WANTED_DESCRIPTORS)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, WANTED_DESCRIPTORS), hard)


def test_an_import_is_found_and_replaced_by_name():
    open_ucx_transport().close()
    libucs = link_map_of(load_library().keeping.ucs_log_push_handler)
    assert find_import(libucs, b"no_such_function") is None
    place = find_import(libucs, b"accept")
    ours = replace_import(place, 4096)
    assert replace_import(place, ours) == 4096
