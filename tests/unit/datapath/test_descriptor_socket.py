"""A descriptor passed over a socket in a folder: to this user, who knows the nonce, while its owner lives."""

import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconnector.datapath.direct import descriptor_socket
from kvconnector.datapath.direct.descriptor_socket import (
    LIMIT_S,
    DescriptorServer,
    fetch_descriptors,
    fetch_segments,
)
from kvconnector.errors import ConfigError, PeerLostError, TransportError
from tests.support.waiting import DEADLINE_S

NONCE = bytes(range(16))


@contextmanager
def server_of(folder, text=b"pools"):
    fd = os.memfd_create("test")
    os.write(fd, text)
    server = DescriptorServer(str(folder), fd, NONCE)
    try:
        yield server
    finally:
        server.close()
        os.close(fd)


def fetched(folder):
    memory, statm = fetch_descriptors(str(folder), NONCE, 2)
    try:
        assert os.pread(statm, 1, 0) > b"0"
        (same,) = fetch_descriptors(str(folder), NONCE, 1)
        os.close(same)
        return os.pread(memory, 100, 0)
    finally:
        os.close(memory)
        os.close(statm)


def test_a_client_with_the_nonce_gets_the_descriptor_until_it_is_closed(tmp_path):
    """Also if the folder's name is longer than a socket's address may be."""
    folder = tmp_path / ("f" * 120)
    folder.mkdir()
    with server_of(folder):
        (path,) = folder.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert NONCE.hex()[:16] not in path.name
        # a client that sends nothing, or something else, gets nothing, and blocks nobody
        link = tmp_path / "short"
        link.symlink_to(path)
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as other:
            other.connect(str(link))
            other.sendall(bytes(16))
            assert socket.recv_fds(other, 1, 1)[:2] == (b"", [])
            silent.connect(str(link))
            silent.shutdown(socket.SHUT_WR)
            assert fetched(folder) == b"pools"
    assert list(folder.iterdir()) == []
    with pytest.raises(TransportError, match="no socket in paths"):
        fetched(folder)


def in_another_process(folder, program):
    """Run a program in an interpreter of its own, in which `t` is this module."""
    program = f"import os, tests.unit.datapath.test_descriptor_socket as t\n{program}"
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)


DIE = "import sys\nwith t.server_of(sys.argv[1]): os._exit(0)"
SERVE = """import sys
sys.stdin.readline()
os.setuid(12345)
with t.server_of(sys.argv[1]):
    print(flush=True)
    sys.stdin.read()
"""


def test_the_next_producer_removes_what_a_dead_one_left_and_nothing_else(tmp_path):
    with in_another_process(tmp_path, DIE) as dead:
        dead.wait(60)
    (stale,) = tmp_path.iterdir()
    with pytest.raises(PeerLostError, match="gone"):
        fetched(tmp_path)
    (tmp_path / "kvconnector-file.sock").touch()
    with closing(DescriptorServer(str(tmp_path), 0, bytes(16))):
        assert not stale.exists()
        with server_of(tmp_path):
            assert fetched(tmp_path) == b"pools"
            assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_gets_nothing_and_is_not_believed(monkeypatch):
    with tempfile.TemporaryDirectory() as name, in_another_process(name, SERVE) as theirs:
        os.chmod(name, 0o777)
        theirs.stdin.write(b"go\n")
        theirs.stdin.flush()
        theirs.stdout.readline()
        with pytest.raises(TransportError, match="belongs to another user"):
            fetched(name)
        monkeypatch.setattr(descriptor_socket, "_is_same_user", lambda server: True)
        with pytest.raises(TransportError, match="does not share its memory"):
            fetched(name)
        theirs.stdin.close()


def test_an_unusable_folder_is_a_config_error(tmp_path):
    (tmp_path / "file").touch()
    for name, reason in (("nowhere", "No such file"), ("file", "Not a directory")):
        with pytest.raises(ConfigError, match=rf"a folder that this process may write.*{reason}"):
            DescriptorServer(str(tmp_path / name), 0, NONCE)
        with pytest.raises(TransportError):
            fetched(tmp_path / name)


def test_a_question_that_fails_unexpectedly_does_not_end_the_server(tmp_path, caplog):
    asked = []

    def export(which):
        asked.append(which)
        if len(asked) == 1:
            raise ZeroDivisionError
        return [bytes(64) for _ in which]

    with server_of(tmp_path) as server:
        server.segments = 7, export
        with pytest.raises(TransportError, match="an unexpected error"):
            fetch_segments(str(tmp_path), NONCE, 7, range(2))
        assert fetch_segments(str(tmp_path), NONCE, 7, range(2)) == [bytes(64)] * 2
    assert "ZeroDivisionError" in caplog.text


def test_a_driver_that_does_not_return_does_not_keep_a_producer_from_closing(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(descriptor_socket, "CLOSE_LIMIT_S", 0.1)
    entered, returns = threading.Event(), threading.Event()

    def export(which):
        entered.set()
        assert returns.wait(DEADLINE_S)
        return [bytes(64) for _ in which]

    def ask():
        with suppress(TransportError, PeerLostError):
            fetch_segments(str(tmp_path), NONCE, 7, range(2))

    asking = threading.Thread(target=ask)
    with server_of(tmp_path) as server:
        server.segments = 7, export
        asking.start()
        assert entered.wait(DEADLINE_S)
    assert not returns.is_set()  # closed, although it has not returned
    assert "as if the CUDA driver did not return" in caplog.text
    returns.set()
    asking.join()
    server._thread.join(DEADLINE_S)
    assert not server._thread.is_alive()


def test_memory_that_is_withdrawn_while_it_is_asked_for_does_not_end_the_server(tmp_path):
    class Withdrawn(DescriptorServer):
        """A server whose memory is withdrawn as soon as the first question has looked at it."""

        looks = 0

        @property
        def segments(self):
            self.looks += 1
            return (7, lambda which: [bytes(64) for _ in which]) if self.looks == 1 else None

        @segments.setter
        def segments(self, found):
            pass

    fd = os.memfd_create("test")
    with closing(Withdrawn(str(tmp_path), fd, NONCE)):
        assert fetch_segments(str(tmp_path), NONCE, 7, range(2)) == [bytes(64)] * 2
        with pytest.raises(TransportError, match="withdrawn"):
            fetch_segments(str(tmp_path), NONCE, 7, range(2))
    os.close(fd)


def trickle(connection, content=b"!" * 100):
    """Send byte after byte, each well within the time for a message, until the other end has had enough."""
    try:
        for at in range(len(content)):
            connection.sendall(content[at : at + 1])
            time.sleep(LIMIT_S / 4)
    except OSError:
        return


def test_a_client_that_sends_byte_after_byte_holds_up_nobody_for_longer_than_a_message_may_take(
    tmp_path,
):
    with server_of(tmp_path), socket.socket(socket.AF_UNIX) as slow:
        (path,) = tmp_path.iterdir()
        slow.connect(str(path))
        thread = threading.Thread(target=trickle, args=(slow, bytes(16)))
        thread.start()
        time.sleep(LIMIT_S / 2)
        assert fetched(tmp_path) == b"pools"
        thread.join()


def test_a_producer_that_answers_byte_after_byte_is_given_up(tmp_path, monkeypatch):
    """Without a limit it would hold up the driver. Here each look at the clock finds another byte."""
    now_s, clients = 100.0, []

    def clock():
        nonlocal now_s
        with suppress(BlockingIOError):
            clients.append(listener.accept()[0])
        for client in clients:
            client.sendall(b"d")
        now_s += LIMIT_S / 4
        return now_s

    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as ends:
        listener.bind(str(tmp_path / descriptor_socket._name(NONCE)))
        listener.listen(1)
        listener.setblocking(False)
        ends.callback(lambda: [client.close() for client in clients])
        monkeypatch.setattr(descriptor_socket, "time", SimpleNamespace(monotonic=clock))
        with pytest.raises(TransportError, match="does not give out its memory") as error:
            fetch_segments(str(tmp_path), NONCE, 7, range(2))
        assert isinstance(error.value.__cause__, TimeoutError)
        assert now_s == 100.0 + LIMIT_S / 4 + LIMIT_S


def test_of_a_producer_that_does_not_stop_answering_little_is_read(tmp_path):
    """Without a limit it would fill the memory."""
    sent = 0

    def flood():
        nonlocal sent
        client, _ = listener.accept()
        with client, suppress(OSError):
            while sent < 1 << 30:
                sent += client.send(b"d" * 65536)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / descriptor_socket._name(NONCE)))
        listener.listen(1)
        thread = threading.Thread(target=flood)
        thread.start()
        with pytest.raises(TransportError, match="other handles"):
            fetch_segments(str(tmp_path), NONCE, 7, range(2))
        thread.join()
        assert sent < 1 << 20  # what the kernel took before anybody read


@contextmanager
def answering(folder, answer):
    """A process that has a producer's socket in a folder, and does with each client what `answer` does."""
    path = folder / descriptor_socket._name(NONCE)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve():
            with suppress(OSError):  # closed
                while True:
                    client, _ = listener.accept()
                    with client:
                        answer(client)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def num_open(name):
    """Return how many descriptors of this process are a memory file of this name."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # another thread's
            found.append(os.readlink(each))
    return sum(each.startswith(f"/memfd:{name} ") for each in found)


@pytest.mark.parametrize(
    "kinds, num_fds", [("dd", 1), ("d", 1), ("ddd", 3), ("df", 2), ("ff", 1), ("", 2)]
)
def test_of_an_answer_with_other_descriptors_than_it_names_none_stays_open(
    tmp_path, kinds, num_fds
):
    """Two segments are asked for, by "d"escriptors or "f"abric handles."""
    text = b"".join(descriptor_socket._ANSWER.pack(kind.encode(), bytes(64)) for kind in kinds)
    name = f"answer {kinds} {num_fds}"
    fd = os.memfd_create(name)

    def answer(client):
        client.recv(4096)
        socket.send_fds(client, [text or b"!"], [fd] * num_fds)

    try:
        with answering(tmp_path, answer):
            with pytest.raises(TransportError):
                fetch_segments(str(tmp_path), NONCE, 0, range(2))
            assert num_open(name) == 1
            with pytest.raises(TransportError, match="does not share its memory"):
                fetch_descriptors(str(tmp_path), NONCE, 4)
            assert num_open(name) == 1
    finally:
        os.close(fd)


def test_a_server_without_a_free_descriptor_goes_on_once_there_is_one(tmp_path, monkeypatch):
    failures = [OSError(errno.EMFILE, "too many open files"), OSError(errno.ENFILE, "too many")]
    pauses = []

    class Busy(socket.socket):
        def accept(self):
            if failures:
                raise failures.pop()
            return super().accept()

    with monkeypatch.context() as patch:
        patch.setattr(descriptor_socket.socket, "socket", Busy)
        patch.setattr(descriptor_socket.time, "sleep", pauses.append)
        with server_of(tmp_path):
            assert fetched(tmp_path) == b"pools"
    assert pauses == [LIMIT_S, LIMIT_S]
