"""Requests end early on either side and at any time, and both engines learn of it."""

import time
from contextlib import closing, contextmanager

import pytest

from kvconnector.errors import (
    AuthenticationError,
    BlockIdError,
    LeaseExpiredError,
    LocalError,
    RemoteError,
    TransferAbortedError,
    UnknownRequestError,
    UnknownTransferError,
)
from kvconnector.integrations.sglang.transfers import Stage, error_from
from kvconnector.session.lease import USED_NAMES
from tests.sglang.pure.engines import Engine, Pair, error_of
from tests.sglang.pure.pools import Model
from tests.support.waiting import until

pytestmark = pytest.mark.ucx

PAGES, OTHERS, TOKENS = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 18
QUICK = {
    "KVCONNECTOR_LEASE_DURATION_S": "1.0",
    "KVCONNECTOR_LEASE_EARLY_FOLLOW_S": "0.5",
    "KVCONNECTOR_PEER_HEARTBEAT_INTERVAL_S": "0.2",
    "KVCONNECTOR_PEER_TIMEOUT_S": "2",
    "KVCONNECTOR_PEER_TRANSFER_TIMEOUT_S": "3",
}


@pytest.fixture
def pair():
    with closing(Pair(Model(), decode={"tp_size": 2}, environ=QUICK)) as made:
        yield made


@pytest.fixture
def patient():
    """Settings for tests that wait for no deadline: deadlines that do not pass even on a busy machine."""
    with closing(Pair(Model(), decode={"tp_size": 2})) as made:
        yield made


def _computed(pair, room):
    sent = pair.send(room)
    pair.compute(sent, PAGES, 0, TOKENS, is_last=True)
    return sent


def test_a_request_that_no_decode_engine_asks_for_ends_with_its_lease(pair):
    sent = _computed(pair, 1)
    assert pair.until_over(*sent) == [Stage.FAILED]
    assert isinstance(error_of(sent[0]), LeaseExpiredError)


def test_a_request_that_no_prefill_engine_is_asked_for_is_refused(pair):
    wanted = pair.want(2)
    pair.load(wanted, OTHERS, TOKENS)
    assert {*pair.until_over(*wanted)} == {Stage.FAILED}
    errors = [error_of(each) for each in wanted]
    assert {type(error) for error in errors} == {UnknownTransferError}, errors


@pytest.mark.parametrize("is_complete", [False, True], ids=["half computed", "computed"])
def test_the_decode_side_gives_up(pair, is_complete):
    sent = pair.send(3)
    wanted = pair.want(3)
    computed = TOKENS if is_complete else 16
    pair.compute(sent, PAGES, 0, computed)
    pair.load(wanted, OTHERS, TOKENS)
    for each in wanted:
        each.abort()
        each.abort()
    assert {*pair.until_over(*wanted)} == {Stage.FAILED}
    assert {type(error_of(each)) for each in wanted} == {TransferAbortedError}
    pair.compute(sent, PAGES, computed, TOKENS, is_last=True)
    assert pair.until_over(*sent) == [Stage.FAILED]
    assert isinstance(error_of(sent[0]), TransferAbortedError)


@pytest.mark.parametrize("is_complete", [False, True], ids=["half computed", "computed"])
def test_the_prefill_side_gives_up(pair, is_complete):
    sent = pair.send(4)
    wanted = pair.want(4)
    if is_complete:
        pair.compute(sent, PAGES, 0, TOKENS, is_last=True)
    else:
        pair.compute(sent, PAGES, 0, 16)
        pair.load(wanted, OTHERS, TOKENS)
    for each in sent:
        each.abort()
    assert pair.until_over(*sent) == [Stage.FAILED]
    pair.load(wanted, OTHERS, TOKENS)
    assert {*pair.until_over(*wanted)} == {Stage.FAILED}
    assert {type(error_of(each)) for each in wanted} == {TransferAbortedError}


def test_nothing_is_kept_of_prompts_that_never_began(patient):
    wanted = patient.want(50)
    ranks = patient.decode.ranks
    until(lambda: all(rank._followed for rank in ranks), lambda: [each.poll() for each in wanted])
    for each in wanted:
        each.abort()
    for rank in ranks:
        assert not rank._followed


def test_a_request_that_is_aborted_before_it_begins_can_be_repeated(patient):
    for each in (*patient.send(5), *patient.want(5)):
        each.abort()
        assert each.poll() is Stage.FAILED
    sent = _computed(patient, 6)
    wanted = patient.want(6)
    patient.load(wanted, OTHERS, TOKENS)
    assert {*patient.until_over(*sent, *wanted)} == {Stage.DONE}


def test_a_failure_of_another_rank_leaves_nothing_under_way(pair):
    sent = pair.send(7)
    wanted = pair.want(7)
    pair.compute(sent, PAGES, 0, 16)
    pair.load(wanted, OTHERS, TOKENS)
    assert wanted[0].poll() is Stage.TRANSFERRING
    rank = wanted[0].kv_mgr
    with held_back(rank):
        error = error_of(wanted[0])
        assert isinstance(error, RemoteError)
        assert error.is_from_another_rank
        assert not rank.is_abort_release_safe(7)  # the worker has not said that it no longer writes
    assert pair.until_over(wanted[0]) == [Stage.FAILED]
    assert rank.is_abort_release_safe(7)
    for each in (*sent, *wanted):
        each.abort()


class Unlisted(dict):
    """Records that nobody may go through one by one."""

    def __iter__(self):
        raise AssertionError("a rank went through all of its transfers")

    keys = values = items = __iter__


def test_whether_pages_are_free_is_known_without_a_look_at_each_transfer(pair):
    """SGLang asks in each pass of its queue, for each request that has failed."""
    sent, wanted = pair.send(12), pair.want(12)
    pair.compute(sent, PAGES, 0, 16)
    pair.load(wanted, OTHERS, TOKENS)
    rank = wanted[0].kv_mgr
    rank._transferring = Unlisted(rank._transferring)
    with held_back(rank):
        wanted[0].abort()
        assert not rank.is_abort_release_safe(12)
        assert rank.is_abort_release_safe(13)
    until(lambda: rank.is_abort_release_safe(12))
    for each in (*sent, *wanted):
        each.abort()


@contextmanager
def held_back(rank):
    """Keep a rank's reports back, as if its worker still used the pages."""
    take, rank.take = rank.take, lambda: setattr(rank, "turn", rank.turn + 1)
    try:
        yield
    finally:
        rank.take = take


class Reduced:
    """Polls each prompt in all ranks at once and takes the least, as SGLang does with one process per rank."""

    def __init__(self, sent):
        self._sent = sent

    def poll(self):
        least = min(each.vote() for each in self._sent)
        return [each.agreed(least) for each in self._sent]

    def until_over(self):
        until_s = time.monotonic() + 60
        while not {*(stages := self.poll())} <= {Stage.DONE, Stage.FAILED}:
            assert time.monotonic() < until_s
            time.sleep(0.001)
        return stages


@pytest.fixture
def ranks():
    with closing(Pair(Model(), prefill={"tp_size": 2})) as made:
        yield made


def test_a_prompt_that_one_rank_fails_ends_in_all_once_none_reads_its_pages(ranks):
    sent = _computed(ranks, 20)
    reduced = Reduced(sent)
    assert reduced.poll() == [Stage.TRANSFERRING] * 2
    sent[0].fail(BlockIdError("no such block"))
    with held_back(sent[1].kv_mgr):
        ranks.until_over(sent[0])
        for _ in range(5):
            assert not {*reduced.poll()} & {Stage.FAILED, Stage.DONE}
    assert reduced.until_over() == [Stage.FAILED] * 2
    errors = [error_of(each) for each in sent]
    assert [type(error) for error in errors] == [BlockIdError, RemoteError]
    assert errors[1].is_from_another_rank


def test_a_prompt_that_is_over_in_one_rank_fails_in_all_if_it_does_in_another(ranks):
    sent = _computed(ranks, 21)
    sent[1].ended(None)
    sent[0].abort()
    assert Reduced(sent).until_over() == [Stage.FAILED] * 2
    assert error_of(sent[1]).is_from_another_rank


def test_prompts_of_several_ranks_are_done_once_they_are_in_all(ranks):
    sent, wanted = _computed(ranks, 22), ranks.want(22)
    reduced = Reduced(sent)
    ranks.load(wanted, OTHERS, TOKENS)
    with held_back(sent[0].kv_mgr):
        assert ranks.until_over(*wanted, sent[1]) == [Stage.DONE] * 2
        assert reduced.poll() == [Stage.TRANSFERRING] * 2
    assert reduced.until_over() == [Stage.DONE] * 2


def test_an_incomplete_prompt_that_one_rank_fails_ends_in_the_same_pass(ranks):
    sent = ranks.send(23)
    ranks.compute(sent, PAGES, 0, 16)
    sent[0].abort()
    assert Reduced(sent).poll() == [Stage.FAILED] * 2
    sent[1].abort()


def test_an_error_of_a_request_fails_it_alone(pair):
    sent = pair.send(12)
    with sent[0].failing():
        raise BlockIdError("no such block")
    assert sent[0].poll() is Stage.FAILED
    assert isinstance(error_of(sent[0]), BlockIdError)


def test_a_room_that_is_drawn_twice_ends_only_the_second_request(patient):
    sent = patient.send(77)
    again = patient.send(77)
    assert {each.poll() for each in again} == {Stage.FAILED}
    error = error_of(again[0])
    assert isinstance(error, LocalError), error
    assert "draw a new one for each request" in str(error)
    wanted, second = patient.want(77), patient.want(77)
    patient.compute(sent, PAGES, 0, 16)
    patient.load(wanted, OTHERS, TOKENS)
    assert {*patient.until_over(*second)} == {Stage.FAILED}
    assert "draw a new one for each request" in str(error_of(second[0]))
    patient.compute(sent, PAGES, 16, TOKENS, is_last=True)
    assert {*patient.until_over(*sent, *wanted)} == {Stage.DONE}
    patient.check(OTHERS, TOKENS)


@pytest.mark.parametrize(
    "chunk",
    [
        # of SGLang 0.5.21, if it is paused during a prompt's first step
        ([6, 7, 8, 9, 10], None, -16),
        ([], None, -3),
        ([1, 2, 3, 4], None, 16),  # its first chunk once more
        ([5], None, 5),
        ([5, 6], None, 4),
        ([5], [], 1),  # its end, too early
    ],
    ids=[
        "before its beginning",
        "fewer than none",
        "again",
        "too many tokens",
        "too many pages",
        "too short",
    ],
)
def test_a_chunk_that_is_not_the_next_one_of_its_prompt_fails_it_alone(patient, chunk):
    (sent,), wanted = patient.send(14), patient.want(14)
    (other,), others = patient.send(15), patient.want(15)
    for each in (sent, other):
        each.prompt_tokens = TOKENS
        patient.compute([each], PAGES, 0, 16)
    patient.load(wanted, OTHERS, TOKENS)
    sent.send(*chunk)
    if chunk[2] == 16:  # it could be the next one, but the prompt ends too late then
        patient.compute([sent], PAGES, 16, TOKENS, is_last=True)
    assert isinstance(sent.error, BlockIdError)
    assert {*patient.until_over(sent, *wanted)} == {Stage.FAILED}
    assert isinstance(error_of(sent), BlockIdError)
    patient.compute([other], PAGES, 16, TOKENS, is_last=True)
    patient.load(others, OTHERS, TOKENS)
    assert {*patient.until_over(other, *others)} == {Stage.DONE}
    patient.check(OTHERS, TOKENS)


@pytest.mark.parametrize("is_prefill_first", [True, False], ids=["prefill", "decode"])
def test_a_room_is_for_one_request_whichever_engine_is_asked_first(patient, is_prefill_first):
    sent, wanted = _computed(patient, 8), patient.want(8)
    patient.load(wanted, OTHERS, TOKENS)
    assert {*patient.until_over(*sent, *wanted)} == {Stage.DONE}
    patient.check(OTHERS, TOKENS)
    sent = _computed(patient, 8) if is_prefill_first else []
    wanted = patient.want(8)
    patient.load(wanted, OTHERS, TOKENS)
    assert {*patient.until_over(*wanted)} == {Stage.FAILED}
    error = error_of(wanted[0])
    assert isinstance(error, LocalError), error
    assert "draw a new one for each request" in str(error)
    sent = sent or _computed(patient, 8)
    assert {*patient.until_over(*sent)} == {Stage.FAILED}
    assert isinstance(error_of(sent[0]), TransferAbortedError)


def test_a_lost_prefill_engine_fails_its_requests_and_a_new_one_serves(pair):
    sent, wanted = pair.send(9), pair.want(9)
    pair.compute(sent, PAGES, 0, 16)
    pair.load(wanted, OTHERS, TOKENS)
    pair.prefill.close()
    assert {*pair.until_over(*wanted)} == {Stage.FAILED}
    with closing(Engine(Model(), is_prefill=True, port=pair.port, environ=QUICK)) as pair.prefill:
        until_s = time.monotonic() + 30
        stages = {Stage.FAILED}
        while stages != {Stage.DONE}:
            assert time.monotonic() < until_s
            room = time.monotonic_ns()
            sent = _computed(pair, room)
            wanted = pair.want(room)
            pair.load(wanted, OTHERS, TOKENS)
            stages = {*pair.until_over(*sent, *wanted)}
        pair.check(OTHERS, TOKENS)


def test_a_request_fails_in_time_if_no_engine_listens():
    environ = QUICK | {"KVCONNECTOR_PEER_HELLO_TIMEOUT_S": "1"}
    with closing(Pair(Model(), environ=environ)) as pair:
        pair.prefill.close()
        wanted = pair.want(10)
        pair.load(wanted, OTHERS, TOKENS)
        assert pair.until_over(*wanted) == [Stage.FAILED]
        error = error_of(wanted[0])
        assert isinstance(error, UnknownRequestError)
        assert "refused" in str(error)


def test_the_refusal_of_a_room_drawn_twice_has_words_that_all_releases_know():
    """A producer of another release sends the text, so neither side may change it alone."""
    words = "the transfer is complete: draw names anew"
    known = error_from(f"UnknownTransferError: {words}; request=a", 3)
    assert isinstance(known, LocalError)
    assert "draw a new one for each request" in str(known)
    assert words == USED_NAMES
    # another failure may quote anything
    assert isinstance(error_from(f"TransferAbortedError: {words}", 3), TransferAbortedError)


def test_an_errors_type_is_kept():
    error = error_from(f"LeaseExpiredError: it ended; {LeaseExpiredError.advice()}", 3)
    assert isinstance(error, LeaseExpiredError)
    assert str(error).count(LeaseExpiredError.remedy) == 1
    assert "room=3" in str(error)
    assert isinstance(error_from("AuthenticationError: a: b", 3), AuthenticationError)
    assert isinstance(error_from("something else", 3), RemoteError)
