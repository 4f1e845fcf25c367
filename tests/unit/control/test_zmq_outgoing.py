"""The loss of a connection whose peer cannot be probed."""

import errno
import socket

import pytest

from kvconnector.control.address import HostPort
from kvconnector.control.zmq_outgoing import _Probe
from kvconnector.errors import PeerLostError


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%no-such-interface"])
def test_a_peer_that_cannot_be_probed_is_lost(monkeypatch, host):
    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    if "%" not in host:
        monkeypatch.setattr(socket, "socket", fail)
    probe = _Probe(HostPort(host, 9))
    assert probe.result() is PeerLostError
    probe.close()
