"""The one place that holds the package's version; the build reads `RELEASE` from here.

`__version__` also names the commit, so that two builds of a release can be told apart: of a checkout as its `.git`
says, without git's help; else as a build has written it into the file `_commit` beside this one.
"""

from __future__ import annotations

from pathlib import Path

RELEASE = "0.1.0"
_COMMIT_DIGITS = 9


def _commit(package: Path) -> str:
    """Return the commit of the files in `package`, "" if nothing says it."""
    try:
        if (package / "_commit").is_file():
            return (package / "_commit").read_text().strip()
        git = package.parent / ".git"
        if git.is_file():  # a work tree: "gitdir: <its folder>"
            git = (package.parent / git.read_text().partition(":")[2].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        shared = git / "commondir"
        common = (git / shared.read_text().strip()).resolve() if shared.is_file() else git
        for folder in (git, common):
            if (folder / name).is_file():
                return (folder / name).read_text().strip()
        for line in (common / "packed-refs").read_text().splitlines():
            commit, _, ref = line.partition(" ")
            if ref == name:
                return commit
    except (OSError, UnicodeDecodeError):
        pass
    return ""


def _version(package: Path) -> str:
    """Return the release, and the commit as PEP 440's local part."""
    commit = _commit(package)
    is_hash = len(commit) >= _COMMIT_DIGITS and set(commit) <= set("0123456789abcdef")
    return f"{RELEASE}+g{commit[:_COMMIT_DIGITS]}" if is_hash else RELEASE


__version__ = _version(Path(__file__).parent)
