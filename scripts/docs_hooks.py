"""MkDocs hooks: add the pages outside docs/, adapt links to files of the repository, and show text meant for the site.

Pages are also read in the repository, so their links are paths there. A link to another page becomes a link within the
site; any other file is copied into the site below `files/`. The text in `<!-- in the site: ... -->` is shown.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath

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
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
IN_SITE = re.compile(r"^<!-- in the site:\n(.*?)\n-->$", re.DOTALL | re.MULTILINE)
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
                return link[0]  # mkdocs reports links that lead nowhere
            target = f"files/{path}"
            if files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
        else:
            target = homes.get(path) or path.removeprefix("docs/")
        return os.path.relpath(target, PurePath(uri).parent) + (link[2] or "")

    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(within_site, text) for text in parts[::2]]
    return IN_SITE.sub(r"\1", "".join(parts))
