"""Tests that need the real ZMQ channel: hostile bytes, dead hosts, reused descriptors, binding."""

import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
import zmq

from kvconnector.control import lookup, zmq_sockets
from kvconnector.control.address import parse_address
from kvconnector.control.base import Received
from kvconnector.control.security import CurveKeys
from kvconnector.control.zmq import ControlChannel
from kvconnector.errors import (
    AuthenticationError,
    ConfigError,
    PeerLostError,
    PeerUnreachableError,
    RemoteError,
    RemoteProtocolError,
    TransportError,
)
from tests.support import waiting
from tests.support.control_suite import (
    DEADLINE_S,
    STEP_S,
    LinkEnd,
    Recorder,
    greeted,
    new_keys,
    small_limits,
)
from tests.support.remote import RemoteObject

OURS, OTHERS = new_keys(), new_keys()


def open_channel(
    security=None, limits=None, bind_host="127.0.0.1", advertise_host=None, bind_port=0
):
    return ControlChannel(
        bind_host=bind_host,
        bind_port=bind_port,
        advertise_host=advertise_host,
        security=security,
        limits=limits or small_limits(),
    )


@contextmanager
def channels(*securities, **limits):
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(open_channel(security, small_limits(**limits))))
            for security in securities
        ]


@pytest.mark.parametrize(
    "near_security, far_security, server_key, text",
    [
        pytest.param(OURS, OTHERS, OTHERS.public_key, "authorised", id="client not authorised"),
        pytest.param(OURS, OURS, OTHERS.public_key, "another server key", id="wrong server key"),
        pytest.param(None, OURS, "", "keys", id="client without keys"),
        pytest.param(OURS, None, OURS.public_key, "keys", id="server without keys"),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(near_security, far_security, server_key, text):
    with channels(near_security, far_security) as (near, far):
        recorder = Recorder(near, far)
        handle = near.connect(far.address, server_key)
        near.send(handle, b"let me in")
        error = recorder.wait_loss(near, handle)
        # a client without keys may not know yet that keys are required
        kinds = AuthenticationError if near.server_key else AuthenticationError | PeerLostError
        assert isinstance(error, kinds)
        assert far.address in str(error)
        assert text in str(error)
        assert recorder.events[far] == []


def test_a_sender_that_does_not_poll_learns_of_the_refusal():
    with channels(OURS, OTHERS, max_queued_messages=1_000_000) as (near, far):
        handle = near.connect(far.address, OTHERS.public_key)

        def keep_sending():
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                far.poll(STEP_S)
                near.send(handle, b"let me in")

        with pytest.raises(AuthenticationError, match="authorised"):
            keep_sending()
        assert isinstance(Recorder(near).wait_loss(near, handle), AuthenticationError)


def test_a_link_with_keys_on_one_side_only_is_refused_before_connecting():
    with channels(new_keys(), None) as (with_keys, plain):
        with pytest.raises(ConfigError, match="keys"):
            with_keys.connect(plain.address, plain.server_key)
        with pytest.raises(ConfigError, match="keys"):
            plain.connect(with_keys.address, with_keys.server_key)
        with pytest.raises(ConfigError, match="server key"):
            with_keys.connect(plain.address, "short")


def test_wildcard_needs_and_shows_an_advertised_host():
    wildcard = "0.0.0.0"  # noqa: S104  with keys
    keys = new_keys()
    with pytest.raises(ConfigError, match="advertise_host"):
        open_channel(keys, bind_host=wildcard)
    far = open_channel(keys, bind_host=wildcard, advertise_host="localhost")
    with closing(far), channels(keys) as (near,):
        assert far.address.startswith("tcp://localhost:")
        Recorder(near, far).link(near, far)


def test_taken_port_is_a_config_error_that_names_it():
    with channels(None) as (channel,):
        port = parse_address(channel.address).port
        with pytest.raises(ConfigError, match=str(port)):
            open_channel(bind_port=port)


def test_multipart_message_of_a_foreign_client_ends_its_connection():
    far = open_channel()
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as foreign:
            foreign.setsockopt(zmq.LINGER, 0)
            foreign.connect(far.address)
            foreign.send_multipart([b"two", b"frames"])
            foreign.send(b"and on")
            recorder = Recorder(far)
            recorder.until(lambda: bool(recorder.events[far]))
            (event,) = recorder.events[far]
            assert isinstance(event.error, RemoteProtocolError)
            with pytest.raises(PeerLostError):
                far.send(event.handle, b"no")
    finally:
        context.term()
        far.close()


@pytest.mark.parametrize("has_read", [False, True], ids=["reset", "closed"])
@pytest.mark.parametrize("uses_keys", [False, True])
def test_a_peer_that_dies_in_the_handshake_is_lost_not_unauthorised(uses_keys, has_read):
    keys = new_keys()
    near = open_channel(keys if uses_keys else None)
    with closing(near), socket.create_server(("127.0.0.1", 0)) as dying:
        address = f"tcp://127.0.0.1:{dying.getsockname()[1]}"
        handle = near.connect(address, keys.public_key if uses_keys else "")
        dying.settimeout(DEADLINE_S)
        connection = dying.accept()[0]
        dying.close()
        if has_read:
            # its last message is read, so the connection's end looks like that of a peer that refuses
            connection.settimeout(DEADLINE_S)
            connection.recv(1 << 16)
        connection.close()
        error = Recorder(near).wait_loss(near, handle)
        assert isinstance(error, PeerLostError)
        assert "ended during the handshake" in str(error)
        assert address in str(error)


def test_an_address_where_nobody_listens_is_named():
    with channels(OURS) as (near,), socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.close()
        error = Recorder(near).wait_loss(near, near.connect(address, OURS.public_key))
        assert isinstance(error, PeerUnreachableError)
        assert "nothing listens there" in str(error)
        assert address in str(error)


def test_an_address_without_a_route_is_not_taken_for_a_port_where_nobody_listens():
    address = "tcp://255.255.255.255:9"  # Linux routes no connection to it
    with channels(OURS) as (near,):
        error = Recorder(near).wait_loss(near, near.connect(address, OURS.public_key))
        assert isinstance(error, PeerUnreachableError)
        assert "has no route to that address (Network is unreachable)" in str(error)
        assert address in str(error)


@pytest.mark.parametrize(
    "num_bytes, is_suspect", [(100, False), (60 << 10, False), (70 << 10, True)]
)
def test_only_after_a_long_message_its_length_may_be_why_a_peer_left(num_bytes, is_suspect):
    with channels(None, None, max_message_bytes=1 << 20) as (near, far):
        recorder = Recorder(near, far)
        handle, _ = recorder.link(near, far)
        near.send(handle, bytes(num_bytes))
        recorder.wait_payloads(far, 1)
        far.close()
        recorder.events.pop(far)
        error = recorder.wait_loss(near, handle)
        assert isinstance(error, PeerLostError)
        assert ("longer than" in str(error)) == is_suspect


def test_a_peer_with_another_protocol_is_a_remote_error():
    with (
        channels(None, connect_timeout_s=2.0, linger_s=0.0) as (near,),
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        handle = near.connect(f"tcp://127.0.0.1:{other.getsockname()[1]}")
        other.settimeout(DEADLINE_S)
        connection, _address = other.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 8)
            assert isinstance(Recorder(near).wait_loss(near, handle), RemoteError)


def test_host_name_that_does_not_resolve_is_unreachable():
    with channels(None, linger_s=0.0) as (near,):
        handle = near.connect("tcp://no-such-host.invalid:5555")
        error = Recorder(near).wait_loss(near, handle)
        assert isinstance(error, PeerUnreachableError)
        assert "does not resolve" in str(error)


class NameServer:
    """Answers `getaddrinfo` once `answers` is set, and counts who asks. Names that `addresses` lacks are this host."""

    def __init__(self):
        self.answers = threading.Event()
        self.asked = []
        self.addresses = {}

    def getaddrinfo(self, host, *_, **__):
        self.asked.append(host)
        assert self.answers.wait(DEADLINE_S)
        found = self.addresses.get(host, ["::1", "127.0.0.1"])
        if isinstance(found, Exception):
            raise found
        return [(None, None, None, "", (address, 0)) for address in found]


@pytest.fixture
def names(monkeypatch):
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.answers.set()


def test_other_connections_work_while_a_host_name_is_looked_up(names):
    """libzmq would look it up in the thread that serves them all."""
    with channels(None, None) as (near, far):
        recorder = Recorder(near, far)
        named = near.connect(f"tcp://a-name.invalid:{parse_address(far.address).port}")
        for payload in (b"first", b"second"):
            near.send(named, payload)
        recorder.link(near, far)
        names.answers.set()
        recorder.wait_payloads(far, 2)
        assert recorder.payloads(far) == [b"first", b"second"]


def test_a_queue_that_fills_while_a_host_name_is_looked_up_ends_the_connection(names):
    with channels(None, linger_s=0.0, max_queued_messages=2) as (near,):
        handle = near.connect("tcp://a-name.invalid:5555")
        for _ in range(2):
            near.send(handle, b"queued")
        with pytest.raises(PeerLostError, match="queue to it is full"):
            near.send(handle, b"one more")
        names.answers.set()
        assert isinstance(Recorder(near).wait_loss(near, handle), PeerLostError)


@pytest.mark.usefixtures("names")
def test_a_host_name_that_is_not_looked_up_in_time_is_unreachable():
    with channels(None, connect_timeout_s=0.2, linger_s=0.0) as (near,):
        handle = near.connect("tcp://a-name.invalid:5555")
        error = Recorder(near).wait_loss(near, handle)
        assert isinstance(error, PeerUnreachableError)
        assert "not looked up in time" in str(error)


def test_three_hundred_links_to_one_host_share_a_look_up(names):
    """An engine of that many ranks on one host is greeted by name."""
    with channels(None, None) as (near, far):
        port = parse_address(far.address).port
        threads = threading.active_count()
        links = [near.connect(f"tcp://one-host.invalid:{port}") for _ in range(300)]
        for number, link in enumerate(links):
            near.send(link, b"%d" % number)
        assert threading.active_count() <= threads + 1
        names.answers.set()
        recorder = Recorder(near, far)
        recorder.wait_payloads(far, 300)
        assert names.asked == ["one-host.invalid"]
        assert {*recorder.payloads(far)} == {b"%d" % number for number in range(300)}


def test_look_ups_of_many_hosts_wait_for_their_turn(names, monkeypatch):
    """Clients may name hosts that nobody knows, and each look-up has a thread."""
    monkeypatch.setattr(lookup, "MAX_THREADS", 2)
    with channels(None, None, linger_s=0.0) as (near, far):
        port = parse_address(far.address).port
        threads = threading.active_count()
        hosts = [f"host-{number}.invalid" for number in range(10)]
        links = {host: near.connect(f"tcp://{host}:{port}") for host in hosts}
        for host, link in links.items():
            near.send(link, host.encode())
        near.disconnect(links["host-7.invalid"])
        assert threading.active_count() == threads + 2
        names.answers.set()
        recorder = Recorder(near, far)
        recorder.wait_payloads(far, 9)
        assert sorted(names.asked) == [host for host in hosts if host != "host-7.invalid"]


@pytest.mark.parametrize("error", [OSError(), UnicodeError("label too long")])
def test_a_look_up_that_fails_without_a_text_ends(names, error):
    names.addresses["odd.invalid"] = error
    names.answers.set()
    with channels(None, linger_s=0.0) as (near,):
        handle = near.connect("tcp://odd.invalid:5555")
        near.send(handle, b"waits")
        found = Recorder(near).wait_loss(near, handle)
        assert isinstance(found, PeerUnreachableError)
        assert (str(error) or "OSError()") in str(found)


def test_the_next_address_is_tried_if_one_does_not_answer(names):
    """Neither one that refuses, one that is silent, nor one that cannot be connected to at all."""
    with (
        channels(None, None, connect_timeout_s=2.0) as (near, far),
        socket.create_server(("127.0.0.3", parse_address(far.address).port)),
    ):
        names.addresses["many.invalid"] = ["127.0.0.2", "127.0.0.3", "no address", "127.0.0.1"]
        names.answers.set()
        handle = near.connect(f"tcp://many.invalid:{parse_address(far.address).port}")
        for payload in (b"first", b"second"):
            near.send(handle, payload)
        recorder = Recorder(near, far)
        recorder.wait_payloads(far, 2)
        assert recorder.payloads(far) == [b"first", b"second"]
        near.send(handle, b"third")
        recorder.wait_payloads(far, 3)


def test_if_no_address_answers_all_are_named(names):
    names.addresses["none.invalid"] = ["127.0.0.2", "no address", "127.0.0.3"]
    names.answers.set()
    with channels(None, linger_s=0.0) as (near,):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        handle = near.connect(f"tcp://none.invalid:{port}")
        near.send(handle, b"nobody")
        error = Recorder(near).wait_loss(near, handle)
        assert isinstance(error, PeerUnreachableError)
        assert all(host in str(error) for host in ("none.invalid", "127.0.0.2", "127.0.0.3"))


def test_a_message_just_before_the_end_reaches_a_host_that_was_found_by_name(names):
    names.answers.set()
    with channels(None, None) as (near, far):
        names.addresses["named.invalid"] = ["127.0.0.1", "127.0.0.2"]
        handle = near.connect(f"tcp://named.invalid:{parse_address(far.address).port}")
        near.send(handle, b"goodbye")
        while near._outgoing[handle]._lookup is not None:
            near.poll(STEP_S)
        near.disconnect(handle)
        recorder = Recorder(near, far)
        recorder.wait_payloads(far, 1)


def test_a_forked_child_looks_up_hosts_itself(names):
    with channels(None, linger_s=0.0) as (near,):
        near.connect("tcp://a-name.invalid:5555")
        waiting.until(lambda: names.asked)
        child = os.fork()
        if not child:
            try:
                signal.alarm(round(DEADLINE_S))
                socket.getaddrinfo = lambda *_, **__: [(None, None, None, "", ("127.0.0.1", 0))]
                ended = os.eventfd(0)
                lookup.Lookup("a-name.invalid", lambda: os.eventfd_write(ended, 1))
                os.eventfd_read(ended)
                os._exit(0)
            finally:
                os._exit(
                    1
                )  # the handler of the alarm raises: this is not to go on as another pytest
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_silent_peer_is_unreachable_at_the_deadline():
    with (
        channels(None, connect_timeout_s=0.2, linger_s=0.0) as (near,),
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        handle = near.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        deadline = time.monotonic() + DEADLINE_S
        events = []
        while not events and time.monotonic() < deadline:
            events = near.poll(DEADLINE_S)
        assert time.monotonic() < deadline
        (event,) = events
        assert event.handle == handle
        assert isinstance(event.error, PeerUnreachableError)


class Echo:
    """A channel in a process of its own, which has connected to another one."""

    def __init__(self, address):
        self._channel = open_channel()
        self.address = self._channel.address
        self._channel.send(self._channel.connect(address), b"dialed")

    def serve(self):
        for _ in range(600):
            for event in self._channel.poll(0.1):
                if isinstance(event, Received):
                    self._channel.send(event.handle, event.payload)


@pytest.mark.integration
def test_a_killed_process_is_noticed_on_both_kinds_of_connection():
    """One that is stopped is not, since its kernel answers: the sessions give that one up."""
    here = open_channel()
    there = RemoteObject("tests.control.test_control_zmq:Echo", here.address)
    try:
        recorder = Recorder(here)
        outgoing = here.connect(there.call("address"))
        there.begin("serve")
        here.send(outgoing, b"echo")
        recorder.until(lambda: {b"echo", b"dialed"} <= set(recorder.payloads(here)))
        (incoming,) = {
            event.handle
            for event in recorder.events[here]
            if isinstance(event, Received) and event.payload == b"dialed"
        }
        there.kill()
        assert isinstance(recorder.wait_loss(here, outgoing), PeerLostError)
        assert isinstance(recorder.wait_loss(here, incoming), PeerLostError)
    finally:
        there.kill()
        there.release()
        here.close()


@pytest.mark.parametrize("host_timeout_s", [1e-3, 1e6])
def test_channels_link_with_any_timeout_that_the_settings_allow(host_timeout_s):
    """Linux probes idle connections in whole seconds, at most every nine hours."""
    with channels(None, None, host_timeout_s=host_timeout_s) as (near, far):
        Recorder(near, far).link(near, far)


class Link(LinkEnd):
    """One end of a connection, in a process of its own: what aborts there fails one test. `stall` does not poll."""

    READ_AHEAD = 32
    """Messages that may wait at the end that stalls."""
    NUM_MESSAGES = 2000
    LEAVE_S = 1.0
    """Until libzmq's thread has given all messages to the kernel."""
    STALL_S = 2.0

    def __init__(self, *, stalls):
        ahead = self.READ_AHEAD if stalls else 2 * self.NUM_MESSAGES
        limits = small_limits(max_queued_messages=ahead, max_messages_per_turn=ahead)
        super().__init__(open_channel(limits=limits))

    def flood(self):
        for number in range(self.NUM_MESSAGES):
            self._channel.send(self._handle, b"%d" % number)
        time.sleep(self.LEAVE_S)

    def stall(self, sends):
        until = time.monotonic() + self.STALL_S
        while time.monotonic() < until:
            if sends:
                with suppress(PeerLostError):
                    self._channel.send(self._handle, b"still busy")
            time.sleep(0.05)

    def rest(self):
        """Return the messages that come before the connection's end."""
        assert isinstance(self._recorder.wait_loss(self._channel, self._handle), PeerLostError)
        return self._recorder.payloads(self._channel)

    def works(self):
        """Returns True if the channel takes another connection in both directions."""
        with closing(open_channel()) as other:
            recorder = Recorder(self._channel, other)
            recorder.link(self._channel, other)
            recorder.link(other, self._channel)
        return True


@pytest.mark.integration
@pytest.mark.parametrize("sends", [True, False], ids=["sends", "is silent"])
@pytest.mark.parametrize("opened_by", ["peer", "us"])
def test_a_peer_dies_while_more_of_its_messages_wait_than_are_read_ahead(opened_by, sends):
    """An engine that compiles polls nothing for seconds. libzmq must do nothing that aborts its process."""
    maker = "tests.control.test_control_zmq:Link"
    ours, theirs = RemoteObject(maker, stalls=True), RemoteObject(maker, stalls=False)
    try:
        first, second = (theirs, ours) if opened_by == "peer" else (ours, theirs)
        first.connect(second.call("address"))
        second.meet()
        first.meet()
        theirs.flood()
        theirs.kill()
        ours.stall(sends)
        messages = ours.rest()
        assert len(messages) >= Link.READ_AHEAD - 1  # the first one counts
        assert messages == [b"%d" % number for number in range(len(messages))]
        assert ours.works()
    finally:
        for each in (ours, theirs):
            each.kill()
            each.release()


class ManyConnections:
    """A worker for a process of its own with a limit on descriptors."""

    def overdo(self):
        """Open more connections than the limit allows. Returns the error's text."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        server, channel = open_channel(), open_channel()
        for _ in range(400 if hard >= 4096 else 100):
            channel.connect(server.address)
        limit = len(os.listdir("/proc/self/fd")) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            for _ in range(20):
                channel.connect(server.address)
        except TransportError as error:
            return str(error)
        return "no error"

    def open_with_few(self):
        """Open channels where so many files and more may be opened. Returns the errors' texts, "" for none."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        texts = []
        for few in range(20):
            limit = len(os.listdir("/proc/self/fd")) + few
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            try:
                open_channel(OURS).close()
                texts.append("")
            except TransportError as error:
                texts.append(str(error))
        return texts

    def serve_without_descriptors(self):
        """Let strangers use up what this process may open. Returns the messages that came meanwhile."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = small_limits(connect_timeout_s=1.0, linger_s=0.0)
        near, far = open_channel(OURS, limits), open_channel(OURS, limits)
        recorder = Recorder(near, far)
        handle, _ = recorder.link(near, far)
        place = parse_address(far.address)
        strangers = [socket.socket() for _ in range(40)]
        limit = len(os.listdir("/proc/self/fd")) + 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        for stranger in strangers:
            stranger.setblocking(False)
            stranger.connect_ex((place.host, place.port))
        recorder.until(has_no_descriptor)
        near.send(handle, b"meanwhile")
        recorder.wait_payloads(far, 1)
        came = recorder.payloads(far)
        for stranger in strangers:
            stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        recorder.link(near, far)
        return came


def has_no_descriptor():
    try:
        os.close(os.eventfd(0))
    except OSError:
        return True
    return False


def test_a_channel_that_finds_no_descriptor_is_a_worded_error():
    """Libzmq aborts the process if its threads find none."""
    process = RemoteObject("tests.control.test_control_zmq:ManyConnections")
    texts = process.open_with_few()
    assert texts[-1] == ""
    refused = [text for text in texts if text]
    assert refused == texts[: len(refused)]
    assert len(refused) >= 10
    assert all("ulimit -n" in text for text in refused)
    process.kill()
    process.release()


def test_links_go_on_while_strangers_use_up_the_descriptors():
    process = RemoteObject("tests.control.test_control_zmq:ManyConnections")
    assert process.serve_without_descriptors() == [b"meanwhile"]
    process.kill()
    process.release()


def test_hundreds_of_connections_are_possible_and_one_too_many_is_a_worded_error():
    process = RemoteObject("tests.control.test_control_zmq:ManyConnections")
    assert "ulimit -n" in process.overdo()
    process.kill()
    process.release()


def calls_of(function):
    """Return how many calls of Python's and C's functions a call makes."""
    calls = [0]

    def count(frame, event, argument):
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls[0]


REPEATS = 5


@pytest.mark.parametrize("others", ["are idle", "are in their handshake", "peers opened"])
@pytest.mark.parametrize("what", ["a send", "a message", "an end"])
def test_a_poll_costs_as_much_as_has_happened_whatever_others_there_are(others, what):
    def calls_with(num_others):
        with (
            socket.create_server(("127.0.0.1", 0), backlog=64) as silent,
            channels(None, None, connect_timeout_s=600.0, linger_s=0.0) as (near, far),
        ):
            recorder = Recorder(near, far)
            here, there = recorder.link(near, far)
            address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            for _ in range(num_others):
                if others == "are in their handshake":
                    near.connect(address)
                else:
                    recorder.link(*((near, far) if others == "are idle" else (far, near)))
            endings = [recorder.link(far, near)[0] for _ in range(REPEATS)]
            # a handshake goes on without the channel: each of its steps is an event
            recorder.until(
                lambda: not recorder.step() and near.is_settled and not near.poll(STEP_S)
            )
            return min(calls_once(near, far, here, there, ending) for ending in endings)

    def calls_once(near, far, here, there, ending):
        if what == "a send":
            near.send(here, b"one")
            return calls_of(lambda: near.poll(0.0))
        if what == "a message":
            far.send(there, b"one")
        else:
            far.disconnect(ending)
        found = []
        for _ in range(1000):
            calls = calls_of(lambda: found.extend(near.poll(0.0)))
            if found:
                break
            time.sleep(0.01)
        assert len(found) == 1
        return calls

    # the least, as a connection may have an event of its own: libzmq tells it, say, that its peer has read
    assert calls_with(13) < calls_with(1) + 10


def test_a_message_that_came_before_a_send_is_found_after_it():
    """A send takes the notice of the message from the socket's descriptor."""
    with channels(None, None) as (near, far):
        recorder = Recorder(near, far)
        here, there = recorder.link(near, far)
        recorder.until(lambda: not recorder.step() and near.is_settled and not near.poll(STEP_S))
        fd = near._outgoing[here].socket.getsockopt(zmq.FD)
        far.send(there, b"one")
        waiting.until(lambda: select.select([fd], [], [], STEP_S)[0])
        waiting.until(
            lambda: not select.select([fd], [], [], 0.0)[0], lambda: near.send(here, b"two")
        )
        assert [event.payload for event in near.poll(0.0)] == [b"one"]


@pytest.mark.parametrize("uses_keys", [True, False])
def test_whoever_opened_a_connection_is_known_by_its_key_or_by_its_host(uses_keys):
    theirs = new_keys(OURS.public_key)
    ours = CurveKeys.from_values(
        secret_key=OURS.secret_key, authorized_clients=[OURS.public_key, theirs.public_key]
    )
    with channels(*((theirs, ours) if uses_keys else (None, None))) as (near, far):
        here, there = Recorder(near, far).link(near, far)
        assert far.origin_of(there) == (theirs.public_key if uses_keys else "127.0.0.1")
        assert near.origin_of(here) == ""


@pytest.mark.parametrize("stated", [b"another", b"\xce", OURS.public_key.encode()])
def test_what_a_peer_without_keys_says_of_itself_does_not_count(stated):
    """ZMTP's metadata may have any bytes, and the names that libzmq itself uses."""
    with channels(None) as (far,), ExitStack() as ends:
        properties = (b"User-Id", stated), (b"Peer-Address", b"192.0.2.1")
        stranger = ends.enter_context(greeted(parse_address(far.address), *properties))
        stranger.sendall(b"\x00\x05hello")
        recorder = Recorder(far)
        recorder.wait_payloads(far, 1)
        (event,) = recorder.events[far]
        assert far.origin_of(event.handle) == far.peer_of(event.handle) == "127.0.0.1"


def test_messages_beyond_a_turn_come_in_the_next_polls_without_a_wait():
    with channels(None, None, max_messages_per_turn=3) as (near, far):
        here, there = Recorder(near, far).link(near, far)
        for number in range(10):
            near.send(here, bytes([number]))
            far.send(there, bytes([number]))
        for channel in (near, far):
            payloads = []
            for _ in range(1000):
                found = channel.poll(STEP_S)
                assert len(found) <= 3
                payloads += [event.payload for event in found]
                if len(payloads) == 10:
                    break
            assert payloads == [bytes([number]) for number in range(10)]


def test_little_is_read_ahead_from_a_peer_while_nobody_polls():
    """What comes is kept in memory, so a peer that sends much keeps it itself, and loses the connection."""
    limits = small_limits(max_queued_messages=1000, max_messages_per_turn=16, linger_s=0.0)
    with closing(open_channel(OURS, limits)) as near, closing(open_channel(OURS, limits)) as far:
        recorder = Recorder(near, far)
        handle, _ = recorder.link(near, far)
        num_sent = 0

        def send():
            nonlocal num_sent
            near.send(handle, bytes(limits.max_message_bytes))
            num_sent += 1
            near.poll(1e-4)

        with pytest.raises(PeerLostError, match="queue to it is full"):
            waiting.until(lambda: False, send)
        # the sender's own queue, and about 25 MB in the kernel
        assert num_sent < limits.max_queued_messages + 400 + limits.max_messages_per_turn


def test_connections_that_came_and_went_are_looked_at_in_turns():
    """However many they are, a poll of the owner's loop takes no longer than one for messages."""
    with channels(None, None, max_messages_per_turn=16) as (near, far):
        place = parse_address(far.address)
        for _ in range(200):
            socket.create_connection((place.host, place.port)).close()
        handle = near.connect(far.address)
        near.send(handle, b"hello")
        counts, monitor = [], far._incoming.monitor
        drain = monitor.drain

        def counted():
            for event in drain():
                counts[-1] += 1
                yield event

        monitor.drain = counted
        found = []

        def look():
            near.poll(0.0)
            counts.append(0)
            found.extend(far.poll(STEP_S))

        waiting.until(lambda: found, look)
        assert [event.payload for event in found] == [b"hello"]
        assert sum(counts) > 200
        assert max(counts) <= 2 * 16


@pytest.mark.parametrize("first", ["near", "far"])
def test_a_channel_keeps_nothing_of_connections_that_have_ended(first):
    """Whichever end gives them up first. Ten thousand restarts of a consumer must not fill its producer's memory."""
    with channels(None) as (far,):
        incoming = far._incoming
        for _ in range(3):
            with channels(None) as (near,):
                recorder = Recorder(near, far)
                near_handle, far_handle = recorder.link(near, far)
                if first == "near":
                    near.disconnect(near_handle)
                    recorder.wait_loss(far, far_handle)
                else:
                    far.disconnect(far_handle)
            recorder = Recorder(far)
            recorder.until(lambda: not incoming._open_fds)
        kept = incoming._by_handle, incoming._by_identity, incoming._by_fd, incoming._ending
        assert not any(kept), kept


@pytest.mark.parametrize("ends", ["is served", "closes"])
def test_a_storm_of_connections_while_nobody_polls_fills_no_memory(ends, monkeypatch):
    """libzmq tells of each that came and went. It waits once too many are untold, and goes on afterwards."""
    monkeypatch.setattr(zmq_sockets, "MAX_MONITOR_EVENTS", 100)
    with channels(None, None) as (near, far):
        place = parse_address(far.address)
        for _ in range(40):
            with ExitStack() as strangers:
                for _ in range(100):
                    stranger = strangers.enter_context(socket.socket())
                    stranger.setblocking(False)
                    stranger.connect_ex(place)
                time.sleep(0.01)  # let libzmq accept some
        if ends == "closes":
            far.close()
            return
        handle = near.connect(far.address)
        near.send(handle, b"hello")
        num_events, monitor = 0, far._incoming.monitor
        drain = monitor.drain

        def counted():
            nonlocal num_events
            for event in drain():
                num_events += 1
                yield event

        monitor.drain = counted
        recorder = Recorder(near, far)
        recorder.wait_payloads(far, 1)
        # libzmq's thousand, ours, and those that the kernel had queued
        assert num_events < 1000 + 100 + 2 * 200


def test_a_peer_that_sends_all_the_time_does_not_keep_another_waiting():
    limits = small_limits(max_messages_per_turn=16)
    with (
        closing(open_channel(OURS, limits)) as flooder,
        closing(open_channel(OURS, limits)) as quiet,
        closing(open_channel(OURS, limits)) as far,
    ):
        recorder = Recorder(flooder, quiet, far)
        flooding, _ = recorder.link(flooder, far)
        handle, _ = recorder.link(quiet, far)
        for _ in range(500):
            flooder.send(flooding, b"flood")
        quiet.send(handle, b"mine")
        received = []

        def step():
            found = [event.payload for event in far.poll(STEP_S)]
            received.extend(found)
            for _ in found:  # what it sends never ends
                flooder.send(flooding, b"flood")

        waiting.until(lambda: b"mine" in received, step)
