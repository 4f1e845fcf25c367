"""The words of the driver lock, and waits in compiled code."""

import ctypes

import pytest

from kvconnector_kernels.library import releasing
from kvconnector_kernels.pump.loop_calls import try_acquire
from kvconnector_kernels.pump.records import DRIVER, INLINE, NOBODY, Lock, State, aligned_lock

THREAD = 77


@pytest.mark.parametrize("before", [DRIVER, INLINE, NOBODY])
@pytest.mark.parametrize("caller", [DRIVER, INLINE])
def test_only_a_free_lock_is_acquired(before, caller):
    lock = aligned_lock()
    lock.owner, lock.inline_thread = before, 5
    state = State(lock=ctypes.addressof(lock))
    is_free = before == NOBODY
    assert try_acquire(ctypes.addressof(state), caller, 0, THREAD) == is_free
    assert (lock.owner, lock.inline_thread) == ((caller, THREAD) if is_free else (before, 5))


def test_a_wait_for_a_flag_ends_with_the_flag_or_the_time():
    flag = ctypes.c_uint32()
    address = ctypes.addressof(flag)
    assert not releasing.kvc_wait_flag(address, 1_000_000)
    flag.value = 1
    assert releasing.kvc_wait_flag(address, 1 << 62)


def test_the_words_of_the_lock_are_on_cache_lines_of_their_own():
    words = ("owner", "pending", "looping", "inline_thread", "wanted")
    assert [getattr(Lock, word).offset for word in words] == [0, 64, 128, 192, 256]
    assert ctypes.addressof(aligned_lock()) % 64 == 0
