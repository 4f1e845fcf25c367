"""The documentation's fenced blocks, and how each is checked.

A block is run, unless the line before it is `<!-- not run: REASON -->`; `<!-- slow -->` leaves it to the slow
tests, and `<!-- in an empty environment -->` to one that runs it in a fresh clone, with nothing installed.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "README.md",
        "BENCHMARKS.md",
        "CONTRIBUTING.md",
        "docs/**/*.md",
        "examples/*/README.md",
    )
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>slow|in an empty environment|not run: [^\n]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
SPAN = re.compile(r"(?<!`)`(kvconnector [^`]+)`(?!`)")

# separators between the arguments of a recorded command, and between commands
UNIT, RECORD = "\x1f", "\x1e"
# variables of `scripts/hosts` besides the commands' prefixes
HOST_VARIABLES = ("ip1", "ip2", "second1", "second2")
EMPTY_ENVIRONMENT = "in an empty environment"
RECORDER = f"""
command_not_found_handle() {{ local IFS=$'{UNIT}'; printf '%s{RECORD}' "$*" >>"$CALLS"; }}
kill() {{ :; }}
source() {{ command_not_found_handle source "$@"; }}
"""
TELL_SETTINGS = f"""
for name in "${{!KVCONNECTOR_@}}"; do command_not_found_handle = "$name" "${{!name}}"; done
printf '{RECORD}' >>"$CALLS"
"""


@dataclass(frozen=True)
class Block:
    """One fenced block. `mark` is the comment before it, empty without one."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks(*languages):
    """Return all blocks in one of `languages`, in order."""
    return [block for page in PAGES for block in _of_page(page) if block.language in languages]


def _of_page(page):
    source = (ROOT / page).read_text(encoding="utf-8")
    for found in FENCE.finditer(source):
        indent = found["indent"]
        text = "".join(line.removeprefix(indent) for line in found["text"].splitlines(True))
        line = source.count("\n", 0, found.start("indent")) + 1
        yield Block(page, line, found["language"], text, found["mark"] or "")


def spans():
    """Yield commands that stand within sentences: page and command."""
    found = (
        (page, " ".join(command.split()))
        for page in PAGES
        for command in SPAN.findall(FENCE.sub("", (ROOT / page).read_text(encoding="utf-8")))
    )
    return list(dict.fromkeys(found))


def recorded(block, folder):
    """Return a shell block's commands as bash parses them, without running any, and the settings that it exports."""
    calls = folder / "calls"
    calls.touch()
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").iterdir()]
    # if a command's name has a slash, bash looks for the file at once
    by_path = "\n".join(
        f'{path}() {{ command_not_found_handle {path} "$@"; }}'
        for path in [*paths, ".venv-vllm/bin/python"]
    )
    script = "\n".join((RECORDER, by_path, block.text, "wait", TELL_SETTINGS))
    subprocess.run(
        ["/bin/bash", "-c", script.replace("/etc/kvconnector", str(folder))],
        env={"PATH": "/nowhere", "CALLS": str(calls), **dict.fromkeys(HOST_VARIABLES, "10.77.0.1")},
        cwd=folder,
        check=True,
        timeout=20,
    )
    found = [call.split(UNIT) for call in calls.read_text().split(RECORD) if call]
    commands = [call for call in found if call[0] != "="]
    return commands, {call[1]: call[2] for call in found if call[0] == "="}


def run(text, folder, prefix, environment):
    """Run shell commands as they are, in a folder that looks like the checkout. Returns their output.

    `scripts/demo` there uses this interpreter instead of an environment of its own.
    """
    for path in ROOT.iterdir():
        if path.name != "scripts":
            (folder / path.name).symlink_to(path)
    (folder / "scripts").mkdir()
    demo = folder / "scripts" / "demo"
    demo.write_text('#!/bin/sh\nexec python -m minillm.demo "$@"\n')
    demo.chmod(0o755)
    (folder / "keys").mkdir()
    script = folder / "block.sh"
    text = text.replace("/tmp/", f"{folder}/").replace("/etc/kvconnector", f"{folder}/keys")
    script.write_text("set -euo pipefail\n" + text)
    done = subprocess.run(
        [*prefix, "bash", str(script)],
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout
