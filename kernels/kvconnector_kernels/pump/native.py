"""Raw memory, records in it, and C functions for compiled code. All values are int64."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_I64, _I32, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(8)


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
    """The record of a numpy dtype at an address: reads and writes of its fields go there."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(dtype.dtype))

    return dtype.dtype(types.int64, dtype), codegen


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _I8.as_pointer())

    return types.voidptr(types.int64), codegen


@njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def array_at(address: Any, count: Any, dtype: Any) -> Any:
    """The `count` elements of a numpy dtype at an address."""
    return carray(_pointer(address), (count,), dtype)


@intrinsic
def two_words(typingctx: Any) -> Any:
    """The address of two int64 on the caller's stack, which no other thread writes; valid until the caller returns."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        return builder.ptrtoint(words, _I64)

    return types.int64(), codegen


@intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """The int64 at an address, aligned or not."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()), align=1)

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64 at an address, aligned or not."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def swap_bytes(typingctx: Any, value: Any) -> Any:
    """An int64 with its bytes in the reverse order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bswap(args[0])

    return types.int64(types.int64), codegen


@intrinsic
def load_flag(typingctx: Any, address: Any) -> Any:
    """The 32-bit flag at an address, written by another device or thread; nothing after it is read before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I32.as_pointer())
        return builder.zext(builder.load_atomic(pointer, "acquire", 4), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def store_flag(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a 32-bit flag; everything before it is visible to who reads it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I32.as_pointer())
        builder.store_atomic(builder.trunc(args[1], _I32), pointer, "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def exchange_flag(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write a 32-bit flag if it has the expected value. Returns True if it had. What came before is ordered."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I32.as_pointer())
        result = builder.cmpxchg(
            pointer,
            builder.trunc(args[1], _I32),
            builder.trunc(args[2], _I32),
            "seq_cst",
            "seq_cst",
        )
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def add_flag(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to a 32-bit flag at once. Returns what it was. What came before and what comes after is ordered."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I32.as_pointer())
        old = builder.atomic_rmw("add", pointer, builder.trunc(args[1], _I32), "seq_cst")
        return builder.zext(old, _I64)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """No load or store moves over it, in either direction. On x86 this keeps the compiler alone from moving them."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), codegen
