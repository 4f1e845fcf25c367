"""The last release of kvconnector, from this checkout's history."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _git(*arguments):
    return subprocess.run(("git", "-C", ROOT, *arguments), capture_output=True, check=False).stdout


def last_release():
    """Return the tree of the newest tag before this commit or, without tags, of the last commit before wire versions.
    Its compiled kernels are kept with it.
    """
    commit = _git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^").decode().strip()
    if not commit:
        added = ("--diff-filter=A", "--format=%H", "--", "kvconnector/wire/versions.py")
        commit = _git("log", *added).decode().strip()
        commit = _git("rev-parse", f"{commit}^").decode().strip() if commit else ""
    archive = _git("archive", commit) if commit else b""
    if not archive:
        pytest.skip("the history of this checkout does not reach back to the last release")
    tree = Path(sys.prefix, "releases", commit)
    if not tree.exists():
        made = tree.with_suffix(f".{os.getpid()}")
        made.mkdir(parents=True)
        subprocess.run(["tar", "-x", "-C", made], input=archive, check=True)
        made.rename(tree)
    return tree
