"""UCX's log, where it would complain about what is known."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SONAME = "libucs.so.0"
_LEVEL_WARN = 2
_STOP, _CONTINUE = 0, 1
_LEAK_SOURCES = (b"mpool.c", b"rcache.c")

# file, line, function, level, component, message; the va_list that follows is not touched.
_LogFunction = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
)


@contextmanager
def leaks_expected() -> Iterator[None]:
    """Keep UCX from warning, while the block destroys a worker, that requests and their memory were not given back.

    A send through shared memory that its peer never received cannot be taken back: it goes with its worker, which is safe,
    but UCX reports it as a leak.
    """
    libucs: Any = ctypes.PyDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    libucs.ucs_log_push_handler(_drop_leak_warnings)
    try:
        yield
    finally:
        libucs.ucs_log_pop_handler()


@_LogFunction
def _drop_leak_warnings(
    file: bytes, _line: int, _function: bytes, level: int, _component: int, _message: bytes
) -> int:
    from_leak_check = os.path.basename(file) in _LEAK_SOURCES
    return _STOP if level == _LEVEL_WARN and from_leak_check else _CONTINUE
