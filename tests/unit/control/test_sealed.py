"""Sealed frames: which ones an inbox accepts and which it drops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.control.sealed import (
    INBOX_ID_BITS,
    KEY_BYTES,
    ForgedMessageError,
    Inbox,
    Opener,
    Sealer,
)
from kvconnector.errors import PeerLostError

INBOX = Inbox(7, bytes(range(KEY_BYTES)))


def frames(*payloads):
    sealer = Sealer(INBOX)
    return [sealer.seal(payload) for payload in payloads]


def test_a_log_that_shows_an_inbox_does_not_show_its_key():
    assert repr(INBOX) == "Inbox(inbox_id=7)"


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_frames_open_in_their_order(payloads):
    opener = Opener(INBOX)
    assert [opener.open(frame) for frame in frames(*payloads)] == payloads
    assert opener.has_opened is bool(payloads)


@given(st.binary(max_size=60), st.data())
def test_a_changed_shorter_or_longer_frame_is_refused_and_changes_nothing(payload, data):
    (frame,) = frames(payload)
    position = data.draw(st.integers(0, len(frame) - 1))
    changed = bytearray(frame)
    changed[position] ^= data.draw(st.integers(1, 255))
    opener = Opener(INBOX)
    for forged in (bytes(changed), frame[:position], frame + b"!"):
        with pytest.raises(ForgedMessageError):
            opener.open(forged)
    assert not opener.has_opened
    assert opener.open(frame) == payload


def test_a_repeated_frame_is_refused_and_the_next_one_opens():
    first, second = frames(b"first", b"second")
    opener = Opener(INBOX)
    opener.open(first)
    with pytest.raises(ForgedMessageError, match="was repeated"):
        opener.open(first)
    assert opener.open(second) == b"second"


def test_a_frame_after_a_gap_shows_that_messages_were_lost():
    _, second = frames(b"first", b"second")
    with pytest.raises(PeerLostError, match="were lost"):
        Opener(INBOX).open(second)


@pytest.mark.parametrize(
    "other", [Inbox(8, INBOX.key), Inbox(7, bytes(KEY_BYTES))], ids=["inbox", "key"]
)
def test_a_frame_opens_in_its_own_inbox_only(other):
    (frame,) = frames(b"payload")
    with pytest.raises(ForgedMessageError):
        Opener(other).open(frame)


def test_fresh_inboxes_differ_and_have_an_id():
    inboxes = [Inbox.fresh() for _ in range(50)]
    assert len({inbox.inbox_id for inbox in inboxes}) == len({i.key for i in inboxes}) == 50
    assert all(0 < inbox.inbox_id < 1 << INBOX_ID_BITS for inbox in inboxes)
    assert {len(inbox.key) for inbox in inboxes} == {KEY_BYTES}
