"""The workers that a directory service names, and the wire version that it chooses."""

import logging
import os
import signal
import struct
import threading
import warnings
from contextlib import ExitStack, closing
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvconnector.config import ConnectorConfig
from kvconnector.control.address import parse_address
from kvconnector.errors import ConfigError, KVConnectorError, PeerLostError
from kvconnector.runtime import directory as directory_module
from kvconnector.runtime.channels import open_directory_control
from kvconnector.runtime.directory import MAX_UNASKED, DirectoryService, answer_to
from kvconnector.wire import decode, encode, version_of, versions
from kvconnector.wire import messages as m
from tests.support.control_suite import greeted
from tests.support.inproc_control import ControlHub, InprocControlChannel
from tests.support.waiting import DEADLINE_S, until
from tests.unit.session import harness

ENTRY = harness.directory().workers[0]
SIZES = st.integers(1, 3 * MAX_UNASKED)


def answered():
    """Return the directory as a service sends it that takes messages as long as those of a `ControlHub` are."""
    limit = InprocControlChannel.max_message_bytes
    return replace(harness.directory(), max_message_bytes=limit)


def directory_of(size):
    workers = tuple(replace(ENTRY, tp_rank=rank) for rank in range(size))
    return replace(harness.directory(), workers=workers)


@given(size=SIZES, theirs=SIZES, ranks=st.lists(st.integers(0, 4 * MAX_UNASKED)))
def test_a_large_directory_names_the_workers_that_overlap(size, theirs, ranks):
    request = m.DirectoryRequest(engine_id="p", ranks=tuple(ranks), world_size=theirs)
    found = {worker.tp_rank for worker in answer_to(request, directory_of(size)).workers}
    overlapping = {
        worker
        for worker in range(size)
        for rank in ranks
        if rank < theirs
        and Fraction(rank, theirs) < Fraction(worker + 1, size)
        and Fraction(worker, size) < Fraction(rank + 1, theirs)
    }
    assert found == (overlapping if size > MAX_UNASKED else {*range(size)})


@given(size=SIZES)
def test_a_request_without_ranks_gets_all_workers(size):
    directory = directory_of(size)
    assert answer_to(m.DirectoryRequest(engine_id="p"), directory) == directory


def asked(service_speaks, asking_speaks, monkeypatch):
    """Return the bytes of a service's answer, between releases that speak these versions."""
    hub = ControlHub(seed=0)
    asking, serving = hub.open(), hub.open()
    service = DirectoryService(serving, harness.directory())
    request = m.DirectoryRequest(
        engine_id="p", oldest_version=asking_speaks[0], newest_version=asking_speaks[1]
    )
    asking.send(asking.connect(serving.address, ""), encode(request, asking_speaks[0]))
    monkeypatch.setattr(versions, "SPOKEN", versions.WireVersions(*service_speaks))
    service.turn(0.0)
    monkeypatch.setattr(versions, "SPOKEN", versions.WireVersions(*asking_speaks))
    (answer,) = asking.poll(0.0)
    return answer.payload


@pytest.mark.parametrize(
    "service_speaks,asking_speaks,agreed",
    [
        ((3, 3), (3, 3), 3),
        ((3, 4), (3, 3), 3),
        ((3, 3), (3, 4), 3),
        ((4, 5), (3, 4), 4),
        ((3, 4), (4, 6), 4),
    ],
)
def test_a_directory_answers_in_the_newest_common_version(
    service_speaks, asking_speaks, agreed, monkeypatch
):
    payload = asked(service_speaks, asking_speaks, monkeypatch)
    assert version_of(payload) == agreed
    assert decode(payload) == replace(answered(), wire_version=agreed)


@pytest.mark.parametrize("ours,theirs", [((3, 3), (4, 5)), ((5, 6), (3, 4))])
def test_releases_without_a_common_version_are_refused_by_name(ours, theirs, monkeypatch):
    refused = decode(asked(ours, theirs, monkeypatch))
    assert refused.refusal is m.Refusal.INCOMPATIBLE
    assert "no wire version in common" in refused.text
    for spoken in (ours, theirs):
        assert str(versions.WireVersions(*spoken)) in refused.text


def test_a_refusal_of_long_names_is_cut_to_what_a_message_takes():
    ours, theirs = "\U000e0001" * 512, "\U000e0002" * 512  # ten characters each in the text
    hub = ControlHub(seed=0)
    asking, serving = hub.open(), hub.open()
    geometry = replace(harness.directory().geometry, engine_id=ours)
    service = DirectoryService(serving, replace(harness.directory(), geometry=geometry))
    handle = asking.connect(serving.address, "")
    asking.send(handle, encode(m.DirectoryRequest(engine_id=theirs)))
    service.turn(0.0)
    (answer,) = asking.poll(0.0)
    refused = decode(answer.payload)
    assert (refused.refusal, len(refused.text)) == (m.Refusal.INCOMPATIBLE, m.MAX_TEXT)


@pytest.mark.parametrize("stated_bytes, is_told", [(0, True), (64 << 10, False), (1 << 20, True)])
def test_an_engine_that_takes_no_message_as_long_as_the_answer_is_refused_in_words(
    stated_bytes, is_told, caplog
):
    hub = ControlHub(seed=0)
    asking, serving = hub.open(), hub.open()
    service = DirectoryService(serving, directory_of(4000))
    request = m.DirectoryRequest(engine_id="p", max_message_bytes=stated_bytes)
    with caplog.at_level(logging.WARNING):
        asking.send(asking.connect(serving.address, ""), encode(request))
        service.turn(0.0)
    (answer,) = asking.poll(0.0)
    answer = decode(answer.payload)
    if is_told:
        assert len(answer.workers) == 4000
        return
    assert answer.refusal is m.Refusal.INCOMPATIBLE
    for text in (answer.text, caplog.text):
        assert "raise control.max_message_bytes of the engine that asks, which is 65536" in text


def test_a_stranger_that_reads_no_answers_is_given_up_after_a_few():
    """A question has 20 bytes, and an answer to it may have half a million."""
    config = ConnectorConfig.from_mapping({"engine_id": "p", "control": {"insecure": True}})
    question = encode(m.DirectoryRequest(engine_id="p"))
    answered, failures = 0, []
    with ExitStack() as ends:
        control = ends.enter_context(closing(open_directory_control(config, 0)))
        service = DirectoryService(control, directory_of(20_000))
        send = control.send

        def counted(handle, payload):
            nonlocal answered
            try:
                send(handle, payload)
            except KVConnectorError as error:
                failures.append(error)
                raise
            answered += 1

        control.send = counted
        stranger = ends.enter_context(greeted(parse_address(control.address)))
        stranger.sendall(400 * (struct.pack(">BQ", 2, len(question)) + question))
        until(lambda: failures, lambda: service.turn(0.01), lambda: answered)
        assert isinstance(failures[0], PeerLostError)
        assert "the queue to it is full" in str(failures[0])
        assert answered < 100


def test_a_directory_longer_than_a_message_may_be_is_refused_at_the_start():
    hub = ControlHub(seed=0)
    serving = hub.open()
    serving.max_message_bytes = 100
    with pytest.raises(ConfigError, match=r"control\.max_message_bytes is too small") as refused:
        DirectoryService(serving, harness.directory())
    assert refused.value.context["max_message_bytes"] == 100
    assert serving.address not in hub.channels  # its port is free


def test_a_directory_whose_thread_cannot_start_frees_its_port(monkeypatch):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    hub = ControlHub(seed=0)
    serving = hub.open()
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError):
        DirectoryService(serving, harness.directory()).start()
    assert serving.address not in hub.channels


@pytest.mark.parametrize("stated_bytes", [0, 1 << 20])
def test_an_engine_is_told_if_the_directorys_own_limit_is_too_low(stated_bytes):
    hub = ControlHub(seed=0)
    asking, serving = hub.open(), hub.open()
    serving.max_message_bytes = 64 << 10
    service = DirectoryService(serving, directory_of(4000))
    handle = asking.connect(serving.address, "")
    for ranks in (None, (0,)):
        request = m.DirectoryRequest(
            engine_id="p", ranks=ranks, world_size=4000, max_message_bytes=stated_bytes
        )
        asking.send(handle, encode(request))
        service.turn(0.0)
    refused, told = (decode(event.payload) for _ in range(2) for event in asking.poll(0.0))
    assert "raise control.max_message_bytes of engine p, which is 65536" in refused.text
    assert len(told.workers) == 1


@pytest.mark.parametrize("step", ["decode", "answer_to", "version_of", "encode"])
def test_an_exception_about_a_request_refuses_it_and_leaves_others_answered(
    step, monkeypatch, caplog
):
    victim, other = answers_to_two(step, 1, monkeypatch, caplog)
    (refused,) = victim
    assert refused.refusal is m.Refusal.INTERNAL
    assert "engine p: an unexpected ZeroDivisionError ended this here: an accident" in refused.text
    assert other == [answered()]
    assert caplog.text.count("Traceback") == 1


def test_a_refusal_that_fails_too_leaves_others_answered(monkeypatch, caplog):
    """The first request's answer is not encoded, and neither is its refusal."""
    victim, other = answers_to_two("encode", 2, monkeypatch, caplog)
    assert victim == []
    assert other == [answered()]


def answers_to_two(step, num_failures, monkeypatch, caplog):
    """Ask twice at one time, while the first calls of a function raise. Returns both engines' answers."""
    hub = ControlHub(seed=0)
    victim, other, serving = hub.open(), hub.open(), hub.open()
    service = DirectoryService(serving, harness.directory())
    original, calls = getattr(directory_module, step), []

    def fail_at_first(*arguments):
        calls.append(arguments)
        if len(calls) <= num_failures:
            raise ZeroDivisionError("an accident\nof two lines")
        return original(*arguments)

    for asking in (victim, other):
        asking.send(asking.connect(serving.address, ""), encode(m.DirectoryRequest(engine_id="p")))
    monkeypatch.setattr(directory_module, step, fail_at_first)
    with caplog.at_level(logging.WARNING):
        service.turn(0.0)
    return [[decode(event.payload) for event in asking.poll(0.0)] for asking in (victim, other)]


@pytest.mark.parametrize(
    "payload, refusal, words",
    [
        (b"GET / HTTP/1.1\r\n", m.Refusal.NOT_GREETED, "these bytes are not a kvconnector message"),
        (
            encode(m.DirectoryRequest(engine_id="p"))[:-3],
            m.Refusal.NOT_GREETED,
            "malformed DirectoryRequest",
        ),
        (encode(m.HeartbeatReply(), 99), m.Refusal.INCOMPATIBLE, "99"),
        (encode(m.HeartbeatReply()), m.Refusal.NOT_GREETED, "takes no HeartbeatReply"),
    ],
)
def test_a_message_that_is_no_request_is_refused_in_words(payload, refusal, words):
    hub = ControlHub(seed=0)
    asking, serving = hub.open(), hub.open()
    service = DirectoryService(serving, harness.directory())
    asking.send(asking.connect(serving.address, ""), payload)
    service.turn(0.0)
    (answer,) = asking.poll(0.0)
    refused = decode(answer.payload)
    assert refused.refusal is refusal
    assert words in refused.text


def test_a_forked_child_leaves_its_parents_service_alone():
    service = DirectoryService(ControlHub(seed=0).open(), harness.directory())
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(int(DEADLINE_S))
            warnings.simplefilter("error")
            service.abandon()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
