"""UCX's listening sockets: what strangers can do to them, and what the log says of it."""

import logging
import resource
import select
from contextlib import ExitStack, suppress

import pytest

from kvconnector.transport.ucx import load_library, open_ucx_transport
from kvconnector.transport.ucx.listeners import FEW_DESCRIPTORS
from tests.support.transport_suite import Ledger, Worker, exchange
from tests.support.waiting import until
from tests.transport.remote import RemoteTransport
from tests.transport.strangers import UCX_TCP_MAGIC, connect, listening_ports, unknown_message

pytestmark = pytest.mark.ucx

OPTIONS = {"TLS": "tcp", "NET_DEVICES": "lo"}
FILES = 192


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def limited():
    """A transport in a process that may open few files, and a peer of it here, which have exchanged a message."""
    if load_library().version[:2] == (1, 20):
        pytest.skip("UCX 1.20 reaches nobody over lo (openucx/ucx#11202)")
    transport = RemoteTransport(
        {"options": OPTIONS}, prefix=("prlimit", f"--nofile={FILES}:{FILES}", "--")
    )
    peer = open_ucx_transport(options=OPTIONS)
    here = Worker(peer, peer.connect(transport.address))
    there = Worker(transport, transport.connect(peer.address), transport.allocate)
    exchange(Ledger(peer, transport), here, there, 1)
    exchange(Ledger(peer, transport), there, here, 2)
    yield here, there
    peer.close()
    transport.close()
    transport.release()


def test_a_listener_that_a_flood_of_connections_has_ended_is_named(limited):
    here, there = limited
    (port,) = listening_ports(there.transport.child.pid)
    with ExitStack() as strangers:
        with suppress(ConnectionError):  # refused once UCX has stopped listening
            for _ in range(FILES):
                strangers.enter_context(connect(port))
        until(
            lambda: "no longer listens" in "".join(there.transport.logged()),
            lambda: there.transport.drive(0.1),
        )
        there.transport.drive(0.6)
    log = "".join(there.transport.logged())
    assert log.count(f"UCX no longer listens on 127.0.0.1 port {port}") == 1
    assert f"the {FILES} files that this process may open" in log
    assert listening_ports(there.transport.child.pid) == []
    # whoever is connected goes on
    exchange(Ledger(here.transport, there.transport), here, there, 3)
    exchange(Ledger(here.transport, there.transport), there, here, 4)


def test_a_listener_that_stays_open_is_not_reported(limited):
    _, there = limited
    (port,) = listening_ports(there.transport.child.pid)
    for _ in range(3):
        connect(port).close()
    there.transport.drive(0.6)
    assert "no longer listens" not in "".join(there.transport.logged())
    assert listening_ports(there.transport.child.pid) == [port]


def test_a_transport_leaves_the_limit_of_open_files_alone_and_names_it(limits, caplog):
    for soft in (512, 2048):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
        with caplog.at_level(logging.INFO, "kvconnector.transport.ucx.listeners"):
            caplog.clear()
            open_ucx_transport(options=OPTIONS).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft
        (record,) = [each for each in caplog.records if "files" in each.getMessage()]
        assert f"may open {soft} files" in record.getMessage()
        assert (record.levelno == logging.WARNING) == (soft < FEW_DESCRIPTORS)


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
