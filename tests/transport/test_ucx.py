"""UCX transports: conformance within and between processes, loss of a peer, orderly shutdown."""

import errno
import gc
import os
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvconnector.bench.limits import bandwidth
from kvconnector.bench.options import BenchOptions
from kvconnector.errors import IncompatiblePeerError, PeerLostError, TransportError
from kvconnector.transport.tagged_messages import CONTROL_TAG_BIT, ControlMessage
from kvconnector.transport.ucx import (
    UcxTransport,
    control,
    listeners,
    load_library,
    open_ucx_transport,
    transport,
)
from kvconnector.transport.ucx.abi import OK
from kvconnector.transport.ucx.address import WorkerAddress
from kvconnector.transport.ucx.endpoints import QUARANTINE_S
from tests.support.remote import RemoteObject
from tests.support.transport_suite import (
    HostMemory,
    Ledger,
    TransportPair,
    TransportSuite,
    Worker,
    exchange,
)
from tests.support.waiting import until
from tests.transport.remote import RemoteTransport, first_error

TCP = {"TLS": "tcp"}
OPTIONS_JUDGED_SINCE = (1, 20, 1)
RENDEZVOUS_OVER_TCP = {**TCP, "RNDV_THRESH": "64k"}
"""A length that waits for its receive: older libucx sends even megabytes over tcp without waiting."""
SEGMENT_BYTES = 512 << 10


pytestmark = pytest.mark.ucx


def connected_pair(**settings):
    a = open_ucx_transport(**settings)
    b = open_ucx_transport(**settings)
    return TransportPair(Worker(a, a.connect(b.address)), Worker(b, b.connect(a.address)))


def remote_pair(**settings):
    a, b = open_ucx_transport(**settings), RemoteTransport(settings)
    return TransportPair(
        Worker(a, a.connect(b.address)),
        Worker(b, b.connect(a.address), b.allocate),
        b.release,
        b.kill,
        b.begin_close,
    )


class TestOneProcess(TransportSuite):
    """Both sides in one process."""

    def pair(self):
        return connected_pair()


class TestTwoProcessesOfOneHost(TransportSuite):
    """Shared memory, with default settings."""

    def pair(self):
        return remote_pair()


class TestTwoProcessesAsOfTwoHosts(TransportSuite):
    """Endpoints that UCX watches, over tcp, with default settings."""

    def pair(self):
        return remote_pair(options=TCP, tcp_segment_bytes=SEGMENT_BYTES)


def met(a, remote, tag):
    """Both sides of a new connection."""
    here = Worker(a, a.connect(remote.address))
    there = Worker(remote, remote.connect(a.address), remote.allocate)
    exchange(Ledger(a, remote), here, there, tag)
    return here, there


@pytest.mark.parametrize("options", [{}, RENDEZVOUS_OVER_TCP], ids=["default", "tcp"])
def test_sends_to_a_killed_process_end_and_others_go_on(options):
    a = open_ucx_transport(options=options)
    doomed, other = RemoteTransport({"options": options}), RemoteTransport({"options": options})
    to_doomed, _ = met(a, doomed, 1)
    to_other, from_other = met(a, other, 2)
    sent = HostMemory(1 << 20)
    ticket = a.send(to_doomed.endpoint, 3, sent.buffer)
    process = f"to process {doomed.child.pid}, "
    assert f"{process}{'watched by UCX' if options else 'its process watched'}" in repr(a)
    doomed.kill()
    assert isinstance(first_error(a, ticket), PeerLostError)
    assert f"{process}lost: the peer" in repr(a)
    late = a.send(to_doomed.endpoint, 4, sent.buffer)
    assert isinstance(first_error(a, late), PeerLostError)
    exchange(Ledger(a, other), to_other, from_other, 5)
    a.disconnect(to_doomed.endpoint)
    assert process not in repr(a)
    a.close()
    assert repr(a).endswith(": closed>")
    other.close()
    other.release()
    doomed.release()


def test_a_send_that_never_ends_does_not_release_the_gil_for_ever(monkeypatch):
    """A busy engine's thread takes the GIL at each release, and keeps it for 5 ms."""
    a, doomed = open_ucx_transport(), RemoteTransport({})
    here, _ = met(a, doomed, 1)
    kept, progress = [], a.libucp.worker_progress
    monkeypatch.setattr(
        a.libucp,
        "worker_progress",
        lambda keeps_gil: kept.append(keeps_gil) or progress(keeps_gil=keeps_gil),
    )
    ticket = a.send(here.endpoint, 2, HostMemory(2 * transport.MAX_HELD_BYTES).buffer)
    a.progress()
    assert not all(kept)
    doomed.kill()
    assert isinstance(first_error(a, ticket), PeerLostError)
    kept.clear()
    a.progress()
    assert all(kept)
    a.close()
    doomed.release()


@pytest.mark.parametrize("options", [{}, RENDEZVOUS_OVER_TCP], ids=["default", "tcp"])
def test_a_large_message_of_a_killed_process_fails_its_receive(options):
    a, doomed = open_ucx_transport(options=options), RemoteTransport({"options": options})
    here, there = met(a, doomed, 1)
    doomed.send(there.endpoint, 2, doomed.allocate(4 << 20).buffer)
    # It has been announced to us once a later small message has arrived.
    exchange(Ledger(a, doomed), here, there, 3)
    doomed.kill()
    doomed.child.wait(30)
    received = HostMemory(4 << 20)
    ticket = a.recv(2, received.buffer)
    assert isinstance(first_error(a, ticket), PeerLostError)
    a.close()
    doomed.release()


def test_a_sender_that_knows_no_bound_takes_no_more_memory_than_one_that_does(monkeypatch):
    """Whatever it sends. Its messages are kept by reference until they have left, as any peer could."""
    monkeypatch.setattr(transport, "MAX_UNSENT_CONTROL_BYTES", 1 << 40)
    monkeypatch.setattr(control, "MAX_UNSENT_CONTROL_BYTES", 1 << 20)
    tag, nbytes, number = CONTROL_TAG_BIT | 7, 256 << 10, 40
    a, b = open_ucx_transport(), open_ucx_transport()
    endpoint = a.connect(b.address)
    for _ in range(number):
        a.send_control(endpoint, tag, bytes(nbytes))
    found = []

    def step():
        found.extend(b.receive_control({tag: nbytes}))
        assert sum(each.nbytes for each in b.arriving_control.get(tag, ())) <= 1 << 20
        a.progress()
        b.progress()

    until(lambda: len(found) == number, step)
    taken = sum(isinstance(each, ControlMessage) for each in found)
    assert 4 <= taken < number
    # what has left room is taken again
    a.send_control(endpoint, tag, bytes(nbytes))
    until(lambda: len(found) == number + 1, step)
    assert isinstance(found[-1], ControlMessage)
    a.close()
    b.close()


def test_nobody_waits_for_the_message_of_a_dead_process_once_its_link_is_closed():
    """UCX never ends it where memory is shared without cross-memory attach. The driver would look each millisecond."""
    options = {"TLS": "sysv,posix,self"}
    a, doomed = open_ucx_transport(options=options), RemoteTransport({"options": options})
    _, there = met(a, doomed, 1)
    tag = CONTROL_TAG_BIT | 7
    doomed.call("send_control", there.endpoint, tag, bytes(4 << 20))

    def step():
        doomed.call("drive", 0.01)
        a.progress()
        assert not a.receive_control({tag: 4 << 20}), "it has arrived whole"

    until(lambda: a.arriving_control, step)
    doomed.kill()
    doomed.child.wait(30)
    assert a.receive_control({tag: 4 << 20}) == []
    assert a.arriving_control
    assert a.receive_control({}) == []
    assert not a.arriving_control
    a.close()
    doomed.release()


def test_peers_with_other_tcp_segments_are_refused_and_those_that_state_none_are_not():
    ours, longer, silent = (
        open_ucx_transport(options=TCP, tcp_segment_bytes=nbytes)
        for nbytes in (SEGMENT_BYTES, 2 * SEGMENT_BYTES, 0)
    )
    for here, there in ((ours, longer), (longer, ours)):
        with pytest.raises(IncompatiblePeerError, match=r"ucx\.tcp_segment_bytes") as caught:
            here.connect(there.address)
        assert set(caught.value.context.values()) == {SEGMENT_BYTES, 2 * SEGMENT_BYTES}
    for here, there in ((ours, silent), (silent, ours), (ours, ours)):
        here.connect(there.address)
    for each in (ours, longer, silent):
        each.close()


def test_a_peer_with_another_ucx_is_refused_at_the_connection():
    ours, theirs = open_ucx_transport(), open_ucx_transport()
    other = replace(WorkerAddress.decode(theirs.address), ucx_version=(1, 17))
    with pytest.raises(IncompatiblePeerError, match="same version of UCX"):
        ours.connect(other.encode())
    ours.close()
    theirs.close()


def test_a_transport_that_cannot_be_opened_leaves_no_descriptor(monkeypatch):
    """Such as where this process may open no more files."""
    list_files, calls = os.listdir, []

    def fail(place):
        calls.append(place)
        if len(calls) == 2:
            raise OSError(errno.EMFILE, "too many open files")
        return list_files(place)

    open_ucx_transport().close()
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as full:
        full.setattr(listeners.os, "listdir", fail)
        with pytest.raises(TransportError, match="too many open files"):
            open_ucx_transport()
    assert os.listdir("/proc/self/fd") == before


def test_a_transport_needs_no_thread_and_leaves_no_descriptor():
    connected_pair().close()
    gc.collect()  # pipes to the children of earlier tests
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for _ in range(3):
        pair = connected_pair()
        exchange(Ledger(pair.a.transport, pair.b.transport), pair.a, pair.b, 1)
        assert threading.active_count() == before[0]
        pair.close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_flush_within_a_host_ends_before_its_peer_has_done_anything():
    """So it sets nothing up, and greetings exchange a message instead."""
    a, b = open_ucx_transport(), open_ucx_transport()
    content = HostMemory(1 << 20)
    try:
        endpoint = a.connect(b.address)
        flush = a.libucp.ep_flush(a.endpoint_handle(endpoint))
        assert (flush.request, flush.status) == (0, OK)
        ticket = a.send(endpoint, 1, content.buffer)
        b.recv(1, content.buffer)
        for _ in range(100):
            assert ticket not in {each.ticket for each in a.progress()}
    finally:
        b.close()
        a.close()


@pytest.fixture
def judges_options():
    """For tests of options that UCX does not use: older versions only warn, and about more of them."""
    transport = open_ucx_transport()
    version = transport.libucp.library.version
    transport.close()
    if version < OPTIONS_JUDGED_SINCE:
        pytest.skip(f"libucx {version} warns of options without a use")


def test_the_bandwidth_of_ucx_alone_is_found_by_its_column():
    command = ["printf", "iterations,avg_bw,overall_bw,avg_mr\n 64,317.39,315.5,158\n"]
    config = BenchOptions().config("bench", "consumer")
    assert bandwidth(command, ("", 0), config, 1) == 315.5 * 2**20


LANES = {
    "default": {},
    "tcp": {"options": TCP, "tcp_segment_bytes": SEGMENT_BYTES},
    "no tcp": {"options": {"TLS": "sysv,self"}, "tcp_segment_bytes": SEGMENT_BYTES},
}


def live(lanes):
    """Transports that close with each kind of operation outstanding."""
    for outstanding in ("nothing", "receive", "small send", "large send"):
        pair = connected_pair(**LANES[lanes])
        a, b = pair.a, pair.b
        exchange(Ledger(a.transport, b.transport), a, b, 1)
        memory = HostMemory(64 if outstanding == "small send" else 1 << 20)
        if outstanding == "receive":
            a.transport.recv(2, memory.buffer)
        elif outstanding != "nothing":
            a.transport.send(a.endpoint, 2, memory.buffer)
        for side in (a, b):
            side.transport.progress()
        pair.close()


def check_silent(lanes, capfd):
    """Check that an interpreter that uses these lanes writes nothing until it ends."""
    process = RemoteObject("tests.transport.test_ucx:live", lanes, prefix=["env"])
    process.release()
    assert process.child.returncode == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("lanes", ["default", "tcp"])
def test_nothing_is_written_to_stderr(lanes, capfd):
    check_silent(lanes, capfd)


@pytest.mark.usefixtures("judges_options")
def test_unused_options_are_accepted_and_unknown_ones_refused(capfd):
    check_silent("no tcp", capfd)
    with pytest.raises(TransportError, match="UCX refused its configuration"):
        open_ucx_transport(options={"NO_SUCH_OPTION": "1"})


def shared_segments():
    """Return the segments of other processes' memory that are mapped here."""
    return Path("/proc/self/maps").read_text().count("/SYSV")


def test_endpoints_within_the_host_are_freed_after_their_quarantine():
    now_s = 0.0
    a = UcxTransport(load_library(), liveness_interval_s=0.0, clock=lambda: now_s)
    before = shared_segments()
    for ends in (RemoteTransport.close, RemoteTransport.kill):
        peer = RemoteTransport({})
        here, _ = met(a, peer, 1)
        ends(peer)
        peer.release()
        a.disconnect(here.endpoint)
    assert shared_segments() > before
    now_s = QUARANTINE_S
    a.progress()
    a.progress()
    assert shared_segments() == before
    a.close()
