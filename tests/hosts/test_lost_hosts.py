"""A control channel notices that a host has vanished, on connections that are idle and with messages on their way."""

import time

import pytest

from kvconnector.errors import PeerLostError
from tests.control.test_control_zmq import open_channel
from tests.support.control_suite import LinkEnd, small_limits
from tests.support.remote import RemoteObject

pytestmark = [pytest.mark.integration, pytest.mark.timeout(110)]

TIMEOUT_S, BUSY_S = 4.0, 4.0
"""The kernel probes each second, so it may notice a second late, and this machine may be busy."""


class End(LinkEnd):
    """One end of a connection, on a host of its own."""

    def __init__(self, host):
        limits = small_limits(host_timeout_s=TIMEOUT_S, linger_s=0.0)
        super().__init__(open_channel(bind_host=host, limits=limits))

    def watch(self, seconds):
        """Returns True if the connection lives for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._recorder.step()
        return not self._recorder.losses(self._channel, self._handle)

    def lost_at(self, *, sends):
        """Return the time at which the connection is reported lost."""
        if sends:
            self._channel.send(self._handle, b"nobody hears this")
        error = self._recorder.wait_loss(self._channel, self._handle)
        assert isinstance(error, PeerLostError)
        return time.monotonic()


@pytest.mark.parametrize("sends", [False, True], ids=["idle", "sends"])
def test_both_ends_notice_that_a_cable_was_pulled(network, sends):
    hosts = [network.host("near"), network.host("far")]
    near, far = ends = [
        RemoteObject("tests.hosts.test_lost_hosts:End", host.address, prefix=host.command([]))
        for host in hosts
    ]
    try:
        near.connect(far.call("address"))
        far.meet()
        near.meet()
        for end in ends:  # an idle one lives on
            end.begin("watch", 2 * TIMEOUT_S)
        assert [end.answer() for end in ends] == [True, True]
        cut_at = time.monotonic()
        hosts[0].cut()
        for end in ends:
            end.begin("lost_at", sends=sends)
        waited_s = [end.answer() - cut_at for end in ends]
        # an idle one may have been probed just before
        assert min(waited_s) > TIMEOUT_S - 2.0, waited_s
        assert max(waited_s) < TIMEOUT_S + 1.0 + BUSY_S, waited_s
    finally:
        for end in ends:
            end.kill()
            end.release()
