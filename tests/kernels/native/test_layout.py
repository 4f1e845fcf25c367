"""The library and its mirror in Python: what differs is refused, by name."""

import ctypes
import re

import pytest

from kvconnector_kernels import library
from kvconnector_kernels.library import LibraryError
from kvconnector_kernels.pump import records
from kvconnector_kernels.relayout.convert import ROUNDINGS
from native import build


class Moved(ctypes.Structure):
    _fields_ = (("head_stride", ctypes.c_int64), ("base", ctypes.c_void_p))


class Shorter(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p),)


@pytest.mark.parametrize(
    "name, struct", [("part", Moved), ("part", Shorter), ("other", records.Part)]
)
def test_a_mirror_that_differs_is_refused(name, struct):
    with pytest.raises(
        LibraryError,
        match=r"the compiled library has \('part', 0, 40\) where .* \(python kernels/native/build.py\)",
    ):
        library.check_mirror([(name, struct)])


def test_fields_of_another_name_or_place_are_refused():
    class Renamed(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("block", ctypes.c_int64 * 4))

    with pytest.raises(
        LibraryError, match=r"\('part.block_stride', 8, 8\) where .* \('part.block', 8, 32\)"
    ):
        library.check_mirror([("part", Renamed)])


def test_structs_that_the_mirror_lacks_are_noticed():
    with pytest.raises(LibraryError, match="'side'"):
        library.check_mirror([("part", records.Part)])


def test_constants_of_the_mirror_are_those_of_the_header():
    header = (build.FOLDER / "kvc.h").read_text()
    found = {}
    for body in re.findall(r"enum \{(.*?)\};", header, re.DOTALL):
        value = -1
        for item in body.strip().rstrip(",").split(","):
            name, _, given = item.strip().partition(" = ")
            value = eval(given, {}, {}) if given else value + 1  # noqa: S307  our own header's numbers
            found[name.removeprefix("KVC_")] = value
    mirrored = {name: getattr(records, name) for name in found if hasattr(records, name)}
    mirrored |= {name.upper(): number for name, number in ROUNDINGS.items()}
    assert {name: found[name] for name in mirrored} == mirrored
    # what the mirror lacks is the library's own
    own = {"NS_PER_MS", "NS_PER_S", "BASELINE", "AVX2", "AVX512"}
    assert found.keys() - mirrored.keys() == own


def test_functions_are_called_with_the_arguments_of_the_header():
    header = (build.FOLDER / "kvc.h").read_text()
    found = re.findall(r"^KVC_API (?!extern)(\w+) (\w+)\(([^)]*)\);", header, re.MULTILINE)
    numbers = {
        "void": None,
        "bool": ctypes.c_bool,
        "int64_t": ctypes.c_int64,
    }
    pointers = {ctypes.c_void_p, ctypes.c_char_p}
    assert {name for _, name, _ in found} == library._SIGNATURES.keys()
    for result, name, arguments in found:
        restype, *argtypes = library._SIGNATURES[name]
        assert restype is numbers[result], name
        for argument, argtype in zip(arguments.split(","), argtypes, strict=True):
            kind, _, _ = argument.strip().rpartition(" ")
            assert argtype in pointers if "*" in argument else argtype is numbers[kind], name


def test_a_missing_library_is_named_with_the_remedy(tmp_path):
    with pytest.raises(LibraryError, match=r"nowhere.so is missing: install kvconnector"):
        library._load(tmp_path / "nowhere.so")


def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("text")
    with pytest.raises(LibraryError, match="cannot be used"):
        library._load(path)


def test_a_library_without_one_of_the_functions_is_refused(monkeypatch):
    monkeypatch.setitem(library._SIGNATURES, "kvc_newer", (None,))
    with pytest.raises(LibraryError, match=r"kvc_newer: install kvconnector anew, or build"):
        library._load(library.PATH)


def test_the_library_is_what_the_sources_make():
    assert build.is_current(library.PATH)
