"""A prefill server is asked for retracted prompts, all at once, and is told when one is not wanted any more."""

import socket
import time
from contextlib import ExitStack, closing

import pytest

from kvconnector.control.address import HostPort
from kvconnector.integrations.sglang.recompute import Recomputer
from kvconnector.integrations.sglang.transfers import next_room
from tests.sglang.pure.registry import PrefillApi
from tests.support.ports import free_ports

LIMIT_S = 30.0
MANY = 40
"""More than any pool of threads has."""


@pytest.fixture
def recomputer():
    with closing(Recomputer()) as made:
        yield made


def _until(is_so):
    until_s = time.monotonic() + LIMIT_S
    while not (found := is_so()):
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return found


def _ask(recomputer, request_id, api, payload=None):
    recomputer.ask(request_id, HostPort("127.0.0.1", api.port), payload or {})


def test_no_question_waits_for_anothers_answer(recomputer):
    with closing(PrefillApi()) as api:
        for number in range(MANY):
            _ask(recomputer, f"r{number}", api, {"number": number})
        _until(lambda: len(api.asked) == MANY)
        assert {each["number"] for each in api.asked} == {*range(MANY)}
        api.answers.set()
        for number in range(MANY):
            recomputer.forget(f"r{number}", is_done=True)
            assert not recomputer.refusal(f"r{number}")


def test_a_server_that_cannot_be_connected_to_delays_no_other(recomputer):
    with (
        closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as full,
        closing(PrefillApi()) as api,
        ExitStack() as clients,
    ):  # a full queue of connections: more of them are not answered
        for _ in range(3):
            client = clients.enter_context(closing(socket.socket()))
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        recomputer.ask("late", HostPort(*full.getsockname()), {})
        _ask(recomputer, "soon", api)
        _until(lambda: api.asked)
        assert not recomputer.refusal("late")
        assert "Timeout" in _until(lambda: recomputer.refusal("late"))


def test_a_server_that_refuses_or_is_gone_is_named(recomputer):
    with closing(PrefillApi(status=503)) as api:
        api.answers.set()
        _ask(recomputer, "refused", api)
        assert f":{api.port}/generate answers 503" in _until(lambda: recomputer.refusal("refused"))
    recomputer.ask("gone", HostPort("127.0.0.1", free_ports()), {})
    assert "Cannot connect" in _until(lambda: recomputer.refusal("gone"))
    recomputer.ask("unwritable", HostPort("127.0.0.1", 9), {"x": object()})
    assert "JSON" in _until(lambda: recomputer.refusal("unwritable"))
    recomputer.forget("gone", is_done=False)
    assert not recomputer.refusal("gone")


def test_the_prompt_goes_nowhere_else(recomputer):
    with closing(PrefillApi()) as other:
        where = f"http://127.0.0.1:{other.port}/generate"
        with closing(PrefillApi(status=307, headers=[("Location", where)])) as api:
            api.answers.set()
            _ask(recomputer, "moved", api, {"input_ids": [1]})
            assert "307" in _until(lambda: recomputer.refusal("moved"))
        assert not other.asked


@pytest.mark.parametrize(
    "ours, reason",
    [("right", ""), ("", "start the decode server with"), ("wrong", "needs another key")],
)
def test_a_server_with_a_key_gets_ours_or_the_error_says_what_to_do(ours, reason):
    with closing(Recomputer(ours)) as recomputer, closing(PrefillApi(key="right")) as api:
        api.answers.set()
        _ask(recomputer, "r", api)
        if reason:
            found = _until(lambda: recomputer.refusal("r"))
            assert all(each in found for each in ("401", reason, "--api-key"))
        else:
            assert _until(lambda: api.answered) == [200]


def test_a_prompt_that_is_not_wanted_any_more_is_given_up_at_the_server(recomputer):
    with closing(PrefillApi()) as api:
        for name in ("unwanted", "read"):
            _ask(recomputer, name, api)
        _until(lambda: len(api.asked) == 2)
        recomputer.forget("read", is_done=True)
        recomputer.forget("unwanted", is_done=False)
        _until(lambda: api.ended)
        assert api.ended == 1


def test_closing_gives_up_what_is_under_way():
    with closing(PrefillApi()) as api:
        with closing(Recomputer()) as recomputer:
            _ask(recomputer, "one", api)
            _until(lambda: api.asked)
        _until(lambda: api.ended)
        recomputer.forget("one", is_done=False)
        _ask(recomputer, "after the end", api)
        recomputer.close()
        assert len(api.asked) == 1


def test_each_retraction_has_a_room_of_its_own():
    rooms = [5]
    for _ in range(3):
        rooms.append(next_room(rooms[-1]))
    assert len({*rooms}) == 4
    assert all(0 < room < 1 << 63 for room in rooms)
    assert next_room(5) == rooms[1]
