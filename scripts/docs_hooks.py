"""MkDocs hooks: pages that lie outside docs/, links to files of the repository, and the tables of settings and errors.

Pages are written to be read in the repository, too, so that their links are paths there. A link to another page becomes
one within the site; any other file is copied into the site below `files/`.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePath

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvconnector.config import KIB, MIB, SECTIONS, ConnectorConfig
from kvconnector.control.sealed import ForgedMessageError  # noqa: F401  makes it known
from kvconnector.errors import KVConnectorError, RemoteError, TransportError
from kvconnector.transport.base import MessageSizeError  # noqa: F401  makes it known

ROOT = Path(__file__).resolve().parent.parent
# in the site, and in the repository
PAGES = {
    "index.md": "README.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "BENCHMARKS.md": "BENCHMARKS.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "minillm.md": "examples/minillm/README.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
SETTINGS = "<!-- all settings -->"
ERRORS = "<!-- all errors -->"
FENCED = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)


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
        path = os.path.normpath(source.parent / link[1])
        if path not in homes and not path.startswith("docs/"):
            if not (ROOT / path).is_file():
                return link[0]  # mkdocs names what leads nowhere
            target = f"files/{path}"
            if files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
        else:
            target = homes.get(path) or path.removeprefix("docs/")
        return os.path.relpath(target, PurePath(uri).parent) + (link[2] or "")

    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(within_site, text) for text in parts[::2]]
    text = "".join(parts)
    return text.replace(SETTINGS, "\n".join(_settings())).replace(ERRORS, "\n".join(_errors()))


def _settings() -> Iterator[str]:
    """A heading and a table of each section of the configuration, out of its own descriptions."""
    sections: dict[str, type[msgspec.Struct]] = {"": ConnectorConfig, **SECTIONS}
    for section, struct in sections.items():
        body = ast.parse(inspect.getsource(struct)).body[0]
        assert isinstance(body, ast.ClassDef)
        said = {
            before.target.id: " ".join(ast.literal_eval(text.value).split())
            for before, text in pairwise(body.body)
            if isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(text, ast.Expr)
        }
        yield from ("", f"### {section or 'engine'}", "", str(struct.__doc__), "")
        yield from ("| setting | default | |", "|---|---|---|")
        for field in msgspec.structs.fields(struct):
            if field.name not in SECTIONS:
                name = f"{section}.{field.name}".lstrip(".")
                yield f"| `{name}` | {_shown(field.default)} | {said[field.name]} |"


def _errors() -> Iterator[str]:
    """A table of what a load can end with."""
    yield from ("| error | what happened | what to do |", "|---|---|---|")
    kinds: list[type[KVConnectorError]] = [TransportError, RemoteError]
    while kinds:
        kind = kinds.pop()
        yield f"| `{kind.__name__}` | {kind.__doc__} | {kind.remedy} |"
        kinds += kind.__subclasses__()


def _shown(default: object) -> str:
    if default is msgspec.NODEFAULT:
        return "must be set"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int) and default >= KIB:
        return f"{default // MIB} MiB" if default % MIB == 0 else f"{default // KIB} KiB"
    return "empty" if default == "" else str(default)
