"""The order of a lease board's loads and stores, also on processors that reorder them."""

import re
from itertools import product

import numpy as np
import pytest

from kvconnector_kernels.pump import board_entries
from native import build

KEY, OTHER_KEY = bytes(range(16)), bytes([*range(15), 99])
NO_KEY = bytes(16)
LOADS, FENCE = {"ldar", "ldapr"}, "dmb"


@pytest.fixture(scope="module")
def on_aarch64(tmp_path_factory):
    """Return a function's ordered loads, stores and fences in machine code for aarch64."""
    if not build.has_zig():
        pytest.skip("no compiler for aarch64: pip install ziglang")
    assembly = tmp_path_factory.mktemp("aarch64") / "board.s"
    build.compile_files(
        build.zig_compiler("aarch64"),
        assembly,
        [build.FOLDER / "board.c"],
        ["-O3", "-S", "-Wno-unused-command-line-argument"],
    )
    bodies = re.split(r"^(kvc_\w+):", assembly.read_text(), flags=re.MULTILINE)
    functions = dict(zip(bodies[1::2], bodies[2::2], strict=True))

    def find(name):
        return re.findall(r"^\t(ldar|ldapr|stlr|dmb)\b", functions[name], re.MULTILINE)

    return find


def test_board_loads_are_ordered_between_two_fences(on_aarch64):
    found = on_aarch64("kvc_board_look_up")
    # a function may leave in several places
    first, *loads = [each for each in found if each == FENCE or each in LOADS]
    assert first == loads[-1] == FENCE
    # the key, four numbers, and the key again
    assert len([each for each in loads if each in LOADS]) >= 4 + 4 + 4
    assert "stlr" not in found


@pytest.mark.parametrize("name, num_words", [("claim", 5), ("write", 1)])
def test_board_stores_are_ordered(name, num_words, on_aarch64):
    assert on_aarch64(f"kvc_board_{name}") == ["stlr"] * num_words


def test_clearing_an_entry_ends_with_a_fence(on_aarch64):
    assert on_aarch64("kvc_board_clear") == ["stlr"] * 5 + [FENCE]


@pytest.mark.parametrize("place", range(board_entries.ENTRIES_PER_BUCKET))
def test_only_ready_entries_with_the_whole_key_are_found(place):
    entries = np.zeros(board_entries.ENTRIES_PER_BUCKET, board_entries.ENTRY)
    bucket = entries.ctypes.data
    board_entries.claim(bucket + place * board_entries.ENTRY_BYTES, KEY, 7)
    entries[place]["num_tokens"], entries[place]["ahead"] = 40, 3
    for ready, key in product((0, 6, 7, 8), (KEY, OTHER_KEY)):
        board_entries.write(entries["ready"][place:].ctypes.data, ready)
        expected = (40, 3) if (ready, key) == (7, KEY) else (-1, 0)
        assert board_entries.look_up_lease(bucket, 1, key) == expected
    board_entries.write(entries["ready"][place:].ctypes.data, 7)
    board_entries.clear(bucket + place * board_entries.ENTRY_BYTES)
    assert board_entries.look_up_lease(bucket, 1, KEY) == (-1, 0)
    # a look-up of an empty entry's key does not find a cleared entry
    assert board_entries.look_up_lease(bucket, 1, NO_KEY) == (-1, 0)


def test_the_first_word_of_a_key_chooses_the_bucket():
    entries = np.zeros(4 * board_entries.ENTRIES_PER_BUCKET, board_entries.ENTRY)
    for bucket in range(4):
        key = (8 + bucket).to_bytes(4, "little") + bytes(12)
        entry = entries[bucket * board_entries.ENTRIES_PER_BUCKET :].ctypes.data
        board_entries.claim(entry, key, 1)
        board_entries.write(entry + 20, 1)
        board_entries.write(entry + 24, 100 + bucket)
        board_entries.write(entry + 28, (1 << 31) - 1)
        assert board_entries.look_up_lease(entries.ctypes.data, 4, key) == (
            100 + bucket,
            (1 << 31) - 1,
        )
