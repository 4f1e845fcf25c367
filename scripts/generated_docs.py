"""The parts of the documentation that are made from the code: settings, errors, names, messages, and a program.

    python scripts/generated_docs.py            fails if a page is not current
    python scripts/generated_docs.py --write    makes all pages current

A part is in its page, between `<!-- generated: NAME, by scripts/docs write -->` and `<!-- end -->`, so that every view
of the page shows it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

import kvconnector as kvc
from kvconnector.config import KIB, MIB, SECTIONS, ConnectorConfig
from kvconnector.control.sealed import ForgedMessageError  # noqa: F401  makes it known
from kvconnector.errors import InternalError, KVConnectorError, RemoteError, TransportError
from kvconnector.integrations.model_values import FIELDS
from kvconnector.transport.tagged_messages import MessageSizeError, RegistrationError  # noqa: F401  makes them known
from kvconnector.wire import messages

ROOT = Path(__file__).resolve().parent.parent
PAGES = tuple(sorted((ROOT / "docs").glob("*.md")))
PART = re.compile(
    r"(?P<begin>^<!-- generated: (?P<name>\w+), by scripts/docs write -->\n)(?P<text>.*?)(?P<end>^<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)


def settings() -> Iterator[str]:
    """Yield a heading and a table for each section of the configuration, from the fields' docstrings."""
    sections: dict[str, type[msgspec.Struct]] = {"": ConnectorConfig, **SECTIONS}
    for section, struct in sections.items():
        body = ast.parse(inspect.getsource(struct)).body[0]
        assert isinstance(body, ast.ClassDef)
        described = {
            before.target.id: " ".join(ast.literal_eval(text.value).split())
            for before, text in pairwise(body.body)
            if isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(text, ast.Expr)
        }
        yield from (f"### {section or 'engine'}", "", _first_paragraph(struct), "")
        yield from ("| setting | default | |", "|---|---|---|")
        for field in msgspec.structs.fields(struct):
            if field.name not in SECTIONS:
                name = f"{section}.{field.name}".lstrip(".")
                yield f"| `{name}` | {_shown(field.default)} | {described[field.name]} |"
        yield ""


def errors() -> Iterator[str]:
    """Yield a table of the errors with which a load can end."""
    yield from ("| error | what happened | what to do | retry |", "|---|---|---|---|")
    kinds: list[type[KVConnectorError]] = [InternalError, TransportError, RemoteError]
    while kinds:
        kind = kinds.pop()
        yield f"| `{kind.__name__}` | {_first_paragraph(kind)} | {kind.remedy} | {kind.retry} |"
        kinds += kind.__subclasses__()


def fleet() -> Iterator[str]:
    """Yield the table of public recipes by model."""
    sys.path.insert(0, str(ROOT / "scripts"))
    module = importlib.import_module("fleet")
    yield module.table(*module.load())


def compared_fields() -> Iterator[str]:
    """Yield the fields of a model's configuration that two engines compare."""
    words = ", ".join(f"`{name}`" for name in FIELDS)
    yield from textwrap.wrap(words, 150, break_on_hyphens=False)


def prefill_pod() -> Iterator[str]:
    """Yield the prefill engine's part of a manifest."""
    text = (ROOT / "examples/launchers/pods.yaml").read_text(encoding="utf-8")
    ours = text.partition("---\napiVersion: apps/v1")[0]
    manifest = "\n".join(line for line in ours.splitlines() if not line.startswith("#"))
    yield from ("```yaml", manifest, "```")


def names() -> Iterator[str]:
    """Yield a table of the names in `import kvconnector as kvc`."""
    yield from ("| `kvc.` | |", "|---|---|")
    for name in kvc.__all__:
        found = getattr(kvc, name)
        if not name.startswith("__"):
            source = importlib.import_module(getattr(found, "__module__", found.__name__))
            path = Path(str(source.__file__)).relative_to(ROOT)
            yield f"| [`{name}`](../{path}) | {_first_sentence(found)} |"


def wire_messages() -> Iterator[str]:
    """Yield a table of the messages and their fields."""
    yield from ("| message | fields | |", "|---|---|---|")
    for name, kind in vars(messages).items():
        if inspect.isclass(kind) and issubclass(kind, messages.Message) and kind.__doc__:
            fields = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(kind))
            if fields:
                yield f"| `{name}` | {fields} | {_first_sentence(kind)} |"


def program(path: str = "examples/embed.py") -> Iterator[str]:
    """Yield an example: by default both sides of an engine."""
    yield "```python"
    yield (ROOT / path).read_text(encoding="utf-8").rstrip()
    yield "```"


def ranks() -> Iterator[str]:
    """Yield the example of an engine whose ranks are processes."""
    yield "<!-- not run: it is the file above, which a test runs -->"
    yield from program("examples/embed_ranks.py")


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "settings": settings,
    "errors": errors,
    "names": names,
    "messages": wire_messages,
    "program": program,
    "ranks": ranks,
    "fleet": fleet,
    "pod": prefill_pod,
    "compared_fields": compared_fields,
}


def current(text: str) -> str:
    """Return a page's text with all generated parts made again from the code."""

    def made(part: re.Match[str]) -> str:
        lines = "\n".join(PARTS[part["name"]]()).rstrip()
        return f"{part['begin']}{lines}\n{part['end']}"

    return PART.sub(made, text)


def _first_paragraph(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n", 1)[0].split())


def _first_sentence(thing: object) -> str:
    return re.split(r"(?<=\.)\s", _first_paragraph(thing), maxsplit=1)[0].replace("|", "\\|")


def _shown(default: object) -> str:
    if default is msgspec.NODEFAULT:
        return "must be set"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int) and default >= KIB:
        return f"{default // MIB} MiB" if default % MIB == 0 else f"{default // KIB} KiB"
    return "empty" if default == "" else str(default)


def main(arguments: list[str]) -> int:
    """Check the pages, or write them; return 1 if one is not current."""
    status = 0
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if (wanted := current(text)) == text:
            continue
        if arguments == ["--write"]:
            path.write_text(wanted, encoding="utf-8")
        else:
            print(f"{path.relative_to(ROOT)} is not current: run `scripts/docs write`")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
