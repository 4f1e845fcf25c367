"""Fails when a commit's title is not a short command, such as "Answer early follows that find no room".

It checks the commits after `BASE`, or none without git, or if the history does not reach back that far (an archive, a
shallow clone). The endings and lists below decide whether a word is a verb in the imperative.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "50ef7d96"
MAX_CHARACTERS = 65
ENDINGS = ("s", "ed", "ing")
VERBS = {"bring", "embed", "exceed", "feed", "focus", "need", "ping", "proceed", "seed", "speed"}
STATEMENTS = """
a all also an and at by each every for how if in it its more most no not of on one some that the
their there these they this those to two what when where whether which who why with you
"""


def complaint_about(title: str) -> str | None:
    """Return what is wrong with a title, or None."""
    if len(title) > MAX_CHARACTERS:
        return f"{len(title)} characters, at most {MAX_CHARACTERS}"
    first = title.partition(" ")[0]
    word = first.rstrip(":,").lower()
    if first != word.capitalize():
        return f"begins with {first!r}, not with a capitalized verb"
    if word in STATEMENTS.split():
        return f"is a statement ({first!r}), not a command"
    if word.endswith(ENDINGS) and not word.endswith("ss") and word not in VERBS:
        return f"begins with {first!r}, which is not in the imperative"
    return None


def titles_after(base: str) -> list[tuple[str, str]] | None:
    """Return the hash and title of each commit after `base`, or None if the history does not have it."""
    log = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"]
    try:
        done = subprocess.run(log, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in done.stdout.splitlines()]


def main() -> int:
    """Check the titles; print the complaints and return 1 if there are any."""
    titles = titles_after(BASE)
    if titles is None:
        print(f"not checked: there is no history back to {BASE}")
        return 0
    found = [(commit, title, complaint_about(title)) for commit, title in titles]
    bad = [f"{commit} {title!r}: {problem}" for commit, title, problem in found if problem]
    print("\n".join(bad) or f"{len(titles)} titles are in order")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
