"""Building the library: at install, once, with what is there."""

import platform
import shlex
import shutil
import tarfile
import zipfile

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from kvconnector import _version
from kvconnector_kernels import library
from native import build
from native.build import BuildError

ROOT = build.FOLDER.parents[1]


@pytest.fixture
def no_compiler(monkeypatch):
    """A host without a C compiler, and without the package that brings one."""
    monkeypatch.setenv("CC", "no-such-compiler")
    build.system_compiler.cache_clear()
    monkeypatch.setattr(build, "has_zig", lambda: False)
    yield
    build.system_compiler.cache_clear()


def test_a_host_without_a_compiler_gets_one_from_pypi(no_compiler, tmp_path):
    assert build.requirements() == [build.ZIG]
    with pytest.raises(BuildError, match=f"no C compiler works here: .* pip install {build.ZIG}"):
        build.build(tmp_path / "library.so")


def test_wheels_for_other_hosts_are_built_by_one_compiler_everywhere(tmp_path):
    assert build.requirements("aarch64") == build.requirements("x86_64") == [build.ZIG]
    with pytest.raises(BuildError, match="not for 'riscv64'"):
        build.build(tmp_path / "library.so", "riscv64")


def test_a_compiler_without_headers_counts_as_none(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    build.system_compiler.cache_clear()
    try:
        assert build.system_compiler() == ()
    finally:
        build.system_compiler.cache_clear()


def test_what_the_compiler_says_is_reported_and_the_old_library_stays(tmp_path):
    compiler = build.system_compiler()
    if not compiler:
        pytest.skip("no C compiler works here")
    (tmp_path / "wrong.c").write_text("int wrong(void) { return missing; }\n")
    output = tmp_path / "library.so"
    output.write_bytes(b"old")
    with pytest.raises(BuildError, match="missing"):
        build.compile_files(compiler, output, [tmp_path / "wrong.c"], ["-shared"])
    assert output.read_bytes() == b"old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["library.so", "wrong.c"]


def test_a_changed_source_makes_the_library_out_of_date(monkeypatch, tmp_path):
    for path in build.FOLDER.iterdir():
        if path.suffix in {".c", ".h"}:
            shutil.copy2(path, tmp_path)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert build.is_current(library.PATH)
    header = tmp_path / "kvc.h"
    header.write_text(header.read_text() + "\n")
    assert not build.is_current(library.PATH)
    assert not build.is_current(tmp_path / "missing.so")


def wheel_of(sources, folder):
    """Build a wheel for this machine in a folder, without optimization, which takes seconds. Returns its path."""
    compiler = build.system_compiler()
    if not (compiler or build.has_zig()):
        pytest.skip("no C compiler works here")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KVCONNECTOR_WHEEL_MACHINE", raising=False)
        if compiler:
            plain = folder / "cc"
            plain.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@" -O0\n')
            plain.chmod(0o755)
            patch.setenv("CC", str(plain))
        (path,) = WheelBuilder(str(sources)).build(directory=str(folder), versions=["standard"])
    return path


@pytest.fixture(scope="module")
def wheel_path(tmp_path_factory):
    """The wheel of this checkout."""
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


def test_a_wheel_is_for_all_pythons_of_this_machine_and_has_the_library(wheel_path):
    assert wheel_path.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel_path) as wheel:
        names = wheel.namelist()
        (built,) = (name for name in names if name.endswith(".so"))
        assert built == f"kvconnector_kernels/{build.NAME}"
        assert build.sources_hash().encode() in wheel.read(built)
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        needed = [
            line
            for line in wheel.read(metadata).decode().splitlines()
            if line.startswith("Requires-Dist:") and "extra ==" not in line
        ]
        assert needed
        assert not any("numba" in line for line in needed)


def test_an_archive_of_sources_and_the_wheel_made_of_it_name_their_commit(tmp_path):
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (sources,) = (each for each in tmp_path.iterdir() if each.is_dir())
    assert _version._version(sources / "kvconnector") == _version.__version__
    with zipfile.ZipFile(wheel_of(sources, tmp_path)) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path / "installed")
    assert len(names) == len({*names})
    assert _version._version(tmp_path / "installed" / "kvconnector") == _version.__version__
    assert not any(name.startswith(("scripts", "tests", "examples")) for name in names)


def test_a_wheel_of_a_checkout_names_its_commit_in_its_version(wheel_path, tmp_path):
    """Two builds of one release can be told apart, as in the checkouts that they were made of."""
    with zipfile.ZipFile(wheel_path) as wheel:
        wheel.extractall(tmp_path / "installed")
    package = tmp_path / "installed" / "kvconnector"
    assert _version._version(package) == _version.__version__
    assert (package / "_commit").is_file() == ("+g" in _version.__version__)
