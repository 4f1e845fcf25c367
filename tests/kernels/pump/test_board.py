"""The order of a lease board's loads and stores, also on processors that reorder them."""

import re
from itertools import product

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import njit

from kvconnector_kernels.pump import board

KEY, OTHER_KEY = (1, 2, 3, 4), (1, 2, 3, 5)
LOADS, STORES, FENCE = ("ldar", "ldapr"), ("stlr",), "dmb"


def on_aarch64(function):
    """Return the ordered loads, stores and fences in a function's machine code for aarch64."""
    compiled = njit(function.py_func)
    compiled.compile(function.signatures[0])
    (ir,) = compiled.inspect_llvm().values()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine()
    ir = re.sub(r'(target triple = ").*(")', r"\1aarch64-linux-gnu\2", ir)
    ir = re.sub(r"target datalayout = .*\n", "", ir)
    assembly = machine.emit_assembly(llvm.parse_assembly(ir))
    return re.findall(r"^\t(ldar|ldapr|stlr|dmb)\b", assembly, re.MULTILINE)


def test_board_loads_are_ordered_between_two_fences():
    found = on_aarch64(board.look_up)
    assert found[0] == found[-1] == FENCE
    assert set(found[1:-1]) <= set(LOADS)
    # the key, four numbers, and the key again
    assert len(found) - 2 >= 4 + 4 + 4


@pytest.mark.parametrize("name, num_words", [("claim", 5), ("write", 1)])
def test_board_stores_are_ordered(name, num_words):
    assert on_aarch64(getattr(board, name)) == ["stlr"] * num_words


def test_clearing_an_entry_ends_with_a_fence():
    assert on_aarch64(board.clear) == ["stlr"] * 5 + [FENCE]


@pytest.mark.parametrize("place", range(board.ENTRIES_PER_BUCKET))
def test_only_ready_entries_with_the_whole_key_are_found(place):
    entries = np.zeros(board.ENTRIES_PER_BUCKET, board.ENTRY)
    bucket = entries.ctypes.data
    board.claim(bucket + place * board.ENTRY_BYTES, KEY, 7)
    entries[place]["num_tokens"], entries[place]["ahead"] = 40, 3
    for ready, key in product((0, 6, 7, 8), (KEY, OTHER_KEY)):
        board.write(entries["ready"][place:].ctypes.data, ready)
        expected = (40, 3) if (ready, key) == (7, KEY) else (-1, 0)
        assert board.look_up(bucket, 1, key) == expected
    board.write(entries["ready"][place:].ctypes.data, 7)
    board.clear(bucket + place * board.ENTRY_BYTES)
    assert board.look_up(bucket, 1, KEY) == (-1, 0)
    # a look-up of an empty entry's key does not find a cleared entry
    assert board.look_up(bucket, 1, (0, 0, 0, 0)) == (-1, 0)
