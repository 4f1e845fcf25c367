"""The clock in compiled code."""

import ctypes

from kvconnector_kernels.library import releasing
from kvconnector_kernels.pump.loop_calls import try_acquire
from kvconnector_kernels.pump.records import DRIVER, INLINE, Lock, State, aligned_lock


def test_threads_read_the_clock_independently():
    """A second thread reads the clock while the first one is in its call of it."""
    lock = aligned_lock()
    lock.owner = DRIVER
    waits, times = [], iter([0, 10, 20, 25])

    def clock(kind, timespec):
        timespec.contents[:] = [0, next(times)]
        if not waits:
            waits.append(None)
            # another wait begins and ends between the call and the read of its result
            waits[0] = try_acquire(ctypes.addressof(state), INLINE, 5, 0)
        return 0

    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64 * 2))
    function = prototype(clock)
    state = State(lock=ctypes.addressof(lock))
    state.clock_gettime = ctypes.cast(function, ctypes.c_void_p).value
    # the outer wait begins at 0 and ends at 25, the inner one lasts from 10 to 20
    assert not try_acquire(ctypes.addressof(state), INLINE, 25, 0)
    assert waits == [False]
    assert next(times, None) is None


def test_a_wait_for_a_flag_ends_with_the_flag_or_the_time():
    flag = ctypes.c_uint32()
    address = ctypes.addressof(flag)
    assert not releasing.kvc_wait_flag(address, 1_000_000)
    flag.value = 1
    assert releasing.kvc_wait_flag(address, 1 << 62)


def test_the_words_of_the_lock_are_on_cache_lines_of_their_own():
    words = ("owner", "pending", "looping", "inline_thread")
    assert [getattr(Lock, word).offset for word in words] == [0, 64, 128, 192]
    assert ctypes.addressof(aligned_lock()) % 64 == 0
