"""Installation as the pages show it: any shell takes every line, and README's run with nothing installed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from packaging.requirements import Requirement

from kvconnector import _version
from tests.docs.blocks import EMPTY_ENVIRONMENT, PAGES, ROOT, blocks

IN_EMPTY = [block for block in blocks("sh") if block.mark == EMPTY_ENVIRONMENT]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _run(command, folder, environment):
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def _served(clone):
    """Serve a clone as a web server would. Yields its address."""
    _run(["git", "update-server-info"], clone, os.environ)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=clone)) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/.git"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("page", PAGES)
def test_brackets_are_quoted_since_zsh_takes_them_for_a_pattern(page):
    lines = [line for line in (ROOT / page).read_text().splitlines() if "pip install" in line]
    wanted = r"pip install [^`#]*?(?<![\w\"'./@-])[\w./-]+\[\w"
    assert not [line for line in lines if re.search(wanted, line)]


def test_the_address_of_the_repository_is_the_project_s():
    assert f"<{PROJECT['urls']['Source']}>" in (ROOT / "README.md").read_text()


def test_files_for_the_host_name_what_exists():
    yaml = pytest.importorskip("yaml")
    forms = ROOT / ".github/ISSUE_TEMPLATE"
    for form in (forms / "bug.yml", forms / "feature.yml"):
        found = yaml.safe_load(form.read_text())
        assert found["name"], found["description"]
        assert all(part["attributes"]["label"] for part in found["body"])
    contact = yaml.safe_load((forms / "config.yml").read_text())["contact_links"][0]
    assert contact["url"].startswith(PROJECT["urls"]["Source"])
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    run = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    programs = re.findall(r"(?<!\S)(?:\.ci|scripts)/\w+", run)
    assert programs
    assert all((ROOT / program).is_file() for program in programs)
    extras = PROJECT["optional-dependencies"]
    (named,) = re.findall(r"\.whl\)\[([\w,-]+),\$", (ROOT / "Dockerfile").read_text())
    assert set(named.split(",")) <= extras.keys()


def test_the_extra_for_vllm_admits_the_releases_that_its_page_names():
    extra = Requirement(PROJECT["optional-dependencies"]["vllm"][0]).specifier
    named = re.findall(r"\b0\.(\d+)\b", (ROOT / "docs/vllm.md").read_text().partition("\n## ")[0])
    minors = sorted({int(minor) for minor in named})
    assert minors
    assert [f"0.{minor}.1" in extra for minor in minors] == [True] * len(minors)
    assert f"0.{minors[0] - 1}.0" not in extra
    assert f"0.{minors[-1] + 1}.0" not in extra


def test_an_image_can_name_the_commit_that_it_is_built_from(tmp_path):
    """What .dockerignore lets into an image of the repository, with the branch in a file and in the list of all."""
    rules = (ROOT / ".dockerignore").read_text().split()
    assert ".git" not in rules  # nothing below it could be let in again
    repository = tmp_path / "repository"
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    _run(["git", "init", "-q", str(repository)], tmp_path, os.environ)
    _run(["git", *author, "commit", "-q", "--allow-empty", "-m", "x"], repository, os.environ)
    commit = _run(["git", "rev-parse", "HEAD"], repository, os.environ).strip()
    for name in ("file", "list"):
        image = tmp_path / name
        for rule in (rule.removeprefix("!") for rule in rules if rule.startswith("!.git/")):
            kept = repository / rule
            if kept.is_dir():
                shutil.copytree(kept, image / rule)
            elif kept.is_file():
                (image / rule).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(kept, image / rule)
        assert _version._version(image / "kvconnector").endswith(f"+g{commit[:9]}")
        _run(["git", "pack-refs", "--all"], repository, os.environ)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(450)
@pytest.mark.parametrize("block", IN_EMPTY, ids=str)
def test_a_clone_is_installed_in_an_empty_environment(block, tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("only a repository can be cloned")
    clone, environment = tmp_path / "kvconnector", tmp_path / "environment"
    _run(["git", "clone", "-q", str(ROOT), str(clone)], tmp_path, os.environ)
    _run([sys.executable, "-m", "venv", str(environment)], tmp_path, os.environ)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {
        "PATH": f"{environment}/bin:{Path(sys.base_prefix, 'bin')}:{os.environ['PATH']}",
        "NO_PROXY": "127.0.0.1",
    }
    script = f"set -euo pipefail\n{block.text}\nkvconnector --help\n"
    if "$REPOSITORY" in block.text:
        with _served(clone) as address:
            shown = _run(["bash", "-c", script], tmp_path, variables | {"REPOSITORY": address})
    else:
        shown = _run(["bash", "-c", script], clone, variables)
    assert "plan" in shown, shown[-5000:]
    if "kvconnector plan" in block.text:
        assert "625 MiB" in shown, shown[-5000:]
