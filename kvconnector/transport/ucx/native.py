"""C functions that UCX calls in its own threads, compiled here since they must not wait for the GIL.

A thread that holds the GIL may be waiting for a lock of UCX's, and the thread that calls back may hold that lock. So
these functions touch only plain memory and libc. Python reads that memory later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir

I32, I64 = ir.IntType(32), ir.IntType(64)

_engines: list[Any] = []
"""Owners of the machine code, which UCX may call until the process ends."""


def compile_function(
    result: ir.Type, parameters: list[ir.Type], body: Callable[[ir.IRBuilder, Any], None]
) -> int:
    """Compile a C function; takes about 10 ms.

    Args:
        result: Type of its result.
        parameters: Types of its parameters; pointers are `I64`.
        body: Emits the code, given a builder and the values of the parameters.

    Returns:
        The address of the function, valid until the process ends.
    """
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(result, parameters), "function")
    body(ir.IRBuilder(function.append_basic_block()), function.args)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address("function"))


def call_libc(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: Any) -> Any:
    """Emit a call of a libc function without variable arguments. Returns its result."""
    address = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.inttoptr(I64(address), kind.as_pointer()), arguments)


def at(builder: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    """Return the emitted pointer to a value at an address, an int or an `I64`."""
    value = I64(address) if isinstance(address, int) else address
    return builder.inttoptr(value, kind.as_pointer())


def increment(builder: ir.IRBuilder, address: int) -> Any:
    """Emit an atomic increment of the 64-bit counter at an address. Returns its value before."""
    return builder.atomic_rmw("add", at(builder, address, I64), I64(1), "seq_cst")
