"""Raw memory, records in it, and C functions for compiled code. All values are int64."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_I64, _I32, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(8)


def operation(result: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic on int64 from a function that emits it, given the builder and the values of its arguments."""

    def define(emit: Callable[..., Any]) -> Any:
        @wraps(emit)
        def typed(typingctx: Any, *arguments: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                found = emit(builder, *values)
                return context.get_dummy_value() if result is types.void else found

            return result(*[types.int64] * len(arguments)), codegen

        return intrinsic(typed)

    return define


def pointer_to(kind: Any, builder: Any, address: Any) -> Any:
    """Return the address as a pointer of LLVM's."""
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def call(typingctx: Any, function: Any, arguments: Any) -> Any:
    """Call the C function at an address with a tuple of integers or pointers; its result register as int64.

    A result narrower than 64 bits leaves the upper bits undefined: mask them.
    """
    signature = types.int64(types.int64, types.UniTuple(types.int64, len(arguments)))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[1])
        function_type = ir.FunctionType(_I64, [_I64] * len(values))
        return builder.call(builder.inttoptr(args[0], function_type.as_pointer()), values)

    return signature, codegen


@intrinsic
def record_at(typingctx: Any, address: Any, dtype: Any) -> Any:
    """Return the record of a numpy dtype at an address: reads and writes of its fields go there."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(dtype.dtype))

    return dtype.dtype(types.int64, dtype), codegen


@operation(types.voidptr)
def _pointer(builder: Any, address: Any) -> Any:
    return pointer_to(_I8, builder, address)


@njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def array_at(address: Any, count: Any, dtype: Any) -> Any:
    """Return the `count` elements of a numpy dtype at an address."""
    return carray(_pointer(address), (count,), dtype)


@operation(types.int64)
def two_words(builder: Any) -> Any:
    """Return the address of two int64 on the caller's stack, where no other thread writes; valid until it returns."""
    return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_I64, 2)), _I64)


@operation(types.int64)
def load(builder: Any, address: Any) -> Any:
    """Return the int64 at an address, aligned or not."""
    return builder.load(pointer_to(_I64, builder, address), align=1)


@operation(types.void)
def store(builder: Any, address: Any, value: Any) -> None:
    """Write an int64 at an address, aligned or not."""
    builder.store(value, pointer_to(_I64, builder, address), align=1)


@operation(types.int64)
def swap_bytes(builder: Any, value: Any) -> Any:
    """Return an int64 with its bytes in the reverse order."""
    return builder.bswap(value)


@operation(types.int64)
def load_flag(builder: Any, address: Any) -> Any:
    """Return the 32-bit flag at an address, written by another device or thread; nothing after it is read before it."""
    return builder.zext(builder.load_atomic(pointer_to(_I32, builder, address), "acquire", 4), _I64)


@operation(types.void)
def store_flag(builder: Any, address: Any, value: Any) -> None:
    """Write a 32-bit flag; everything before it is visible to a thread that reads it."""
    flag = pointer_to(_I32, builder, address)
    builder.store_atomic(builder.trunc(value, _I32), flag, "release", 4)


@operation(types.boolean)
def exchange_flag(builder: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write a 32-bit flag if it has the expected value. Returns True if it had. What came before is ordered."""
    flag, words = pointer_to(_I32, builder, address), (expected, value)
    orders = "seq_cst", "seq_cst"
    found = builder.cmpxchg(flag, *(builder.trunc(word, _I32) for word in words), *orders)
    return builder.extract_value(found, 1)


@operation(types.int64)
def add_flag(builder: Any, address: Any, value: Any) -> Any:
    """Add to a 32-bit flag at once. Returns what it was. What came before and what comes after is ordered."""
    flag, added = pointer_to(_I32, builder, address), builder.trunc(value, _I32)
    return builder.zext(builder.atomic_rmw("add", flag, added, "seq_cst"), _I64)


@operation(types.void)
def fence(builder: Any) -> None:
    """Let no load or store move across this, in either direction. On x86 this restrains only the compiler."""
    builder.fence("acq_rel")


@operation(types.void)
def end_stream(builder: Any) -> None:
    """Streamed lines are ordered by a fence only: without it another thread might not see them after a flag."""
    builder.fence("seq_cst")
