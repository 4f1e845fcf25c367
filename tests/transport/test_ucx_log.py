"""UCX's log: a fatal message does not end the process and does not need the GIL."""

import ctypes
import logging
import sys
import threading

import pytest

from kvconnector.transport.ucx import load_library, open_ucx_transport
from kvconnector.transport.ucx.log import LOG_GUARD, MAX_PER_PLACE
from native import build

pytestmark = pytest.mark.ucx

WARN = 2


class Component(ctypes.Structure):
    """`ucs_log_component_config_t`."""

    _fields_ = (("level", ctypes.c_int), ("name", ctypes.c_char * 16), ("filter", ctypes.c_char_p))


def log_arguments(file, level, text):
    component = Component(7, b"test", b"*")
    return file, ctypes.c_uint(7), b"function", level, ctypes.byref(component), text


def log(file, level, text):
    load_library().keeping.ucs_log_dispatch(*log_arguments(file, level, text))


LOG_LATER = """
#include <unistd.h>
typedef void log_function(const char *, unsigned, const char *, int, void *, const char *, ...);
void log_later(log_function *log, void *component, int *done);
void log_later(log_function *log, void *component, int *done)
{
    usleep(50000);
    log("some.c", 7, "function", 0, component, "the peer is gone");
    *done = 1;
}
"""


def test_a_thread_logs_while_another_holds_the_gil(caplog, tmp_path):
    if not build.system_compiler():
        pytest.skip("no C compiler works here, and Python has no call that sleeps and then logs")
    (tmp_path / "later.c").write_text(LOG_LATER)
    library = tmp_path / "later.so"
    build.compile_files(
        build.system_compiler(),
        library,
        [tmp_path / "later.c"],
        ["-shared", "-fvisibility=default"],
    )
    log_later = ctypes.CDLL(str(library)).log_later
    transport = open_ucx_transport()
    component, usleep, done = Component(7, b"test", b"*"), ctypes.PyDLL(None).usleep, ctypes.c_int()
    dispatch = load_library().keeping.ucs_log_dispatch
    arguments = dispatch, ctypes.byref(component), ctypes.byref(done)
    thread = threading.Thread(target=log_later, args=arguments)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread.start()
        for _ in range(100):
            usleep(10_000)  # keeps the GIL
            if done.value:
                break
        ended_without_the_gil = bool(done.value)
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
