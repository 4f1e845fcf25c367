"""Sequences, groups and content hashes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvconnector.cache.block_manager import (
    ExtraKey,
    Sequence,
    SequenceError,
    SequenceGroup,
    SequenceStatus,
)


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [2**63], [None]])
def test_tokens_must_be_64_bit_integers(tokens: list[int]) -> None:
    with pytest.raises(SequenceError, match="64-bit"):
        Sequence(1, tokens)
    seq = Sequence(1, [1])
    with pytest.raises(SequenceError, match="64-bit"):
        seq.append_tokens(tokens)
    assert seq.num_tokens == 1


def test_a_sequence_needs_a_token_and_a_group_a_sequence() -> None:
    with pytest.raises(SequenceError, match="at least one token"):
        Sequence(1, [])
    with pytest.raises(SequenceError, match="at least one sequence"):
        SequenceGroup("r", [])


def test_a_group_holds_each_id_once_and_selects_by_status() -> None:
    group = SequenceGroup("r", [Sequence(1, [1]), Sequence(2, [1])])
    with pytest.raises(SequenceError) as caught:
        group.add(Sequence(2, [5]))
    assert caught.value.context == {"request_id": "r", "seq_id": 2}
    group.seqs()[1].status = SequenceStatus.RUNNING
    assert [seq.seq_id for seq in group.seqs(SequenceStatus.RUNNING)] == [2]
    assert [seq.seq_id for seq in group.seqs()] == [1, 2]
    assert repr(group) == (
        "SequenceGroup('r', [Sequence(1, 1 tokens, waiting), Sequence(2, 1 tokens, running)])"
    )


def test_a_block_that_is_not_full_has_no_hash() -> None:
    with pytest.raises(SequenceError, match="full blocks"):
        Sequence(1, range(7)).block_hashes(4, 2)


def test_extra_keys_are_told_apart_by_type_order_and_boundary() -> None:
    keys: list[tuple[ExtraKey, ...]] = [
        (),
        ("",),
        (b"",),
        ("1",),
        (b"1",),
        (1,),
        (-1,),
        ("ab",),
        ("a", "b"),
        ("b", "a"),
        (0, 1),
    ]
    hashes = {Sequence(1, [1], extra_keys=key).block_hashes(1, 1)[0] for key in keys}
    assert len(hashes) == len(keys)


def test_an_extra_key_of_another_type_is_refused() -> None:
    with pytest.raises(SequenceError, match="extra key"):
        Sequence(1, [1], extra_keys=[1.5])  # type: ignore[list-item]


def test_hashes_are_the_same_in_every_process() -> None:
    program = (
        "from kvconnector.cache.block_manager import Sequence\n"
        "seq = Sequence(1, range(8), extra_keys=['adapter', 7, b'salt'])\n"
        "print(seq.block_hashes(4, 2)[1].hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    seq = Sequence(1, range(8), extra_keys=["adapter", 7, b"salt"])
    assert printed == {seq.block_hashes(4, 2)[1].hex()}
