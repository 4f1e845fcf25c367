"""UCX's log: what must not end the process, and what is known already.

UCX logs an error of an endpoint without peer error handling at level "fatal", and its log's own handler then aborts the
process: reading the memory of a peer that was killed would take this process along. The operation returns its status
all the same, so such a message is passed on to Python's log instead.

UCX may log in any thread and under its locks, while a thread that holds the GIL waits for such a lock. So the handler
is compiled: it notes messages in a table, which `report` reads later.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import binding, ir

_logger = logging.getLogger(__name__)

_SONAME = "libucs.so.0"
_LEVEL_FATAL, _LEVEL_WARN = 0, 2
_STOP, _CONTINUE = 0, 1
_LEAK_SOURCES = ("mpool.c", "rcache.c")

# The table: how many messages were noted, whether leaks are expected, then file, line, text and level of the
# last ones.
_COUNT, _EXPECTING_LEAKS, _NOTES = 0, 1, 2
_NUM_NOTES, _NOTE_FIELDS = 64, 4


class _LogGuard:
    """The handler on top of UCX's own, installed while a transport is open. UCX's log is one per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._num_reported = 0
        self._table = np.zeros(_NOTES + _NUM_NOTES * _NOTE_FIELDS, np.int64)
        self._handler: tuple[Any, int] | None = None

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._handler = self._handler or _compile_handler(self._table.ctypes.data)
                _libucs().ucs_log_push_handler(ctypes.c_void_p(self._handler[1]))
                # UCX may log after Python has ended.
                atexit.register(self._remove)

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                atexit.unregister(self._remove)
                self._remove()
        self.report()

    def report(self) -> None:
        """Pass what the handler has noted since the last call on to Python's log."""
        if self._table[_COUNT] == self._num_reported:
            return
        with self._lock:
            count = int(self._table[_COUNT])
            first = max(self._num_reported, count - _NUM_NOTES)
            self._num_reported = count
            notes = self._table[_NOTES:].reshape(_NUM_NOTES, _NOTE_FIELDS)
            found = [notes[number % _NUM_NOTES].tolist() for number in range(first, count)]
        for file, line, text, level in found:
            source = os.path.basename(ctypes.string_at(file).decode(errors="replace"))
            if level == _LEVEL_WARN and source in _LEAK_SOURCES:
                continue
            words = ctypes.string_at(text).decode(errors="replace")
            _logger.warning("UCX reports (%s:%d): %s", source, line, words)

    @contextmanager
    def leaks_expected(self) -> Iterator[None]:
        """Keep UCX from warning, while the block destroys a worker, that requests and memory were not given back. A
        send through shared memory that its peer never received goes with its worker, which is safe.
        """
        self._table[_EXPECTING_LEAKS] += 1
        try:
            yield
        finally:
            self._table[_EXPECTING_LEAKS] -= 1

    def _remove(self) -> None:
        _libucs().ucs_log_pop_handler()


def _compile_handler(table: int) -> tuple[Any, int]:
    """The handler that notes messages in the table at an address: what owns its code, and where that is. Its arguments
    are file, line, function, level, component and format, UCX's constants; it leaves the va_list that follows alone.
    """
    i32, i64 = ir.IntType(32), ir.IntType(64)
    module = ir.Module()
    handle = ir.Function(module, ir.FunctionType(i32, [i64, i32, i64, i32, i64, i64]), "handle")
    file, line, _, level, _, text = handle.args
    builder = ir.IRBuilder(handle.append_basic_block())

    def field(index: Any) -> Any:
        address = builder.add(i64(table), builder.mul(index, i64(8)))
        return builder.inttoptr(address, i64.as_pointer())

    is_leak = builder.and_(
        builder.icmp_signed("==", level, i32(_LEVEL_WARN)),
        builder.icmp_signed("!=", builder.load(field(i64(_EXPECTING_LEAKS))), i64(0)),
    )
    is_fatal = builder.icmp_signed("==", level, i32(_LEVEL_FATAL))
    with builder.if_then(builder.or_(is_fatal, is_leak)):
        count = builder.load(field(i64(_COUNT)))
        note = builder.mul(builder.urem(count, i64(_NUM_NOTES)), i64(_NOTE_FIELDS))
        for offset, value in enumerate(
            (file, builder.zext(line, i64), text, builder.zext(level, i64))
        ):
            builder.store(value, field(builder.add(note, i64(_NOTES + offset))))
        builder.store(builder.add(count, i64(1)), field(i64(_COUNT)))
        builder.ret(i32(_STOP))
    builder.ret(i32(_CONTINUE))
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    return engine, engine.get_function_address("handle")


def _libucs() -> Any:
    return ctypes.PyDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


LOG_GUARD = _LogGuard()
