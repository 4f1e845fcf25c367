"""SGLang's registry of prefill ranks, which speaks HTTP at the bootstrap address: where each engine's directory is.

Each data-parallel rank of a prefill server is an engine of its own. All of them register with the server's registry,
and a decode rank asks there which of them has a request, and where that one's directory service listens. The registry
is SGLang's own, and authenticates nobody. So it may choose an address, but no identity: the engine's id follows from
the bootstrap address and the rank, its key from our own file. Rooms are not told to it, only digests of them, since the
secret of a transfer follows from its room.

*Threads.* SGLang's own queries block its scheduler, and with data-parallel attention all other ranks then wait, too.
Here a `Finder` answers at once, if the address was asked before and its requests go where their rooms say. Otherwise
its thread hands each address to a few workers, one question at a time, so an address that does not answer delays no
others that do. A `Poster` has one thread, and repeats what fails. Nothing here blocks SGLang's thread.

*Clock.* Connecting takes at most `ANSWER_S`, including the look-up of the host's name, and so does a whole answer: a
client may name hosts that no name server knows, and addresses that answer one byte at a time. There is no deadline here
for finding a room: whoever asked has one, and then calls `forget`.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvconnector.control.address import HostPort, parse_address
from kvconnector.control.lookup import Lookup, is_name
from kvconnector.errors import TransportError
from kvconnector.ids import MAX_PORT

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Seconds for one answer of a registry, from the question to its last byte."""
MAX_ANSWER_BYTES = 1 << 20
OK = 200
PAUSES_S = (0.002, 0.005, 0.01, 0.02)
"""Pauses between questions about the same rooms, the last one again for `SOON_S`: a prefill rank names a room when its
scheduler takes the request, which is usually within this time."""
SOON_S = 1.0
LATER_S = 0.2
RETRY_S = 0.5
RENEW_S = 60.0
"""A registry forgets rooms after 120 s."""
MAX_RANKS = 1 << 16
MAX_SERVERS = 1024
"""Servers that are remembered: a client may name any number."""
WORKERS = 4


def registry_key(room: int) -> int:
    """Return the number by which the registry knows a room. It does not tell the room."""
    digest = hashlib.blake2b(str(room).encode(), digest_size=8, person=b"sglang-registry")
    return int.from_bytes(digest.digest(), "big") >> 1


class _Incoming(io.RawIOBase):
    """A socket's bytes as a file that ends with TimeoutError at `until_s`.

    A socket's own timeout counts from byte to byte, so a registry that sends one byte now and then would never end.
    `whole` is the file of the socket that the base class of answers has opened. It is kept, since the socket is closed
    with it.
    """

    def __init__(self, connection: socket.socket, whole: io.BufferedIOBase, until_s: float) -> None:
        self._socket, self._whole, self._until_s = connection, whole, until_s

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left_s)
        return self._socket.recv_into(memory)

    def close(self) -> None:
        super().close()
        self._whole.close()


class _Response(http.client.HTTPResponse):
    """An answer that is complete within `ANSWER_S`."""

    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp = io.BufferedReader(_Incoming(sock, self.fp, time.monotonic() + ANSWER_S))


class _Connection(http.client.HTTPConnection):
    """A connection that is made within `ANSWER_S`, whatever the host's name server does. Its addresses have equal
    shares of the time.
    """

    response_class = _Response

    def connect(self) -> None:
        until_s = time.monotonic() + ANSWER_S
        left, failure = [*_addresses_of(self.host)], OSError("the host has no address")
        while left:
            share_s = (until_s - time.monotonic()) / len(left)
            try:
                self.sock = socket.create_connection(
                    (left.pop(0), self.port), timeout=max(share_s, 1e-3)
                )
            except OSError as error:
                failure = error
            else:
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return
        raise failure


def _addresses_of(host: str) -> tuple[str, ...]:
    """Return the addresses of a host. Raises OSError: it has none, or they are not found in time."""
    if not is_name(host):
        return (host,)
    ended = threading.Event()
    try:
        lookup = Lookup(host, ended.set)
    except TransportError as error:
        raise OSError(str(error)) from error
    if not ended.wait(ANSWER_S):
        lookup.abandon()
        raise TimeoutError("the host name was not looked up in time")
    if lookup.error:
        raise OSError(f"the host name does not resolve: {lookup.error}")
    return lookup.addresses


class Asker:
    """One connection to a registry, kept open between questions. For one thread at a time."""

    def __init__(self, address: HostPort) -> None:
        self._connection = _Connection(address.host, address.port, timeout=ANSWER_S)
        self._closed = threading.Event()

    def close(self) -> None:
        """Close the connection; questions fail from now on. Any thread may call this. Idempotent."""
        self._closed.set()
        self._connection.close()

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer's JSON, or its text if it is none.

        Raises:
            OSError: the registry cannot be reached, or does not answer in time, or with another status than 200.
        """
        payload = None if body is None else json.dumps(body)
        is_old = self._connection.sock is not None
        try:
            status, text = self._answer(method, path, payload)
        except OSError:
            if not is_old:  # the registry closes connections that were idle for long
                raise
            status, text = self._answer(method, path, payload)
        if status != OK:
            raise OSError(f"status {status}: {text[:200]}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text

    def _answer(self, method: str, path: str, payload: str | None) -> tuple[int, str]:
        if self._closed.is_set():
            raise OSError("closed")
        try:
            if self._connection.sock is not None:
                self._connection.sock.settimeout(ANSWER_S)  # the last answer has left less
            self._connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            text = response.read(MAX_ANSWER_BYTES).decode(errors="replace")
            if not response.isclosed():
                raise OSError("the answer is too long")
        except (http.client.HTTPException, OSError, AttributeError) as error:
            # AttributeError: the connection was closed meanwhile
            self._connection.close()
            raise OSError(f"{type(error).__name__}: {error}") from error
        if self._closed.is_set():
            self._connection.close()
        return response.status, text


class Poster:
    """Registers a prefill rank, and names its rooms if decode ranks cannot compute where they are.

    Args:
        address: The registry's.
        row: What this rank registers.
    """

    def __init__(self, address: HostPort, row: Mapping[str, object]) -> None:
        self._address, self._row = address, dict(row)
        self._changed = threading.Condition()
        self._rooms: dict[int, tuple[int, float]] = {}
        """The rank of each open room, by the registry's number, and when it is to be named again."""
        self._is_open = True
        self.is_registered = False
        threading.Thread(target=self._run, daemon=True, name="kvconnector-registry").start()

    def name(self, room: int, dp_rank: int) -> None:
        """Tell the registry which data-parallel rank has a room, until `forget`."""
        with self._changed:
            self._rooms[registry_key(room)] = dp_rank, 0.0
            self._changed.notify()

    def forget(self, room: int) -> None:
        """Stop naming a room."""
        with self._changed:
            self._rooms.pop(registry_key(room), None)

    def close(self) -> None:
        """Stop. Idempotent."""
        with self._changed:
            self._is_open = False
            self._changed.notify()

    def _run(self) -> None:
        asker, failures = Asker(self._address), 0
        while self._is_open:
            try:
                if not self.is_registered:
                    asker.ask("PUT", "/route", self._row)
                    self.is_registered = True
                    logger.info("registered with SGLang's registry at %s", self._address)
                self._name_due(asker)
                failures = 0
            except OSError as error:
                failures += 1
                if failures & failures - 1 == 0:  # the first, second, fourth ... in a row
                    logger.warning("SGLang's registry at %s: %s", self._address, error)
                with self._changed:
                    if self._is_open:
                        self._changed.wait(RETRY_S)
        asker.close()

    def _name_due(self, asker: Asker) -> None:
        """Name the rooms that are due, then wait for more."""
        with self._changed:
            now = time.monotonic()
            due = [(key, rank) for key, (rank, due_s) in self._rooms.items() if due_s <= now]
            if not due and self._is_open:
                self._changed.wait(RENEW_S / 4 if self._rooms else None)
        for key, rank in due:
            asker.ask("POST", "/register_dp_rank", {"bootstrap_room": key, "dp_rank": rank})
            with self._changed:
                if key in self._rooms:
                    self._rooms[key] = rank, time.monotonic() + RENEW_S


@dataclass(frozen=True, slots=True)
class Found:
    """The engine that has a request: data-parallel rank `dp_rank` of `dp_size`. `directory` is the address of its
    directory service, or "" if the server has no such rank.
    """

    dp_size: int
    dp_rank: int
    directory: str
    http_port: int = 0
    """The server's HTTP API; 0 if it did not say."""


@dataclass(slots=True)
class _Server:
    """What is known of a prefill server, and which of its rooms are asked for."""

    asker: Asker
    dp_size: int = 0
    http_port: int = 0
    follows_rooms: bool = False
    directories: dict[int, str] = field(default_factory=dict)
    wanted: dict[int, int | None] = field(default_factory=dict)
    """Rooms, with the rank that the router named, if it did."""
    found: dict[int, Found] = field(default_factory=dict)
    is_asked: bool = False
    turn: int = 0
    due_s: float = 0.0
    since_s: float = 0.0
    trouble: str = "it was not asked yet"

    def rank_of(self, room: int, named: int | None) -> int | None:
        """Return the rank that has a room, or None if only the registry can tell."""
        if named is not None:
            return named
        if self.dp_size == 1:
            return 0
        return room % self.dp_size if self.follows_rooms else None

    def place_of(self, rank: int) -> Found:
        """Return what is known of a rank; its directory is "" if the server has none of that number."""
        return Found(self.dp_size, rank, self.directories.get(rank, ""), self.http_port)


class Finder:
    """Finds the engine that has a request.

    Args:
        must_query: True if the ranks are never computed from rooms.
    """

    def __init__(self, *, must_query: bool = False) -> None:
        self._must_query = must_query
        self._changed = threading.Condition()
        self._servers: dict[HostPort, _Server] = {}
        self._active: set[HostPort] = set()
        """Servers with rooms that are not found yet."""
        self._is_open = True
        # servers that have answered before do not wait for those that have not
        self._pools = [ThreadPoolExecutor(WORKERS, "kvconnector-registry") for _ in range(2)]
        self.num_questions = 0
        threading.Thread(target=self._run, daemon=True, name="kvconnector-finder").start()

    def want(self, address: HostPort, room: int, named: int | None) -> None:
        """Look for a room. Never blocks.

        Args:
            address: The registry's.
            room: The request's room.
            named: The data-parallel rank that the router named, or None.
        """
        with self._changed:
            if len(self._servers) >= MAX_SERVERS:
                idle = [
                    each
                    for each, of in self._servers.items()
                    if not (of.wanted or of.is_asked or of.found)
                ]
                for each in idle:
                    self._servers.pop(each).asker.close()
            server = self._servers.setdefault(address, _Server(Asker(address)))
            rank = server.rank_of(room, named) if server.dp_size else None
            if rank is not None and rank in server.directories:
                server.found[room] = server.place_of(rank)
                return
            if not server.wanted:
                server.since_s, server.turn, server.due_s = time.monotonic(), 0, 0.0
            server.wanted[room] = named
            server.due_s = min(server.due_s, time.monotonic() + PAUSES_S[0])
            self._active.add(address)
            self._changed.notify()

    def take(self, address: HostPort, room: int) -> Found | None:
        """Return what was found, once; None before. Never blocks."""
        server = self._servers.get(address)
        return server.found.pop(room, None) if server is not None and server.found else None

    def trouble(self, address: HostPort) -> str:
        """Return what keeps a server's rooms from being found."""
        server = self._servers.get(address)
        return server.trouble if server is not None else "it was not asked"

    def forget(self, address: HostPort, room: int) -> None:
        """Stop looking for a room."""
        with self._changed:
            server = self._servers.get(address)
            if server is None:
                return
            server.wanted.pop(room, None)
            server.found.pop(room, None)
            if not server.wanted:
                self._active.discard(address)
                if not server.dp_size and not server.is_asked:
                    # a client may name any number of addresses
                    self._servers.pop(address).asker.close()

    def ask_again(self, address: HostPort) -> None:
        """Drop what is known of a server: its engines may have been started anew, elsewhere."""
        with self._changed:
            server = self._servers.get(address)
            if server is not None:
                server.dp_size = 0
                server.directories.clear()

    def close(self) -> None:
        """Stop. Idempotent."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
            servers, self._servers = [*self._servers.values()], {}
            self._active.clear()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for server in servers:
            server.asker.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                waiting = [self._servers[each] for each in self._active]
                dues = [each.due_s for each in waiting if not each.is_asked]
                if not dues or min(dues) > now:
                    self._changed.wait(min(dues) - now if dues else None)
                if not self._is_open:
                    return
                now = time.monotonic()
                due = [
                    (address, self._servers[address])
                    for address in self._active
                    if not self._servers[address].is_asked and self._servers[address].due_s <= now
                ]
                for _, server in due:
                    server.is_asked = True
            for address, server in due:
                with suppress(RuntimeError):  # closed meanwhile
                    self._pools[server.dp_size == 0].submit(self._ask, address, server)

    def _ask(self, address: HostPort, server: _Server) -> None:
        """Ask a server once about all rooms that are wanted of it."""
        wanted = dict(server.wanted)
        found: dict[int, Found] = {}
        trouble = "the prefill engine did not name the request's rank"
        try:
            found = self._resolve(server, wanted)
        except OSError as error:
            trouble = str(error)
        except Exception as error:  # whatever it is, the server is asked again
            trouble = f"its answer is malformed: {type(error).__name__}: {error}"
        with self._changed:
            server.is_asked = False
            server.trouble = trouble
            now = time.monotonic()
            for room, where in found.items():
                if room in server.wanted:  # otherwise it was forgotten meanwhile
                    del server.wanted[room]
                    server.found[room] = where
            if found:
                server.since_s, server.turn = now, 0
            pause_s = PAUSES_S[min(server.turn, len(PAUSES_S) - 1)]
            server.turn += 1
            server.due_s = now + (pause_s if now - server.since_s < SOON_S else LATER_S)
            if not server.wanted:
                self._active.discard(address)
                if not server.dp_size and self._servers.pop(address, None) is not None:
                    server.asker.close()
            self._changed.notify()

    def _resolve(self, server: _Server, wanted: Mapping[int, int | None]) -> dict[int, Found]:
        ask = server.asker.ask
        if not server.dp_size:
            self.num_questions += 1
            info = ask("GET", route_of(-1, -1))
            size = int(info["dp_size"])
            if not 1 <= size <= MAX_RANKS:
                raise ValueError(f"dp_size {size}")
            server.follows_rooms = bool(info["follow_bootstrap_room"]) and not self._must_query
            server.http_port = _port(info.get("prefill_http_port"))
            server.dp_size = size
        size = server.dp_size
        ranks = {room: server.rank_of(room, named) for room, named in wanted.items()}
        if unknown := {registry_key(room): room for room, rank in ranks.items() if rank is None}:
            self.num_questions += 1
            answer = ask("POST", "/query_dp_ranks", {"bootstrap_rooms": [*unknown]})
            for key, rank in answer.items():
                ranks[unknown[int(key)]] = int(rank)
        found = {}
        for room, rank in ranks.items():
            if rank is not None and not 0 <= rank < size:
                found[room] = server.place_of(rank)
            elif rank is not None:
                if rank not in server.directories:
                    self.num_questions += 1
                    place = ask("GET", route_of(rank, 0))
                    where = HostPort(str(place["rank_ip"]).strip("[]"), int(place["rank_port"]))
                    server.directories[rank] = str(parse_address(str(where)))
                found[room] = server.place_of(rank)
        return found


def _port(given: object) -> int:
    """Return a port that a registry states, or 0 if it states none."""
    return given if isinstance(given, int) and 0 < given <= MAX_PORT else 0


def route_of(dp_rank: int, others: int) -> str:
    """Return the path and query by which a registry is asked for a data-parallel rank, and for rank `others` of its
    other kinds of parallelism; -1 for both asks for the server's shape.
    """
    places = ("prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    return f"/route?prefill_dp_rank={dp_rank}&" + "&".join(f"{each}={others}" for each in places)
