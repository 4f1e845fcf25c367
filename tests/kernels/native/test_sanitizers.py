"""The library's sources under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: see driver.c."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from native import build

RACES, MEMORY = ("board", "crew", "lock", "notes"), ("copies", "conversions", "loop", "block_table")
DRIVER = Path(__file__).with_name("driver.c")
TIMEOUT_S = 100


@pytest.fixture(scope="module")
def driver_with(tmp_path_factory):
    """Return what builds a driver with sanitizers, once for each, or skips where the compiler lacks them."""
    folder, built = tmp_path_factory.mktemp("sanitized"), {}

    def build_driver(sanitizers):
        if sanitizers in built:
            return built[sanitizers]
        compiler = build.system_compiler()
        if not compiler:
            pytest.skip("no C compiler works here")
        # gcc warns that its ThreadSanitizer does not understand fences, which the board and streamed copies have
        flags = [
            f"-fsanitize={sanitizers}",
            "-fno-sanitize-recover=all",
            "-O1",
            "-g",
            "-Wno-error=tsan",
        ]
        empty = folder / "empty.c"
        empty.write_text("int main(void) { return 0; }\n")
        try:
            build.compile_files(compiler, folder / "empty", [empty], [*flags, "-Wno-error"])
            subprocess.run([folder / "empty"], check=True, timeout=TIMEOUT_S)
        except (build.BuildError, subprocess.CalledProcessError) as error:
            pytest.skip(f"the compiler or this system lacks -fsanitize={sanitizers}: {error}")
        driver = built[sanitizers] = folder / sanitizers
        build.compile_files(compiler, driver, [*build.sources(), DRIVER], flags)
        return driver

    return build_driver


@pytest.mark.parametrize(
    "sanitizers, part",
    [("thread", part) for part in (*RACES, "loop")]
    + [("address,undefined", part) for part in (*RACES, *MEMORY)],
)
def test_a_sanitizer_finds_nothing(driver_with, sanitizers, part):
    command = [driver_with(sanitizers), part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_a_sanitizer_would_find_a_race(driver_with, tmp_path):
    """The lock's words are stored with release: without it, what they guard is a race."""
    driver_with("thread")
    header = (build.FOLDER / "kvc.h").read_text()
    weaker = header.replace("memory_order_release", "memory_order_relaxed")
    assert weaker != header
    for path in build.sources():
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "kvc.h").write_text(weaker)
    (tmp_path / "driver.c").write_text(DRIVER.read_text())
    flags = ["-fsanitize=thread", "-O1", "-Wno-error=tsan"]
    build.compile_files(
        build.system_compiler(), tmp_path / "driver", sorted(tmp_path.glob("*.c")), flags
    )
    done = subprocess.run(
        [tmp_path / "driver", "lock"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "data race" in done.stderr


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(400)
def test_the_data_path_runs_with_a_sanitized_library(tmp_path):
    """Tests of the loop and of copies, in a Python that has loaded the sanitizers' runtimes."""
    compiler = build.system_compiler()
    names = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
        if compiler
    ]
    if not names or not all(Path(name).is_absolute() for name in names):
        pytest.skip("the compiler has no shared runtimes of AddressSanitizer and UBSan")
    root = build.FOLDER.parents[1]
    unbuilt = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("kvconnector_kernels", "native"):
        shutil.copytree(build.FOLDER.parent / name, tmp_path / name, ignore=unbuilt)
    library = tmp_path / "kvconnector_kernels" / build.NAME
    flags = ["-shared", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    build.compile_files(compiler, library, build.sources(), flags)
    tests = [
        *("tests/kernels/pump", "tests/kernels/block_table/test_device_block_tables.py"),
        *("tests/unit/datapath/test_pump.py", "tests/unit/datapath/test_copy_threads.py"),
    ]
    options = ["-q", "-p", "no:cacheprovider", "-o", f"pythonpath={tmp_path} . examples"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", "not (gpu or slow)", *tests],
        cwd=root,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root), str(root / "examples")]),
            "LD_PRELOAD": ":".join(names),
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
