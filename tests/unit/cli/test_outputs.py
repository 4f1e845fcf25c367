"""What commands write, and where: files of the names they were given, and text as wide as its reader."""

import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from msgspec import structs
from rich.console import Console

from kvconnector.bench import pairs, server
from kvconnector.bench.results import CaseResult, Measurement
from kvconnector.bench.shapes import MODELS
from kvconnector.bench.simulation import Simulation
from kvconnector.cli import doctor as doctor_module
from kvconnector.cli import main
from kvconnector.cli.app import COMMANDS, app
from kvconnector.cli.bench import Benchmark
from kvconnector.cli.console import OutputPath
from scripts.benchmarks import __main__ as benchmarks

ODD = [
    "-1",
    "0",
    "1,3",
    "1e-7",
    "1e300",
    "99999999",
    "llama-3.1-8b",
    "nan",
    "tp=0",
    "tp=2,dcp=2",
    "x",
    "é",
    "",
    "-",
    ".",
    ".svg",
    "plan.unknown",
    "a b",
]


class StoppedError(Exception):
    """What follows was not to be run."""


@pytest.fixture
def nothing_runs(monkeypatch):
    """Commands read their options, and stop before anything that takes long."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Benchmark, "run", lambda *_: iter(()))
    monkeypatch.setattr(Simulation, "run", stop)
    monkeypatch.setattr(pairs, "run", stop)
    monkeypatch.setattr(server, "serve", stop)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=stop)
    monkeypatch.setattr("kvconnector.cli.top.time", clock)
    monkeypatch.setattr(doctor_module, "examine_host", lambda **_: iter(()))


def commands():
    """Yield the words of every command that does something, and the command."""
    for name, found in benchmarks.app.commands.items():
        yield ["scripts/bench", name], found
    context = click.Context(app)
    for name in COMMANDS:
        command = app.get_command(context, name)
        if isinstance(command, click.Group):
            yield from (([name, each], found) for each, found in command.commands.items())
        else:
            yield [name], command


def call(words):
    """Run a command of the command line, or of scripts/bench. Returns the exit status."""
    return benchmarks.main(words[1:]) if words[0] == "scripts/bench" else main(words)


NEEDED = {
    "top": ["127.0.0.1:1", "--count", "1"],
    "keygen": ["keys"],
}
OPTIONS = [
    pytest.param(
        [*words, *NEEDED.get(words[0], [])], option, id=f"{'-'.join(words)}{option.opts[0]}"
    )
    for words, command in commands()
    for option in command.params
    if isinstance(option, click.Option) and not option.is_flag
]


def files_below(folder):
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("line, option", OPTIONS)
def test_no_value_of_an_option_becomes_the_name_of_a_file(
    tmp_path, monkeypatch, capsys, line, option
):
    monkeypatch.chdir(tmp_path)
    more = ["--engines", "2", "--seconds", "1"] if line[0] == "simulate" else []
    for value in ODD:
        call([*line, *more, option.opts[0], value])
    capsys.readouterr()
    assert {Path(name).parent for name in files_below(tmp_path)} <= {Path("keys")}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "line, option",
    [each for each in OPTIONS if isinstance(each.values[1].type, OutputPath)],
)
def test_an_output_s_name_without_its_ending_is_refused_with_the_endings(
    tmp_path, monkeypatch, capsys, line, option
):
    monkeypatch.chdir(tmp_path)
    for value in ODD:
        assert call([*line, option.opts[0], value]) == 2
        err = capsys.readouterr().err
        assert value == "." or re.search(r"does not end in \.\w+", err)
    assert files_below(tmp_path) == []


def test_every_option_that_names_a_file_to_write_checks_its_ending():
    """An option of another type that opens its value would write the value of a neighbour."""
    written = {"svg", "html", "output", "state"}
    found = {option for *_, option in (each.values for each in OPTIONS) if option.name in written}
    assert {option.name for option in found} == written
    assert all(isinstance(option.type, OutputPath) for option in found)


PLAN = ["plan", "--model", "qwen3-235b", "--prefill", "tp=2,dcp=2,interleave=8", "--decode", "pp=2"]
COMMAND = [sys.executable, "-c", "import sys; from kvconnector.cli import main; sys.exit(main())"]


def on_a_terminal(columns, arguments):
    """Run a command on a terminal of `columns` columns. Returns its lines."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=theirs, stdin=theirs, env={**environment, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 1 << 16):
                text += piece
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[\d;]*m", "", text.decode()).splitlines()


@pytest.mark.parametrize("columns", [24, 38, 60, 80, 160])
def test_a_terminal_of_any_width_shows_whole_tables(columns):
    lines = on_a_terminal(columns, PLAN)
    assert all(len(line) <= columns for line in lines)
    shown = "".join(lines)
    assert "…" not in shown
    for text in ("pp1tp0", "47-93", "0-1999:", "91.8 MiB"):
        assert text in shown
    # columns where they fit beside each other, else a line for each value
    assert any(line.split() == ["reads", "from", "pp0tp1"] for line in lines) == (columns < 80)


def test_without_a_terminal_no_line_is_cut_or_wrapped(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    name = "a-model-with-a-name-" + "x" * 300
    assert main(["plan", "--model", "llama-3.1-8b"]) == 0
    whole = capsys.readouterr().out
    assert "…" not in whole
    monkeypatch.setitem(MODELS, name, structs.replace(MODELS["llama-3.1-8b"], name=name))
    assert main(["plan", "--model", name]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(whole.splitlines())


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_fault(arguments):
    """As in `kvconnector plan | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, *PLAN, *arguments], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_few_samples_have_no_99th_percentile():
    few, many = (Measurement("x", "ours", (0.001,) * 98 + (0.5,) * more) for more in (1, 2))
    assert math.isnan(few.stated_s(99))
    assert few.stated_s(90) == 0.001
    assert many.stated_s(99) == many.percentile_s(99)
    console = Console(file=StringIO(), width=120)
    CaseResult("case", (Measurement("y", "ours", (0.002,) * 3),)).print_to(console)
    shown = console.file.getvalue()
    assert shown.count("2 ms") == 1
    assert "p90 takes 10 samples, p99 takes 100 samples" in shown
