import json
import shlex
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvconnector as kvconnector_package
from kvconnector import __version__, _version
from kvconnector.cli import main
from kvconnector.cli.bench import BENCHMARKS, Benchmark, bench
from kvconnector.control.security import CurveKeys
from scripts.benchmarks import __main__ as program
from scripts.benchmarks import relayout
from tests.docs import commands

ISSUE = (
    "plan --prefill tp=2,pp=1,block=16 --decode tp=1,pp=2,block=64 --layers 32 --kv-heads 8"
    " --head-dim 128 --dtype bfloat16 --tokens 2000 --start 0 --chunk 2MiB"
)
BENCH = "scripts/bench relayout --model qwen3-8b,layers=1 --tokens 64 --iterations 2 --output"


@pytest.fixture
def kvconnector(capsys, monkeypatch):
    """Runs the command line, or scripts/bench, in this process. Returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(line, *more):
        words = [*line.split(), *map(str, more)]
        is_ours = words[0] == "scripts/bench"
        status = program.main(words[1:]) if is_ours else main(words)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return run


def test_torch_2_11_is_enough_and_the_command_line_is_an_extra():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (torch,) = map(Requirement, project["optional-dependencies"]["torch"])
    assert torch.specifier.contains("2.11.0")
    needed = {Requirement(each).name for each in project["dependencies"]}
    assert needed == {"msgspec", "numpy", "pyzmq"}
    extra = {Requirement(each).name for each in project["optional-dependencies"]["cli"]}
    assert extra == {"click", "matplotlib", "prometheus-client", "rich"}


@pytest.mark.parametrize("package", ["click", "matplotlib", "rich"])
def test_without_its_packages_the_command_line_says_what_to_install(
    kvconnector, monkeypatch, tmp_path, package
):
    for name in list(sys.modules):
        if name.startswith(("kvconnector.cli.", "kvconnector.bench.results")):
            monkeypatch.delitem(sys.modules, name)
    for name in [package, *(each for each in sys.modules if each.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    status, out, err = kvconnector("plan", "--svg", tmp_path / "plan.svg")
    assert (status, out) == (2, "")
    assert err == f'kvconnector: the command line needs {package}: pip install "kvconnector[cli]"\n'


def test_plan_lists_which_rank_reads_what_from_which(kvconnector):
    status, out, _ = kvconnector(ISSUE + " --json")
    assert status == 0
    report = json.loads(out)
    assert [(read["consumer"], read["producer"]) for read in report["reads"]] == [
        ("pp0tp0", "pp0tp0"),
        ("pp0tp0", "pp0tp1"),
        ("pp1tp0", "pp0tp0"),
        ("pp1tp0", "pp0tp1"),
    ]
    first = report["reads"][0]
    assert first["layers"] == [[0, 16]]
    assert first["heads"] == [[0, 4]]
    assert first["tokens"] == [0, 2000]
    assert first["bytes"] == 16 * 2 * 4 * 128 * 2 * 2000
    assert first["largest_chunk_bytes"] <= 2 << 20
    assert report["total_bytes"] == 32 * 2 * 8 * 128 * 2 * 2000


def test_plan_says_which_tokens_ranks_that_share_them_read(kvconnector):
    line = "plan --prefill tp=1 --decode dcp=2,interleave=8 --layers 2 --kv-heads 2 --tokens 100"
    reads = json.loads(kvconnector(line + " --json")[1])["reads"]
    assert [(read["consumer"], read["producer"]) for read in reads] == [
        ("pp0tp0", "pp0tp0"),
        ("pp0tp1", "pp0tp0"),
    ]
    assert [read["stripes"] for read in reads] == [[[0, 8, 16]], [[8, 8, 16]]]
    token_bytes = 2 * 2 * 2 * 128 * 2
    assert [read["bytes"] for read in reads] == [52 * token_bytes, 48 * token_bytes]
    out = kvconnector(line)[1]
    assert "0-99: 8 of 16 from 8" in out
    assert "decode tp2 pp1 block 16 NHD dcp2 interleave 8" in out


@pytest.mark.parametrize(
    "line,named",
    [
        ("plan --prefill tp=3,dcp=2", "tp=3, dcp=2"),
        ("plan --prefill dcp=2,interleave=5", "interleave=5"),
        ("plan --prefill pp=99", "num_layers=32"),
        ("plan --prefill 2", "a value is missing"),
        ("doctor --peer 127.0.0.1", "HOST:PORT"),
        ("doctor --params x.json --model qwen3-8b", "only with --peer"),
        ("bench transfer --connect 127.0.0.1", "HOST:PORT"),
        ("scripts/bench inferencex --bursts 0", "positive numbers"),
        ("plan --model nothing", "'nothing'"),
        ("plan --chunk 10B", "chunk_bytes=10"),
        ("plan --mla --kv-heads 2", "num_kv_heads=2"),
        (f"plan --kv-heads {10**20}", f"num_kv_heads={10**20}"),
        ("plan --dtype bfloat17", "'bfloat17'"),
        ("bench transfer --peer moon", "'moon'"),
        ("scripts/bench relayout --device tpu", "'tpu'"),
        ("scripts/bench relayout --tokens 99999999999999", "most=10000000"),
        ("simulate --engines 99999999999999", "two engines to"),
        ("bench transfer --device cuda:0,x:1", "'cuda:0,x:1'"),
        ("bench transfer --device cpu:5", "'cpu:5'"),
    ],
)
def test_an_error_is_one_line_that_names_the_value_and_status_2(kvconnector, line, named):
    status, out, err = kvconnector(line)
    assert status == 2
    assert out == ""
    names = ("kvconnector: ", "scripts/bench: ")
    lines = [each for each in err.splitlines() if each.startswith(names)]
    assert len(lines) == 1
    assert named in lines[0]


@pytest.mark.parametrize(
    "line",
    [
        "plan --nonsense",
        "bench speed",
        "scripts/bench relayout --peer nixl",
        "simulate --seconds inf",
    ],
)
def test_wrong_usage_is_status_2(kvconnector, line):
    status, _, err = kvconnector(line)
    assert status == 2
    assert "Usage" in err


def test_keygen_makes_keys_that_work_and_never_overwrites_them(kvconnector, tmp_path):
    folder = tmp_path / "new" / "keys"
    status, out, _ = kvconnector("keygen", folder)
    assert status == 0
    files = {
        "secret_key_file": folder / "curve.secret",
        "authorized_clients_file": folder / "authorized_clients",
    }
    keys = CurveKeys.from_files(**files)
    assert keys.authorized_clients == {keys.public_key}
    assert (folder / "curve.public").read_text().strip() == keys.public_key
    assert keys.public_key in out
    assert keys.secret_key not in out
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "curve.secret")]
    assert modes == [0o700, 0o600]
    status, out, err = kvconnector("keygen", folder)
    assert (status, out) == (2, "")
    assert "not overwritten" in err
    assert CurveKeys.from_files(**files) == keys


def test_bench_prints_a_table_and_last_the_environment(kvconnector, tmp_path):
    report = tmp_path / "report.json"
    status, out, err = kvconnector(BENCH, report)
    assert status == 0
    assert "relayout" in err
    assert " cores, " in out.splitlines()[-1]
    parsed = json.loads(report.read_text())
    assert parsed["options"]["tokens"] == [64]


def test_a_wrong_result_prints_no_figure_and_is_status_1(kvconnector, monkeypatch, tmp_path):
    monkeypatch.setattr(relayout, "relayout", lambda *args, **kwargs: None)
    report = tmp_path / "report.json"
    status, out, err = kvconnector(BENCH, report)
    assert (status, out) == (1, "")
    assert "wrong result" in err
    assert not report.exists()


def test_keygen_prints_paths_that_hold_in_every_folder(kvconnector, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = kvconnector("keygen", "keys")[1]
    assert f"KVCONNECTOR_CONTROL_SECRET_KEY_FILE={tmp_path}/keys/curve.secret" in out


def test_the_package_is_a_program(tmp_path):
    line = [sys.executable, "-m", "kvconnector", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == f"kvconnector {__version__}\n"


def test_a_version_names_the_commit_of_a_checkout_a_work_tree_and_a_build(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"

    def version_in(package):
        package.mkdir(parents=True, exist_ok=True)
        return _version._version(package)

    assert version_in(tmp_path / "none" / "kvconnector") == _version.RELEASE
    wanted = f"{_version.RELEASE}+g{commit[:9]}"
    git = tmp_path / "checkout" / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs" / "heads" / "main").write_text(f"{commit}\n")
    assert version_in(tmp_path / "checkout" / "kvconnector") == wanted
    (git / "refs" / "heads" / "main").unlink()
    (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    assert version_in(tmp_path / "checkout" / "kvconnector") == wanted
    tree = git / "worktrees" / "other"
    tree.mkdir(parents=True)
    (tree / "HEAD").write_text("ref: refs/heads/main\n")
    (tree / "commondir").write_text("../..\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".git").write_text(f"gitdir: {tree}\n")
    assert version_in(tmp_path / "other" / "kvconnector") == wanted
    built = tmp_path / "site-packages" / "kvconnector"
    built.mkdir(parents=True)
    (built / "_commit").write_text(f"{commit}\n")
    assert version_in(built) == wanted
    (built / "_commit").write_text("../nonsense\n")
    assert version_in(built) == _version.RELEASE


def test_version(kvconnector):
    assert kvconnector("--version") == (0, f"kvconnector {__version__}\n", "")


def test_each_benchmark_has_options_of_its_own_and_an_example_that_runs(kvconnector):
    assert list(BENCHMARKS) == [name for name in BENCHMARKS if name in kvconnector("bench -h")[1]]
    assert {*BENCHMARKS} == {*bench.commands} - {"serve", "pairs"}
    assert set(BENCHMARKS) | set(program.BENCHMARKS) < set(program.app.commands)
    for prefix, name, each in (
        *(("bench", *each) for each in BENCHMARKS.items()),
        *(("scripts/bench", *each) for each in program.BENCHMARKS.items()),
    ):
        status, out, _ = kvconnector(f"{prefix} {name} --help")
        assert status == 0
        assert ("--compute" in out) == (name == "handover")
        assert ("--minutes" in out) == (name == "soak")
        example = "".join(out.partition("Example: ")[2].split("\n"))
        assert example.split() == each.example.split()
        commands.check(each.example.split())


def test_no_wheel_has_a_benchmark_of_developers(kvconnector):
    for name in program.BENCHMARKS:
        assert kvconnector(f"bench {name}")[0] == 2
        assert not list((Path(kvconnector_package.__file__).parent / "bench").rglob(f"{name}.py"))


def test_help_of_all_commands_imports_none_of_them():
    line = "import sys; from kvconnector.cli import main; main(['--help']); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert not {"numpy", "zmq", "rich.console", "torch"} & {*run.stdout.split()}


@pytest.mark.parametrize("form", ["json", "output"])
def test_an_interrupted_benchmark_keeps_the_cases_that_are_finished(
    kvconnector, monkeypatch, tmp_path, form
):
    run = relayout.run

    def interrupted(options, progress):
        yield from run(options, progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(relayout, "run", interrupted)
    report = tmp_path / "report.json"
    status, out, err = kvconnector(BENCH, report, *["--json"][: form == "json"])
    assert status == 130
    assert len(json.loads(out if form == "json" else report.read_text())["cases"]) == 1
    assert f"1 finished cases are saved in {report}" in err


def test_a_benchmark_that_is_terminated_keeps_the_cases_that_are_finished(tmp_path):
    code = """
import os, signal, sys
from scripts.benchmarks import relayout
from scripts.benchmarks.__main__ import main
run = relayout.run
def terminated(options, progress):
    yield from run(options, progress)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
relayout.run = terminated
sys.exit(main())
"""
    report = tmp_path / "report.json"
    line = [sys.executable, "-c", code, *BENCH.split()[1:], str(report)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 130
    assert len(json.loads(report.read_text())["cases"]) == 1
    assert f"1 finished cases are saved in {report}" in done.stderr


def test_a_report_for_which_there_is_no_space_is_an_error_that_names_its_file(kvconnector):
    status, _, err = kvconnector(BENCH, "/dev/full")
    assert status == 2
    assert "cannot write the report" in err
    assert "/dev/full" in err


@pytest.mark.parametrize("option", ["--output", "--svg", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    kvconnector, tmp_path, monkeypatch, option
):
    benchmark = {
        "--output": "bench transfer",
        "--svg": "bench handover",
        "--html": "scripts/bench inferencex",
    }[option]
    monkeypatch.setattr(Benchmark, "run", lambda *_: pytest.fail("it was measured"))
    for path in (tmp_path / "no" / "x.svg", tmp_path):
        status, _, err = kvconnector(benchmark, option, path)
        assert status == 2
        assert str(tmp_path) in err


@pytest.mark.parametrize("output, status", [("/dev/full", 2), ("&-", 0)])
def test_a_full_or_closed_output_gives_no_traceback(output, status):
    code = "import sys; from kvconnector.cli import main; sys.exit(main(['plan']))"
    line = shlex.join([sys.executable, "-c", code]) + f" >{output}"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert ("No space left" in done.stderr) == (status == 2)
