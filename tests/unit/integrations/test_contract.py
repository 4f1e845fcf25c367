"""Releases of engines that nobody has tested are compared with what the integrations use of them."""

import ast

import pytest

from kvconnector.errors import ConfigError
from kvconnector.integrations.contract import (
    VARIABLE,
    Fields,
    Implemented,
    Imported,
    Mentioned,
    Name,
    Passed,
    Sources,
    Unchanged,
    Used,
    Values,
    admit,
    differences,
    digest,
    policy_of,
    release_of,
)

ENGINE = '''
"""An engine."""
from enum import Enum
from abc import abstractmethod

limit = 3


class Poll:
    Failed = 0
    Done = 4


class Base:
    size: int

    def __init__(self, manager, room, hint=None):
        self.room = room

    @abstractmethod
    def send(self, pages):
        """Send."""

    def maybe(self):
        return False

    def ask(self, room, hint=None):
        return room


class Queue:
    def step(self, request):
        request.sender.send(1)
        request.sender.maybe()
        if hasattr(request.sender, "later"):
            request.sender.later()


def page_bytes(size, heads):
    """Say how large a page is."""
    # in elements
    return size * heads
'''
OURS = """
from engine.core import Poll, page_bytes


class Sender:
    def __init__(self, manager, room):
        pass

    def send(self, pages):
        pass

    def ask(self, room, hint=None, *, ours=0, **more):
        return room
"""


@pytest.fixture
def engine(tmp_path):
    """A function that makes an engine's sources, with the first text replaced by the second."""

    def make(old="", new=""):
        folder = tmp_path / "engine"
        folder.mkdir(exist_ok=True)
        assert old in ENGINE
        (folder / "core.py").write_text(ENGINE.replace(old, new) if old else ENGINE, "utf-8")
        return Sources(folder)

    return make


@pytest.fixture
def table(tmp_path, engine):
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "sender.py").write_text(OURS, "utf-8")
    digests = (digest(engine(), "core.py:page_bytes"),)
    return (
        Name("core.py:page_bytes", ("size", "heads")),
        Fields("core.py:Base", ("size", "room", "send")),
        Mentioned("core.py", ("limit",)),
        Values("core.py:Poll", {"Failed": 0, "Done": 4}),
        Unchanged("core.py:page_bytes", digests),
        Passed("core.py:Base", lambda: (("manager", "room", "hint"), False)),
        Used(("core.py",), "sender", "core.py:Base", lambda: frozenset({"send"})),
        Imported(ours, "engine"),
        Implemented("core.py:Base", ours / "sender.py", "Sender"),
    )


def test_an_engine_that_has_everything_differs_in_nothing(engine, table):
    assert differences(table, engine()) == []


@pytest.mark.parametrize(
    "old, new, text",
    [
        ("def page_bytes", "def page_size", "core.py:page_bytes is missing"),
        ("(size, heads)", "(heads, size)", "takes heads, size instead of size, heads"),
        ("    size: int", "    length: int", "has no size"),
        ("limit = 3", "bound = 3", "has no limit"),
        ("Done = 4", "Done = 5", "Done is 5 instead of 4"),
        ("size * heads", "heads * size", "may lay bytes out differently"),
        ("hint=None", "hint=None, rank=0", "also takes rank"),
        ("sender.maybe()", "sender.flush()", "uses flush of sender"),
        ("class Poll", "class Polls", "engine.core has no Poll"),
        ("    def maybe", "    @abstractmethod\n    def maybe", "maybe is new"),
        ("send(self, pages)", "send(self, pages, states)", "send takes states, too"),
        ("send(self, pages)", "send(self)", "send takes no pages"),
        ("send(self, pages)", "send(self, page_ids)", "send takes no pages"),
        ("ask(self, room, hint", "ask(self, hint, room", "ask takes hint, room in this order"),
    ],
)
def test_each_difference_is_named(engine, table, old, new, text):
    found = differences(table, engine(old, new))
    assert any(text in each for each in found), found


def test_comments_docstrings_and_spacing_do_not_change_a_layout(engine):
    known = digest(engine(), "core.py:page_bytes")
    for old, new in (
        ("    # in elements\n", ""),
        ("Say how", "Tell how"),
        ("size * heads", "size  *  heads"),
    ):
        assert digest(engine(old, new), "core.py:page_bytes") == known


def test_the_source_of_a_statement_is_what_ast_gives(tmp_path):
    text = 'ä = "ü"; é = (\n    "ö", 2)\n\n\n@cache\ndef ô(ñ): return "ß"; pass\n'
    (tmp_path / "file.py").write_text(text, "utf-8")
    sources = Sources(tmp_path)
    statements = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.stmt)]
    assert len(statements) == 5
    for each in statements:
        assert sources.segment("file.py", each) == ast.get_source_segment(text, each)


def test_a_file_that_is_missing_or_not_python_is_a_difference(tmp_path, table):
    assert differences(table, Sources(tmp_path / "nowhere"))
    (tmp_path / "core.py").write_text("def (", "utf-8")
    assert differences(table, Sources(tmp_path))


@pytest.mark.parametrize(
    "version, release",
    [
        ("0.5.23.post1", (0, 5, 23)),
        ("0.5.23+cu130", (0, 5, 23)),
        ("0.34.0rc1", (0, 34, 0)),
        ("x", ()),
    ],
)
def test_a_versions_release_is_its_numbers(version, release):
    assert release_of(version) == release


def _admit(version, policy, found):
    return admit("E", version, known=("0.32", "0.33"), policy=policy, find=lambda: found)


def test_known_releases_are_not_even_compared():
    def fail():
        raise AssertionError

    for version in ("0.32.4", "0.33.0.post1+cu130"):
        for policy in ("known", "checked", "any"):
            known = ("0.32", "0.33")
            assert admit("E", version, known=known, policy=policy, find=fail) == ""


def test_an_unknown_release_runs_with_a_warning_if_it_differs_in_nothing():
    assert "0.34.0" in _admit("0.34.0", "checked", [])
    assert "doctor --engine" in _admit("0.34.0", "checked", [])
    with pytest.raises(ConfigError, match=VARIABLE):
        _admit("0.34.0", "known", [])


def test_an_unknown_release_that_differs_is_refused_with_each_difference():
    with pytest.raises(ConfigError, match=r"0\.34\.0.*a is missing.*b is new"):
        _admit("0.34.0", "checked", ["a is missing", "b is new"])
    assert "a is missing" in _admit("0.34.0", "any", ["a is missing"])


def test_the_policy_comes_from_the_environment():
    assert policy_of({}) == "checked"
    assert policy_of({VARIABLE: "any"}) == "any"
    with pytest.raises(ConfigError, match="known, checked, any"):
        policy_of({VARIABLE: "all"})
