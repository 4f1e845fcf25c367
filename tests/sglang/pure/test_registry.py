"""Decode ranks find the engine that has a request by the prefill server's registry, and block nothing meanwhile."""

import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from kvconnector.control.address import HostPort, parse_address
from kvconnector.errors import (
    AuthenticationError,
    PeerUnreachableError,
    RemoteProtocolError,
    UnknownRequestError,
)
from kvconnector.integrations.sglang.rank import _open_directory
from kvconnector.integrations.sglang.registry import (
    WORKERS,
    Asker,
    Finder,
    Found,
    Poster,
    registry_key,
    route_of,
)
from kvconnector.integrations.sglang.settings import connector_config
from kvconnector.integrations.sglang.transfers import Stage
from tests.sglang.pure.engines import Engine, Pair, error_of
from tests.sglang.pure.pools import Model
from tests.sglang.pure.registry import Registry
from tests.support.keys import keyed_controls
from tests.support.ports import free_ports

LIMIT_S = 30.0
QUICK_S = 0.05
PAGES, OTHERS, TOKENS = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 18
REFUSED = (AuthenticationError, PeerUnreachableError)


@pytest.fixture
def finder():
    with closing(Finder()) as made:
        yield made


@pytest.fixture
def registry():
    with closing(Registry()) as made:
        yield made


def _row(dp_rank, dp_size=2, port=9000, method="follow_bootstrap_room"):
    return {
        "attn_tp_size": 1,
        "attn_tp_rank": 0,
        "attn_dp_size": dp_size,
        "attn_dp_rank": dp_rank,
        "pp_size": 1,
        "pp_rank": 0,
        "system_dp_size": 1,
        "system_dp_rank": 0,
        "rank_ip": "10.0.0.1",
        "rank_port": port + dp_rank,
        "load_balance_method": method,
    }


def _at(registry):
    return HostPort("127.0.0.1", registry.port)


def _until_found(finder, address, room):
    until_s = time.monotonic() + LIMIT_S
    while (found := finder.take(address, room)) is None:
        assert time.monotonic() < until_s, finder.trouble(address)
        time.sleep(0.001)
    return found


def _until(condition):
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_a_room_is_at_its_own_rank_and_nothing_is_asked_twice(finder, registry):
    registry.rows = [_row(0), _row(1)]
    registry.dp_size = 2
    for room in (4, 5):
        finder.want(_at(registry), room, None)
        found = _until_found(finder, _at(registry), room)
        assert found == Found(2, room % 2, f"tcp://10.0.0.1:{9000 + room % 2}")
    asked = len(registry.asked)
    for room in (6, 7):
        finder.want(_at(registry), room, None)
        assert finder.take(_at(registry), room).dp_rank == room % 2  # at once
    assert len(registry.asked) == asked


def test_the_routers_word_counts_more_than_the_room(finder, registry):
    registry.rows, registry.dp_size = [_row(0), _row(1)], 2
    finder.want(_at(registry), 4, 1)
    assert _until_found(finder, _at(registry), 4).dp_rank == 1


def test_rooms_of_other_load_balancers_are_asked_for_until_they_are_named(finder, registry):
    registry.rows, registry.dp_size = [_row(0), _row(1)], 2
    registry.follows = False
    for room in (4, 5):
        finder.want(_at(registry), room, None)
    _until(lambda: registry.asked.count("/query_dp_ranks") > 1)
    assert finder.take(_at(registry), 4) is None
    assert "did not name" in finder.trouble(_at(registry))
    registry.rooms[registry_key(4)] = 1
    assert _until_found(finder, _at(registry), 4).dp_rank == 1
    assert finder.take(_at(registry), 5) is None


def test_the_registry_does_not_learn_rooms(registry):
    poster = Poster(_at(registry), _row(0))
    poster.name(123456, 1)
    _until(lambda: registry.rooms)
    poster.close()
    assert registry.rooms == {registry_key(123456): 1}
    assert 123456 not in registry.rooms
    assert 0 <= registry_key(123456) < 1 << 63


def test_what_could_not_be_registered_is_repeated():
    port = free_ports()
    poster = Poster(HostPort("127.0.0.1", port), _row(0))
    poster.name(7, 0)
    with closing(Registry(port)) as registry:
        _until(lambda: registry.rooms)
        assert registry.rows == [_row(0)]
        poster.close()


def test_a_server_that_is_not_complete_yet_is_asked_again(finder, registry):
    finder.want(_at(registry), 4, None)
    _until(lambda: len(registry.asked) > 1)
    assert "503" in finder.trouble(_at(registry))
    registry.rows, registry.dp_size = [_row(0), _row(1)], 2
    assert _until_found(finder, _at(registry), 4).dp_rank == 0


def test_an_address_that_does_not_answer_delays_no_other(finder, registry):
    registry.rows, registry.dp_size = [_row(0, 1)], 1
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        silent = HostPort("127.0.0.1", mute.getsockname()[1])
        for room in range(20):
            finder.want(silent, room, None)
        finder.want(_at(registry), 4, None)
        started = time.monotonic()
        _until_found(finder, _at(registry), 4)
        assert time.monotonic() - started < 5.0
        assert finder.take(silent, 1) is None
        for room in range(20):
            finder.forget(silent, room)


@contextmanager
def _dripping():
    """Yield the address of a server whose answers never end: a byte comes at a time."""
    is_over = threading.Event()

    def drip(connection):
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Drip: ")
            while not is_over.wait(0.01):
                connection.sendall(b"x")

    def serve():
        with suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=drip, args=(connection,)))
                threads[-1].start()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threads = [threading.Thread(target=serve)]
        threads[0].start()
        try:
            yield HostPort("127.0.0.1", listener.getsockname()[1])
        finally:
            is_over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def test_servers_whose_answers_never_end_delay_no_other_for_long(finder, registry, monkeypatch):
    monkeypatch.setattr("kvconnector.integrations.sglang.registry.ANSWER_S", 0.2)
    registry.rows = [_row(0, 1)]
    with ExitStack() as stack:
        endless = [stack.enter_context(_dripping()) for _ in range(WORKERS)]
        for address in endless:
            finder.want(address, 1, None)
        _until(lambda: all(finder._servers[each].is_asked for each in endless))
        finder.want(_at(registry), 4, None)
        _until_found(finder, _at(registry), 4)
        _until(lambda: all("timed out" in finder.trouble(each) for each in endless))
        for address in endless:
            finder.forget(address, 1)


def test_a_name_that_nobody_looks_up_delays_no_other_for_long(finder, registry, monkeypatch):
    """A client may name any host, and a name server may not answer for a minute."""
    monkeypatch.setattr("kvconnector.integrations.sglang.registry.ANSWER_S", 0.2)
    answers, look_up = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host, *arguments, **named):
        if host.endswith(".invalid"):
            assert answers.wait(LIMIT_S)
            raise OSError("no such host")
        return look_up(host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    registry.rows = [_row(0, 1)]
    names = [HostPort(f"host-{number}.invalid", 80) for number in range(WORKERS)]
    try:
        for name in names:
            finder.want(name, 1, None)
        _until(lambda: all(finder._servers[each].is_asked for each in names))
        finder.want(_at(registry), 4, None)
        _until_found(finder, _at(registry), 4)
        _until(lambda: all("not looked up in time" in finder.trouble(each) for each in names))
        for name in names:
            finder.forget(name, 1)
    finally:
        answers.set()


def test_the_next_address_of_a_name_is_asked_if_one_does_not_answer(registry, monkeypatch):
    def getaddrinfo(host, *_, **__):
        found = {"two.invalid": ["127.0.0.2", "127.0.0.1"]}.get(host, [host])
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, _at(registry).port))
            for each in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    registry.rows = [_row(0, 1)]
    with closing(Asker(HostPort("two.invalid", _at(registry).port))) as asker:
        assert asker.ask("GET", route_of(-1, -1))["dp_size"] == 1


def test_a_server_that_is_known_does_not_wait_for_new_ones_that_do_not_answer(finder, registry):
    registry.rows, registry.dp_size, registry.follows = [_row(0), _row(1)], 2, False
    registry.rooms = {registry_key(room): 1 for room in (4, 5)}
    finder.want(_at(registry), 4, None)
    _until_found(finder, _at(registry), 4)
    with ExitStack() as stack:
        endless = [stack.enter_context(_dripping()) for _ in range(WORKERS)]
        for address in endless:
            finder.want(address, 1, None)
        servers = [finder._servers[each] for each in endless]
        _until(lambda: all(each.is_asked for each in servers))
        finder.want(_at(registry), 5, None)
        _until_found(finder, _at(registry), 5)
        assert all(each.is_asked for each in servers)
        for address in endless:
            finder.forget(address, 1)


def test_a_connection_that_the_registry_closed_meanwhile_is_opened_again(registry):
    registry.rows, registry.hangs_up = [_row(0, 1)], True
    with closing(Asker(_at(registry))) as asker:
        for _ in range(3):
            assert asker.ask("GET", route_of(-1, -1))["dp_size"] == 1


def test_a_registry_that_does_not_answer_on_a_new_connection_is_asked_once():
    """Whoever waits would wait twice as long, and what is posted twice may count twice."""
    accepted = []

    def hang_up():
        with suppress(OSError):  # closed
            while True:
                accepted.append(server.accept()[0])
                accepted[-1].close()

    with ExitStack() as ends:
        server = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        thread = threading.Thread(target=hang_up)
        thread.start()
        ends.callback(thread.join)
        ends.callback(server.shutdown, socket.SHUT_RDWR)
        asker = Asker(HostPort("127.0.0.1", server.getsockname()[1]))
        ends.callback(asker.close)
        for number in (1, 2):
            with pytest.raises(OSError, match=r"RemoteDisconnected|ConnectionResetError"):
                asker.ask("GET", route_of(-1, -1))
            assert len(accepted) == number


def test_an_answer_that_is_too_long_is_refused(registry, monkeypatch):
    registry.rows = [_row(0, 1)]
    with closing(Asker(_at(registry))) as asker:
        asker.ask("GET", route_of(-1, -1))
        monkeypatch.setattr("kvconnector.integrations.sglang.registry.MAX_ANSWER_BYTES", 10)
        with pytest.raises(OSError, match="the answer is too long"):
            asker.ask("GET", route_of(-1, -1))


def test_nothing_is_kept_of_servers_that_no_request_needs(finder, monkeypatch):
    """A client may name any number of addresses."""
    monkeypatch.setattr("kvconnector.integrations.sglang.registry.MAX_SERVERS", 2)
    nobody = HostPort("127.0.0.1", free_ports())
    finder.want(nobody, 1, None)
    _until(lambda: "refused" in finder.trouble(nobody))
    finder.forget(nobody, 1)
    _until(lambda: nobody not in finder._servers)
    for _ in range(4):
        with closing(Registry()) as registry:
            registry.rows = [_row(0, 1)]
            finder.want(_at(registry), 4, None)
            _until_found(finder, _at(registry), 4)
        assert len(finder._servers) <= 2


def test_a_room_that_is_given_up_while_it_is_asked_for_is_forgotten(finder, registry):
    right, may_answer = registry.answer, threading.Event()

    def answer(*question):
        assert may_answer.wait(LIMIT_S)
        return right(*question)

    registry.rows, registry.answer = [_row(0, 1)], answer
    finder.want(_at(registry), 4, None)
    _until(lambda: registry.asked)
    finder.forget(_at(registry), 4)
    may_answer.set()
    server = finder._servers[_at(registry)]
    _until(lambda: not server.is_asked)
    assert finder.take(_at(registry), 4) is None
    assert not server.found


@pytest.mark.parametrize(
    "stated, port",
    [(80, 80), (65535, 65535), (65536, 0), (0, 0), (-1, 0), ("80", 0), (None, 0), (8.5, 0)],
)
def test_a_port_that_is_none_is_not_stated(finder, registry, stated, port):
    registry.rows = [_row(0, 1) | {"prefill_http_port": stated}]
    finder.want(_at(registry), 4, None)
    assert _until_found(finder, _at(registry), 4).http_port == port


def test_a_question_never_blocks_who_asks(finder):
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        started = time.monotonic()
        finder.want(HostPort("127.0.0.1", mute.getsockname()[1]), 1, None)
        finder.take(HostPort("127.0.0.1", mute.getsockname()[1]), 1)
        assert time.monotonic() - started < QUICK_S


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}),
        (200, []),
        (200, {"dp_size": "x"}),
        (200, {"dp_size": 0}),
        (200, {"dp_size": float("inf")}),
        (200, "text"),
        (200, None),
        pytest.param((200, b"[" * 100_000), id="nested too deeply"),
    ],
    ids=str,
)
def test_a_malformed_answer_is_named_and_asked_for_again(finder, registry, answer):
    right, registry.answer = registry.answer, lambda *_: answer
    finder.want(_at(registry), 4, None)
    _until(lambda: len(registry.asked) > 1)
    registry.rows, registry.dp_size = [_row(0, 1)], 1
    registry.answer = right
    assert _until_found(finder, _at(registry), 4).dp_size == 1


def test_an_address_from_the_registry_that_is_none_is_not_used(finder, registry):
    registry.rows = [_row(0, 1) | {"rank_ip": "a b\r\n"}]
    finder.want(_at(registry), 4, None)
    _until(lambda: "malformed" in finder.trouble(_at(registry)))
    assert finder.take(_at(registry), 4) is None


def test_a_server_that_was_started_anew_is_found_where_it_is(finder, registry):
    registry.rows = [_row(0, 1)]
    finder.want(_at(registry), 4, None)
    _until_found(finder, _at(registry), 4)
    registry.rows = [_row(0, 1, port=9100)]
    finder.ask_again(_at(registry))
    finder.want(_at(registry), 5, None)
    assert _until_found(finder, _at(registry), 5).directory == "tcp://10.0.0.1:9100"


@pytest.fixture
def ranks():
    """A function that makes a server of two data-parallel ranks, and a decode engine."""
    made = []

    def make(method, model=None, prefill=None, decode=None, port=None, **environ):
        model = model or Model()
        prefill = {"method": method, "environ": environ} | (prefill or {})
        of_pair = {"prefill": prefill | {"dp": (0, 2)}, "decode": decode, "environ": environ}
        pair = Pair(model, port=port, **of_pair)
        made.append(pair)
        pair.registry = Registry(pair.port)
        made.append(pair.registry)
        second = Engine(model, is_prefill=True, port=pair.port, dp=(1, 2), **prefill)
        made.append(second)
        return pair, second

    yield make
    for each in reversed(made):
        each.close()


@pytest.mark.ucx
@pytest.mark.parametrize("method", ["follow_bootstrap_room", "round_robin"])
def test_each_data_parallel_rank_serves_its_rooms(ranks, method):
    _serve_both(*ranks(method), follows=method == "follow_bootstrap_room")


def _serve_both(pair, second, *, follows=True):
    """Let both ranks of the prefill server serve a room, and compare what the decode engine has then."""
    engines = [pair.prefill, second]
    for room in (20, 21):
        pair.prefill = engines[room % 2 if follows else 1 - room % 2]
        wanted = pair.want(room)
        sent = pair.send(room)
        pair.compute(sent, PAGES, 0, TOKENS, is_last=True)
        pair.load(wanted, OTHERS, TOKENS)
        assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}
        pair.check(OTHERS, TOKENS)


MIXED = Model(layers=6, windows=(1, 4), states=(2, 5), window_tokens=9)
SHAPES = {
    "stages": (Model(), {"pp_size": 2}, {}),
    "stages to ranks": (Model(), {"pp_size": 2}, {"tp_size": 2}),
    "ranks to stages": (Model(), {"tp_size": 2}, {"pp_size": 2, "page_size": 8}),
    "latents to one rank of several": (Model(latent=True), {"tp_size": 2}, {"dp": (1, 2)}),
    "windows and states": (MIXED, {}, {"page_size": 8}),
    "windows and states of stages": (MIXED, {"pp_size": 2}, {"tp_size": 2, "dp": (0, 2)}),
    "a draft model at the decode engine only": (Model(draft=1), {"draft": 0}, {"dp": (1, 2)}),
}


@pytest.mark.ucx
@pytest.mark.parametrize("model, prefill, decode", [*SHAPES.values()], ids=[*SHAPES])
def test_data_parallel_ranks_have_any_shape_and_caches(ranks, model, prefill, decode):
    _serve_both(*ranks("round_robin", model, prefill, decode), follows=False)


@pytest.fixture
def keyed(ranks, tmp_path):
    """Both ranks of a server have one key, which the decode engine's file lists with the bootstrap address, and a
    stranger's key stands beside it.
    """
    port = free_ports()
    trusts = {"prefill": ["decode"], "decode": ["prefill", "other"], "other": ["decode"]}
    keys, controls = keyed_controls(tmp_path, **trusts)
    environs = {
        name: {f"KVCONNECTOR_CONTROL_{each.upper()}": value for each, value in control.items()}
        | {"KVCONNECTOR_PEER_HELLO_TIMEOUT_S": "1"}
        for name, control in controls.items()
    }
    listed = f"{keys['prefill'].public_key} 127.0.0.1:{port}\n{keys['other'].public_key}\n"
    Path(controls["decode"]["authorized_clients_file"]).write_text(listed)
    options = {name: {"environ": environ} for name, environ in environs.items()}
    made = ranks("follow_bootstrap_room", None, options["prefill"], options["decode"], port)
    return *made, options["other"]


@pytest.mark.ucx
def test_one_key_is_that_of_all_ranks_of_a_server(keyed):
    pair, second, _ = keyed
    _serve_both(pair, second)


@pytest.mark.ucx
def test_an_address_that_the_registry_makes_up_gets_no_request(keyed):
    """Its engine has another key, although one that the decode engine's file lists, too."""
    pair, _, other = keyed
    port = free_ports()
    with closing(Engine(Model(), is_prefill=True, port=port, **other)) as stranger:
        where = parse_address(stranger.ranks[0].directory)
        _until(lambda: len(pair.registry.rows) == 2)
        for row in pair.registry.rows:
            row["rank_port"] = where.port
        wanted = pair.want(22)
        pair.load(wanted, OTHERS, TOKENS)
        assert pair.until_over(*wanted) == [Stage.FAILED]
        assert isinstance(error_of(wanted[0]), REFUSED)


@pytest.mark.ucx
def test_a_port_from_the_settings_is_that_of_the_first_rank(ranks):
    port = free_ports()
    pair, second = ranks("round_robin", KVCONNECTOR_CONTROL_PORT=str(port))
    directories = [engine.ranks[0].directory for engine in (pair.prefill, second)]
    assert directories == [f"tcp://127.0.0.1:{each}" for each in (port, port + 1)]


def test_a_directory_whose_usual_port_is_taken_listens_at_another_one(caplog):
    """Another engine of this host may have it: that is no reason not to start."""
    port = free_ports()
    config = connector_config(
        is_prefill=True,
        host="127.0.0.1",
        bootstrap_port=port,
        unique_name="p",
        own_address="127.0.0.1",
        environ={},
        dp_rank=0,
        dp_size=1,
    )
    with closing(_open_directory(config, port, 0)) as first:
        assert first.address == f"tcp://127.0.0.1:{port}"
        with closing(_open_directory(config, port, 0)) as second:
            assert second.address.startswith("tcp://127.0.0.1:")
            assert second.address != first.address
    assert "the directory service listens on another port" in caplog.text


@pytest.mark.ucx
def test_a_room_at_another_rank_than_it_says_fails_at_once_unless_the_router_names_it(ranks):
    pair, second = ranks("follow_bootstrap_room")
    pair.prefill = second
    (sent,) = pair.send(20)
    assert sent.poll() is Stage.FAILED
    error = error_of(sent)
    assert isinstance(error, RemoteProtocolError)
    assert "disagg_prefill_dp_rank" in str(error)
    named = [type(sent)(rank, "", 22, True) for rank in second.ranks]
    assert named[0].poll() is Stage.WAITING
    named[0].abort()


@pytest.mark.ucx
def test_a_request_that_names_a_rank_which_is_not_there_fails_at_once(ranks):
    pair, _ = ranks("round_robin")
    (wanted,) = [type(each)(each.kv_mgr, f"127.0.0.1:{pair.port}", 40) for each in pair.want(39)]
    wanted.dp_rank = 7
    wanted.init(0)
    assert pair.until_over(wanted) == [Stage.FAILED]
    assert "dp_rank=7, dp_size=2" in str(error_of(wanted))


@pytest.mark.ucx
def test_a_request_whose_registry_is_silent_fails_in_time_and_says_why():
    environ = {"KVCONNECTOR_LEASE_EARLY_FOLLOW_S": "0.5"}
    with closing(Pair(Model(), environ=environ)) as pair:
        pair.prefill.registry.close()
        wanted = pair.want(30)
        assert pair.until_over(*wanted) == [Stage.FAILED]
        error = error_of(wanted[0])
        assert isinstance(error, UnknownRequestError)
        assert f"127.0.0.1:{pair.port}" in str(error)
