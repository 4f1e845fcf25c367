"""UCX's transports for RDMA over ports in software: bytes, lanes, a port that goes down, refused registration."""

import os

import pytest

from kvconnector.errors import ConfigError, PeerLostError
from kvconnector.transport import RegistrationError
from kvconnector.transport.ucx import load_library
from kvconnector.transport.ucx.rdma import offered
from tests.support.software_nic import TLS, SoftwareNics
from tests.support.transport_suite import (
    Ledger,
    TransportPair,
    TransportSuite,
    Worker,
    exchange,
    pattern,
)
from tests.transport.remote import RemoteTransport, first_error

MESSAGE_BYTES = 16 << 20

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.integration]


@pytest.fixture(scope="module")
def nics(tmp_path_factory):
    return SoftwareNics(tmp_path_factory.mktemp("nics"))


LOCK_LIMIT = 8 << 20
AS_ANY_USER = [] if os.geteuid() else ["setpriv", "--bounding-set", "-ipc_lock"]
LITTLE_MEMORY = [*AS_ANY_USER, "prlimit", f"--memlock={LOCK_LIMIT}"]


def start(nics, *, device="", within=(), require_rdma=False, **environment):
    """Start a transport in a process that has these ports, or one of them. `within`: the command that starts it."""
    options = {"TLS": TLS}
    if device:
        interfaces = {name for _, name in offered(load_library(), {"TLS": "tcp"})}
        options["NET_DEVICES"] = ",".join([device, *interfaces])
    variables = nics.environment(**environment).items()
    prefix = [*within, "env", *(f"{name}={value}" for name, value in variables)]
    settings = {"library": nics.library, "options": options, "require_rdma": require_rdma}
    return RemoteTransport(settings, prefix=prefix)


def join(a, b):
    """Connect. Returns both sides."""
    return TransportPair(
        Worker(a, a.connect(b.address), a.allocate),
        Worker(b, b.connect(a.address), b.allocate),
        lambda: (a.release(), b.release()),
        b.kill,
        lambda: (a.begin_close(), b.begin_close()),
    )


def move(ledger, pair, nbytes, tag):
    """Send one message, from the first to the second."""
    sent, received = pair.a.allocate(nbytes), pair.b.allocate(nbytes)
    sent.write(pattern(nbytes, tag))
    receive = pair.b.transport.recv(tag, received.buffer)
    send = pair.a.transport.send(pair.a.endpoint, tag, sent.buffer)
    assert ledger.wait((0, send), (1, receive)) == [None, None]
    assert received.read() == pattern(nbytes, tag)


class TestRdma(TransportSuite):
    """Both ports as lanes of one endpoint."""

    @pytest.fixture(autouse=True)
    def _nics(self, nics):
        self.nics = nics

    def pair(self):
        return join(start(self.nics), start(self.nics))

    def poller(self, transport):
        return transport.poller()


@pytest.mark.parametrize("device, num_lanes", [("", 2), ("soft_1:1", 1)])
def test_lanes_are_all_ports_or_the_named_one(nics, device, num_lanes):
    pair = join(start(nics, device=device), start(nics, device=device))
    ledger = Ledger(pair.a.transport, pair.b.transport)
    exchange(ledger, pair.a, pair.b, 1)
    lanes = pair.a.transport.call("lanes", pair.a.endpoint).split("+")
    assert sum(lane.startswith("rc_verbs/") for lane in lanes) == num_lanes
    assert all(device in lane for lane in lanes if lane.startswith("rc_verbs/"))
    move(ledger, pair, MESSAGE_BYTES, 2)
    pair.close()
    pair.release()


def test_a_port_that_goes_down_loses_its_peers_alone_and_they_meet_again(nics):
    """A message is announced, then the cable is pulled: its receiver waits, and cancels."""
    a, b, *others = (start(nics, device=f"soft_{number}:1") for number in (0, 0, 1, 1))
    pair, spared = join(a, b), join(*others)
    ledger, others = Ledger(a, b), Ledger(*others)
    exchange(ledger, pair.a, pair.b, 1)
    exchange(others, spared.a, spared.b, 1)
    receive = b.recv(2, b.allocate(MESSAGE_BYTES).buffer)
    send = a.send(pair.a.endpoint, 2, a.allocate(MESSAGE_BYTES).buffer)
    nics.set_link("soft_0", is_up=False)
    (error,) = ledger.wait((0, send))
    assert isinstance(error, PeerLostError)
    b.cancel(receive)
    (error,) = ledger.wait((1, receive))
    assert error is not None
    move(others, spared, MESSAGE_BYTES, 3)
    nics.set_link("soft_0", is_up=True)
    again = join(a, b)
    exchange(ledger, again.a, again.b, 4)
    move(ledger, again, MESSAGE_BYTES, 5)
    for each in (again, spared):
        each.close()
        each.release()


def test_a_killed_process_fails_the_sends_to_it(nics):
    pair = join(start(nics), start(nics))
    ledger = Ledger(pair.a.transport, pair.b.transport)
    exchange(ledger, pair.a, pair.b, 1)
    a, doomed = pair.a.transport, pair.b.transport
    ticket = a.send(pair.a.endpoint, 2, a.allocate(MESSAGE_BYTES).buffer)
    doomed.kill()
    assert isinstance(first_error(a, ticket), PeerLostError)
    a.close()
    pair.release()


def test_a_process_that_may_lock_little_memory_starts_and_uses_tcp(nics):
    """The NIC registers no more at once than the process may lock, as a real one does."""
    little = {"within": LITTLE_MEMORY, "SOFTWARE_NIC_LIMIT": LOCK_LIMIT}
    pair = join(start(nics, **little), start(nics, **little))
    ledger = Ledger(pair.a.transport, pair.b.transport)
    exchange(ledger, pair.a, pair.b, 1)
    lanes = pair.a.transport.call("lanes", pair.a.endpoint).split("+")
    assert all(lane.startswith("tcp/") for lane in lanes)
    move(ledger, pair, MESSAGE_BYTES, 2)
    pair.close()
    pair.release()
    with pytest.raises(ConfigError, match=r"may lock 8388608 bytes.*soft_0:1, soft_1:1"):
        start(nics, require_rdma=True, **little)


@pytest.mark.parametrize("refused", ["sender", "receiver"])
def test_memory_that_a_nic_does_not_register_fails_its_message_alone(nics, refused):
    limits = {refused: {"SOFTWARE_NIC_LIMIT": 40 << 20}}
    a, b = (start(nics, **limits.get(side, {})) for side in ("sender", "receiver"))
    pair = join(a, b)
    ledger = Ledger(a, b)
    exchange(ledger, pair.a, pair.b, 1)
    receive = b.recv(2, b.allocate(3 * MESSAGE_BYTES).buffer)
    send = a.send(pair.a.endpoint, 2, a.allocate(3 * MESSAGE_BYTES).buffer)
    (error,) = ledger.wait((0, send) if refused == "sender" else (1, receive))
    assert isinstance(error, RegistrationError)
    assert "ulimit -l" in str(error)
    move(ledger, pair, MESSAGE_BYTES, 3)
    pair.close()
    pair.release()
