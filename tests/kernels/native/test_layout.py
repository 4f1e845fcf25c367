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
    (version,) = re.findall(r"#define KVC_VERSION (\d+)", header)
    assert int(version) == library.VERSION
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


def test_a_missing_library_is_named_with_the_remedy(tmp_path):
    with pytest.raises(LibraryError, match=r"nowhere.so is missing: install kvconnector"):
        library._load(tmp_path / "nowhere.so")


def test_a_file_that_is_no_library_is_refused(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("text")
    with pytest.raises(LibraryError, match="cannot be used"):
        library._load(path)


def test_a_library_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    with pytest.raises(LibraryError, match="install kvconnector anew"):
        library._load(library.PATH)


def test_the_library_is_what_the_sources_make():
    assert build.is_current(library.PATH)
