"""The documentation's site, as `scripts/docs` builds it."""

import re
import subprocess
import sys
import tomllib

import pytest

from tests.docs.blocks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    for package in ("material", "mermaidx", "mkdocs", "mkdocstrings"):
        pytest.importorskip(package, reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {path: path.read_text() for path in folder.rglob("*.html")}


def test_diagrams_are_pictures(pages):
    drawn = {
        picture for text in pages.values() for picture in re.findall(r"diagrams/\w+\.svg", text)
    }
    written = sum(
        page.read_text().count("```mermaid") for page in sorted((ROOT / "docs").glob("*.md"))
    )
    assert len(drawn) == written > 0
    assert not [
        text
        for text in pages.values()
        if re.search(r"<code[^>]*>(sequenceDiagram|stateDiagram|flowchart)", text)
    ]


def test_links_to_pages_have_titles_as_texts(pages):
    found = {
        link
        for text in pages.values()
        for link in re.findall(r"<a [^>]*>(?:<code>)?([\w/.-]+\.md)(?:</code>)?</a>", text)
    }
    assert not found


def test_every_page_links_to_the_repository(pages):
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    assert not [path for path, text in pages.items() if f'href="{address}"' not in text]
