"""README and docs: every command takes the options it is shown with, and those that can run here do run."""

import os
import re
import shlex
import shutil
import sys
import tomllib
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvconnector as kvc
from kvconnector.config import SECTIONS
from tests.docs.blocks import ROOT, blocks, recorded, run, spans
from tests.docs.commands import check, check_cli, check_json, check_settings
from tests.hosts.network import missing
from tests.support.working import run_while_working

SHELL = blocks("sh", "bash")
DATA = {"json": check_json, "toml": tomllib.loads, "text": str, "mermaid": str, "": None}
ON_TWO_HOSTS = "docs/hosts.md"
# output that a reader sees at the end
SHOWN = {
    "docs/tutorial.md": ("10 of 10 runs", '"loaded_tokens": 18', "did not answer", '"text"'),
    ON_TWO_HOSTS: ('"text"', "round trip"),
}


def by_page(*marks):
    """Pages with runnable shell blocks, each with the text of all of them in order."""
    pages = {}
    for block in SHELL:
        if block.mark in marks:
            pages.setdefault(block.page, []).append(block)
    return [
        pytest.param(page, "\n".join(b.text for b in found), id=page)
        for page, found in pages.items()
    ]


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_every_command_takes_the_options_that_it_is_shown_with(block, tmp_path):
    commands, settings = recorded(block, tmp_path)
    assert commands or settings
    for command in commands:
        check(command)
    check_settings(settings)


@pytest.mark.parametrize("page, command", spans())
def test_commands_within_sentences_exist(page, command):
    words = [word for word in shlex.split(command)[1:] if word != "..."]
    if words and words[-1] == "--peer":  # the option is named without its value
        words.append("HOST:1")
    if words:
        check_cli(words, is_whole=False)


def test_tests_to_copy_exist():
    rows = re.findall(
        r"`(test_\w+)` in \[\w+\.py\]\(([\w/.]+)\)", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert rows
    assert not [row for row in rows if f"def {row[0]}(" not in (ROOT / row[1]).read_text()]


def test_every_function_of_the_walk_exists():
    walk = (ROOT / "ARCHITECTURE.md").read_text().partition("## A walk")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w./]+)`", walk)
    assert {Path(word).suffix for word in named} >= {".py", ".c"}
    for word in named:
        if word.endswith((".py", ".c")):
            folder = ROOT if word.startswith("kernels/") else ROOT / "kvconnector"
            source, is_c = (folder / word).read_text(), word.endswith(".c")
        elif is_c:
            assert re.search(rf"^\w.*\b{word}\(", source, re.MULTILINE), word
        else:
            of_class, _, name = word.rpartition(".")
            _, _, inside = source.partition(f"class {of_class}" if of_class else "import")
            assert f"def {name}(" in inside, word


def _changes_in_detail():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text.partition("## Changes in detail")[2].partition("\n## ")[0]


def test_every_file_that_the_architecture_names_exists():
    """A file without a folder is in the one that its row named last."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    missing = []
    for line in (text[text.index("## The register") :] + _changes_in_detail()).splitlines():
        beside = ROOT
        for named in re.findall(r"`([\w./-]+(?:/|\.py))`", line):
            places = [ROOT / "kvconnector" / named, ROOT / named, beside / named]
            found = [place for place in places if place.exists()]
            missing += [] if found else [named]
            beside = found[0] if found and found[0].is_dir() else (found or [ROOT / "x"])[0].parent
    assert not missing


def _shown_by():
    """Yield the register's mechanisms, each with what shows it: commands, tests and settings."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    register = text.partition("## The register")[2].partition("\n## ")[0]
    for line in register.splitlines():
        if line.startswith("| ") and not line.startswith("| mechanism "):
            mechanism, files, reason, shown_by = line.strip("| ").split(" | ")
            assert files.strip(), mechanism
            assert reason.strip(), mechanism
            yield pytest.param(re.findall(r"`([^`]+)`", shown_by), id=mechanism.replace("`", ""))


@pytest.mark.parametrize("shown_by", [*_shown_by()])
def test_what_shows_a_mechanism_of_the_register_exists(shown_by):
    """Words in capitals stand for a value. A file without a folder is beside the one before it."""
    assert shown_by
    beside = ROOT
    for text in shown_by:
        words = shlex.split(re.sub(r"\b[A-Z,]+$", "1,1,1", text))
        settings = [word for word in words if re.match(r"[A-Z_]+=", word)]
        ours = dict(word.split("=") for word in settings if word.startswith("KVCONNECTOR_"))
        check_settings(ours)
        command = words[len(settings) :]
        if not command:
            continue
        if command[0].startswith("tests/") or command[0].endswith(".py"):
            places = [ROOT / command[0], beside / command[0]]
            (place, *_) = [each for each in places if each.exists()]
            beside = place.parent
        elif command[0] == "bench":
            check(["scripts/bench", *command[1:]])
        elif command[0] == "kvconnector" or command[0].startswith("scripts/"):
            check(command)
            if command[0] == "scripts/test_vllm":
                cases = (ROOT / "tests/vllm/harness/cases.py").read_text()
                assert not [name for name in command[1:] if f'"{name}"' not in cases]
        elif command[0] == "python":
            assert (ROOT / f"{command[2].replace('.', '/')}.py").exists()
        else:
            section, name = command[0].partition("=")[0].split(".")
            assert name in SECTIONS[section].__struct_fields__


def test_names_beside_files_in_the_architecture_are_in_these_files():
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where a change goes")[2]
    text += _changes_in_detail()
    beside = re.findall(r"`([\w./]+\.py)` \(((?:[^()`]|`[^`]*`)*)\)", text)
    assert beside
    for file, within in beside:
        folder = ROOT / "kvconnector"
        at_top = "/" in file or (folder / file).exists()
        source = (folder / file if at_top else folder / "session" / file).read_text()
        for name in re.findall(r"`(\w+(?:\.\w+)?)`", within):
            last = name.rpartition(".")[2]
            wanted = rf"(?:def|class) {last}\b|^ *(?:self\.)?{last}\b(?:.* =|: )"
            assert re.search(wanted, source, re.MULTILINE), name


@pytest.mark.parametrize("block", blocks(*DATA), ids=str)
def test_data_is_well_formed_and_configurations_are_valid(block):
    assert block.language, "no check knows a block without a language"
    DATA[block.language](block.text)
    if block.language == "mermaid":
        assert ";" not in block.text, "Mermaid takes it for the end of a statement"


def _run(page, text, folder):
    if page == ON_TWO_HOSTS:
        prefix = [sys.executable, str(ROOT / "tests/hosts/network.py"), "--two"]
    elif missing() is None:  # with ports of its own, and nothing outlives it
        own = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        prefix = [*own, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    else:
        prefix = []
    path = ":".join(str(ROOT / each) for each in ("", "kernels", "examples"))
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run(text, folder, prefix, {**os.environ, "PATH": tools, "PYTHONPATH": path})


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize("page, text", by_page(""))
def test_commands_run(page, text, tmp_path):
    _run(page, text, tmp_path)


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("page, text", by_page("", "slow"))
def test_all_commands_of_a_page_run_in_order(page, text, tmp_path):
    if page == ON_TWO_HOSTS and (reason := missing()):
        pytest.skip(reason)
    if shutil.which("curl") is None and "curl" in text:
        pytest.skip("curl is not installed")
    shown = _run(page, text, tmp_path)
    for expected in SHOWN.get(page, ()):
        assert expected in shown, shown[-5000:]


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize("block", [b for b in blocks("python") if not b.mark], ids=str)
def test_python_runs(block, capsys):
    import torch

    from embed import Engine

    prefill = Engine("p0", "producer", 16)
    names = {
        "layers": range(4),
        "k": [torch.zeros(32, 8, 64, 64) for _ in range(4)],
        "v": [torch.zeros(32, 8, 64, 64) for _ in range(4)],
        "params": prefill.scheduler.offer("r0", blocks=[[3, 1, 2]], num_tokens=40),
        "request_id": "r0",
        "block_ids": [5],
        "num_prompt_tokens": 41,
        "num_computed_tokens": 0,
    }
    if block.page == "docs/monitoring.md":
        gauges = SimpleNamespace(num_loading=0, held=frozenset())
        names |= {"scheduler": gauges, "output": kvc.WorkerOutput(), "traceparent": ""}
    text = block.text.replace("start_http_server(9400)", "start_http_server(0, '127.0.0.1')")
    names["__name__"] = "__main__"
    with closing(prefill.worker), closing(prefill.scheduler):
        exec(compile(text, str(block), "exec"), names)  # noqa: S102  of ours
        if "worker" in names:
            worker, scheduler, output = (names[n] for n in ("worker", "scheduler", "output"))
            while "r0" not in output.finished_recving:
                prefill.step()
                worker.start_step(scheduler.build_step())
                worker.wait(0.01)
                scheduler.update(output := worker.poll())
            assert not output.failed_recving
            worker.close()
            scheduler.close()
        shown = {"docs/embedding.md": "loaded\n"}
        if "print(" in text and block.page in shown:
            assert capsys.readouterr().out.startswith(shown[block.page])


@pytest.mark.ucx
@pytest.mark.integration
def test_an_engine_whose_ranks_are_processes_loads_from_all_of_them():
    path = ":".join(str(ROOT / each) for each in ("", "kernels"))
    done = run_while_working(
        [sys.executable, str(ROOT / "examples/embed_ranks.py")],
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout == f"loaded\nheads of block 5: {[float(n) for n in range(8)]}\n", done.stderr


def test_every_name_of_the_face_is_in_the_reference():
    page = (ROOT / "docs/api.md").read_text()
    named = set(kvc.__all__) - {"__version__", "errors", "Config", "KVConnectorError"}
    assert not [name for name in named if f".{name}\n" not in page]
