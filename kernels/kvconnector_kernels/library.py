"""The compiled library: loaded once, by the first module that needs it, and compared with its mirror in Python.

It is built when the package is installed (kernels/native). Nothing is compiled here, and nothing is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_bool, c_int64, c_void_p
from pathlib import Path
from typing import Any

NAME = "libkvconnector_kernels.so"

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "kvc_board_look_up": (c_int64, c_void_p, c_int64, ctypes.c_char_p),
    "kvc_board_claim": (None, c_void_p, ctypes.c_char_p, c_int64),
    "kvc_board_clear": (None, c_void_p),
    "kvc_board_write": (None, c_void_p, c_int64),
    "kvc_wait_flag": (c_bool, c_void_p, c_int64),
    "kvc_copy_cpu": (c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64),
    "kvc_read_cpu": (c_int64, c_void_p, c_void_p, c_void_p, c_int64),
    "kvc_help": (None, c_void_p),
    "kvc_copy_cuda": (c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64),
    "kvc_read_cuda": (c_int64, c_void_p, c_void_p, c_void_p, c_int64),
    "kvc_fill_jobs": (None, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
    "kvc_apply_writes": (None, *[c_void_p, c_int64, c_void_p] * 2, c_int64, c_int64),
    "kvc_gather_rows": (
        *(None, c_void_p, c_int64, c_int64, c_void_p),
        *(c_void_p, c_int64, c_void_p, c_void_p, c_int64),
    ),
    "kvc_map_slots": (
        *(None, c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        *(c_void_p, c_int64, c_void_p, c_int64, c_void_p),
    ),
    "kvc_try_acquire": (c_bool, c_void_p, c_int64, c_int64, c_int64),
    "kvc_wait_until_free": (None, c_void_p),
    "kvc_release_inline": (None, c_void_p),
    "kvc_notify": (c_bool, c_void_p),
    "kvc_run_loop": (c_int64, c_void_p),
    "kvc_append_digest": (c_int64, c_void_p, c_void_p, c_int64),
    "kvc_check_digest": (c_int64, c_void_p, c_void_p, c_int64),
}
"""Result and arguments of every function that Python calls, by name."""


class LibraryError(ImportError):
    """The compiled library is missing, was built for another machine, or does not belong to this Python."""


class _LayoutEntry(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


def _load(path: Path) -> tuple[Any, Any]:
    """Return the library as a caller sees it that releases the GIL, and as one that keeps it."""
    if not path.is_file():
        raise LibraryError(
            f"the compiled library {path} is missing: install kvconnector (pip install .), or build it in a checkout "
            "(python kernels/native/build.py)"
        )
    try:
        releasing = ctypes.CDLL(str(path))
        keeping = ctypes.PyDLL(str(path), handle=releasing._handle)
        for library in (releasing, keeping):
            for name, (restype, *argtypes) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = restype, argtypes
    except (OSError, AttributeError) as error:
        raise LibraryError(
            f"the compiled library cannot be used: {error}: install kvconnector anew, or build the library (python "
            "kernels/native/build.py)",
            path=str(path),
        ) from error
    return releasing, keeping


PATH = Path(__file__).with_name(NAME)
releasing, keeping = _load(PATH)
"""The same functions. Calls of `releasing` release the GIL: use it for what sleeps or takes more than microseconds."""


def address_of_function(name: str, library: ctypes.CDLL = keeping) -> int:
    """Return the address of a function of a library, by default ours, for C that calls it."""
    address = ctypes.cast(getattr(library, name), c_void_p).value
    assert address is not None  # getattr would have raised
    return address


def check_mirror(structs: Sequence[tuple[str, type[ctypes.Structure]]]) -> None:
    """Compare structs of Python's, by name, with the library's: their fields, and where these are.

    Raises:
        LibraryError: they differ; the text has the first difference.
    """
    mirrored: list[tuple[str, int, int]] = []
    for name, struct in structs:
        mirrored.append((name, 0, ctypes.sizeof(struct)))
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            mirrored.append((f"{name}.{field}", place.offset, place.size))
    table = (_LayoutEntry * (len(mirrored) + 1)).in_dll(keeping, "kvc_layout")
    for entry, found in zip(table, [*mirrored, None], strict=True):
        there = (entry.name.decode(), entry.offset, entry.size) if entry.name else None
        if there != found:
            raise LibraryError(
                f"the compiled library has {there} where this Python expects {found}: install kvconnector anew, or "
                "build the library (python kernels/native/build.py)",
                path=str(PATH),
            )
        if there is None:
            return
