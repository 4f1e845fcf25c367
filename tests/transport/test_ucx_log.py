"""UCX's log: a fatal message does not end the process and does not need the GIL."""

import ctypes
import logging
import sys
import threading

import numpy as np
import pytest
from numba import njit

from kvconnector.transport.ucx import load_library, open_ucx_transport
from kvconnector.transport.ucx.log import LOG_GUARD, MAX_PER_PLACE
from kvconnector_kernels.pump.native import call

pytestmark = pytest.mark.ucx

FATAL, WARN = 0, 2


class Component(ctypes.Structure):
    """`ucs_log_component_config_t`."""

    _fields_ = (("level", ctypes.c_int), ("name", ctypes.c_char * 16), ("filter", ctypes.c_char_p))


def log_arguments(file, level, text):
    component = Component(7, b"test", b"*")
    return file, ctypes.c_uint(7), b"function", level, ctypes.byref(component), text


def log(file, level, text):
    load_library().keeping.ucs_log_dispatch(*log_arguments(file, level, text))


@njit(nogil=True)
def log_later(sleep, dispatch, arguments, done):
    call(sleep, (50_000,))
    call(dispatch, arguments)
    done[0] = 1


def address_of(value):
    return ctypes.cast(value, ctypes.c_void_p).value or 0


def test_a_thread_logs_while_another_holds_the_gil(caplog):
    transport = open_ucx_transport()
    component, strings = Component(7, b"test", b"*"), [b"some.c", b"function", b"the peer is gone"]
    file, function, text = (address_of(ctypes.c_char_p(string)) for string in strings)
    arguments = (file, 7, function, FATAL, ctypes.addressof(component), text)
    usleep = ctypes.PyDLL(None).usleep
    dispatch = address_of(load_library().keeping.ucs_log_dispatch)
    done = np.zeros(1, np.int64)
    log_later(
        address_of(usleep), address_of(ctypes.PyDLL(None).labs), (0,) * 6, np.zeros(1, np.int64)
    )
    thread = threading.Thread(
        target=log_later, args=(address_of(usleep), dispatch, arguments, done)
    )
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread.start()
        for _ in range(100):
            usleep(10_000)  # keeps the GIL
            if done[0]:
                break
        ended_without_the_gil = bool(done[0])
    finally:
        sys.setswitchinterval(interval_s)
    thread.join()
    assert ended_without_the_gil
    with caplog.at_level(logging.WARNING):
        LOG_GUARD.report()
    assert "some.c:7): the peer is gone" in caplog.text
    transport.close()


def test_only_expected_leaks_are_kept_quiet_and_the_rest_of_a_place_is_counted(caplog, capfd):
    transport = open_ucx_transport()
    with caplog.at_level(logging.WARNING):
        log(b"/a/mpool.c", WARN, b"a leak")
        with LOG_GUARD.leaks_expected():
            log(b"/a/mpool.c", WARN, b"an expected leak")
            for _ in range(MAX_PER_PLACE + 2):
                log(b"/a/other.c", WARN, b"something else")
        transport.close()
        LOG_GUARD.report(is_last=True)  # another test's transport may be open
    assert caplog.text.count("something else") == MAX_PER_PLACE
    assert "other.c:7): 2 more like these" in caplog.text
    assert "expected" not in caplog.text + capfd.readouterr().out
