"""A prefill server is asked for retracted prompts, all at once, and is told when one is not wanted any more."""

import time
from contextlib import closing

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


def test_no_question_waits_for_anothers_answer(recomputer):
    with closing(PrefillApi()) as api:
        for number in range(MANY):
            recomputer.ask(f"r{number}", HostPort("127.0.0.1", api.port), {"number": number})
        _until(lambda: len(api.asked) == MANY)
        assert {each["number"] for each in api.asked} == {*range(MANY)}
        api.answers.set()
        for number in range(MANY):
            recomputer.forget(f"r{number}", is_done=True)
            assert recomputer.refusal(f"r{number}") is None


def test_a_server_that_refuses_or_is_gone_is_named(recomputer):
    with closing(PrefillApi(status=503)) as api:
        api.answers.set()
        recomputer.ask("refused", HostPort("127.0.0.1", api.port), {})
        assert "503" in _until(lambda: recomputer.refusal("refused"))
    recomputer.ask("gone", HostPort("127.0.0.1", free_ports()), {})
    assert "ConnectionRefused" in _until(lambda: recomputer.refusal("gone"))
    recomputer.ask("unwritable", HostPort("127.0.0.1", 9), {"x": object()})
    assert "JSON" in _until(lambda: recomputer.refusal("unwritable"))
    assert recomputer.refusal("gone") is None


def test_a_prompt_that_is_not_wanted_any_more_is_given_up_at_the_server(recomputer):
    with closing(PrefillApi()) as api:
        for name in ("unwanted", "read"):
            recomputer.ask(name, HostPort("127.0.0.1", api.port), {})
        _until(lambda: len(api.asked) == 2)
        recomputer.forget("read", is_done=True)
        recomputer.forget("unwanted", is_done=False)
        _until(lambda: api.ended)
        assert api.ended == 1


def test_each_retraction_has_a_room_of_its_own():
    rooms = [5]
    for _ in range(3):
        rooms.append(next_room(rooms[-1]))
    assert len({*rooms}) == 4
    assert all(0 < room < 1 << 63 for room in rooms)
    assert next_room(5) == rooms[1]
