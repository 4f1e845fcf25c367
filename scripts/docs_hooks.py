"""MkDocs hooks: add the pages outside docs/, adapt links, draw diagrams, and show text meant for the site.

Pages are also read in the repository, so their links are paths there. A link to another page becomes a link within the
site, with the page's title if its text is a file name; any other file is copied into the site below `files/`. Mermaid
diagrams become pictures. The text in `<!-- in the site: ... -->` is shown.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from pathlib import Path, PurePath

import mermaidx
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# paths in the site, and in the repository
PAGES = {
    "index.md": "README.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "BENCHMARKS.md": "BENCHMARKS.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "minillm.md": "examples/minillm/README.md",
}
LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?!\w+:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
FILE_NAME = re.compile(r"\[`?(?:[\w.-]+/)*[\w-]+\.md`?\]")
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DRAWN = ROOT / "build" / "diagrams"
IN_SITE = re.compile(r"^<!-- in the site:\n(.*?)\n-->$", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository, whose address pyproject.toml has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url, config.repo_name = project["urls"]["Source"], project["name"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/."""
    for uri, path in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links within the site."""
    uri = page.file.src_uri
    source = PurePath(PAGES.get(uri, f"docs/{uri}"))
    homes = {path: uri for uri, path in PAGES.items()}

    def within_site(link: re.Match[str]) -> str:
        path, text = os.path.normpath(source.parent / link["path"]), link["text"]
        if path not in homes and not path.startswith("docs/"):
            if not (ROOT / path).is_file():
                return link[0]  # mkdocs reports links that lead nowhere
            target = f"files/{path}"
            if files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
        else:
            target = homes.get(path) or path.removeprefix("docs/")
            if FILE_NAME.fullmatch(text):  # good for a reader of the repository
                text = f"[{_title(ROOT / path)}]"
        return f"{text}({os.path.relpath(target, PurePath(uri).parent)}{link['anchor'] or ''})"

    def drawn(diagram: re.Match[str]) -> str:
        picture = _draw(diagram[1])
        target = f"diagrams/{picture.name}"
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, abs_src_path=str(picture)))
        return f"![diagram]({os.path.relpath(target, PurePath(uri).parent)})"

    markdown = DIAGRAM.sub(drawn, markdown)
    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(within_site, text) for text in parts[::2]]
    return IN_SITE.sub(r"\1", "".join(parts))


def _title(page: Path) -> str:
    """Return a page's heading."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _draw(diagram: str) -> Path:
    """Return the picture of a Mermaid diagram. It is kept, since drawing one takes a second."""
    DRAWN.mkdir(parents=True, exist_ok=True)
    path = DRAWN / f"{hashlib.sha256(diagram.encode()).hexdigest()[:16]}.svg"
    if not path.exists():
        svg = mermaidx.render(diagram).svg()
        width, height = re.findall(r'viewBox="\S+ \S+ (\S+) (\S+)"', svg)[0]
        part = path.with_suffix(".part")
        part.write_text(
            svg.replace('width="100%"', f'width="{width}" height="{height}"', 1), encoding="utf-8"
        )
        part.replace(path)
    return path
