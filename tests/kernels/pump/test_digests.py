"""Digests that the loop appends and checks, in host memory and in a device's memory, compared with xxhash."""

import ctypes

import numpy as np
import pytest
import xxhash

from kvconnector.datapath.pump.digests import Digests
from kvconnector_kernels.pump import loop_calls
from kvconnector_kernels.pump.records import CORRUPTED, DIGEST_BYTES, State

# XXH3 treats each of these lengths differently
LENGTHS = [1, 3, 8, 16, 128, 240, 241, 1024, 4096 + 17]
DEVICE_ERROR = 700
_copier = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)


def call(name, state, chunk):
    step = getattr(loop_calls, f"{name}_digest")
    return step(ctypes.addressof(state), chunk.ctypes.data, len(chunk))


class Loop:
    """A loop state with digests. With `device`, other host memory stands for a device's, and is staged in a room."""

    def __init__(self, device, status=0):
        self.state = State()
        self._digests = Digests("cpu", 1)
        self._digests.attach(self.state)
        self._room = np.zeros(1 << 13, np.uint8)
        self._copy = _copier(lambda to, source, count: self._move(to, source, count) or status)
        if device:
            self.state.digest_room = self._room.ctypes.data
            for name in ("copy_to_host", "copy_to_device"):
                setattr(self.state, name, ctypes.cast(self._copy, ctypes.c_void_p).value)

    def _move(self, to, source, count):
        assert (to == self._room.ctypes.data) != (source == self._room.ctypes.data)
        ctypes.memmove(to, source, count)

    def call(self, name, chunk):
        return call(name, self.state, chunk)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("length", LENGTHS)
def test_digests_equal_xxhash_and_detect_changed_bytes(length, device):
    checked = Loop(device)
    content = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    chunk = np.concatenate([content, np.zeros(DIGEST_BYTES, np.uint8)])
    assert checked.call("append", chunk) == 0
    assert chunk.tobytes() == content.tobytes() + xxhash.xxh3_64_digest(content)
    assert checked.call("check", chunk) == 0
    for place in (0, length // 2, length - 1, length, len(chunk) - 1):
        chunk[place] ^= 4
        assert checked.call("check", chunk) == CORRUPTED
        chunk[place] ^= 4


@pytest.mark.parametrize("name", ["append", "check"])
def test_device_copy_errors_are_returned(name):
    assert Loop(device=True, status=DEVICE_ERROR).call(name, np.zeros(100, np.uint8)) == 700


def test_chunks_are_unchanged_without_digests():
    state, chunk = State(), np.full(64, 7, np.uint8)
    for name in ("append", "check"):
        assert call(name, state, chunk) == 0
    assert (chunk == 7).all()
